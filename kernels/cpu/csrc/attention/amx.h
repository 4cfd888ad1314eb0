// The two products of attention over pages of bfloat16, with tile registers. Rows of queries or of weights are `a`. A
// page's keys are stored as lines of dimensions and its values as lines of tokens, so both can be `b` directly. Any
// number of rows is computed this way, since a sum's bits depend on where its tiles begin: every 32 dimensions, and
// every page.
#pragma once

#include "attention/tiles.h"
#include "attention/kv_page.h"
#include "core/simd.h"

#if defined(__AMX_BF16__)

#include "core/amx.h"

namespace PENSTOCK_LEVEL {

namespace paged {

namespace amx {

// Registers: four with sums, then operands with 32 numbers per row, and with 16 for the last dimensions of a head and
// for the weights of a page. `b` follows its `a`.
constexpr int SUMS = 4, WIDE = 4, NARROW = 6;

// The rows of a block, in one tile or two tiles of equal height. The second may begin before the first ends; rows that
// both have get the same result twice.
struct RowTiles {
  int num, rows;
  int second;  // the first row of the second tile
};

INLINE RowTiles row_tiles(int rows) {
  if (rows <= TILE_LINES) return {1, rows, 0};
  const int half = (rows + 1) / 2;
  return {2, half, rows - half};
}

INLINE void configure(const RowTiles& tiles) {
  TileShapes shapes;
  for (int sum = 0; sum < SUMS; sum++) shapes.set(sum, tiles.rows, TILE_LINE);
  shapes.set(WIDE, tiles.rows, TILE_LINE);
  shapes.set(WIDE + 1, TILE_LINES, TILE_LINE);
  shapes.set(NARROW, tiles.rows, TILE_LINE / 2);
  shapes.set(NARROW + 1, TILE_LINES / 2, TILE_LINE);
  configure_tiles(shapes);
}

template <int COUNT, int SUM = 0>
INLINE void zero_sums() {
  if constexpr (SUM < COUNT) {
    zero_tile<SUM>();
    zero_sums<COUNT, SUM + 1>();
  }
}

// The sums of one tile of rows, from register SUM on. The sums of a row are adjacent in memory.
template <int COLUMNS, int SUM, int COLUMN = 0>
INLINE void load_sums(const uint8_t* from, int64_t stride) {
  if constexpr (COLUMN < COLUMNS) {
    load_tile<SUM + COLUMN>(from + COLUMN * VECTOR, stride);
    load_sums<COLUMNS, SUM, COLUMN + 1>(from, stride);
  }
}

template <int ROW_TILES, int COLUMNS>
INLINE void load_all(const uint8_t* from, int64_t stride, int second) {
  load_sums<COLUMNS, 0>(from, stride);
  if constexpr (ROW_TILES == 2) load_sums<COLUMNS, COLUMNS>(from + second * stride, stride);
}

template <int COLUMNS, int SUM, int COLUMN = 0>
INLINE void store_sums(uint8_t* out, int64_t stride) {
  if constexpr (COLUMN < COLUMNS) {
    store_tile<SUM + COLUMN>(out + COLUMN * VECTOR, stride);
    store_sums<COLUMNS, SUM, COLUMN + 1>(out, stride);
  }
}

template <int ROW_TILES, int COLUMNS>
INLINE void store_all(uint8_t* out, int64_t stride, int second) {
  store_sums<COLUMNS, 0>(out, stride);
  if constexpr (ROW_TILES == 2) store_sums<COLUMNS, COLUMNS>(out + second * stride, stride);
}

// Adds the products of a tile of rows, in register A, with the lines at `offset` of each of the columns.
template <int COLUMNS, int A, int SUM, int COLUMN = 0>
INLINE void add_columns(const uint8_t* const* columns, int64_t offset, int64_t stride) {
  if constexpr (COLUMN < COLUMNS) {
    load_tile<A + 1>(columns[COLUMN] + offset, stride);
    add_tile_pairs<SUM + COLUMN, A, A + 1>();
    add_columns<COLUMNS, A, SUM, COLUMN + 1>(columns, offset, stride);
  }
}

template <int ROW_TILES, int COLUMNS, int A>
INLINE void add_rows(const uint8_t* rows, int64_t row_bytes, int second, const uint8_t* const* columns, int64_t offset,
                     int64_t stride) {
  load_tile<A>(rows, row_bytes);
  add_columns<COLUMNS, A, 0>(columns, offset, stride);
  if constexpr (ROW_TILES == 2) {
    load_tile<A>(rows + second * row_bytes, row_bytes);
    add_columns<COLUMNS, A, COLUMNS>(columns, offset, stride);
  }
}

template <int ROW_TILES, int PAGES>
static void score_pages(const Block& block, int second, int page) {
  const int64_t row_bytes = block.padded / 2 * WORD;
  for (; page + PAGES <= block.num_pages; page += PAGES) {
    zero_sums<ROW_TILES * PAGES>();
    for (int dim = 0; dim < block.padded; dim += 2 * LANES) {
      const uint8_t* queries = block.queries + dim / 2 * WORD;
      const int64_t offset = dim / 2 * VECTOR;
      if (dim + LANES < block.padded)
        add_rows<ROW_TILES, PAGES, WIDE>(queries, row_bytes, second, block.keys() + page, offset, VECTOR);
      else
        add_rows<ROW_TILES, PAGES, NARROW>(queries, row_bytes, second, block.keys() + page, offset, VECTOR);
      const int lines = smaller(block.padded - dim, 2 * LANES) / 2;
      for (int p = 0; p < PAGES; p++) {
        if (const uint8_t* ahead = block.ahead_of_keys(page + p, 0)) ask_for(ahead + offset, lines);
      }
    }
    store_all<ROW_TILES, PAGES>(block.scores + page * VECTOR, SPLIT_BYTES, second);
  }
  if constexpr (PAGES > 1) score_pages<ROW_TILES, PAGES / 2>(block, second, page);
}

template <int ROW_TILES, int VECTORS>
static void value_vectors(const Block& block, int second, int vector, int begin, int end) {
  const int64_t stride = block.padded * WORD;
  for (; vector + VECTORS <= block.padded / LANES; vector += VECTORS) {
    if (begin == 0)
      zero_sums<ROW_TILES * VECTORS>();
    else
      load_all<ROW_TILES, VECTORS>(block.values + vector * VECTOR, stride, second);
    for (int page = begin; page < end; page++) {
      const uint8_t* weights = block.scores + page * VECTOR / 2;
      const uint8_t* columns[VECTORS];
      for (int v = 0; v < VECTORS; v++) columns[v] = block.page_values()[page] + (vector + v) * VECTOR;
      add_rows<ROW_TILES, VECTORS, NARROW>(weights, SPLIT_BYTES, second, columns, 0, stride);
      constexpr int LINES = LANES / 2;
      if (const uint8_t* ahead = block.ahead_of_values(page, 0))
        ask_for(ahead + vector * LINES * VECTOR, VECTORS * LINES);
    }
    store_all<ROW_TILES, VECTORS>(block.values + vector * VECTOR, stride, second);
  }
  if constexpr (VECTORS > 1) value_vectors<ROW_TILES, VECTORS / 2>(block, second, vector, begin, end);
}

}  // namespace amx

template <>
inline void multiply_keys<Bf16Kv>(const Block& block) {
  const amx::RowTiles tiles = amx::row_tiles(block.rows);
  amx::configure(tiles);
  if (tiles.num == 1)
    amx::score_pages<1, amx::SUMS>(block, 0, 0);
  else
    amx::score_pages<2, amx::SUMS / 2>(block, tiles.second, 0);
}

template <>
inline void multiply_values<Bf16Kv>(const Block& block) {
  const amx::RowTiles tiles = amx::row_tiles(block.rows);
  if (tiles.num == 2) return amx::value_vectors<2, amx::SUMS / 2>(block, tiles.second, 0, 0, block.num_pages);
  for (int page = 0; page < block.num_pages; page += AHEAD)
    amx::value_vectors<1, amx::SUMS>(block, 0, 0, page, smaller(page + AHEAD, block.num_pages));
}

}  // namespace paged

}  // namespace PENSTOCK_LEVEL

#endif
