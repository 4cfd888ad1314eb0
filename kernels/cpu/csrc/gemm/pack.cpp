// Packs weights while they are read: panel by panel, on all threads, without a copy of the matrix.
#include <cstring>

#include "core/arena.h"
#include "model/program.h"

namespace penstock {

namespace {

// The element type of a tensor on disk.
enum Source : int32_t { SOURCE_F32 = 0, SOURCE_BF16 = 1, SOURCE_F16 = 2, SOURCE_F64 = 3 };

float from_half(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu, bits;
  float value;
  if (rest >= 0x7c00u) {
    bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
  } else if (rest >= 0x400u) {
    bits = sign | ((rest << 13) + 0x38000000u);
  } else {
    value = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  memcpy(&value, &bits, 4);
  return value;
}

void read_row(const uint8_t* from, int64_t stride, Source source, int columns, float* to) {
  for (int c = 0; c < columns; c++, from += stride) switch (source) {
      case SOURCE_F32:
        memcpy(to + c, from, 4);
        break;
      case SOURCE_BF16: {
        uint16_t half;
        memcpy(&half, from, 2);
        uint32_t bits = static_cast<uint32_t>(half) << 16;
        memcpy(to + c, &bits, 4);
        break;
      }
      case SOURCE_F16: {
        uint16_t half;
        memcpy(&half, from, 2);
        to[c] = from_half(half);
        break;
      }
      case SOURCE_F64: {
        double wide;
        memcpy(&wide, from, 8);
        to[c] = static_cast<float>(wide);
        break;
      }
    }
}

}  // namespace

// Packs `rows`, addresses in the mapped file, one for each row of whole panels, null for a missing row. The columns of
// a row are `stride` bytes apart. `error` has two sums for each thread, to which pack_panel adds.
void pack(Threads& threads, const Kernels& kernels, const Matrix& matrix, const uint8_t* const* rows, Source source,
          int64_t stride, double* error) {
  int panels = (matrix.rows + LANES - 1) / LANES;
  Arena arena;
  float** room = arena.take<float*>(threads.num());
  for (int i = 0; i < threads.num(); i++) room[i] = arena.take<float>(static_cast<int64_t>(matrix.columns) * LANES);
  threads.first_touch(panels, [&](int panel, int thread) {
    const uint8_t* const* some = rows + static_cast<int64_t>(panel) * LANES;
    uint8_t* to = const_cast<uint8_t*>(matrix.panels) + panel * matrix.panel_bytes;
    if (matrix.format == FORMAT_BF16 && source == SOURCE_BF16 && stride == 2) {
      kernels.pack_panel_bf16(matrix.columns, reinterpret_cast<const uint16_t* const*>(some), to);
      return;
    }
    const float* floats[LANES];
    for (int i = 0; i < LANES; i++) {
      float* row = room[thread] + static_cast<int64_t>(i) * matrix.columns;
      if (some[i]) read_row(some[i], stride, source, matrix.columns, row);
      floats[i] = some[i] ? row : nullptr;
    }
    kernels.pack_panel(matrix.format, matrix.columns, matrix.group, floats, to, error + 2 * thread);
  });
}

}  // namespace penstock

using penstock::Kernels;
using penstock::LANES;
using penstock::Matrix;
using penstock::Threads;

PENSTOCK_API Threads* penstock_threads(const penstock::Placement* placement) { return new Threads(*placement); }
PENSTOCK_API void penstock_threads_end(Threads* threads) { delete threads; }

PENSTOCK_API void penstock_pack(Threads* threads, const Kernels* kernels, const Matrix* matrix,
                                const uint8_t* const* rows, int32_t source, int64_t stride, double* error) {
  penstock::pack(*threads, *kernels, *matrix, rows, static_cast<penstock::Source>(source), stride, error);
}

// The same from codes: for each row of whole panels the addresses of its codes, scales and zero points, or null.
PENSTOCK_API void penstock_pack_codes(Threads* threads, const Kernels* kernels, const Matrix* matrix,
                                      const uint8_t* const* codes, const float* const* scales,
                                      const float* const* zeros) {
  threads->first_touch((matrix->rows + LANES - 1) / LANES, [&](int panel, int) {
    int first = panel * LANES;
    kernels->pack_panel_codes(matrix->format, matrix->columns, matrix->group, codes + first, scales + first,
                              zeros + first, const_cast<uint8_t*>(matrix->panels) + panel * matrix->panel_bytes);
  });
}
