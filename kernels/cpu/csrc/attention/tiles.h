// The two products of attention over the pages of a split: queries times keys, and weights times values. Sums stay in
// registers for a tile of rows by pages, or of rows by vectors of the head. Every sum adds up the same words in the
// same order, whatever its tile.
#pragma once

#include "attention/kv_formats.h"
#include "attention/lanes.h"
#include "core/kernel_table.h"
#include "attention/kv_page.h"
#include "core/simd.h"

namespace PENSTOCK_LEVEL {

namespace paged {

// Rows of words that are computed together; their scores fill 32 KiB.
constexpr int BLOCK_ROWS = 32;
constexpr int SPLIT_PAGES = SPLIT / LANES;

// The maximum number of a tile's rows. Each of a tile's vectors takes a register for the sums of each row, and OPERANDS
// more; there is room for TILE_VECTORS vectors of 16 numbers.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12, TILE_VECTORS = 32, OPERANDS = 2;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int TILE_ROWS = 4, TILE_VECTORS = 4, OPERANDS = 0;
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 2, OPERANDS = 0;
#endif

// How many sections ahead of their use sections are prefetched: as many as memory delivers in twice its latency.
constexpr int AHEAD = 4;

// The bytes of keys or of values that stay in the L1 cache, beside queries or sums.
constexpr int CACHED_BYTES = 16 << 10;

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

#define UNROLL _Pragma("GCC unroll 16")

// Prefetches lines of 64 bytes into L2, since few can be in flight to L1 at once. Sections are prefetched from
// beginning to end, which suits the processor's own prefetcher.
INLINE void ask_for(const uint8_t* at, int lines) {
  UNROLL for (int i = 0; i < lines; i++) __builtin_prefetch(at + i * VECTOR, 0, 2);
}

// Some rows of words against some pages of a split.
struct Block {
  int rows;
  int first_page, num_pages;
  int padded;       // the head size, padded to 16
  int64_t section;  // bytes
  // In the order in which memory is read: the keys of the pages, their values, and the keys of the next pages, or null.
  const uint8_t* sections[2 * SPLIT_PAGES + AHEAD];
  bool streams;            // sections come from memory, so the next ones are prefetched
  const uint8_t* queries;  // factors [rows][padded / PER]
  uint8_t* scores;         // words [rows][SPLIT]: sums, then scores, then the weights' factors
  uint8_t* values;         // words [rows][padded]

