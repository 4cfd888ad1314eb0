// Products of bytes with AMX tile registers: 64 columns of two tiles of rows times two panels at a time.
//
// The sums of a chunk, which is the columns that share a scale of the inputs, are exact in int32. They go from the
// registers to memory, and from there to the totals in the same way as sums of vectors, so the bits are those of
// avx512_bf16. A few chunks' sums are added while the registers compute the next ones. A Kind is created for a matrix
// and provides
//   chunk        the columns of a chunk, at most two blocks
//   find_chunk   where a panel's chunk lies as whole blocks, which may be the given room
//   add_sums     adds the sums of a unit to the totals of one of its tiles
//   finish       turns totals into results
#pragma once

#include "core/prefetch.h"
#include "gemm/epilogue.h"
#include "gemm/quantize_activations.h"
#include "core/amx.h"

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::Inputs;

namespace byte_tiles {

// With fewer rows, vectors are as fast and read memory more evenly.
constexpr int LEAST_ROWS = 16;
// Rows that are multiplied with two panels before the next ones. Their totals stay in the L1 cache.
constexpr int MOST_ROWS = 64;
constexpr int TILES = 2, PANELS = 2;  // that the registers multiply at a time
constexpr int CHUNKS = 2;             // whose sums are added at a time

// The sizes of a panel's blocks, as the registers load them.
constexpr int BLOCK_COLUMNS = TILE_LINE, BLOCK_BYTES = TILE_LINES * TILE_LINE, CHUNK_BLOCKS = 2;
typedef uint8_t ChunkRoom[CHUNK_BLOCKS * BLOCK_BYTES];

// The sums of a chunk, (rows, panels, 16). The sums of a unit's second tile follow those of its first.
typedef int32_t Sums[TILES * TILE_LINES * PANELS * LANES];

// Up to MOST_ROWS rows of inputs from `row` on, in tiles of equal height. Totals are (tiles, height, panels, 16).
struct Rows {
  const Inputs& inputs;
  int row, rows, tiles, height;

  // If the rows do not fill the last tile, it overlaps the previous one, so that all tiles have the same shape.
  int begin(int tile) const { return tile + 1 < tiles ? tile * height : rows - height; }
  const uint8_t* data(int tile) const { return inputs.data + (row + begin(tile)) * inputs.stride; }
};

// The chunks and tiles whose sums are in memory at the same time.
struct Unit {
  int first_chunk, chunks;
  int first_tile, tiles;
};

// Prefetches the next panels, `lines` lines at a time.
struct NextPanels {
  const uint8_t* at;
  int lines;

