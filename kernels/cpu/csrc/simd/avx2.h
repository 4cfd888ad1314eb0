// Sixteen lanes in two AVX2 registers, since gcc keeps a vector that is wider than a register in memory and copies it
// in pieces. Has the operations of gcc's vectors that kernels use.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define LANES_INLINE friend inline __attribute__((always_inline))

namespace PENSTOCK_LEVEL {

template <class Number>
struct Lanes {
  typedef Number Half __attribute__((vector_size(32), may_alias));
  Half low, high;

  LANES_INLINE Lanes operator+(Lanes a, Lanes b) { return {a.low + b.low, a.high + b.high}; }
  LANES_INLINE Lanes operator-(Lanes a, Lanes b) { return {a.low - b.low, a.high - b.high}; }
  LANES_INLINE Lanes operator*(Lanes a, Lanes b) { return {a.low * b.low, a.high * b.high}; }
  LANES_INLINE Lanes operator/(Lanes a, Lanes b) { return {a.low / b.low, a.high / b.high}; }
  LANES_INLINE Lanes operator&(Lanes a, Lanes b) { return {a.low & b.low, a.high & b.high}; }
  LANES_INLINE Lanes operator|(Lanes a, Lanes b) { return {a.low | b.low, a.high | b.high}; }
  LANES_INLINE Lanes operator-(Lanes a) { return {-a.low, -a.high}; }
  LANES_INLINE Lanes operator~(Lanes a) { return {~a.low, ~a.high}; }

  // A number is broadcast to all lanes.
  LANES_INLINE Lanes operator+(Lanes a, Number b) { return {a.low + b, a.high + b}; }
  LANES_INLINE Lanes operator-(Lanes a, Number b) { return {a.low - b, a.high - b}; }
  LANES_INLINE Lanes operator-(Number a, Lanes b) { return {a - b.low, a - b.high}; }
  LANES_INLINE Lanes operator*(Lanes a, Number b) { return {a.low * b, a.high * b}; }
  LANES_INLINE Lanes operator*(Number a, Lanes b) { return b * a; }
  LANES_INLINE Lanes operator/(Lanes a, Number b) { return {a.low / b, a.high / b}; }
  LANES_INLINE Lanes operator/(Number a, Lanes b) { return {a / b.low, a / b.high}; }
  LANES_INLINE Lanes operator&(Lanes a, Number b) { return {a.low & b, a.high & b}; }
  LANES_INLINE Lanes operator<<(Lanes a, int bits) { return {a.low << bits, a.high << bits}; }
  LANES_INLINE Lanes operator>>(Lanes a, int bits) { return {a.low >> bits, a.high >> bits}; }

  template <class Other>
  LANES_INLINE Lanes& operator+=(Lanes& a, Other b) { return a = a + b; }
  template <class Other>
  LANES_INLINE Lanes& operator*=(Lanes& a, Other b) { return a = a * b; }
  LANES_INLINE Lanes& operator|=(Lanes& a, Lanes b) { return a = a | b; }

  // All bits of a lane if the comparison holds, else none.
  LANES_INLINE Lanes<int32_t> operator>(Lanes a, Number b) { return Lanes<int32_t>{a.low > b, a.high > b}; }
  LANES_INLINE Lanes<int32_t> operator>=(Lanes a, Number b) { return Lanes<int32_t>{a.low >= b, a.high >= b}; }
  LANES_INLINE Lanes<int32_t> operator<=(Lanes a, Number b) { return Lanes<int32_t>{a.low <= b, a.high <= b}; }

  // For the few uses of single lanes.
  __attribute__((always_inline)) Number operator[](int i) const { return i < 8 ? low[i] : high[i - 8]; }
};

#undef LANES_INLINE

#define TWO_REGISTERS
typedef Lanes<float> Floats;
typedef Lanes<int32_t> Ints;
typedef Lanes<uint32_t> Words;

// ------------------------------------------------------------------------------------------------------- load and store

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

// ------------------------------------------------------------------------------------------------ arithmetic and choice

INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }  // one instruction: -ffp-contract=fast

INLINE Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}

INLINE Floats where(Ints mask, Floats yes, Floats no) {
  const Floats chosen = as_floats(mask);
  return {_mm256_blendv_ps(no.low, yes.low, chosen.low), _mm256_blendv_ps(no.high, yes.high, chosen.high)};
}

INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

INLINE float sum(Floats x) {
  const __m256 a = _mm256_add_ps(x.low, x.high);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

INLINE float largest(Floats x) {
  const __m256 a = _mm256_max_ps(x.low, x.high);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

// --------------------------------------------------------------------------------------------------------- conversions

INLINE Floats to_floats(Ints x) {
  return {__builtin_convertvector(x.low, Floats::Half), __builtin_convertvector(x.high, Floats::Half)};
}
INLINE Ints to_ints_nearest(Floats x) { return ints_of(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)); }

INLINE Floats load_bf16(const uint16_t* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}

// Packing works within halves of a register, so the quarters of the result are put in order.
INLINE __m256i packed_halves(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
INLINE void store_halves(void* p, Words x) {  // the upper half of each lane is zero
  const __m256i half = packed_halves(reinterpret_cast<__m256i>(x.low), reinterpret_cast<__m256i>(x.high));
  _mm256_storeu_si256(static_cast<__m256i*>(p), half);
}
INLINE void store_bytes(void* p, Ints x) {
  const Ints bytes = x & 255;
  const __m256i ordered = packed_halves(reinterpret_cast<__m256i>(bytes.low), reinterpret_cast<__m256i>(bytes.high));
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}

// --------------------------------------------------------------------------------------------------- products of bytes

#if defined(MULTIPLIES_BYTES)
INLINE __m256i dot4(__m256i sum, __m256i a, __m256i b) {
#if defined(PENSTOCK_SOFTWARE_DOT)  // only for tests
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#else
  // gcc 12 copies sums through memory around the intrinsic.
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#endif
}
#endif

}  // namespace PENSTOCK_LEVEL
