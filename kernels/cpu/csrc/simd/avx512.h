// Sixteen lanes in one AVX512 register.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/wide.h"

namespace PENSTOCK_LEVEL {

INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

INLINE Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }

INLINE float sum(Floats x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

INLINE float largest(Floats x) { return _mm512_reduce_max_ps(x); }

INLINE Ints to_ints_nearest(Floats x) { return reinterpret_cast<Ints>(_mm512_cvtps_epi32(x)); }

INLINE Floats load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE void store_halves(void* p, Words x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
}
INLINE void store_bytes(void* p, Ints x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
}

#if defined(__AVX512BF16__)
#define MULTIPLIES_BF16
INLINE void store_bf16(uint16_t* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
INLINE Floats dot2(Floats sum, Ints a, Ints b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#endif

INLINE Ints dot4(Ints sum, Ints a, Ints b) {
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), x, y));
#else
  // Widened to 16 bits: products of bytes added in 16 bits, as maddubs does, would saturate.
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(255)),
                                   _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(y, 8));
  return sum + reinterpret_cast<Ints>(_mm512_add_epi32(even, odd));
#endif
}

}  // namespace PENSTOCK_LEVEL