  __attribute__((always_inline)) void fetch() {
    for (int line = 0; line < lines; line++) __builtin_prefetch(at + line * 64, 0, 2);
    at += lines * 64;
  }
};

INLINE void configure(int height) {
  TileShapes shapes;
  for (int sums = 0; sums < 4; sums++) shapes.set(sums, height, TILE_LINE);
  for (int inputs = 4; inputs < 6; inputs++) shapes.set(inputs, height, TILE_LINE);
  for (int weights = 6; weights < 8; weights++) shapes.set(weights, TILE_LINES, TILE_LINE);
  configure_tiles(shapes);
}

// Computes the sums of a chunk: T tiles, `second` bytes apart and with rows `stride` bytes apart, times P panels.
template <int T, int P>
INLINE void multiply_chunk(const uint8_t* inputs, int64_t second, int64_t stride, int height,
                           const uint8_t* const weights[PANELS], int blocks, NextPanels& next, int32_t* sums) {
  constexpr int WIDTH = P * LANES;
  zero_tile<0>();
  if (P > 1) zero_tile<1>();
  if (T > 1) zero_tile<2>();
  if (T > 1 && P > 1) zero_tile<3>();
  for (int b = 0; b < blocks; b++) {
    load_tile<6>(weights[0] + b * BLOCK_BYTES, TILE_LINE);
    load_tile<4>(inputs + b * BLOCK_COLUMNS, stride);
    add_tile_quads<0, 4, 6>();
    next.fetch();
    if (P > 1) {
      load_tile<7>(weights[1] + b * BLOCK_BYTES, TILE_LINE);
      add_tile_quads<1, 4, 7>();
    }
    next.fetch();
    if (T > 1) {
      load_tile<5>(inputs + second + b * BLOCK_COLUMNS, stride);
      add_tile_quads<2, 5, 6>();
      if (P > 1) add_tile_quads<3, 5, 7>();
    }
  }
  store_tile<0>(sums, WIDTH * 4);
  if (P > 1) store_tile<1>(sums + LANES, WIDTH * 4);
  if (T > 1) store_tile<2>(sums + height * WIDTH, WIDTH * 4);
  if (T > 1 && P > 1) store_tile<3>(sums + height * WIDTH + LANES, WIDTH * 4);
}

// Multiplies all columns of the rows with P panels. The registers are already configured for that.
template <class Kind, int P>
static void multiply_panels(const Kind& kind, const Rows& rows, const uint8_t* panels, const uint8_t* after,
                            float* totals) {
  alignas(64) Sums sums[2][CHUNKS];
  alignas(64) ChunkRoom room[CHUNKS][P];
  const uint8_t* weights[CHUNKS][PANELS];
  const int columns = kind.matrix.columns, chunk = kind.chunk, chunks = divide_up(columns, chunk);
  const int64_t panel_bytes = kind.matrix.panel_bytes, stride = rows.inputs.stride;
  const int fetches = 2 * divide_up(columns, BLOCK_COLUMNS) * divide_up(rows.tiles, TILES);
  NextPanels next = {after, divide_up(static_cast<int>(P * panel_bytes / 64), fetches)};
  Unit before = {};
  int turn = 0;
  for (int first = 0; first < chunks; first += CHUNKS) {
    const int count = chunks - first < CHUNKS ? chunks - first : CHUNKS;
    for (int c = 0; c < count; c++)
      for (int p = 0; p < P; p++) weights[c][p] = kind.find_chunk(panels + p * panel_bytes, first + c, room[c][p]);
    for (int tile = 0; tile < rows.tiles; tile += TILES, turn ^= 1) {
      const Unit unit = {first, count, tile, rows.tiles - tile < TILES ? 1 : TILES};
      const int64_t second = rows.data(tile + unit.tiles - 1) - rows.data(tile);
      for (int i = 0; i < CHUNKS || i < TILES; i++) {  // chunk i of this unit, tile i of the previous one
        if (i < unit.chunks) {
          const int begin = (first + i) * chunk;
          const int blocks = divide_up(columns - begin < chunk ? columns - begin : chunk, BLOCK_COLUMNS);
          const uint8_t* inputs = rows.data(tile) + begin;
          if (unit.tiles > 1) {
            multiply_chunk<2, P>(inputs, second, stride, rows.height, weights[i], blocks, next, sums[turn][i]);
          } else {
            multiply_chunk<1, P>(inputs, second, stride, rows.height, weights[i], blocks, next, sums[turn][i]);
          }
        }
        if (i < before.tiles)
          kind.template add_sums<P>(panels, rows, before, before.first_tile + i, sums[turn ^ 1], totals);
      }
      before = unit;
    }
  }
  for (int i = 0; i < before.tiles; i++)
    kind.template add_sums<P>(panels, rows, before, before.first_tile + i, sums[turn ^ 1], totals);
}

// Multiplies all rows with panels [panel, panel + count), one or two.
template <class Kind>
static void multiply_group(const Kind& kind, const Rows& rows, int panel, int count, int end,
                           const GemmOutput& output) {
  alignas(64) float totals[MOST_ROWS * PANELS * LANES] = {};
  const Matrix& matrix = kind.matrix;
  const uint8_t* panels = matrix.panels + panel * matrix.panel_bytes;
  const uint8_t* after = panel + count < end ? panels + count * matrix.panel_bytes : panels;
  if (count > 1) {
    multiply_panels<Kind, PANELS>(kind, rows, panels, after, totals);
  } else {
    multiply_panels<Kind, 1>(kind, rows, panels, after, totals);
  }
  for (int tile = 0; tile < rows.tiles; tile++) {
    const int known = tile * rows.height - rows.begin(tile);  // rows that the previous tile has as well
    const int num = rows.height - known;
    float* some = totals + (tile * rows.height + known) * count * LANES;
    kind.finish(panels, count, rows.data(tile) + known * rows.inputs.stride, rows.inputs.stride, num, some);
    write_tile(matrix, output, rows.row + rows.begin(tile) + known, num, panel, count, some);
  }
}

// Multiplies all rows with panels [begin, end).
template <class Kind>
static void multiply(const Kind& kind, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
  const int64_t blocks = divide_up(inputs.rows, MOST_ROWS);
  for (int64_t i = 0; i < blocks; i++) {
    const int row = static_cast<int>(inputs.rows * i / blocks);
    const int num = static_cast<int>(inputs.rows * (i + 1) / blocks) - row, tiles = divide_up(num, TILE_LINES);
    const Rows rows = {inputs, row, num, tiles, divide_up(num, tiles)};
    configure(rows.height);
    for (int panel = begin; panel < end; panel += PANELS)
      multiply_group(kind, rows, panel, end - panel < PANELS ? 1 : PANELS, end, output);
  }
  release_tiles();
}

}  // namespace byte_tiles

}  // namespace PENSTOCK_LEVEL
