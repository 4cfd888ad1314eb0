// Vectors of sixteen lanes, whatever the size of the machine's registers. Every kernel is written once in terms of this
// file, and compiled for each instruction set by a file in target/, which defines the namespace PENSTOCK_LEVEL.
//
// Kernels must not instantiate templates of the standard library: the linker keeps one copy of each, possibly the one
// with instructions that this machine lacks. Lanes are reduced in a fixed order, so a result depends only on the
// instruction set and the operands.
#pragma once

#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

// Each of these files defines Floats, Ints and Words, of sixteen lanes, and
//   splat, splat_int, load, store, load_ints, store_ints, as_floats, as_ints, as_words
//   fma(a, b, c)                  a b + c
//   where(mask, yes, no)          `yes` in lanes where all bits of the mask are set, `no` where none are
//   where_less(a, b, yes, no)     a < b ? yes : no, in each lane
//   max(a, b), min(a, b)          for NaN, the second operand
//   sum                           adds lanes i and i + 8 first, then those 4, 2 and 1 apart: everywhere the same tree
//   largest                       the largest lane
//   to_floats, to_ints_nearest    ties to even; |x| < 2^22
//   load_bf16                     widens sixteen bfloat16
//   store_halves, store_bytes     the low 16 and 8 bits of each lane; the upper half of a lane of store_halves is zero
//   dot4(sum, a, b)               sum + the products of four bytes, in each lane; exact. `b` has signed bytes, `a` has
//                                 unsigned ones, or with SIGNED_DOT4 signed ones. The level avx2 has none, and
//                                 avx_vnni only for eight lanes.
// and, with MULTIPLIES_BF16, if the processor has instructions for it,
//   store_bf16                    rounds to bfloat16
//   dot2(sum, a, b)               sum + the products of two bfloat16, in each lane
#if defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(__aarch64__)
#include "simd/neon.h"
#else
#include "simd/generic.h"
#endif

namespace PENSTOCK_LEVEL {

// ------------------------------------------------------------------------------------------------------- load and store

// The numbers 0 to 15.
INLINE Ints lane_numbers() {
  const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_ints(numbers);
}

#if !defined(__aarch64__)
// Adds the lanes, as neon.h does in one instruction.
INLINE int32_t sum_ints(Ints x) {
  int32_t total = 0;
  for (int i = 0; i < 16; i++) total += x[i];
  return total;
}
#endif

// Loads the first n lanes, 0 <= n <= 16; the others are zero.
INLINE Floats load_some(const float* p, int n) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
#else
  float lanes[16] = {};
  memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
  return load(lanes);
#endif
}

INLINE void store_some(float* p, Floats x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), x);
#else
  float lanes[16];
  store(lanes, x);
  memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
#endif
}

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Loads the first n lanes, at most 16; the others are zero.
INLINE Floats load_up_to(const float* p, int n) { return n >= 16 ? load(p) : load_some(p, n); }

INLINE float largest_magnitude(const float* x, int n) {
  Floats most = {};
  for (int i = 0; i < n; i += 16) {
    const Floats part = load_up_to(x + i, n - i);
    most = max(most, max(part, -part));
  }
  return largest(most);
}

// ------------------------------------------------------------------------------------------------------------- bfloat16

typedef uint16_t bf16;

INLINE float widen(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE Words narrowed(Floats x) {  // to nearest, ties to even: 16 bits in the low half of each lane; not for NaN
  Words bits = as_words(as_ints(x));
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// The factors of a product with bfloat16 are rounded to it, and stored as float32 where the product converts its other
// operand anyway: converting both would take time.
#if defined(MULTIPLIES_BF16)
constexpr int BF16_FACTOR_BYTES = 2;
INLINE void store_bf16_factors(void* p, Floats x) { store_bf16(static_cast<bf16*>(p), x); }
INLINE Floats load_bf16_factors(const void* p) { return load_bf16(static_cast<const bf16*>(p)); }
#else
constexpr int BF16_FACTOR_BYTES = 4;
INLINE void store_bf16(bf16* p, Floats x) { store_halves(p, narrowed(x)); }
INLINE void store_bf16_factors(void* p, Floats x) { store_ints(p, as_ints(narrowed(x) << 16)); }
INLINE Floats load_bf16_factors(const void* p) { return as_floats(load_ints(p)); }
#endif

// ----------------------------------------------------------------------------------------------------------------- int8

// Four bytes per lane, the first one in the lowest byte.
typedef Ints Quads;

// What is added to signed bytes to make them the first operand of dot4. Layouts of weights depend on it.
#if defined(SIGNED_DOT4)
constexpr int EXCESS = 0;
#else
constexpr int EXCESS = 128;
#endif

// --------------------------------------------------------------------------------------------------------- mathematics

// e^x within 2 ulp: x = n ln 2 + r, with the Taylor series of e^r up to r^6. e^0 is exactly 1. Below -87.3 the result
// is 0; for NaN it is NaN.
INLINE Floats exp(Floats x) {
  const Floats low = splat(-87.33654f), high = splat(88.72283f);
  Floats clamped = min(high, max(low, x));  // for NaN, the second operand
  Ints n = to_ints_nearest(clamped * 1.44269504f);
  Floats whole = to_floats(n);
  Floats r = fma(whole, splat(-0.693359375f), clamped);
  r = fma(whole, splat(2.12194440e-4f), r);
  Floats p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, whole);
#else
  // In two factors, since 2^128 overflows a float.
  Ints half = n >> 1;
  Floats y = p * as_floats((half + 127) << 23) * as_floats((n - half + 127) << 23);
  return where_less(x, low, Floats{}, y);
#endif
}

INLINE Floats sigmoid(Floats x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

}  // namespace PENSTOCK_LEVEL
