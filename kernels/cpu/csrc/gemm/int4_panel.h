// The layout of a panel of int4 weights, and quantising and packing it.
//
// Columns are stored in chunks: groups of up to 128 columns, or pieces of a longer group. A chunk has one line of 64
// bytes with the scales and the zero points of the 16 rows as float16, and then one line of [16][4] bytes for every 8
// columns. The low halves of these bytes hold the codes of the first 4 columns, the high halves those of the other 4.
// The last chunk is as long as its columns, padded to 8. The panel ends with a line of 16 float32, the units: powers of
// two that bring the scales of a row into float16's range, whatever the size of its weights. W = (code - zero) * scale
// * unit.
#pragma once

#include "gemm/quantize_activations.h"

namespace PENSTOCK_LEVEL {

// The columns of a chunk: the largest of 128, 96, 64 and 32 that divides the group. A group of 0 means one group per
// row.
INLINE int int4_chunk(int group) {
  int chunk = 128;
  while (group % chunk != 0 && chunk > 32) chunk -= 32;
  return chunk;
}

INLINE int64_t int4_chunk_bytes(int chunk) { return 64 + chunk * 8; }

static int64_t int4_panel_bytes(int columns, int group) {
  return (divide_up(columns, int4_chunk(group)) + divide_up(columns, 8) + 1) * int64_t{64};
}

// ------------------------------------------------------------------------------------------------------------- float16

// Rounds to nearest, ties to even; larger numbers become the largest float16.
static uint16_t to_half(float x) {
  uint32_t bits, rounded;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x38800000u) {  // below 2^-14, where float16 has steps of 2^-24, as float32 has from 0.5 on
    float shifted;
    memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    memcpy(&rounded, &shifted, 4);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7bffu);
  rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  return static_cast<uint16_t>(sign | rounded);
}

INLINE Floats load_half(const void* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif defined(TWO_REGISTERS) && defined(__F16C__)
  const __m128i* from = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
#elif defined(__aarch64__)
  const uint16_t* from = static_cast<const uint16_t*>(p);
  const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(from)), high = vreinterpretq_f16_u16(vld1q_u16(from + 8));
  return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
          vcvt_high_f32_f16(high)};
#else
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  Words half;
  for (int i = 0; i < LANES; i++) half[i] = static_cast<uint32_t>(bytes[2 * i] | bytes[2 * i + 1] << 8);
  // The exponent's bias is 112 less. The multiplication corrects it, also for zero and denormal numbers.
  const Floats magnitude = as_floats(as_ints((half & 0x7fffu) << 13)) * splat(0x1p112f);
  return as_floats(as_ints(magnitude) | as_ints((half & 0x8000u) << 16));
#endif
}

// Rounds and stores each lane; returns the rounded values.
INLINE Floats store_half(void* p, Floats x) {
  uint16_t half[LANES];
  for (int i = 0; i < LANES; i++) half[i] = to_half(x[i]);
  memcpy(p, half, sizeof(half));
  return load_half(p);
}

// The power of two, per lane, that brings scales up to `bound` below 512, far from both ends of float16's range.
INLINE Floats int4_unit(Floats bound) {
  const Floats power = as_floats(as_ints(bound) & 0x7f800000), lowest = as_floats(splat_int(9 << 23));
  return as_floats(as_ints(max(power, lowest)) - (8 << 23));
}

// --------------------------------------------------------------------------------------------------- 16 rows at a time

// A scale and a zero point for each of 16 rows.
struct Grid {
  Floats scale, zero;
};

INLINE Floats int4_inverse(Floats scale) { return where(scale > SMALLEST, splat(1.0f) / scale, Floats{}); }

INLINE Floats int4_code(Floats weight, Floats inverse, Floats zero) {
  const Floats code = fma(weight, inverse, zero);
  return to_floats(to_ints_nearest(min(max(code, Floats{}), splat(15.0f))));
}

