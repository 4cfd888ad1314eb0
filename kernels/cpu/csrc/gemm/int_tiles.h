// Divides a product into tiles: some rows of inputs times one or two panels, whose sums stay in registers.
#pragma once

#include "core/prefetch.h"
#include "gemm/int_dot.h"
#include "gemm/epilogue.h"

namespace PENSTOCK_LEVEL {

using penstock::Inputs;

// A tile's work. Rows of `sums` are `width` floats apart, panels 16.
struct DotTile {
  const Matrix& matrix;
  const uint8_t* panels;
  const uint8_t* inputs;
  int64_t stride;
  Ahead ahead;
  float* sums;
  int width;
};

// Calls the tile function for `rows` rows, 1 to M.
template <class Kind, int M, int P, class Tile>
INLINE void compute_tile(int rows, const Tile& tile) {
  if constexpr (M > 0) {
    if (rows == M) return Kind::template compute<M, P>(tile);
    compute_tile<Kind, M - 1, P>(rows, tile);
  }
}

// The panels to prefetch while those from `panel` on are multiplied, of the product with panels up to `end`.
INLINE const uint8_t* panels_after(const Matrix& matrix, const Inputs& inputs, int panel, int end) {
  if (panel + 2 >= end && inputs.following) return inputs.following;
  return matrix.panels + (panel + 2 < end ? panel + 2 : panel) * matrix.panel_bytes;
}

// Multiplies all rows with panels [begin, end). Tiles differ by at most one row, so that none is too small to be fast.
template <class Kind>
INLINE void compute_tiles(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
  alignas(64) float sums[Kind::ROWS * 2 * LANES];
  const int tiles = divide_up(inputs.rows, Kind::ROWS);
  for (int panel = begin; panel < end; panel += 2) {
    const int count = end - panel < 2 ? 1 : 2, per_tile = count < DOT_PANELS ? count : DOT_PANELS;
    const uint8_t* panels = matrix.panels + panel * matrix.panel_bytes;
    const uint8_t* next = panels_after(matrix, inputs, panel, end);
    // Perhaps nothing has prefetched the first panels, so their first tile of several prefetches its own.
    const int calls = count / per_tile, own = panel == begin && tiles > 1 ? calls : 0;
    for (int i = 0; i < tiles; i++) {
      const int row = static_cast<int>(static_cast<int64_t>(inputs.rows) * i / tiles);
      const int rows = static_cast<int>(static_cast<int64_t>(inputs.rows) * (i + 1) / tiles) - row;
      for (int p = 0; p < count; p += per_tile) {
        const int call = i * calls + p / per_tile;
        const uint8_t* at = panels + p * matrix.panel_bytes;
        const Ahead ahead = call < own
                                ? ahead_of(at, matrix.panel_bytes, per_tile)
                                : share_of(next, matrix.panel_bytes, count, call - own, tiles * calls - own);
        const uint8_t* data = inputs.data + row * inputs.stride;
        const DotTile tile = {matrix, at, data, inputs.stride, ahead, sums + p * LANES, count * LANES};
        if (per_tile == 2) {
          compute_tile<Kind, Kind::ROWS, DOT_PANELS>(rows, tile);
        } else {
          compute_tile<Kind, Kind::ROWS, 1>(rows, tile);
        }
      }
      write_tile(matrix, output, row, rows, panel, count, sums);
    }
  }
}

}  // namespace PENSTOCK_LEVEL
