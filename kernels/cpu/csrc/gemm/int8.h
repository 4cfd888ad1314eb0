// Products with int8 weights: one scale per row of W, and one scale per segment of the inputs' columns.
//
// A panel is [ceil(K/4)][16][4] bytes, each a weight's code + EXCESS, then 16 float32 scales and 16 float32 zero points
// (in units of the codes; zero for weights that are quantised here): W = (code - zero) * scale. With an EXCESS of 128
// the bytes are unsigned, as most dot products require of one operand. EXCESS times the sum of a segment's inputs is
// known when a row is prepared. A prepared row is
//   bytes [K filled up to 64] | scales [segments] | -EXCESS * their sum, int32 [segments] | sum of the row, float32
// and, if products read bytes as 16-bit numbers, those as well, from a multiple of 8 on: the first, third, second and
// fourth of each four bytes.
//
// The dot product over a segment is exact in int32; segments are added in float32, in their order.
#pragma once

#include "gemm/quantize_activations.h"
#include "gemm/int_tiles.h"

#if defined(__AMX_INT8__)
#include "gemm/int_amx.h"
#endif

namespace PENSTOCK_LEVEL {

// The bytes of the weights in a panel.
INLINE int64_t int8_weight_bytes(int columns) { return static_cast<int64_t>(divide_up(columns, 4)) * 64; }

static int64_t int8_panel_bytes(int columns) { return int8_weight_bytes(columns) + 128; }

// The offset in a prepared row of the numbers that products read.
INLINE int int8_numbers_at(int columns) {
  return DOT_STEPS == 1 ? 0 : divide_up(filled(columns) + divide_up(columns, SEGMENT) * 8 + 4, 8) * 8;
}

static int64_t int8_input_bytes(int columns) {
  if (DOT_STEPS == 2) return row_bytes(int8_numbers_at(columns) + 2 * filled(columns));
  return row_bytes(filled(columns) + divide_up(columns, SEGMENT) * 8 + 4);
}

// ------------------------------------------------------------------------------------------------------------- packing

// Writes n codes of a row, signed bytes, to its lane, padded with zeros to a multiple of four.
INLINE void int8_place(int n, const int8_t* codes, int row, uint8_t* panel) {
  for (int k = 0; k < divide_up(n, 4) * 4; k++)
    panel[k / 4 * 64 + row * 4 + k % 4] = static_cast<uint8_t>((k < n ? codes[k] : 0) + EXCESS);
}

// Packs a float32 row with its scale. Adds the squared errors and the squared weights to error[0] and error[1].
static void int8_pack_row(int columns, const float* weights, float scale, int row, uint8_t* panel, double error[2]) {
  int8_t codes[SEGMENT];
  const Floats inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
  for (int k = 0; k < columns; k += SEGMENT) {
    const int n = columns - k < SEGMENT ? columns - k : SEGMENT;
    Floats wrong = {}, all = {};
    for (int i = 0; i < n; i += LANES) {
      const Floats weight = load_up_to(weights + k + i, n - i);
      const Ints code = to_ints_nearest(weight * inverse);
      const Floats off = fma(to_floats(code), splat(-scale), weight);
      wrong = fma(off, off, wrong);
      all = fma(weight, weight, all);
      store_bytes(codes + i, code);
    }
    error[0] += static_cast<double>(sum(wrong));
    error[1] += static_cast<double>(sum(all));
    int8_place(n, codes, row, panel + static_cast<int64_t>(k) * LANES);
  }
}

static void int8_pack_panel(int columns, const float* const rows[LANES], uint8_t* panel, double error[2]) {
  float ends[2 * LANES] = {};
  memset(panel, EXCESS, static_cast<size_t>(int8_weight_bytes(columns)));
  for (int row = 0; row < LANES; row++) {
    if (!rows[row]) continue;
    const float bound = largest_magnitude(rows[row], columns);
    ends[row] = bound > SMALLEST ? bound / 127.0f : 0.0f;
    int8_pack_row(columns, rows[row], ends[row], row, panel, error);
  }
  memcpy(panel + int8_weight_bytes(columns), ends, sizeof(ends));
}

static void int8_pack_codes(int columns, const uint8_t* const codes[LANES], const float* const scales[LANES],
                            const float* const zeros[LANES], uint8_t* panel) {
  float ends[2 * LANES] = {};
  memset(panel, EXCESS, static_cast<size_t>(int8_weight_bytes(columns)));
  for (int row = 0; row < LANES; row++) {
    if (!codes[row]) continue;
    int8_place(columns, reinterpret_cast<const int8_t*>(codes[row]), row, panel);
    ends[row] = scales[row][0];
    ends[LANES + row] = zeros[row][0];
  }
  memcpy(panel + int8_weight_bytes(columns), ends, sizeof(ends));
}

static void int8_unpack_row(const Matrix& matrix, int row, float* out) {
  const uint8_t* panel = matrix.panels + row / LANES * matrix.panel_bytes;
  const uint8_t* ends = panel + int8_weight_bytes(matrix.columns) + row % LANES * 4;
  const float scale = load_float(ends), zero = load_float(ends + 64);
  for (int k = 0; k < matrix.columns; k++) {
    const uint8_t byte = panel[static_cast<int64_t>(k / 4) * 64 + row % LANES * 4 + k % 4];
    const int code = static_cast<int8_t>(byte - EXCESS);
    out[k] = (static_cast<float>(code) - zero) * scale;
  }
}

// ------------------------------------------------------------------------------------------------------------- product

INLINE void int8_widen(int n, const int8_t* bytes, uint8_t* out) {
  for (int k = 0; k < n; k += 4) {
    const int16_t numbers[4] = {bytes[k], bytes[k + 2], bytes[k + 1], bytes[k + 3]};
    memcpy(out + 2 * k, numbers, 8);
  }
}

static void int8_prepare(int columns, const float* x, uint8_t* out) {
  const uint8_t* scale_at = out + filled(columns);
  uint8_t* at = quantize_row(columns, SEGMENT, x, out);
  float total = 0;
  for (int begin = 0; begin < columns; begin += SEGMENT) {
    const int whole = sum_bytes(out + begin, columns - begin < SEGMENT ? columns - begin : SEGMENT);
    const int32_t offset = -EXCESS * whole;
    total += load_float(scale_at) * static_cast<float>(whole);
    memcpy(at, &offset, 4);
    at += 4;
    scale_at += 4;
  }
  memcpy(at, &total, 4);
  if (DOT_STEPS == 2) int8_widen(filled(columns), reinterpret_cast<int8_t*>(out), out + int8_numbers_at(columns));
}

struct Int8 {
  static constexpr int ROWS = DOT_ROWS;

