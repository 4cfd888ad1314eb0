// Vectors of sixteen lanes, whatever the size of the machine's registers. Every kernel is written once in terms of this
// file, and compiled for each instruction set by a file in target/, which defines the namespace PENSTOCK_LEVEL.
//
// Kernels must not instantiate templates of the standard library: the linker keeps one copy of each, possibly the one
// with instructions that this machine lacks. Lanes are reduced in a fixed order, so a result depends only on the
// instruction set and the operands.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
#define TWO_REGISTERS
#include "core/simd_avx2.h"
#endif

#define INLINE static inline __attribute__((always_inline))

namespace PENSTOCK_LEVEL {

#if defined(TWO_REGISTERS)
typedef Lanes<float> Floats;
typedef Lanes<int32_t> Ints;
typedef Lanes<uint32_t> Words;
#else
typedef float Floats __attribute__((vector_size(64), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), may_alias));
typedef float FloatsAnywhere __attribute__((vector_size(64), may_alias, aligned(4)));
typedef int32_t IntsAnywhere __attribute__((vector_size(64), may_alias, aligned(1)));
#endif

// ------------------------------------------------------------------------------------------------ load, store, reduce

#if defined(TWO_REGISTERS)
INLINE Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Ints splat_int(int32_t x) { return Ints{} + x; }
INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
INLINE Ints ints_of(__m256i low, __m256i high) {
  return {reinterpret_cast<Ints::Half>(low), reinterpret_cast<Ints::Half>(high)};
}
INLINE Ints load_ints(const void* p) {
  const __m256i* from = static_cast<const __m256i*>(p);
  return ints_of(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
}
INLINE void store_ints(void* p, Ints x) {
  __m256i* to = static_cast<__m256i*>(p);
  _mm256_storeu_si256(to, reinterpret_cast<__m256i>(x.low));
  _mm256_storeu_si256(to + 1, reinterpret_cast<__m256i>(x.high));
}
template <class To, class From>
INLINE To bits_of(From x) {
  return {reinterpret_cast<typename To::Half>(x.low), reinterpret_cast<typename To::Half>(x.high)};
}
INLINE Floats as_floats(Ints x) { return bits_of<Floats>(x); }
INLINE Ints as_ints(Floats x) { return bits_of<Ints>(x); }
INLINE Ints as_ints(Words x) { return bits_of<Ints>(x); }
INLINE Words as_words(Ints x) { return bits_of<Words>(x); }
#else
INLINE Floats splat(float x) { return x - Floats{}; }  // not 0 + x, which would turn -0 into 0
INLINE Ints splat_int(int32_t x) { return Ints{} + x; }
INLINE Floats load(const float* p) { return *reinterpret_cast<const FloatsAnywhere*>(p); }
INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsAnywhere*>(p) = x; }
INLINE Ints load_ints(const void* p) { return *reinterpret_cast<const IntsAnywhere*>(p); }
INLINE void store_ints(void* p, Ints x) { *reinterpret_cast<IntsAnywhere*>(p) = x; }
INLINE Floats as_floats(Ints x) { return reinterpret_cast<Floats>(x); }
INLINE Ints as_ints(Floats x) { return reinterpret_cast<Ints>(x); }
INLINE Ints as_ints(Words x) { return reinterpret_cast<Ints>(x); }
INLINE Words as_words(Ints x) { return reinterpret_cast<Words>(x); }
#endif

// The numbers 0 to 15.
INLINE Ints lane_numbers() {
  const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_ints(numbers);
}

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

INLINE Floats fma(Floats a, Floats b, Floats c) {  // a b + c
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#else
  return a * b + c;  // one instruction if the machine has it: -ffp-contract=fast
#endif
}

// a < b ? yes : no, in each lane.
INLINE Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
#if defined(__AVX512F__)
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
#elif defined(TWO_REGISTERS)
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
#else
  // In pieces, since GCC splits a wider comparison into single lanes.
  typedef float Piece __attribute__((vector_size(16), may_alias));
  Floats chosen;
  const Piece *left = reinterpret_cast<Piece*>(&a), *right = reinterpret_cast<Piece*>(&b);
  const Piece *first = reinterpret_cast<Piece*>(&yes), *second = reinterpret_cast<Piece*>(&no);
  for (unsigned i = 0; i < sizeof(Floats) / sizeof(Piece); i++)
    reinterpret_cast<Piece*>(&chosen)[i] = left[i] < right[i] ? first[i] : second[i];
  return chosen;
#endif
}

// `yes` in lanes where all bits of `mask` are set, `no` where none are.
INLINE Floats where(Ints mask, Floats yes, Floats no) {
#if defined(TWO_REGISTERS)
  const Floats chosen = as_floats(mask);
  return {_mm256_blendv_ps(no.low, yes.low, chosen.low), _mm256_blendv_ps(no.high, yes.high, chosen.high)};
#else
  return mask ? yes : no;
#endif
}

INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(TWO_REGISTERS)
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
#else
  return where_less(b, a, a, b);
#endif
}

INLINE Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(TWO_REGISTERS)
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
#else
  return where_less(a, b, a, b);
