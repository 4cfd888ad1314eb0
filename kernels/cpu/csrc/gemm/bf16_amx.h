// Products with bfloat16 weights on AMX, for any number of rows. A step takes one tile of a panel, 32 columns, directly
// from memory; panels and inputs are padded with zeros to whole steps.
//
// Steps begin at column 0, and sums that are stored in memory in between keep all their bits. So the bits of an output
// depend only on its row and its column, however rows and columns are divided.
#pragma once

#include "gemm/float_panel.h"
#include "core/kernel_table.h"
#include "gemm/epilogue.h"
#include "core/amx.h"

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::Inputs;

namespace bf16_tiles {

constexpr int STEP_BYTES = TILE_LINES * TILE_LINE;  // of one panel
// Up to two tiles of rows are multiplied with up to two panels at a time; their sums are in registers 0 to 3.
constexpr int PAIR = 2, INPUTS = 4, WEIGHTS = 6;
// The maximum sizes of a block. Its inputs stay in the L2 cache, and its sums are in memory between pieces of the
// columns.
constexpr int BLOCK_ROWS = 256, BLOCK_PANELS = 16, BLOCK_BYTES = 768 << 10;
constexpr int AHEAD = 4;  // steps between prefetching weights and using them, if the product itself must prefetch

#define UNROLLED _Pragma("GCC unroll 16")

// Prefetches weights: `lines` of each panel in each step, from `at` to `end`, then from `after` to `after_end`.
struct Lookahead {
  const uint8_t *at, *end, *after, *after_end;
  int64_t panel_bytes;
  int lines;

  template <int P>
  __attribute__((always_inline)) void next() {
    if (at >= end) {
      at = after;
      end = after_end;
      if (at >= end) return;
    }
    if (lines == TILE_LINES) {
      UNROLLED for (int line = 0; line < TILE_LINES; line++)
        UNROLLED for (int p = 0; p < P; p++) prefetch(at + p * panel_bytes + line * TILE_LINE);
    } else {  // for later, so only into L2
      for (int line = 0; line < lines; line++)
        UNROLLED for (int p = 0; p < P; p++) __builtin_prefetch(at + p * panel_bytes + line * TILE_LINE, 0, 2);
    }
    at += lines * TILE_LINE;
  }
};

// One sweep over columns. The inputs of its two tiles are `second` bytes apart and have `height` rows each.
struct Sweep {
  const uint8_t* weights;
  int64_t panel_bytes;
  const uint8_t* inputs;
  int64_t stride, second;
  int64_t steps;
  int height;
};

// Sums are (R tiles, height, P panels, 16) float32.
template <int R, int P>
INLINE void load_sums(const float* sums, int height) {
  const float* second = sums + height * P * LANES;
  load_tile<0>(sums, P * TILE_LINE);
  if constexpr (P > 1) load_tile<1>(sums + LANES, P * TILE_LINE);
  if constexpr (R > 1) load_tile<2>(second, P * TILE_LINE);
  if constexpr (R > 1 && P > 1) load_tile<3>(second + LANES, P * TILE_LINE);
}

template <int R, int P>
INLINE void store_sums(float* sums, int height) {
  float* second = sums + height * P * LANES;
  store_tile<0>(sums, P * TILE_LINE);
  if constexpr (P > 1) store_tile<1>(sums + LANES, P * TILE_LINE);
  if constexpr (R > 1) store_tile<2>(second, P * TILE_LINE);
  if constexpr (R > 1 && P > 1) store_tile<3>(second + LANES, P * TILE_LINE);
}

template <int R, int P>
INLINE void zero_sums() {
  zero_tile<0>();
  if constexpr (P > 1) zero_tile<1>();
  if constexpr (R > 1) zero_tile<2>();
  if constexpr (R > 1 && P > 1) zero_tile<3>();
}

// Adds the products of the steps to the sums, which start at zero if `first`.
template <int R, int P>
static void multiply_tiles(const Sweep& sweep, Lookahead& shared, float* sums, bool first) {
  const uint8_t *weights = sweep.weights, *x = sweep.inputs;
  Lookahead ahead = shared;
  if (first) {
    zero_sums<R, P>();
  } else {
    load_sums<R, P>(sums, sweep.height);
  }
  for (int64_t step = 0; step < sweep.steps; step++) {
    load_tile<WEIGHTS>(weights, TILE_LINE);
    load_tile<INPUTS>(x, sweep.stride);
    add_tile_pairs<0, INPUTS, WEIGHTS>();
    if constexpr (P > 1) {
      load_tile<WEIGHTS + 1>(weights + sweep.panel_bytes, TILE_LINE);
      add_tile_pairs<1, INPUTS, WEIGHTS + 1>();
    }
    if constexpr (R > 1) {
      load_tile<INPUTS + 1>(x + sweep.second, sweep.stride);
      add_tile_pairs<2, INPUTS + 1, WEIGHTS>();
      if constexpr (P > 1) add_tile_pairs<3, INPUTS + 1, WEIGHTS + 1>();
    }
    ahead.template next<P>();
    weights += STEP_BYTES;
    x += TILE_LINE;
  }
  store_sums<R, P>(sums, sweep.height);
  shared = ahead;
}

template <int P>
INLINE void multiply_rows(int tiles, const Sweep& sweep, Lookahead& ahead, float* sums, bool first) {
  if (tiles == 1) return multiply_tiles<1, P>(sweep, ahead, sums, first);
  multiply_tiles<PAIR, P>(sweep, ahead, sums, first);
}

// Rows [row, row + rows) of the inputs, in tiles of `height` rows, times panels [begin, end), in successive pieces of
// `piece_steps` steps.
struct Block {
  int row, rows, tiles, height, begin, end;
  int64_t steps, piece_steps;

