// MXFP4 weights: four-bit floats (E2M1), of which 32 columns share a power of two. Twice a value is a whole number. Of
// a scale only the exponent plus 127 is stored, so a weight takes 17 / 32 bytes.
#pragma once

#include "gemm/block_scaled.h"

namespace PENSTOCK_LEVEL {

constexpr int FP4_ZERO = 12;

alignas(16) constexpr uint8_t FP4_BYTES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// 16 scales.
INLINE Floats fp4_scales(const uint8_t* exponents) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
#elif defined(TWO_REGISTERS)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), 23))};
#elif defined(__aarch64__)
  const uint8x16_t bytes = vld1q_u8(exponents);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  const Words wide = {vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)),
                      vmovl_high_u16(high)};
  return as_floats(as_ints(wide << 23));
#else
  Words bits;
  for (int i = 0; i < LANES; i++) bits[i] = static_cast<uint32_t>(exponents[i]) << 23;
  return as_floats(as_ints(bits));
#endif
}

// FP4_BYTES of each code.
#if defined(__AVX512BW__)
INLINE Quads fp4_bytes(Quads codes) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(FP4_BYTES)));
  return reinterpret_cast<Quads>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
}
#elif defined(__AVX2__)
INLINE DotPart fp4_bytes(DotPart codes) {
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(FP4_BYTES));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
#elif defined(__SSE2__)
// Without an instruction for tables: twice the magnitude is the code up to 4, then 6, 8 and 12.
INLINE DotPart fp4_bytes(DotPart codes) {
  const DotPart code = _mm_and_si128(codes, _mm_set1_epi8(7));
  const DotPart seven = _mm_and_si128(_mm_cmpeq_epi8(code, _mm_set1_epi8(7)), _mm_set1_epi8(2));
  const DotPart doubled = _mm_add_epi8(_mm_add_epi8(code, _mm_subs_epu8(code, _mm_set1_epi8(4))), seven);
  const DotPart negative = _mm_cmpgt_epi8(codes, _mm_set1_epi8(7));
  return _mm_add_epi8(_mm_sub_epi8(_mm_xor_si128(doubled, negative), negative), _mm_set1_epi8(FP4_ZERO));
}
#elif defined(__aarch64__)
INLINE int32x4_t fp4_bytes(int32x4_t codes) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(FP4_BYTES), vreinterpretq_u8_s32(codes)));
}
INLINE Quads fp4_bytes(Quads codes) {
  return {fp4_bytes(codes.q0), fp4_bytes(codes.q1), fp4_bytes(codes.q2), fp4_bytes(codes.q3)};
}
#else
INLINE Quads fp4_bytes(Quads codes) {
  uint8_t bytes[64];
  store_ints(bytes, codes);
  for (int i = 0; i < 64; i++) bytes[i] = FP4_BYTES[bytes[i]];
  return load_ints(bytes);
}
#endif

INLINE DotNibbles fp4_load(const uint8_t* line) {
  DotNibbles weights = load_nibbles(line);
#if defined(DOT_IN_PARTS)
  for (int i = 0; i < DOT_PARTS; i++) {
    weights.low[i] = fp4_bytes(weights.low[i]);
    weights.high[i] = fp4_bytes(weights.high[i]);
  }
#else
  weights.low = fp4_bytes(weights.low);
  weights.high = fp4_bytes(weights.high);
#endif
  return weights;
}

struct Fp4 {
  static constexpr int LINE_COLUMNS = 128, ZERO = FP4_ZERO, LARGEST = 24;
  static constexpr float UNIT = 0.5f;

  // Scales are powers of two: 2^-127 becomes zero.
  static void store_scale(uint8_t* to, float scale) {
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    *to = static_cast<uint8_t>(bits >> 23);
  }
  INLINE Floats load_scales(const uint8_t* line) { return fp4_scales(line); }
  static int byte_of(int code) { return FP4_BYTES[code]; }
  INLINE DotNibbles load_bytes(const uint8_t* line) { return fp4_load(line); }
};

}  // namespace PENSTOCK_LEVEL
