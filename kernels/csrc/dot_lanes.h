// Sums of products of bytes in 16 lanes, held as the machine's registers are: gcc keeps a vector that is wider than a
// register in memory. All are exact, so every instruction set gives the same integers.
#pragma once

#include "vec.h"

#if !defined(__AVX512F__) && !defined(__AVX2__) && defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace PENSTOCK_LEVEL {

#if !defined(__AVX512F__) && (defined(__AVX2__) || defined(__SSE2__))

#if defined(__AVX2__)
typedef __m256i DotPart;
INLINE DotPart part_of(int32_t x) { return _mm256_set1_epi32(x); }
INLINE DotPart load_part(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const DotPart*>(p)); }
INLINE void store_part(uint8_t* p, DotPart x) { _mm256_storeu_si256(reinterpret_cast<DotPart*>(p), x); }
INLINE DotPart bits_and(DotPart a, DotPart b) { return _mm256_and_si256(a, b); }
INLINE DotPart add_ints(DotPart a, DotPart b) { return _mm256_add_epi32(a, b); }
INLINE DotPart add_pairs(DotPart a, DotPart b) { return _mm256_madd_epi16(a, b); }  // of 16-bit products
template <int BITS>
INLINE DotPart left(DotPart x) { return _mm256_slli_epi16(x, BITS); }
template <int BITS>
INLINE DotPart right(DotPart x) { return _mm256_srli_epi16(x, BITS); }
template <int BITS>
INLINE DotPart right_signed(DotPart x) { return _mm256_srai_epi16(x, BITS); }
#else
typedef __m128i DotPart;
INLINE DotPart part_of(int32_t x) { return _mm_set1_epi32(x); }
INLINE DotPart load_part(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const DotPart*>(p)); }
INLINE void store_part(uint8_t* p, DotPart x) { _mm_storeu_si128(reinterpret_cast<DotPart*>(p), x); }
INLINE DotPart bits_and(DotPart a, DotPart b) { return _mm_and_si128(a, b); }
INLINE DotPart add_ints(DotPart a, DotPart b) { return _mm_add_epi32(a, b); }
INLINE DotPart add_pairs(DotPart a, DotPart b) { return _mm_madd_epi16(a, b); }
template <int BITS>
INLINE DotPart left(DotPart x) { return _mm_slli_epi16(x, BITS); }
template <int BITS>
INLINE DotPart right(DotPart x) { return _mm_srli_epi16(x, BITS); }
template <int BITS>
INLINE DotPart right_signed(DotPart x) { return _mm_srai_epi16(x, BITS); }
#endif

constexpr int DOT_PARTS = static_cast<int>(64 / sizeof(DotPart));
constexpr int DOT_ROWS = DOT_PARTS == 2 ? 4 : 2, DOT_PANELS = 1;

struct DotSums {
  DotPart part[DOT_PARTS];
};

// Bytes as 16-bit numbers, those with even indices and those with odd ones: so no sum of two products overflows.
struct DotBytes {
  DotPart even[DOT_PARTS], odd[DOT_PARTS];
};

INLINE DotSums sums_of(int32_t x) {
  DotSums sums;
  for (int i = 0; i < DOT_PARTS; i++) sums.part[i] = part_of(x);
  return sums;
}

INLINE Ints dot_ints(const DotSums& sums) {
  alignas(64) uint8_t bytes[64];
  for (int i = 0; i < DOT_PARTS; i++) store_part(bytes + i * 64 / DOT_PARTS, sums.part[i]);
  return load_ints(bytes);
}

INLINE DotBytes load_weights(const uint8_t* p) {
  DotBytes weights;
  for (int i = 0; i < DOT_PARTS; i++) {
    const DotPart bytes = load_part(p + i * 64 / DOT_PARTS);
    weights.even[i] = bits_and(bytes, part_of(0x00ff00ff));
    weights.odd[i] = right<8>(bytes);
  }
  return weights;
}

INLINE DotSums add_products(DotSums sums, const DotBytes& weights, int32_t x) {
  const DotPart even = right_signed<8>(left<8>(part_of(x))), odd = right_signed<8>(part_of(x));
  for (int i = 0; i < DOT_PARTS; i++) {
    sums.part[i] = add_ints(sums.part[i], add_pairs(weights.even[i], even));
    sums.part[i] = add_ints(sums.part[i], add_pairs(weights.odd[i], odd));
  }
  return sums;
}

struct DotNibbles {
  DotPart low[DOT_PARTS], high[DOT_PARTS];
};

INLINE DotNibbles load_nibbles(const uint8_t* p) {
  DotNibbles weights;
  for (int i = 0; i < DOT_PARTS; i++) {
    const DotPart bytes = load_part(p + i * 64 / DOT_PARTS);
    weights.low[i] = bits_and(bytes, part_of(0x0f0f0f0f));
    weights.high[i] = bits_and(right<4>(bytes), part_of(0x0f0f0f0f));
  }
  return weights;
}

INLINE DotSums add_nibbles(DotSums sums, const DotNibbles& weights, int32_t low, int32_t high) {
#if defined(__AVX2__)
  for (int i = 0; i < DOT_PARTS; i++) {  // four products of at most 15 * 128 fit into 16 bits
    const DotPart pairs = _mm256_add_epi16(_mm256_maddubs_epi16(weights.low[i], part_of(low)),
                                        _mm256_maddubs_epi16(weights.high[i], part_of(high)));
    sums.part[i] = add_ints(sums.part[i], add_pairs(pairs, part_of(0x00010001)));
  }
  return sums;
#else
  DotBytes wide[2];
  for (int i = 0; i < DOT_PARTS; i++) {
    wide[0].even[i] = bits_and(weights.low[i], part_of(0x00ff00ff));
    wide[0].odd[i] = right<8>(weights.low[i]);
    wide[1].even[i] = bits_and(weights.high[i], part_of(0x00ff00ff));
    wide[1].odd[i] = right<8>(weights.high[i]);
  }
  return add_products(add_products(sums, wide[0], low), wide[1], high);
#endif
}

#else

constexpr int DOT_ROWS = 8, DOT_PANELS = 2;

typedef Ints DotSums;
typedef Quads DotBytes;

INLINE DotSums sums_of(int32_t x) { return splat_int(x); }
INLINE Ints dot_ints(DotSums sums) { return sums; }

// 64 unsigned bytes, four a lane.
INLINE DotBytes load_weights(const uint8_t* p) { return load_ints(p); }

// Adds each lane's four products with the four signed bytes in x.
INLINE DotSums add_products(DotSums sums, DotBytes weights, int32_t x) { return dot4(sums, weights, splat_int(x)); }

// 64 bytes that each hold two numbers.
struct DotNibbles {
  Quads low, high;
};

INLINE DotNibbles load_nibbles(const uint8_t* p) {
  const Ints bytes = load_ints(p);
  return {bytes & 0x0f0f0f0f, bytes >> 4 & 0x0f0f0f0f};
}

// Adds the products of the low halves with the bytes in `low`, and of the high ones with those in `high`.
INLINE DotSums add_nibbles(DotSums sums, const DotNibbles& weights, int32_t low, int32_t high) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
  // Four products of at most 15 * 128 fit into 16 bits.
  const __m512i pairs =
      _mm512_add_epi16(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights.low), _mm512_set1_epi32(low)),
                       _mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights.high), _mm512_set1_epi32(high)));
  return sums + reinterpret_cast<Ints>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
  return dot4(dot4(sums, weights.low, splat_int(low)), weights.high, splat_int(high));
#endif
}

#endif

}  // namespace PENSTOCK_LEVEL
