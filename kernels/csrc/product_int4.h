// Products with int4 weights, see int4_panel.h, and int8 inputs with a scale a chunk of columns. A prepared row is
//   bytes [K filled up to 64] | scales [chunks] | scale * sum of the bytes, float32 [chunks]
//
// The dot product over a chunk is exact in int32; chunks are added in float32, in their order.
#pragma once

#include "int4_panel.h"
#include "dot_tiles.h"

namespace PENSTOCK_LEVEL {

static int64_t int4_input_bytes(int columns, int group) {
  return row_bytes(filled(columns) + divide_up(columns, int4_chunk(group)) * 8);
}

static void int4_prepare(int columns, int group, const float* x, uint8_t* out) {
  const int chunk = int4_chunk(group);
  const uint8_t* scale_at = out + filled(columns);
  uint8_t* at = quantize_row(columns, chunk, x, out);
  for (int begin = 0; begin < columns; begin += chunk) {
    const int whole = sum_bytes(out + begin, columns - begin < chunk ? columns - begin : chunk);
    const float weighed = load_float(scale_at) * static_cast<float>(whole);
    memcpy(at, &weighed, 4);
    at += 4;
    scale_at += 4;
  }
}

struct Int4 {
  // M rows of inputs with P panels.
  template <int M, int P>
  static void compute(const DotTile& tile) {
    const int columns = tile.matrix.columns, chunk = int4_chunk(tile.matrix.group);
    const int64_t bytes = tile.matrix.panel_bytes, stride = tile.stride, rests = divide_up(columns, chunk) * 4;
    const uint8_t* inputs = tile.inputs;
    const uint8_t* scales = inputs + filled(columns);
    const uint8_t* line = tile.panels;
    Ahead ahead = tile.ahead;
    Floats total[M][P] = {};
    for (int begin = 0; begin < columns; begin += chunk, scales += 4) {
      const int end = columns - begin < chunk ? columns : begin + chunk;
      Floats scale[P], shift[P];
      for (int p = 0; p < P; p++) {
        scale[p] = load_half(line + p * bytes);
        shift[p] = -(load_half(line + p * bytes + 32) * scale[p]);
      }
      DotSums dot[M][P];
      for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) dot[m][p] = sums_of(0);
      ahead.next();
      line += 64;
      for (int k = begin; k < end; k += 8, line += 64) {
        DotNibbles weights[P];
        for (int p = 0; p < P; p++) weights[p] = load_nibbles(line + p * bytes);
        ahead.next();
        for (int m = 0; m < M; m++) {
          const int32_t x0 = load_int(inputs + m * stride + k), x1 = load_int(inputs + m * stride + k + 4);
          for (int p = 0; p < P; p++) dot[m][p] = add_nibbles(dot[m][p], weights[p], x0, x1);
        }
      }
      for (int m = 0; m < M; m++) {
        const Floats input_scale = splat(load_float(scales + m * stride));
        const Floats rest = splat(load_float(scales + m * stride + rests));
        for (int p = 0; p < P; p++) {
          total[m][p] = fma(rest, shift[p], total[m][p]);
          total[m][p] = fma(to_floats(dot_ints(dot[m][p])) * input_scale, scale[p], total[m][p]);
        }
      }
    }
    for (int p = 0; p < P; p++) {
      const Floats unit = load(reinterpret_cast<const float*>(line + p * bytes));
      for (int m = 0; m < M; m++) store(tile.sums + m * tile.width + p * LANES, total[m][p] * unit);
    }
  }
};

static void int4_product(const Matrix& matrix, const Inputs& inputs, int begin, int end, const Output& output) {
  compute_tiles<Int4>(matrix, inputs, begin, end, output);
}

}  // namespace PENSTOCK_LEVEL