  // M rows of inputs with P panels.
  template <int M, int P>
  static void compute(const DotTile& tile) {
    const int columns = tile.matrix.columns;
    const int64_t bytes = tile.matrix.panel_bytes, stride = tile.stride, offsets = divide_up(columns, SEGMENT) * 4;
    const uint8_t* inputs = tile.inputs;
    const uint8_t *scales = inputs + filled(columns), *numbers = inputs + int8_numbers_at(columns);
    Ahead ahead = tile.ahead;
    Floats total[M][P] = {};
    for (int begin = 0; begin < columns; begin += SEGMENT, scales += 4) {
      const int end = columns - begin < SEGMENT ? columns : begin + SEGMENT;
      DotSums dot[M][P];
      for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) dot[m][p] = sums_of(load_int(scales + m * stride + offsets));
      for (int k = begin; k < end; k += 4) {
        ahead.next();
        const uint8_t *lines = tile.panels + static_cast<int64_t>(k) * LANES, *x = numbers + k * DOT_STEPS;
        add_line<M, P>(dot, lines, bytes, x, stride);
      }
      for (int m = 0; m < M; m++) {
        const Floats scale = splat(load_float(scales + m * stride));
        for (int p = 0; p < P; p++) total[m][p] = fma(to_floats(dot_ints(dot[m][p])), scale, total[m][p]);
      }
    }
    const uint8_t* rests = scales + offsets;
    for (int p = 0; p < P; p++) {
      const float* ends = reinterpret_cast<const float*>(tile.panels + (p + 1) * bytes) - 2 * LANES;
      const Floats scale = load(ends), zero = load(ends + LANES);
      for (int m = 0; m < M; m++) {
        const Floats rest = splat(-load_float(rests + m * stride));
        store(tile.sums + m * tile.width + p * LANES, fma(zero, rest, total[m][p]) * scale);
      }
    }
  }
};

