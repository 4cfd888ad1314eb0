// Emulates AMX's tile registers in memory, for tests on processors without AMX, and for sanitizers, which cannot see
// what a tile instruction reads and writes. Results are bitwise those of the processor, and invalid uses end the
// process here as well.
#pragma once

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

// A register without rows is not configured. Memory beyond its rows and bytes is never visible.
struct SoftwareTile {
  int rows, bytes;
  alignas(64) uint8_t lines[TILE_LINES][TILE_LINE];
};

static thread_local SoftwareTile SOFTWARE_TILES[8];

INLINE void demand(bool valid) {
  if (!valid) __builtin_trap();
}

INLINE void configure_tiles(const TileShapes& shapes) {
  demand(shapes.palette == 1 && shapes.start_row == 0);
  for (int i = 0; i < 16; i++) {
    const int rows = shapes.rows[i], bytes = shapes.row_bytes[i];
    demand(i < 8 ? rows <= TILE_LINES && bytes <= TILE_LINE && !rows == !bytes : !rows && !bytes);
    if (i < 8) SOFTWARE_TILES[i] = {rows, bytes, {}};
  }
}

INLINE void release_tiles() {
  for (SoftwareTile& tile : SOFTWARE_TILES) tile = {};
}

INLINE SoftwareTile& configured_tile(int tile) {
  demand(SOFTWARE_TILES[tile].rows);
  return SOFTWARE_TILES[tile];
}

template <int TILE>
INLINE void zero_tile() {
  SoftwareTile& tile = configured_tile(TILE);
  memset(tile.lines, 0, sizeof(tile.lines));
}

template <int TILE>
INLINE void load_tile(const void* from, int64_t stride) {
  SoftwareTile& tile = configured_tile(TILE);
  for (int i = 0; i < tile.rows; i++)
    memcpy(tile.lines[i], static_cast<const uint8_t*>(from) + i * stride, static_cast<size_t>(tile.bytes));
}

template <int TILE>
INLINE void store_tile(void* to, int64_t stride) {
  const SoftwareTile& tile = configured_tile(TILE);
  for (int i = 0; i < tile.rows; i++)
    memcpy(static_cast<uint8_t*>(to) + i * stride, tile.lines[i], static_cast<size_t>(tile.bytes));
}

INLINE void demand_product(const SoftwareTile& c, const SoftwareTile& a, const SoftwareTile& b) {
  demand(a.rows == c.rows && a.bytes == 4 * b.rows && b.bytes == c.bytes && c.bytes % 4 == 0);
}

// Four bytes of a row of `a`, broadcast to all lanes.
INLINE Words splat_step(const SoftwareTile& a, int row, int step) {
  uint32_t word;
  memcpy(&word, a.lines[row] + 4 * step, sizeof(word));
  return Words{} + word;
}

// Between two calls, instructions round to nearest and treat denormal numbers as zero. The compiler does not move
// memory accesses across the calls.
INLINE uint32_t exchange_float_mode(uint32_t mode) {
  uint32_t before;
  asm volatile("stmxcsr %0" : "=m"(before)::"memory");
  asm volatile("ldmxcsr %0" ::"m"(mode) : "memory");
  return before;
}

static inline void add_pairs(SoftwareTile& c, const SoftwareTile& a, const SoftwareTile& b) {
  constexpr uint32_t HIGH = 0xffff0000, NO_DENORMALS = 0x9fc0;  // flush inputs and results; mask all exceptions
  demand_product(c, a, b);
  const uint32_t before = exchange_float_mode(NO_DENORMALS);
  for (int i = 0; i < c.rows; i++) {
    Floats even = {}, odd = {};
    for (int k = 0; k < b.rows; k++) {
      const Words left = splat_step(a, i, k), right = reinterpret_cast<Words>(load_ints(b.lines[k]));
      even = fma(reinterpret_cast<Floats>(left << 16), reinterpret_cast<Floats>(right << 16), even);
      odd = fma(reinterpret_cast<Floats>(left & HIGH), reinterpret_cast<Floats>(right & HIGH), odd);
    }
    const Floats sums = as_floats(load_ints(c.lines[i])) + (even + odd);
    store_ints(c.lines[i], as_ints(sums));
  }
  exchange_float_mode(before);
}

static inline void add_quads(SoftwareTile& c, const SoftwareTile& a, const SoftwareTile& b) {
  demand_product(c, a, b);
  for (int i = 0; i < c.rows; i++) {
    Words sums = reinterpret_cast<Words>(load_ints(c.lines[i]));
    for (int k = 0; k < b.rows; k++) {
      const Words left = splat_step(a, i, k), right = reinterpret_cast<Words>(load_ints(b.lines[k]));
      for (int shift = 0; shift < 32; shift += 8) {
        const Ints signed_bytes = reinterpret_cast<Ints>(left << (24 - shift)) >> 24;
        sums += reinterpret_cast<Words>(signed_bytes) * (right >> shift & 0xff);
      }
    }
    store_ints(c.lines[i], reinterpret_cast<Ints>(sums));
  }
}

template <int C, int A, int B>
INLINE void add_tile_pairs() {
  static_assert(C != A && C != B && A != B, "");
  add_pairs(configured_tile(C), configured_tile(A), configured_tile(B));
}

template <int C, int A, int B>
INLINE void add_tile_quads() {
  static_assert(C != A && C != B && A != B, "");
  add_quads(configured_tile(C), configured_tile(A), configured_tile(B));
}

}  // namespace PENSTOCK_LEVEL
