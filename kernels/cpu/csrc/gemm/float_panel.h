// The layout of float32 and bfloat16 panels and of their inputs, with the functions that write and read them.
#pragma once

#include "core/kernel_table.h"

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::LANES;
using penstock::Matrix;

// Columns of all 16 rows that are packed before the next ones, so that this part of the panel stays in the L1 cache.
constexpr int PACKED_AT_ONCE = 256;

#if defined(__AMX_BF16__)
constexpr int BF16_FILL = 32;  // panels and inputs are padded with zeros to a multiple of a tile's columns
#else
constexpr int BF16_FILL = 2;
#endif

// The columns of a bfloat16 panel, including padding.
INLINE int64_t bf16_filled(int columns) {
  return (static_cast<int64_t>(columns) + BF16_FILL - 1) / BF16_FILL * BF16_FILL;
}

// The bytes of an input row. Avoids multiples of 1024, at which rows would compete for few sets of the L1 cache.
INLINE int64_t float_input_bytes(int columns, int bytes) {
  const int64_t whole = (static_cast<int64_t>(columns) * bytes + 63) / 64 * 64;
  return whole % 1024 == 0 ? whole + 64 : whole;
}

static int64_t f32_panel_bytes(int columns) { return static_cast<int64_t>(columns) * LANES * 4; }
static int64_t bf16_panel_bytes(int columns) { return bf16_filled(columns) * LANES * 2; }
static int64_t f32_input_bytes(int columns) { return float_input_bytes(columns, 4); }
static int64_t bf16_input_bytes(int columns) { return float_input_bytes(columns, BF16_FACTOR_BYTES); }

// Writes n columns of a row, or zeros for a null row, to lane `lane` of float32 lines.
INLINE void pack_floats(const float* row, int n, int lane, uint8_t* lines) {
  for (int c = 0; c < n; c++) {
    const float value = row ? row[c] : 0.0f;
    memcpy(lines + (static_cast<int64_t>(c) * LANES + lane) * 4, &value, 4);
  }
}

// The same for pairs of bfloat16. If n is odd, the second element of the last pair is zero.
INLINE void pack_pairs(const bf16* row, int n, int lane, uint8_t* lines) {
  uint8_t* to = lines + lane * 4;
  for (int c = 0; c < n; c += 2, to += LANES * 4) {
    uint32_t pair = 0;
    if (row && c + 1 < n) {
      memcpy(&pair, row + c, 4);
    } else if (row) {
      pair = row[c];
    }
    memcpy(to, &pair, 4);
  }
}

static void f32_pack_panel(int columns, const float* const rows[LANES], uint8_t* panel) {
  for (int begin = 0; begin < columns; begin += PACKED_AT_ONCE) {
    const int n = columns - begin < PACKED_AT_ONCE ? columns - begin : PACKED_AT_ONCE;
    for (int lane = 0; lane < LANES; lane++)
      pack_floats(rows[lane] ? rows[lane] + begin : nullptr, n, lane, panel + static_cast<int64_t>(begin) * LANES * 4);
  }
}

// Writes zeros to the padding columns of a panel, after the last pair.
INLINE void fill_panel(int columns, uint8_t* panel) {
  const int64_t packed = static_cast<int64_t>(columns + 1) / 2 * LANES * 4;
  memset(panel + packed, 0, static_cast<size_t>(bf16_panel_bytes(columns) - packed));
}

static void bf16_pack_panel_bf16(int columns, const bf16* const rows[LANES], uint8_t* panel) {
  for (int begin = 0; begin < columns; begin += PACKED_AT_ONCE) {
    const int n = columns - begin < PACKED_AT_ONCE ? columns - begin : PACKED_AT_ONCE;
    for (int lane = 0; lane < LANES; lane++)
      pack_pairs(rows[lane] ? rows[lane] + begin : nullptr, n, lane, panel + static_cast<int64_t>(begin) * LANES * 2);
  }
  fill_panel(columns, panel);
}

static void bf16_pack_panel(int columns, const float* const rows[LANES], uint8_t* panel) {
  bf16 rounded[PACKED_AT_ONCE];
  for (int begin = 0; begin < columns; begin += PACKED_AT_ONCE) {
    const int n = columns - begin < PACKED_AT_ONCE ? columns - begin : PACKED_AT_ONCE;
    for (int lane = 0; lane < LANES; lane++) {
      const float* row = rows[lane] ? rows[lane] + begin : nullptr;
      for (int c = 0; row && c < n; c += LANES)
        store_bf16(rounded + c, n - c < LANES ? load_some(row + c, n - c) : load(row + c));
      pack_pairs(row ? rounded : nullptr, n, lane, panel + static_cast<int64_t>(begin) * LANES * 2);
    }
  }
  fill_panel(columns, panel);
}

static void f32_unpack_row(const Matrix& matrix, int row, float* out) {
  const uint8_t* from = matrix.panels + row / LANES * matrix.panel_bytes + row % LANES * 4;
  for (int c = 0; c < matrix.columns; c++, from += LANES * 4) memcpy(out + c, from, 4);
}

static void bf16_unpack_row(const Matrix& matrix, int row, float* out) {
  const uint8_t* from = matrix.panels + row / LANES * matrix.panel_bytes + row % LANES * 4;
  for (int c = 0; c < matrix.columns; c++) {
    bf16 value;
    memcpy(&value, from + static_cast<int64_t>(c / 2) * LANES * 4 + c % 2 * 2, 2);
    out[c] = widen(value);
  }
}

static void f32_prepare(int columns, const float* x, uint8_t* out) {
  memcpy(out, x, static_cast<size_t>(columns) * 4);
}

// Pads with zeros to 16 columns, and to the columns of the last tile.
static void bf16_prepare(int columns, const float* x, uint8_t* out) {
  const int filled = BF16_FILL > LANES ? static_cast<int>(bf16_filled(columns)) : columns;
  for (int c = 0; c < filled; c += LANES) {
    const int left = columns - c < 0 ? 0 : columns - c;
    store_bf16_factors(out + static_cast<int64_t>(c) * BF16_FACTOR_BYTES, load_up_to(x + c, left));
  }
}

}  // namespace PENSTOCK_LEVEL
