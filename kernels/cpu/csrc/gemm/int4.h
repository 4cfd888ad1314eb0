// Products with int4 weights (see gemm/int4_panel.h) and int8 inputs with one scale per chunk. A prepared row is
//   bytes [K filled up to 64] | scales [chunks] | scale * sum of the bytes, float32 [chunks]
//
// The dot product over a chunk is exact in int32; chunks are added in float32, in their order.
#pragma once

#include "gemm/int4_panel.h"
#include "gemm/int_tiles.h"

#if defined(__AMX_INT8__)
#include "gemm/int_amx.h"
#endif

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
  static constexpr int ROWS = NIBBLE_ROWS;

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
      const int lines = divide_up(end - begin, 8);
      add_lines<15>(dot, lines, [&](auto& sums, int first, int count) __attribute__((always_inline)) {
        const uint8_t* x = inputs + begin + first * 8;
        for (int i = 0; i < count; i++, line += 64, x += 8) {
          DotNibbles weights[P];
          for (int p = 0; p < P; p++) weights[p] = load_nibbles(line + p * bytes);
          ahead.next();
          for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) sums[m][p] = add_nibbles(sums[m][p], weights[p], x + m * stride);
        }
      });
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

// Codes are unpacked once for many rows, except by avx512_bf16, which AMD's processors use: on Zen 4 a product is 2 to 7 %
// faster if each tile masks and shifts the codes itself.
#if defined(__AVX512VNNI__) && (defined(__AMX_INT8__) || !defined(__AVX512BF16__))
#define UNPACKS_INT4

// Unpacks n columns to one byte per number, in the layout of an int8 panel.
INLINE void int4_unpack(const uint8_t* line, int n, uint8_t* to) {
  for (int k = 0; k < n; k += 8, line += 64, to += 128) {
    const DotNibbles weights = load_nibbles(line);
    store_ints(to, weights.low);
    store_ints(to + 64, weights.high);
  }
}

// The same for many rows: a chunk of two panels is unpacked once for all of them, not once for each tile. Then it is
// multiplied as int8 weights are.
struct Int4Unpacked {
  static constexpr int LEAST_ROWS = 4 * DOT_ROWS;
  static constexpr int MOST_ROWS = 64;  // whose sums and chunk of inputs stay in the L1 cache
  static constexpr int CHUNK_BYTES = 128 * LANES;

  struct Tile {
    const uint8_t* weights;  // of the chunk, CHUNK_BYTES for each panel
    const Floats *scale, *shift;
    int columns;
    const uint8_t* inputs;  // of the chunk
    const uint8_t* scales;
    int64_t stride, rests;
    Ahead ahead;
    float* totals;
  };

  // Adds the products of M rows of inputs with the chunk of P panels.
  template <int M, int P>
  static void compute(const Tile& tile) {
    DotSums dot[M][P];
    for (int m = 0; m < M; m++)
      for (int p = 0; p < P; p++) dot[m][p] = sums_of(0);
    Ahead ahead = tile.ahead;
    const uint8_t *line = tile.weights, *x = tile.inputs;
    for (int k = 0; k < tile.columns; k += 8) {
      ahead.next();
      for (int half = 0; half < 2; half++, line += 64, x += 4) {
        add_line<M, P>(dot, line, CHUNK_BYTES, x, tile.stride);
      }
    }
    for (int m = 0; m < M; m++) {
      const uint8_t* scales = tile.scales + m * tile.stride;
      const Floats input_scale = splat(load_float(scales)), rest = splat(load_float(scales + tile.rests));
      for (int p = 0; p < P; p++) {
        float* at = tile.totals + (m * P + p) * LANES;
        const Floats total = fma(rest, tile.shift[p], load(at));
        store(at, fma(to_floats(dot_ints(dot[m][p])) * input_scale, tile.scale[p], total));
      }
    }
  }

  // Multiplies up to MOST_ROWS rows from `row` on with `P` panels. The tiles of all rows prefetch `next`.
  template <int P>
  static void multiply_rows(const Matrix& matrix, const Inputs& inputs, int row, int rows, int panel,
                            const uint8_t* next, const GemmOutput& output) {
    alignas(64) uint8_t weights[P * CHUNK_BYTES];
    alignas(64) float totals[MOST_ROWS * P * LANES] = {};
    const int columns = matrix.columns, chunk = int4_chunk(matrix.group), tiles = divide_up(rows, DOT_ROWS);
    const int all_tiles = divide_up(inputs.rows, DOT_ROWS), first_tile = row / DOT_ROWS;
    const int64_t bytes = matrix.panel_bytes, rests = divide_up(columns, chunk) * 4;
    const uint8_t* panels = matrix.panels + panel * bytes;
    for (int begin = 0, line = 0; begin < columns; begin += chunk, line += 1 + chunk / 8) {
      const int n = columns - begin < chunk ? columns - begin : chunk;
      Floats scale[P], shift[P];
      for (int p = 0; p < P; p++) {
        const uint8_t* lines = panels + p * bytes + line * 64;
        scale[p] = load_half(lines);
        shift[p] = -(load_half(lines + 32) * scale[p]);
        int4_unpack(lines + 64, n, weights + p * CHUNK_BYTES);
      }
      for (int i = 0; i < tiles; i++) {
        const int first = rows * i / tiles, count = rows * (i + 1) / tiles - first;
        const uint8_t* data = inputs.data + (row + first) * inputs.stride;
        Ahead ahead = share_of(next, bytes, P, first_tile + i, all_tiles);
        ahead.at += line * ahead.step;
        const Tile tile = {weights, scale, shift, n, data + begin, data + filled(columns) + begin / chunk * 4,
                           inputs.stride, rests, ahead, totals + first * P * LANES};
        compute_tile<Int4Unpacked, DOT_ROWS, P>(count, tile);
      }
    }
    for (int p = 0; p < P; p++) {
      const Floats unit = load(reinterpret_cast<const float*>(panels + (p + 1) * bytes) - LANES);
      for (int r = 0; r < rows; r++) {
        float* total = totals + (r * P + p) * LANES;
        store(total, load(total) * unit);
      }
    }
    write_tile(matrix, output, row, rows, panel, P, totals);
  }

