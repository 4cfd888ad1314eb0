// The two products of attention over the pages of a split: queries by keys, and weights by values. Sums stay in registers
// for a tile of rows by pages, or of rows by vectors of the head; every sum adds up the same words in the same order,
// whatever its tile.
#pragma once

#include "attention_format.h"
#include "kernels.h"
#include "kv_page.h"
#include "vec.h"

namespace PENSTOCK_LEVEL {

// Rows of words that are computed together; their scores fill 32 KiB.
constexpr int BLOCK_ROWS = 32;
constexpr int SPLIT_PAGES = SPLIT / LANES;

#if defined(__AVX512F__)
constexpr int TILE_SUMS = 16, TILE_ROWS = 8;
#else
constexpr int TILE_SUMS = 4, TILE_ROWS = 2;  // a sum takes two registers of 16, or four
#endif

// Sections are asked for so many before they are used: what memory delivers in twice its latency.
constexpr int AHEAD = 4;

// Some rows of words against some pages of a split.
struct Block {
  int rows;
  int first_page, num_pages;
  int padded;        // the head size, filled up
  int64_t section;   // bytes
  // In the order in which memory is read: keys of the pages, their values, and keys of what comes next.
  const uint8_t* sections[2 * SPLIT_PAGES + AHEAD];
  bool streams;      // sections come from memory, so the next ones are asked for
  const uint8_t* queries;  // words [rows][padded / PER]
  uint8_t* scores;         // words [rows][SPLIT]: sums, then scores, then weights
  uint8_t* values;         // words [rows][padded]

  const uint8_t* const* keys() const { return sections; }
  const uint8_t* const* page_values() const { return sections + num_pages; }
};

INLINE Ints splat_word(const uint8_t* p) {
  int32_t word;
  memcpy(&word, p, WORD);
  return splat_int(word);
}

INLINE void store_sum(uint8_t* p, Floats sum) { store_ints(p, as_ints(sum)); }
INLINE void store_sum(uint8_t* p, Ints sum) { store_ints(p, sum); }

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

// 8, 4, 3, 2, 1: seven rows are four and three.
constexpr int fewer_rows(int rows) { return rows > 4 ? 4 : rows - 1; }

// -------------------------------------------------------------------------------------------------- queries by keys

template <class Kv, int ROWS, int PAGES>
static void score_tile(const Block& block, int row, int page) {
  const int words = block.padded / Kv::PER;
  const uint8_t* queries = block.queries + static_cast<int64_t>(row) * words * WORD;
  const uint8_t* const* keys = block.sections + page;
  const bool streams = block.streams && row == 0;
  typename Kv::Sum sums[ROWS][PAGES] = {};
  for (int word = 0; word < words; word++) {
    Ints part[PAGES];
#pragma GCC unroll 8
    for (int p = 0; p < PAGES; p++) {
      part[p] = load_ints(keys[p] + word * VECTOR);
      if (streams) prefetch(keys[p + AHEAD] + word * VECTOR);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      Ints query = splat_word(queries + (r * words + word) * WORD);
#pragma GCC unroll 8
      for (int p = 0; p < PAGES; p++) sums[r][p] = Kv::add_keys(sums[r][p], part[p], query);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PAGES; p++)
      store_sum(block.scores + (row + r) * SPLIT_BYTES + (page + p) * VECTOR, sums[r][p]);
}

template <class Kv, int ROWS, int PAGES>
static void score_pages(const Block& block, int row, int page) {
  for (; page + PAGES <= block.num_pages; page += PAGES) score_tile<Kv, ROWS, PAGES>(block, row, page);
  if constexpr (PAGES > 1) score_pages<Kv, ROWS, PAGES / 2>(block, row, page);
}

// Sums of the rows from `row` on against all the pages.
template <class Kv, int ROWS = TILE_ROWS>
static void score_rows(const Block& block, int row) {
  constexpr int PAGES = smaller(ROWS == 3 ? 4 : TILE_SUMS / ROWS, AHEAD);
  for (; row + ROWS <= block.rows; row += ROWS) score_pages<Kv, ROWS, PAGES>(block, row, 0);
  if constexpr (ROWS > 1) score_rows<Kv, fewer_rows(ROWS)>(block, row);
}

// ------------------------------------------------------------------------------------------------- weights by values

INLINE void load_sum(const uint8_t* p, Floats& sum) { sum = as_floats(load_ints(p)); }
INLINE void load_sum(const uint8_t* p, Ints& sum) { sum = load_ints(p); }

// Adds pages [begin, end) to the sums of some vectors of the head.
template <class Kv, int ROWS, int VECTORS>
static void value_tile(const Block& block, int row, int vector, int begin, int end) {
  constexpr int WORDS = LANES / Kv::PER;
  const bool streams = block.streams && row == 0;
  const int64_t stride = block.padded * WORD;
  uint8_t* out = block.values + row * stride + vector * VECTOR;
  typename Kv::Sum sums[ROWS][VECTORS] = {};
  if (begin > 0) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) load_sum(out + r * stride + v * VECTOR, sums[r][v]);
  }
  for (int page = begin; page < end; page++) {
    const uint8_t* values = block.page_values()[page] + vector * VECTOR;
    const uint8_t* ahead = block.page_values()[page + AHEAD] + vector * VECTOR;
    const uint8_t* weights = block.scores + row * SPLIT_BYTES + page * WORDS * WORD;
    for (int word = 0; word < WORDS; word++, values += stride, ahead += stride) {
      Ints part[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        part[v] = load_ints(values + v * VECTOR);
        if (streams) prefetch(ahead + v * VECTOR);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        Ints weight = splat_word(weights + r * SPLIT_BYTES + word * WORD);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = Kv::add_values(sums[r][v], part[v], weight);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store_sum(out + r * stride + v * VECTOR, sums[r][v]);
}

template <class Kv, int ROWS, int VECTORS>
static void value_vectors(const Block& block, int row, int vector, int begin, int end) {
  for (; vector + VECTORS <= block.padded / LANES; vector += VECTORS)
    value_tile<Kv, ROWS, VECTORS>(block, row, vector, begin, end);
  if constexpr (VECTORS > 1) value_vectors<Kv, ROWS, VECTORS / 2>(block, row, vector, begin, end);
}

// Sums of the rows from `row` on over all the pages. While they stream, a few pages at a time get through all of the
// head, so that memory is read in the order in which it was asked for.
template <class Kv, int ROWS = TILE_ROWS>
static void value_rows(const Block& block, int row) {
  constexpr int VECTORS = smaller(ROWS == 3 ? 4 : TILE_SUMS / ROWS, 8);
  for (; row + ROWS <= block.rows; row += ROWS) {
    const int step = block.streams && row == 0 ? AHEAD : block.num_pages;
    for (int page = 0; page < block.num_pages; page += step)
      value_vectors<Kv, ROWS, VECTORS>(block, row, 0, page, smaller(page + step, block.num_pages));
  }
  if constexpr (ROWS > 1) value_rows<Kv, fewer_rows(ROWS)>(block, row);
}

}  // namespace PENSTOCK_LEVEL