  // The first row of a tile. The last tile ends at the last row, so it may overlap the one before.
  int top(int tile) const { return tile + 1 < tiles ? tile * height : rows - height; }
};

// Weights of the first pair of a call, or of a pair that only one or two tiles use, are prefetched just before they are
// used. Otherwise the next pair of panels is prefetched while one pair is multiplied.
INLINE Lookahead look_ahead(const Block& block, bool cold, const uint8_t* weights, const uint8_t* next, int64_t steps,
                            int64_t panel_bytes) {
  const int users = (block.tiles + PAIR - 1) / PAIR;
  const int64_t bytes = steps * STEP_BYTES;
  if (users == 1 || cold)
    return {weights + AHEAD * STEP_BYTES, weights + bytes, next, next + bytes, panel_bytes, TILE_LINES};
  return {next, next + bytes, nullptr, nullptr, panel_bytes, (TILE_LINES + users - 1) / users};
}

// Multiplies steps [step, step + steps) of all rows and one or two panels. Sums are (tiles, height, panels, 16).
static void multiply_pair(const Matrix& matrix, const Inputs& inputs, const Block& block, int64_t step, int64_t steps,
                          int panel, const uint8_t* next, const GemmOutput& output, float* sums) {
  const int panels = block.end - panel < PAIR ? block.end - panel : PAIR;
  const uint8_t* weights = matrix.panels + panel * matrix.panel_bytes + step * STEP_BYTES;
  const bool first = step == 0, last = step + steps == block.steps;
  Lookahead ahead = look_ahead(block, first && panel == block.begin, weights, next, steps, matrix.panel_bytes);
  Sweep sweep = {weights, matrix.panel_bytes, nullptr, inputs.stride, 0, steps, block.height};
  for (int tile = 0; tile < block.tiles; tile += PAIR) {
    const int tiles = block.tiles - tile < PAIR ? 1 : PAIR, end = tile + tiles;
    sweep.inputs = inputs.data + (block.row + block.top(tile)) * inputs.stride + step * TILE_LINE;
    sweep.second = (block.top(end - 1) - block.top(tile)) * inputs.stride;
    float* kept = sums + tile * block.height * panels * LANES;
    if (panels == 1) {
      multiply_rows<1>(tiles, sweep, ahead, kept, first);
    } else {
      multiply_rows<PAIR>(tiles, sweep, ahead, kept, first);
    }
    for (int t = tile; last && t < end; t++) {
      const int begin = t * block.height, again = begin - block.top(t);  // rows that the previous tile has written
      write_tile(matrix, output, block.row + begin, block.height - again, panel, panels,
                 sums + (begin + again) * panels * LANES);
    }
  }
}

static void multiply_block(const Matrix& matrix, const Inputs& inputs, const Block& block, const GemmOutput& output,
                           float* sums) {
  for (int64_t step = 0; step < block.steps; step += block.piece_steps) {
    const int64_t left = block.steps - step, steps = left < block.piece_steps ? left : block.piece_steps;
    for (int panel = block.begin; panel < block.end; panel += PAIR) {
      // After the last pair of a piece comes the first pair of the next piece; after the last piece, the next panels of
      // the matrix.
      const bool turns = panel + PAIR >= block.end && steps < left;
      const int64_t next_panel = turns ? block.begin : panel + PAIR, next_step = turns ? step + steps : step;
      const bool exists = next_panel * LANES < matrix.rows;
      const uint8_t* next = matrix.panels + (exists ? next_panel * matrix.panel_bytes + next_step * STEP_BYTES : 0);
      const int before = steps < block.steps ? panel - block.begin : 0;  // panels whose sums are in memory
      multiply_pair(matrix, inputs, block, step, steps, panel, next, output,
                    sums + before * block.tiles * block.height * LANES);
    }
  }
}

static void multiply_rows_of_block(const Matrix& matrix, const Inputs& inputs, Block block, const GemmOutput& output) {
  alignas(64) float sums[BLOCK_ROWS * BLOCK_PANELS * LANES];
  const int most = block.piece_steps < block.steps ? BLOCK_PANELS : block.end - block.begin;
  for (const int end = block.end; block.begin < end; block.begin = block.end) {
    block.end = end - block.begin < most ? end : block.begin + most;
    multiply_block(matrix, inputs, block, output, sums);
  }
}

static void configure(int height) {
  TileShapes shapes;
  for (int tile = 0; tile < WEIGHTS; tile++) shapes.set(tile, height, TILE_LINE);
  for (int tile = WEIGHTS; tile < WEIGHTS + PAIR; tile++) shapes.set(tile, TILE_LINES, TILE_LINE);
  configure_tiles(shapes);
}

static void multiply(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
  const int64_t steps = bf16_filled(matrix.columns) * 2 / TILE_LINE;
  const int64_t blocks = (inputs.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  int configured = 0;
  for (int64_t i = 0; i < blocks; i++) {
    const int row = static_cast<int>(inputs.rows * i / blocks);
    const int rows = static_cast<int>(inputs.rows * (i + 1) / blocks) - row;
    const int tiles = (rows + TILE_LINES - 1) / TILE_LINES, height = (rows + tiles - 1) / tiles;
    const int64_t most = BLOCK_BYTES / (rows * TILE_LINE), pieces = (steps + most - 1) / most;
    if (configured != height) configure(height);
    configured = height;
    const Block block = {row, rows, tiles, height, begin, end, steps, (steps + pieces - 1) / pieces};
    multiply_rows_of_block(matrix, inputs, block, output);
  }
  release_tiles();
}

#undef UNROLLED

}  // namespace bf16_tiles

static void bf16_product(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
  bf16_tiles::multiply(matrix, inputs, begin, end, output);
}

}  // namespace PENSTOCK_LEVEL