  static void multiply(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
    const int blocks = divide_up(inputs.rows, MOST_ROWS);
    for (int panel = begin; panel < end; panel += 2) {
      const uint8_t* next = panels_after(matrix, inputs, panel, end);
      for (int i = 0; i < blocks; i++) {
        const int row = static_cast<int>(static_cast<int64_t>(inputs.rows) * i / blocks);
        const int rows = static_cast<int>(static_cast<int64_t>(inputs.rows) * (i + 1) / blocks) - row;
        if (end - panel < 2) {
          multiply_rows<1>(matrix, inputs, row, rows, panel, next, output);
        } else {
          multiply_rows<2>(matrix, inputs, row, rows, panel, next, output);
        }
      }
    }
  }
};

#endif

#if defined(__AMX_INT8__)

// The same with AMX tile registers.
struct Int4Tiles {
  // Shorter chunks have so many sums to add that vectors are as fast.
  static constexpr int LEAST_CHUNK = 64;
  const Matrix& matrix;
  const int chunk;

  explicit Int4Tiles(const Matrix& all) : matrix(all), chunk(int4_chunk(all.group)) {}

  const uint8_t* scales_of(const uint8_t* panel, int index) const { return panel + index * int4_chunk_bytes(chunk); }

  // Unpacks to one byte per number, padded with zeros to whole blocks.
  const uint8_t* find_chunk(const uint8_t* panel, int index, byte_tiles::ChunkRoom& room) const {
    const int begin = index * chunk, n = matrix.columns - begin < chunk ? matrix.columns - begin : chunk;
    int4_unpack(scales_of(panel, index) + 64, n, room);
    uint8_t* to = room + divide_up(n, 8) * 128;
    const uint8_t* end = room + divide_up(n, byte_tiles::BLOCK_COLUMNS) * byte_tiles::BLOCK_BYTES;
    memset(to, 0, static_cast<size_t>(end - to));
    return room;
  }

  template <int P>
  __attribute__((always_inline)) void add_sums(const uint8_t* panels, const byte_tiles::Rows& rows,
                                               const byte_tiles::Unit& unit, int tile, const byte_tiles::Sums* sums,
                                               float* totals) const {
    const int64_t rests = divide_up(matrix.columns, chunk) * 4;
    const uint8_t* scales = rows.data(tile) + filled(matrix.columns) + unit.first_chunk * 4;
    const int first = (tile - unit.first_tile) * rows.height;
    float* at = totals + tile * rows.height * P * LANES;
    Floats scale[byte_tiles::CHUNKS][P], shift[byte_tiles::CHUNKS][P];
    for (int c = 0; c < unit.chunks; c++)
      for (int p = 0; p < P; p++) {
        const uint8_t* line = scales_of(panels + p * matrix.panel_bytes, unit.first_chunk + c);
        scale[c][p] = load_half(line);
        shift[c][p] = -(load_half(line + 32) * scale[c][p]);
      }
    for (int r = 0; r < rows.height; r++, scales += rows.inputs.stride, at += P * LANES) {
      Floats total[P];
      for (int p = 0; p < P; p++) total[p] = load(at + p * LANES);
      for (int c = 0; c < unit.chunks; c++) {
        const Floats input_scale = splat(load_float(scales + c * 4)), rest = splat(load_float(scales + rests + c * 4));
        for (int p = 0; p < P; p++) {
          const Ints dot = load_ints(sums[c] + ((first + r) * P + p) * LANES);
          total[p] = fma(rest, shift[c][p], total[p]);
          total[p] = fma(to_floats(dot) * input_scale, scale[c][p], total[p]);
        }
      }
      for (int p = 0; p < P; p++) store(at + p * LANES, total[p]);
    }
  }

  void finish(const uint8_t* panels, int count, const uint8_t*, int64_t, int rows, float* totals) const {
    for (int p = 0; p < count; p++) {
      const Floats unit = load(reinterpret_cast<const float*>(panels + (p + 1) * matrix.panel_bytes) - LANES);
      for (int r = 0; r < rows; r++) {
        float* total = totals + (r * count + p) * LANES;
        store(total, load(total) * unit);
      }
    }
  }
};

#endif

static void int4_product(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
#if defined(__AMX_INT8__)
  if (inputs.rows >= byte_tiles::LEAST_ROWS && int4_chunk(matrix.group) >= Int4Tiles::LEAST_CHUNK)
    return byte_tiles::multiply(Int4Tiles(matrix), inputs, begin, end, output);
#endif
#if defined(UNPACKS_INT4)
  if (inputs.rows >= Int4Unpacked::LEAST_ROWS) return Int4Unpacked::multiply(matrix, inputs, begin, end, output);
#endif
  compute_tiles<Int4>(matrix, inputs, begin, end, output);
}

}  // namespace PENSTOCK_LEVEL
