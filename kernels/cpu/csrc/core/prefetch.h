// Prefetches a matrix from memory ahead of its product.
#pragma once

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

INLINE int divide_up(int a, int b) { return (a + b - 1) / b; }

// The lines to prefetch while a tile is computed: its share of the next panels. This keeps memory busy all the time,
// not only while the first of several tiles reads its weights. A tile calls `next` once for each line of a panel.
struct Ahead {
  const uint8_t* at;
  int step, second;

  __attribute__((always_inline)) void next() {
    __builtin_prefetch(at, 0, 2);  // only into L2, since L1 is full of this tile's data
    __builtin_prefetch(at + second, 0, 2);
    at += step;
  }
};

// The lines of the panels that a tile computes, some time before it uses them.
INLINE Ahead ahead_of(const uint8_t* panels, int64_t bytes, int count) {
  constexpr int DISTANCE = 64;  // lines
  return {panels + DISTANCE * 64, 64, count > 1 ? static_cast<int>(bytes) : 0};
}

// The share of tile `tile` of `tiles`, if `count` panels of `bytes` bytes each follow at `next`.
INLINE Ahead share_of(const uint8_t* next, int64_t bytes, int count, int tile, int tiles) {
  const int step = divide_up(count * 64, tiles);
  return {next + bytes / 64 * step * tile, step, step > 64 ? 64 : 0};
}

}  // namespace PENSTOCK_LEVEL
