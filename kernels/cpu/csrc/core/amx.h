// AMX: eight tile registers, each of up to 16 rows of 64 bytes, and the instructions that multiply them.
//
// c += a b, where a row of `a` is a row of inputs as stored in memory, `b` has lines of a panel in the layout of the
// dot products ([K / 2][16][2] bfloat16, or [K / 4][16][4] bytes), and `c` has 16 lanes of sums per row. A bfloat16 sum
// adds up the products of even columns and those of odd columns over the tile, both in order, and then adds both to c.
// So its bits depend on where tiles begin, and not on how many rows they have. Denormal numbers count as zero. Sums of
// bytes are exact.
//
// Written in assembly, since the compilers' intrinsics take register numbers only as literals, which templates cannot
// supply, and those of gcc 12 do not declare that they read memory. core/amx_emulated.h has the same functions for
// tests.
#pragma once

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

constexpr int TILE_LINES = 16, TILE_LINE = 64;  // maximum rows of a register, and bytes of a row

// The rows of each register, and the bytes per row. A thread's configuration stays valid until it is released.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int lines, int bytes) {
    rows[tile] = static_cast<uint8_t>(lines);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

}  // namespace PENSTOCK_LEVEL

#if defined(PENSTOCK_SOFTWARE_TILES)
#include "core/amx_emulated.h"
#else

namespace PENSTOCK_LEVEL {

INLINE void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }

// Releases the registers. While they are in use, the system saves 8 KiB whenever another thread gets the core.
INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int C, int A, int B>
INLINE void add_tile_pairs() {  // bfloat16
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

template <int C, int A, int B>
INLINE void add_tile_quads() {  // signed bytes of `a`, unsigned bytes of `b`
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace PENSTOCK_LEVEL

#endif