// The squared error of each row's n weights; `weights` is (n, 16).
static Floats int4_error(const float* weights, int n, Grid grid) {
  const Floats inverse = int4_inverse(grid.scale);
  Floats wrong = {};
  for (int k = 0; k < n; k++) {
    const Floats weight = load(weights + k * LANES);
    const Floats off = fma(int4_code(weight, inverse, grid.zero) - grid.zero, -grid.scale, weight);
    wrong = fma(off, off, wrong);
  }
  return wrong;
}

// The grid on which the codes of n weights have the least squared error: a line fitted through (code, weight).
static Grid int4_fit(const float* weights, int n, Grid grid) {
  const Floats inverse = int4_inverse(grid.scale);
  Floats codes = {}, squares = {}, sums = {}, products = {};
  for (int k = 0; k < n; k++) {
    const Floats weight = load(weights + k * LANES), code = int4_code(weight, inverse, grid.zero);
    codes += code;
    squares = fma(code, code, squares);
    sums += weight;
    products = fma(code, weight, products);
  }
  const Floats count = splat(static_cast<float>(n)), spread = count * squares - codes * codes;
  const Floats scale = (count * products - codes * sums) / where(spread > 0, spread, splat(1.0f));
  const Floats zero = (codes - sums * int4_inverse(scale)) / count;
  // Without a positive slope, or with a zero point outside the codes, the fitted grid cannot be used.
  const Ints usable = (spread > 0) & (scale > SMALLEST) & (zero >= 0) & (zero <= 15);
  return {where(usable, scale, grid.scale), where(usable, zero, grid.zero)};
}

// The best grid for n weights of each row. Tries the range from the least to the greatest weight and narrower ranges,
// and fits each. A range always includes zero.
static Grid int4_search(const float* weights, int n) {
  constexpr int TRIALS = 12;
  constexpr float NARROWEST = 0.7f;
  Floats low = {}, high = {};
  for (int k = 0; k < n; k++) {
    low = min(low, load(weights + k * LANES));
    high = max(high, load(weights + k * LANES));
  }
  Grid best = {(high - low) * splat(1.0f / 15), Floats{}};
  best.zero = -low * int4_inverse(best.scale);
  const Grid widest = best;
  Floats least = int4_error(weights, n, best);
  for (int i = 0; i < TRIALS; i++) {
    Grid grid = widest;  // the zero point stays the same when both ends move
    grid.scale *= splat(NARROWEST + (1 - NARROWEST) * static_cast<float>(i) / (TRIALS - 1));
    grid = int4_fit(weights, n, grid);
    const Floats wrong = int4_error(weights, n, grid);
    best.scale = where_less(wrong, least, grid.scale, best.scale);
    best.zero = where_less(wrong, least, grid.zero, best.zero);
    least = min(wrong, least);
  }
  return best;
}

// ------------------------------------------------------------------------------------------------------------- packing

// Packs n columns of codes, (n, 16) floats, as lines of 8 columns.
INLINE void int4_pack_lines(const float* codes, int n, uint8_t* lines) {
  for (int begin = 0; begin < n; begin += 8) {
    Ints line = {};
    for (int k = begin; k < begin + 8 && k < n; k++) {
      const Ints code = to_ints_nearest(load(codes + k * LANES));
      line |= code << ((k - begin) % 4 * 8 + (k - begin) / 4 * 4);
    }
    store_ints(lines + begin * 8, line);
  }
}

// Packs a chunk of n columns of `weights`, (n, 16). Adds each row's squared errors and squared weights to `squares`.
static void int4_pack_chunk(const float* weights, int n, Floats unit, uint8_t* chunk, Floats squares[2]) {
  Grid grid = int4_search(weights, n);
  grid.scale = store_half(chunk, grid.scale / unit) * unit;
  grid.zero = store_half(chunk + 32, grid.zero);
  const Floats inverse = int4_inverse(grid.scale);
  float codes[128 * LANES];
  for (int k = 0; k < n; k++) {
    const Floats weight = load(weights + k * LANES);
    store(codes + k * LANES, int4_code(weight, inverse, grid.zero));
    squares[1] = fma(weight, weight, squares[1]);
  }
  squares[0] += int4_error(weights, n, grid);
  int4_pack_lines(codes, n, chunk + 64);
}

