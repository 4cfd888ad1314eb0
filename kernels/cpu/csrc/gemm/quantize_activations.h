// Quantises the inputs of products with int8 or int4 weights to signed bytes, with one scale per segment of columns.
#pragma once

#include "core/prefetch.h"
#include "core/kernel_table.h"

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::LANES;
using penstock::Matrix;

// The maximum number of columns that share a scale in a row of inputs. A few columns of a model's activations are far
// greater than the rest. With one scale per row all other columns would lose precision; with segments, only the columns
// near them do.
constexpr int SEGMENT = 128;

// The stride of prepared rows of `used` bytes. Avoids multiples of 1024, at which rows would compete for few sets of a
// cache.
INLINE int64_t row_bytes(int64_t used) {
  const int64_t whole = (used + 63) / 64 * 64;
  return whole % 1024 == 0 ? whole + 64 : whole;
}

// The columns, padded to 64: the number of bytes in a prepared row.
INLINE int filled(int columns) { return divide_up(columns, 64) * 64; }

INLINE int32_t load_int(const void* p) {
  int32_t value;
  memcpy(&value, p, 4);
  return value;
}

INLINE float load_float(const void* p) {
  float value;
  memcpy(&value, p, 4);
  return value;
}

// Scales below this become zero, since their inverse may overflow.
constexpr float SMALLEST = 1e-30f;

// Rounds x to signed bytes: x = byte * scale. A row's bytes come first, padded with zeros, then the scales of its
// segments. The scale of a segment with a NaN or an infinity is NaN, so that products with it are NaN, as they would be
// with floats. Returns the end of the scales.
static uint8_t* quantize_row(int columns, int segment, const float* x, uint8_t* out) {
  uint8_t* scale_at = out + filled(columns);
  for (int begin = 0; begin < columns; begin += segment) {
    const int n = columns - begin < segment ? columns - begin : segment;
    const float bound = largest_magnitude(x + begin, n);
    const float scale = bound > SMALLEST ? bound / 127.0f : 0.0f;
    const Floats inverse = splat(bound > SMALLEST ? 127.0f / bound : 0.0f);
    Floats poison = {};  // stays zero unless x is not finite: 0 * x is NaN then
    for (int i = 0; i < n; i += LANES) {
      const Floats part = load_up_to(x + begin + i, n - i);
      poison = fma(part, Floats{}, poison);
      store_bytes(out + begin + i, to_ints_nearest(part * inverse));
    }
    const float told = scale + sum(poison);
    memcpy(scale_at, &told, 4);
    scale_at += 4;
  }
  const int written = divide_up(columns, LANES) * LANES;
  memset(out + written, 0, static_cast<size_t>(filled(columns) - written));
  return scale_at;
}

INLINE int sum_bytes(const uint8_t* bytes, int n) {
  int total = 0;
  for (int i = 0; i < n; i++) total += static_cast<int8_t>(bytes[i]);
  return total;
}

}  // namespace PENSTOCK_LEVEL
