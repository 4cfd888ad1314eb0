// Products with weights of four bits, of which 32 columns share a scale and no zero point is stored, as in MXFP4 and
// GGUF's Q4_0. A KIND specifies how codes and scales are stored: Q4_0 below, and Fp4 in gemm/fp4.h.
//
// A panel has for every KIND::LINE_COLUMNS columns a line of 64 bytes with the scales, [chunks of 32 columns][16 rows],
// and then lines of codes in int4's layout (gemm/int4_panel.h), so it takes as many bytes as the weights in the file.
// Codes become bytes: a number times 1 / KIND::UNIT, plus KIND::ZERO so that none is negative. A prepared row is
//   bytes [K filled up to 64] | scales times UNIT [chunks] | what each chunk's sum starts from, int32 [chunks]
//
// The dot product over a chunk is exact in int32; chunks are added in float32, in their order.
#pragma once

#include "gemm/int4_panel.h"
#include "gemm/int_tiles.h"

namespace PENSTOCK_LEVEL {

constexpr int SCALE_COLUMNS = 32;

template <class KIND>
constexpr int block_scale_bytes() {
  return 64 / (KIND::LINE_COLUMNS / SCALE_COLUMNS * LANES);
}

template <class KIND>
int64_t block_scaled_panel_bytes(int columns) {
  return (divide_up(columns, KIND::LINE_COLUMNS) + divide_up(columns, 8)) * int64_t{64};
}

static int64_t block_scaled_input_bytes(int columns) {
  return row_bytes(filled(columns) + divide_up(columns, SCALE_COLUMNS) * 8);
}

// ------------------------------------------------------------------------------------------------------------- packing

template <class KIND>
void block_scaled_pack_codes(int columns, const uint8_t* const codes[LANES], const float* const scales[LANES],
                             uint8_t* panel) {
  memset(panel, 0, static_cast<size_t>(block_scaled_panel_bytes<KIND>(columns)));
  for (int begin = 0; begin < columns; begin += KIND::LINE_COLUMNS) {
    const int n = columns - begin < KIND::LINE_COLUMNS ? columns - begin : KIND::LINE_COLUMNS;
    for (int row = 0; row < LANES; row++) {
      if (!codes[row]) continue;
      for (int k = 0; k < n; k += SCALE_COLUMNS)
        KIND::store_scale(panel + (k / SCALE_COLUMNS * LANES + row) * block_scale_bytes<KIND>(),
                          scales[row][(begin + k) / SCALE_COLUMNS]);
      uint8_t* to = panel + 64 + row * 4;
      for (int k = 0; k < n; k += 8, to += 64) {
        uint32_t halves[2] = {};
        memcpy(halves, codes[row] + begin + k, static_cast<size_t>(n - k < 8 ? n - k : 8));
        const uint32_t both = (halves[0] & 0x0f0f0f0fu) | (halves[1] & 0x0f0f0f0fu) << 4;
        memcpy(to, &both, 4);
      }
    }
    panel += 64 + divide_up(n, 8) * 64;
  }
}

template <class KIND>
void block_scaled_unpack_row(const Matrix& matrix, int row, float* out) {
  const uint8_t* panel = matrix.panels + row / LANES * matrix.panel_bytes;
  const int lane = row % LANES;
  for (int begin = 0; begin < matrix.columns; begin += KIND::LINE_COLUMNS) {
    const int n = matrix.columns - begin < KIND::LINE_COLUMNS ? matrix.columns - begin : KIND::LINE_COLUMNS;
    for (int k = 0; k < n; k++) {
      const uint8_t pair = panel[64 + k / 8 * 64 + lane * 4 + k % 4];
      const int number = KIND::byte_of(k % 8 < 4 ? pair & 15 : pair >> 4) - KIND::ZERO;
      const uint8_t* scales = panel + k / SCALE_COLUMNS * LANES * block_scale_bytes<KIND>();
      out[begin + k] = KIND::UNIT * static_cast<float>(number) * KIND::load_scales(scales)[lane];
    }
    panel += 64 + divide_up(n, 8) * 64;
  }
}

// ------------------------------------------------------------------------------------------------------------- product

template <class KIND>
void block_scaled_prepare(int columns, const float* x, uint8_t* out) {
  uint8_t* scale_at = out + filled(columns);
  uint8_t* at = quantize_row(columns, SCALE_COLUMNS, x, out);
  for (int begin = 0; begin < columns; begin += SCALE_COLUMNS) {
    const int n = columns - begin < SCALE_COLUMNS ? columns - begin : SCALE_COLUMNS;
    const int32_t offset = -KIND::ZERO * sum_bytes(out + begin, n);
    const float scale = KIND::UNIT * load_float(scale_at);
    memcpy(at, &offset, 4);
    memcpy(scale_at, &scale, 4);
    at += 4;
    scale_at += 4;
  }
}

template <class KIND>
struct BlockScaled {
  static constexpr int ROWS = NIBBLE_ROWS;