static void int4_pack_panel(int columns, int group, const float* const rows[LANES], uint8_t* panel, double error[2]) {
  const int chunk = int4_chunk(group);
  float weights[128 * LANES], bounds[LANES];
  for (int row = 0; row < LANES; row++)  // a scale fitted to few codes may be as large as the weights
    bounds[row] = rows[row] ? largest_magnitude(rows[row], columns) : 0.0f;
  const Floats unit = int4_unit(load(bounds));
  for (int begin = 0; begin < columns; begin += chunk) {
    const int n = columns - begin < chunk ? columns - begin : chunk;
    for (int row = 0; row < LANES; row++)
      for (int k = 0; k < n; k++) weights[k * LANES + row] = rows[row] ? rows[row][begin + k] : 0.0f;
    Floats squares[2] = {};
    int4_pack_chunk(weights, n, unit, panel, squares);
    error[0] += static_cast<double>(sum(squares[0]));
    error[1] += static_cast<double>(sum(squares[1]));
    panel += 64 + divide_up(n, 8) * 64;
  }
  store(reinterpret_cast<float*>(panel), unit);
}

static void int4_pack_codes(int columns, int group, const uint8_t* const codes[LANES],
                            const float* const scales[LANES], const float* const zeros[LANES], uint8_t* panel) {
  const int chunk = int4_chunk(group), groups = group > 0 ? divide_up(columns, group) : 1;
  float chunk_codes[128 * LANES], lanes[2 * LANES] = {};
  for (int row = 0; row < LANES; row++)
    if (codes[row]) lanes[row] = largest_magnitude(scales[row], groups);
  const Floats unit = int4_unit(load(lanes));
  for (int begin = 0; begin < columns; begin += chunk) {
    const int n = columns - begin < chunk ? columns - begin : chunk, index = group > 0 ? begin / group : 0;
    for (int row = 0; row < LANES; row++) {
      lanes[row] = codes[row] ? scales[row][index] : 0.0f;
      lanes[LANES + row] = codes[row] ? zeros[row][index] : 0.0f;
      for (int k = 0; k < n; k++)
        chunk_codes[k * LANES + row] = codes[row] ? static_cast<float>(codes[row][begin + k] & 15) : 0.0f;
    }
    store_half(panel, load(lanes) / unit);
    store_half(panel + 32, load(lanes + LANES));
    int4_pack_lines(chunk_codes, n, panel + 64);
    panel += 64 + divide_up(n, 8) * 64;
  }
  store(reinterpret_cast<float*>(panel), unit);
}

static void int4_unpack_row(const Matrix& matrix, int row, float* out) {
  const uint8_t* panel = matrix.panels + row / LANES * matrix.panel_bytes;
  const int chunk = int4_chunk(matrix.group), lane = row % LANES;
  const float unit = load_float(panel + matrix.panel_bytes - 64 + lane * 4);
  for (int begin = 0; begin < matrix.columns; begin += chunk, panel += int4_chunk_bytes(chunk)) {
    const int n = matrix.columns - begin < chunk ? matrix.columns - begin : chunk;
    const float scale = load_half(panel)[lane] * unit, zero = load_half(panel + 32)[lane];
    for (int k = 0; k < n; k++) {
      const uint8_t pair = panel[64 + k / 8 * 64 + lane * 4 + k % 4];
      out[begin + k] = (static_cast<float>(k % 8 < 4 ? pair & 15 : pair >> 4) - zero) * scale;
    }
  }
}

}  // namespace PENSTOCK_LEVEL
