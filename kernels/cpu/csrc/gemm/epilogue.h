// The end of a product, for all formats: bias, activation and output.
#pragma once

#include "core/activation.h"
#include "core/kernel_table.h"

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::LANES;
using penstock::Matrix;
using penstock::GemmOutput;

// Writes the first `columns` entries of `result` to row `row` from `column` on.
INLINE void write_columns(const GemmOutput& output, int row, int column, Floats result, int columns) {
  float* out = output.data + row * output.stride + column;
  const bool add = output.mode == penstock::OUTPUT_ADD;
  if (columns >= LANES) {
    store(out, add ? load(out) + result : result);
  } else {
    store_some(out, add ? load_some(out, columns) + result : result, columns);
  }
}

INLINE Floats gate(Floats gate, Floats up, const GemmOutput& output) {
  if (output.activation != penstock::ACTIVATION_CLAMPED) return activate(gate, output.activation) * up;
  // For NaN, the second operand.
  const Floats limit = splat(output.limit), g = min(limit, gate), u = max(-limit, min(limit, up));
  return g * sigmoid(g * output.alpha) * (u + splat(1.0f));
}

// Finishes a tile. `sums`, (rows, panels, 16) float32, are the sums of rows [row, row + rows) of the inputs and panels
// [panel, panel + panels) of the matrix. Entries past the matrix's last row are not written. A gated output has half as
// many columns as the matrix has rows. For it, `panel` and `panels` are even, and the last two panels hold the same
// number of rows.
static void write_tile(const Matrix& matrix, const GemmOutput& output, int row, int rows, int panel, int panels,
                       const float* sums) {
  const bool gated = output.mode == penstock::OUTPUT_GATED;
  for (int p = 0; p < panels; p += gated ? 2 : 1) {
    const int width = gated ? matrix.rows / 2 : matrix.rows;
    const int column = (gated ? (panel + p) / 2 : panel + p) * LANES;
    const float* bias = matrix.bias ? matrix.bias + (panel + p) * LANES : nullptr;
    const Floats bias0 = bias ? load(bias) : Floats{}, bias1 = bias && gated ? load(bias + LANES) : Floats{};
    for (int r = 0; r < rows; r++) {
      const float* sum = sums + (r * panels + p) * LANES;
      Floats result = load(sum) + bias0;
      if (gated) result = gate(result, load(sum + LANES) + bias1, output);
      write_columns(output, row + r, column, result, width - column);
    }
  }
}

}  // namespace PENSTOCK_LEVEL