  // M rows of inputs with P panels.
  template <int M, int P>
  static void compute(const DotTile& tile) {
    const int columns = tile.matrix.columns;
    const int64_t bytes = tile.matrix.panel_bytes, stride = tile.stride;
    const int64_t offsets = divide_up(columns, SCALE_COLUMNS) * 4;
    const uint8_t* input_scales = tile.inputs + filled(columns);
    const uint8_t *line = tile.panels, *scales = nullptr;
    Ahead ahead = tile.ahead;
    Floats total[M][P] = {};
    for (int begin = 0; begin < columns; begin += SCALE_COLUMNS, input_scales += 4) {
      if (begin % KIND::LINE_COLUMNS == 0) {
        scales = line;
        line += 64;
        ahead.next();
      }
      const int lines = divide_up(columns - begin < SCALE_COLUMNS ? columns - begin : SCALE_COLUMNS, 8);
      DotSums dot[M][P];
      for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) dot[m][p] = sums_of(load_int(input_scales + m * stride + offsets));
      add_lines<KIND::LARGEST>(dot, lines, [&](auto& sums, int first, int count) __attribute__((always_inline)) {
        const uint8_t* x = tile.inputs + begin + first * 8;
        for (int i = 0; i < count; i++, line += 64, x += 8) {
          DotNibbles weights[P];
          for (int p = 0; p < P; p++) weights[p] = KIND::load_bytes(line + p * bytes);
          ahead.next();
          for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) sums[m][p] = add_nibbles(sums[m][p], weights[p], x + m * stride);
        }
      });
      Floats scale[P];
      for (int p = 0; p < P; p++) scale[p] = KIND::load_scales(scales + p * bytes);
      scales += LANES * block_scale_bytes<KIND>();
      for (int m = 0; m < M; m++) {
        const Floats input_scale = splat(load_float(input_scales + m * stride));
        for (int p = 0; p < P; p++)
          total[m][p] = fma(to_floats(dot_ints(dot[m][p])) * input_scale, scale[p], total[m][p]);
      }
    }
    for (int p = 0; p < P; p++)
      for (int m = 0; m < M; m++) store(tile.sums + m * tile.width + p * LANES, total[m][p]);
  }
};

// Codes around 8, of which 32 columns share a float16. A weight takes 18 / 32 bytes.
struct Q4_0 {
  static constexpr int LINE_COLUMNS = 64, ZERO = 8, LARGEST = 15;
  static constexpr float UNIT = 1.0f;

  static void store_scale(uint8_t* to, float scale) {
    const uint16_t half = to_half(scale);
    memcpy(to, &half, 2);
  }
  INLINE Floats load_scales(const uint8_t* line) { return load_half(line); }
  static int byte_of(int code) { return code; }
  INLINE DotNibbles load_bytes(const uint8_t* line) { return load_nibbles(line); }
};

}  // namespace PENSTOCK_LEVEL
