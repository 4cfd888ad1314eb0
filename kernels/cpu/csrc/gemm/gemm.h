// The table's product functions, which dispatch on the format.
#pragma once

#include "gemm/float_panel.h"
#include "core/kernel_table.h"
#if defined(__AMX_BF16__)
#include "gemm/bf16_amx.h"
#endif
#include "gemm/float.h"
#include "gemm/fp4.h"
#include "gemm/int4.h"
#include "gemm/int8.h"

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::Format;

static int64_t panel_bytes(Format format, int columns, int group) {
  switch (format) {
    case penstock::FORMAT_BF16: return bf16_panel_bytes(columns);
    case penstock::FORMAT_INT8: return int8_panel_bytes(columns);
    case penstock::FORMAT_INT4: return int4_panel_bytes(columns, group);
    case penstock::FORMAT_FP4: return block_scaled_panel_bytes<Fp4>(columns);
    case penstock::FORMAT_Q4_0: return block_scaled_panel_bytes<Q4_0>(columns);
    default: return f32_panel_bytes(columns);
  }
}

static int64_t input_bytes(Format format, int columns, int group) {
  switch (format) {
    case penstock::FORMAT_BF16: return bf16_input_bytes(columns);
    case penstock::FORMAT_INT8: return int8_input_bytes(columns);
    case penstock::FORMAT_INT4: return int4_input_bytes(columns, group);
    case penstock::FORMAT_FP4:
    case penstock::FORMAT_Q4_0: return block_scaled_input_bytes(columns);
    default: return f32_input_bytes(columns);
  }
}

static void pack_panel(Format format, int columns, int group, const float* const rows[LANES], uint8_t* panel,
                       double error[2]) {
  switch (format) {
    case penstock::FORMAT_BF16: return bf16_pack_panel(columns, rows, panel);
    case penstock::FORMAT_INT8: return int8_pack_panel(columns, rows, panel, error);
    case penstock::FORMAT_INT4: return int4_pack_panel(columns, group, rows, panel, error);
    default: return f32_pack_panel(columns, rows, panel);
  }
}

static void pack_panel_bf16(int columns, const uint16_t* const rows[LANES], uint8_t* panel) {
  bf16_pack_panel_bf16(columns, rows, panel);
}

static void pack_panel_codes(Format format, int columns, int group, const uint8_t* const codes[LANES],
                             const float* const scales[LANES], const float* const zeros[LANES], uint8_t* panel) {
  switch (format) {
    case penstock::FORMAT_INT8: return int8_pack_codes(columns, codes, scales, zeros, panel);
    case penstock::FORMAT_FP4: return block_scaled_pack_codes<Fp4>(columns, codes, scales, panel);
    case penstock::FORMAT_Q4_0: return block_scaled_pack_codes<Q4_0>(columns, codes, scales, panel);
    default: return int4_pack_codes(columns, group, codes, scales, zeros, panel);
  }
}

static void unpack_row(const Matrix& matrix, int row, float* out) {
  switch (matrix.format) {
    case penstock::FORMAT_BF16: return bf16_unpack_row(matrix, row, out);
    case penstock::FORMAT_INT8: return int8_unpack_row(matrix, row, out);
    case penstock::FORMAT_INT4: return int4_unpack_row(matrix, row, out);
    case penstock::FORMAT_FP4: return block_scaled_unpack_row<Fp4>(matrix, row, out);
    case penstock::FORMAT_Q4_0: return block_scaled_unpack_row<Q4_0>(matrix, row, out);
    default: return f32_unpack_row(matrix, row, out);
  }
}

static void prepare(Format format, int columns, int group, const float* x, uint8_t* out) {
  switch (format) {
    case penstock::FORMAT_BF16: return bf16_prepare(columns, x, out);
    case penstock::FORMAT_INT8: return int8_prepare(columns, x, out);
    case penstock::FORMAT_INT4: return int4_prepare(columns, group, x, out);
    case penstock::FORMAT_FP4: return block_scaled_prepare<Fp4>(columns, x, out);
    case penstock::FORMAT_Q4_0: return block_scaled_prepare<Q4_0>(columns, x, out);
    default: return f32_prepare(columns, x, out);
  }
}

static void product(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
  switch (matrix.format) {
    case penstock::FORMAT_BF16: return bf16_product(matrix, inputs, begin, end, output);
    case penstock::FORMAT_INT8: return int8_product(matrix, inputs, begin, end, output);
    case penstock::FORMAT_INT4: return int4_product(matrix, inputs, begin, end, output);
    case penstock::FORMAT_FP4: return compute_tiles<BlockScaled<Fp4>>(matrix, inputs, begin, end, output);
    case penstock::FORMAT_Q4_0: return compute_tiles<BlockScaled<Q4_0>>(matrix, inputs, begin, end, output);
    default: return f32_product(matrix, inputs, begin, end, output);
  }
}

// The number of rows that share a panel while it is in cache. AMX tiles multiply a panel in about the time that
// fetching it takes, so it pays to share it among many rows. Otherwise few are enough, and short pieces balance the
// threads' work better.
static int product_rows(Format format) {
#if defined(__AMX_BF16__)
  if (format == penstock::FORMAT_BF16) return 256;
#endif
  (void)format;
  return 64;
}

}  // namespace PENSTOCK_LEVEL