  // The pages that all rows are computed with before the next ones.
  int pages_at_once() const { return smaller(larger(static_cast<int>(CACHED_BYTES / section), 1), AHEAD); }
  const uint8_t* const* keys() const { return sections; }
  const uint8_t* const* page_values() const { return sections + num_pages; }
  // The section to prefetch while the rows from `row` on are computed; null: none.
  const uint8_t* ahead_of_keys(int page, int row) const { return streams && row == 0 ? keys()[page + AHEAD] : nullptr; }
  const uint8_t* ahead_of_values(int page, int row) const {
    return streams && row == 0 ? page_values()[page + AHEAD] : nullptr;
  }
};

// The vectors of a tile with `rows` rows, a power of two up to 8.
constexpr int vectors_of(int rows) {
  int vectors = 1;
  while (vectors < 8 && (rows + OPERANDS) * vectors * 2 <= TILE_VECTORS) vectors *= 2;
  return vectors;
}

// The next smaller of 8, 4, 3, 2, 1: seven rows are computed as four and three.
constexpr int fewer_rows(int rows) { return rows > 8 ? 8 : rows > 4 ? 4 : rows - 1; }

// -------------------------------------------------------------------------------------------------- queries by keys

template <class Kv, int ROWS, int PAGES>
static void score_tile(const Block& block, int row, int page) {
  constexpr int COLUMNS = PAGES * PARTS;  // registers that hold the pages' tokens
  const int words = block.padded / Kv::PER;
  const uint8_t* queries = block.queries + static_cast<int64_t>(row) * words * Kv::FACTOR_BYTES;
  const uint8_t* const* keys = block.keys() + page;
  typename Kv::Sum sums[ROWS][COLUMNS] = {};
  for (int p = 0, word = 0; p < PAGES; p++) {
    const uint8_t* ahead = block.ahead_of_keys(page + p, row);
    for (int line = 0; line < words; line += PAGES, word++) {
      IntPart part[COLUMNS];
      UNROLL for (int c = 0; c < COLUMNS; c++)
        part[c] = load_part(keys[c / PARTS] + word * VECTOR + c % PARTS * PART_BYTES);
      if (ahead) ask_for(ahead + line * VECTOR, PAGES);
      UNROLL for (int r = 0; r < ROWS; r++) {
        const auto query = Kv::spread(queries + (r * words + word) * Kv::FACTOR_BYTES);
        UNROLL for (int c = 0; c < COLUMNS; c++) sums[r][c] = Kv::add_keys(sums[r][c], part[c], query);
      }
    }
  }
  uint8_t* out = block.scores + row * SPLIT_BYTES + page * VECTOR;
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < COLUMNS; c++) store_part(out + r * SPLIT_BYTES + c * PART_BYTES, sums[r][c]);
}

template <class Kv, int ROWS, int PAGES>
static void score_pages(const Block& block, int row, int begin, int end) {
  for (; begin + PAGES <= end; begin += PAGES) score_tile<Kv, ROWS, PAGES>(block, row, begin);
  if constexpr (PAGES > 1) score_pages<Kv, ROWS, PAGES / 2>(block, row, begin, end);
}

// Computes the sums of the rows from `row` on with pages [begin, end).
template <class Kv, int ROWS = TILE_ROWS>
static void score_rows(const Block& block, int row, int begin, int end) {
  constexpr int PAGES = smaller(vectors_of(ROWS), AHEAD);
  for (; row + ROWS <= block.rows; row += ROWS) score_pages<Kv, ROWS, PAGES>(block, row, begin, end);
  if constexpr (ROWS > 1) score_rows<Kv, fewer_rows(ROWS)>(block, row, begin, end);
}

// ------------------------------------------------------------------------------------------------- weights by values

// Adds pages [begin, end) to the sums of some vectors of the head.
template <class Kv, int ROWS, int VECTORS>
static void value_tile(const Block& block, int row, int vector, int begin, int end) {
  constexpr int WORDS = LANES / Kv::PER, COLUMNS = VECTORS * PARTS;
  const int64_t stride = block.padded * WORD;
  uint8_t* out = block.values + row * stride + vector * VECTOR;
  typename Kv::Sum sums[ROWS][COLUMNS] = {};
  if (begin > 0) {
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int c = 0; c < COLUMNS; c++) reload_part(out + r * stride + c * PART_BYTES, sums[r][c]);
  }
  for (int page = begin; page < end; page++) {
    const uint8_t* values = block.page_values()[page] + vector * VECTOR;
    const uint8_t* ahead = block.ahead_of_values(page, row);
    const uint8_t* weights = block.scores + row * SPLIT_BYTES + page * WORDS * Kv::FACTOR_BYTES;
    for (int word = 0; word < WORDS; word++, values += stride) {
      IntPart part[COLUMNS];
      UNROLL for (int c = 0; c < COLUMNS; c++) part[c] = load_part(values + c * PART_BYTES);
      if (ahead) ask_for(ahead + (vector * WORDS + word * VECTORS) * VECTOR, VECTORS);
      UNROLL for (int r = 0; r < ROWS; r++) {
        const auto weight = Kv::spread(weights + r * SPLIT_BYTES + word * Kv::FACTOR_BYTES);
        UNROLL for (int c = 0; c < COLUMNS; c++) sums[r][c] = Kv::add_values(sums[r][c], part[c], weight);
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < COLUMNS; c++) store_part(out + r * stride + c * PART_BYTES, sums[r][c]);
}

template <class Kv, int ROWS, int VECTORS>
static void value_vectors(const Block& block, int row, int vector, int begin, int end) {
  for (; vector + VECTORS <= block.padded / LANES; vector += VECTORS)
    value_tile<Kv, ROWS, VECTORS>(block, row, vector, begin, end);
  if constexpr (VECTORS > 1) value_vectors<Kv, ROWS, VECTORS / 2>(block, row, vector, begin, end);
}

// Adds pages [begin, end) to the sums of the rows from `row` on.
template <class Kv, int ROWS = TILE_ROWS>
static void value_rows(const Block& block, int row, int begin, int end) {
  constexpr int VECTORS = vectors_of(ROWS);
  for (; row + ROWS <= block.rows; row += ROWS) value_vectors<Kv, ROWS, VECTORS>(block, row, 0, begin, end);
  if constexpr (ROWS > 1) value_rows<Kv, fewer_rows(ROWS)>(block, row, begin, end);
}

#undef UNROLL

// --------------------------------------------------------------------------------------------------------- a block

// Computes the sums of all rows: `scores`, then `values` from the weights that replaced the scores. All rows are
// computed with a few pages before the next ones, so that these pages stay in the L1 cache, and memory is read in the
// order of the prefetches.
template <class Kv>
inline void multiply_keys(const Block& block) {
  const int step = block.pages_at_once();
  for (int page = 0; page < block.num_pages; page += step)
    score_rows<Kv>(block, 0, page, smaller(page + step, block.num_pages));
}

template <class Kv>
inline void multiply_values(const Block& block) {
  const int step = block.pages_at_once();
  for (int page = 0; page < block.num_pages; page += step)
    value_rows<Kv>(block, 0, page, smaller(page + step, block.num_pages));
}

}  // namespace paged

}  // namespace PENSTOCK_LEVEL