#endif
}

// Adds lanes i and i + 8 first, then those 4, 2 and 1 apart: the same tree on every machine.
INLINE float sum(Floats x) {
#if defined(__AVX512F__) || defined(TWO_REGISTERS)
#if defined(__AVX512F__)
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
  __m256 a = _mm256_add_ps(x.low, x.high);
#endif
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
#else
  float lanes[16];
  store(lanes, x);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

INLINE float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#elif defined(TWO_REGISTERS)
  __m256 a = _mm256_max_ps(x.low, x.high);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
#else
  float lanes[16], best;
  store(lanes, x);
  best = lanes[0];
  for (int i = 1; i < 16; i++) best = lanes[i] > best ? lanes[i] : best;
  return best;
#endif
}

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

INLINE Floats to_floats(Ints x) {
#if defined(TWO_REGISTERS)
  return {__builtin_convertvector(x.low, Floats::Half), __builtin_convertvector(x.high, Floats::Half)};
#else
  return __builtin_convertvector(x, Floats);
#endif
}

INLINE Ints to_ints_nearest(Floats x) {  // ties to even; |x| < 2^22
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(x));
#elif defined(TWO_REGISTERS)
  return ints_of(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
#else
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  return as_ints(x + magic) - as_ints(magic);
#endif
}

// ------------------------------------------------------------------------------------------------------------- bfloat16

typedef uint16_t bf16;

INLINE float widen(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE Floats load_bf16(const bf16* p) {
#if defined(__AVX512F__)
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(TWO_REGISTERS)
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
#else
  Words bits;
  for (int i = 0; i < 16; i++) bits[i] = static_cast<uint32_t>(p[i]) << 16;
  return reinterpret_cast<Floats>(bits);
#endif
}

INLINE Words narrowed(Floats x) {  // to nearest, ties to even: 16 bits in the low half of each lane; not for NaN
  Words bits = as_words(as_ints(x));
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

INLINE void store_bf16(bf16* p, Floats x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
#elif defined(__AVX512F__)
  __m256i half = _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(narrowed(x)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
#elif defined(TWO_REGISTERS)
  const Words bits = narrowed(x);  // packed within halves of a register
  const __m256i half = _mm256_packus_epi32(reinterpret_cast<__m256i>(bits.low), reinterpret_cast<__m256i>(bits.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(half, 0xd8));
#else
  Words bits = narrowed(x);
  for (int i = 0; i < 16; i++) p[i] = static_cast<bf16>(bits[i]);
#endif
}

// Two bfloat16 per lane, the first one in the low half.
typedef Ints Pairs;

INLINE Pairs load_pairs(const void* p) { return load_ints(p); }
INLINE Pairs splat_pair(const void* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return splat_int(pair);
}
INLINE Floats first(Pairs x) { return as_floats(x << 16); }
INLINE Floats second(Pairs x) { return as_floats(x & static_cast<int32_t>(0xffff0000u)); }

// sum + a.first b.first + a.second b.second, in each lane.
INLINE Floats dot2(Floats sum, Pairs a, Pairs b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  return fma(second(a), second(b), fma(first(a), first(b), sum));
#endif
}

// ----------------------------------------------------------------------------------------------------------------- int8

// Four bytes per lane, the first one in the lowest byte.
typedef Ints Quads;

#if !defined(TWO_REGISTERS)  // which sums products differently

// sum + the four products, in each lane; exact. `a` has unsigned bytes, `b` signed ones.
INLINE Ints dot4(Ints sum, Quads a, Quads b) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  // Widened to 16 bits: products of bytes added in 16 bits, as maddubs does, would saturate.
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(255)),
                                   _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(y, 8));
  return sum + reinterpret_cast<Ints>(_mm512_add_epi32(even, odd));
#else
  typedef int16_t Shorts __attribute__((vector_size(64), may_alias));
  Ints even_a = a & 0x00ff00ff, odd_a = as_ints(as_words(a) >> 8) & 0x00ff00ff;
  Shorts y = reinterpret_cast<Shorts>(b);
  Ints even_b = reinterpret_cast<Ints>((y << 8) >> 8), odd_b = reinterpret_cast<Ints>(y >> 8);
  // Each lane now holds two 16-bit numbers: low halves by sign extension, high halves by arithmetic shift.
  sum += ((even_a << 16) >> 16) * ((even_b << 16) >> 16) + (even_a >> 16) * (even_b >> 16);
  return sum + ((odd_a << 16) >> 16) * ((odd_b << 16) >> 16) + (odd_a >> 16) * (odd_b >> 16);
#endif
}

#endif

INLINE void store_bytes(void* p, Ints x) {  // the low byte of each lane
#if defined(__AVX512F__)
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#elif defined(TWO_REGISTERS)
  const Ints bytes = x & 255;
  const __m256i words = _mm256_packus_epi32(reinterpret_cast<__m256i>(bytes.low), reinterpret_cast<__m256i>(bytes.high));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
#else
  for (int i = 0; i < 16; i++) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(x[i]);
#endif
}

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