#if defined(__AMX_INT8__)

// The same with AMX tile registers.
struct Int8Tiles {
  static constexpr int chunk = SEGMENT;
  const Matrix& matrix;

  // A panel's bytes have the registers' layout, except for an incomplete last block.
  const uint8_t* find_chunk(const uint8_t* panel, int index, byte_tiles::ChunkRoom& room) const {
    const int begin = index * SEGMENT, n = matrix.columns - begin < SEGMENT ? matrix.columns - begin : SEGMENT;
    const uint8_t* at = panel + static_cast<int64_t>(begin) * LANES;
    if (n % byte_tiles::BLOCK_COLUMNS == 0) return at;
    const size_t bytes = static_cast<size_t>(int8_weight_bytes(n));
    memcpy(room, at, bytes);
    memset(room + bytes, 0, sizeof(room) - bytes);
    return room;
  }

  template <int P>
  __attribute__((always_inline)) void add_sums(const uint8_t*, const byte_tiles::Rows& rows,
                                               const byte_tiles::Unit& unit, int tile, const byte_tiles::Sums* sums,
                                               float* totals) const {
    const int64_t offsets = divide_up(matrix.columns, SEGMENT) * 4;
    const uint8_t* scales = rows.data(tile) + filled(matrix.columns) + unit.first_chunk * 4;
    const int first = (tile - unit.first_tile) * rows.height;
    float* at = totals + tile * rows.height * P * LANES;
    for (int r = 0; r < rows.height; r++, scales += rows.inputs.stride, at += P * LANES) {
      Floats total[P];
      for (int p = 0; p < P; p++) total[p] = load(at + p * LANES);
      for (int c = 0; c < unit.chunks; c++) {
        const Ints offset = splat_int(load_int(scales + offsets + c * 4));
        const Floats scale = splat(load_float(scales + c * 4));
        for (int p = 0; p < P; p++) {
          const Ints dot = load_ints(sums[c] + ((first + r) * P + p) * LANES) + offset;
          total[p] = fma(to_floats(dot), scale, total[p]);
        }
      }
      for (int p = 0; p < P; p++) store(at + p * LANES, total[p]);
    }
  }

  void finish(const uint8_t* panels, int count, const uint8_t* inputs, int64_t stride, int rows, float* totals) const {
    const uint8_t* rests = inputs + filled(matrix.columns) + divide_up(matrix.columns, SEGMENT) * 8;
    for (int p = 0; p < count; p++) {
      const float* ends = reinterpret_cast<const float*>(panels + (p + 1) * matrix.panel_bytes) - 2 * LANES;
      const Floats scale = load(ends), zero = load(ends + LANES);
      for (int r = 0; r < rows; r++) {
        float* total = totals + (r * count + p) * LANES;
        store(total, fma(zero, splat(-load_float(rests + r * stride)), load(total)) * scale);
      }
    }
  }
};

#endif

static void int8_product(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
#if defined(__AMX_INT8__)
  if (inputs.rows >= byte_tiles::LEAST_ROWS)
    return byte_tiles::multiply(Int8Tiles{matrix}, inputs, begin, end, output);
#endif
  compute_tiles<Int8>(matrix, inputs, begin, end, output);
}

}  // namespace PENSTOCK_LEVEL
