// Sums of products of bytes in 16 lanes, in vectors as wide as the machine's registers, since gcc keeps wider ones in
// memory. All sums are exact, so every instruction set gives the same integers.
#pragma once

#include "gemm/quantize_activations.h"

#if !defined(__AVX512F__) && !defined(__AVX2__) && defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace PENSTOCK_LEVEL {

#if !defined(__AVX512F__) && (defined(__AVX2__) || defined(__SSE2__))
#define DOT_IN_PARTS

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

// Bytes are widened to 16-bit numbers, even and odd indices separately, so that no sum of two products overflows.
// Inputs are stored widened, since each is used with every panel.
constexpr int INPUT_BYTES = 8;
struct DotBytes {
  DotPart even[DOT_PARTS], odd[DOT_PARTS];
};

INLINE DotSums sums_of(int32_t x) {
  DotSums sums;
  for (int i = 0; i < DOT_PARTS; i++) sums.part[i] = part_of(x);
  return sums;
}

INLINE Ints dot_ints(const DotSums& sums) {
#if defined(TWO_REGISTERS)
  return ints_of(sums.part[0], sums.part[1]);
#else
  alignas(64) uint8_t bytes[64];
  for (int i = 0; i < DOT_PARTS; i++) store_part(bytes + i * 64 / DOT_PARTS, sums.part[i]);
  return load_ints(bytes);
#endif
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

INLINE DotSums add_products(DotSums sums, const DotBytes& weights, DotPart even, DotPart odd) {
  for (int i = 0; i < DOT_PARTS; i++) {
    sums.part[i] = add_ints(sums.part[i], add_pairs(weights.even[i], even));
    sums.part[i] = add_ints(sums.part[i], add_pairs(weights.odd[i], odd));
  }
  return sums;
}

INLINE DotSums add_products(DotSums sums, const DotBytes& weights, const uint8_t* x) {
  return add_products(sums, weights, part_of(load_int(x)), part_of(load_int(x + 4)));
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

#if defined(__AVX2__)
#define WIDENS_NIBBLES
typedef DotSums NibbleSums;  // in 16 bits

INLINE NibbleSums add_nibbles(NibbleSums sums, const DotNibbles& weights, const uint8_t* x) {
  const DotPart low = part_of(load_int(x)), high = part_of(load_int(x + 4));
  for (int i = 0; i < DOT_PARTS; i++) {
    const DotPart pairs = _mm256_add_epi16(_mm256_maddubs_epi16(weights.low[i], low),
                                           _mm256_maddubs_epi16(weights.high[i], high));
    sums.part[i] = _mm256_add_epi16(sums.part[i], pairs);
  }
  return sums;
}

INLINE DotSums add_widened(DotSums sums, const NibbleSums& more) {
  for (int i = 0; i < DOT_PARTS; i++)
    sums.part[i] = add_ints(sums.part[i], add_pairs(more.part[i], part_of(0x00010001)));
  return sums;
}
#else
INLINE DotSums add_nibbles(DotSums sums, const DotNibbles& weights, const uint8_t* x) {
  const DotPart low = part_of(load_int(x)), high = part_of(load_int(x + 4));
  DotBytes wide[2];
  for (int i = 0; i < DOT_PARTS; i++) {
    wide[0].even[i] = bits_and(weights.low[i], part_of(0x00ff00ff));
    wide[0].odd[i] = right<8>(weights.low[i]);
    wide[1].even[i] = bits_and(weights.high[i], part_of(0x00ff00ff));
    wide[1].odd[i] = right<8>(weights.high[i]);
  }
  sums = add_products(sums, wide[0], right_signed<8>(left<8>(low)), right_signed<8>(low));
  return add_products(sums, wide[1], right_signed<8>(left<8>(high)), right_signed<8>(high));
}
#endif

#else

#if defined(__aarch64__)
constexpr int DOT_ROWS = 4, DOT_PANELS = 1;
#else
constexpr int DOT_ROWS = 8, DOT_PANELS = 2;
#endif

typedef Ints DotSums;
typedef Quads DotBytes;

INLINE DotSums sums_of(int32_t x) { return splat_int(x); }
INLINE Ints dot_ints(DotSums sums) { return sums; }

// Loads 64 bytes, four per lane.
INLINE DotBytes load_weights(const uint8_t* p) { return load_ints(p); }

// The bytes of four inputs in the form that products read.
constexpr int INPUT_BYTES = 4;

// Adds the products of each lane's four bytes with the four inputs at x.
INLINE DotSums add_products(DotSums sums, DotBytes weights, const uint8_t* x) {
  return dot4(sums, weights, splat_int(load_int(x)));
}

// 64 bytes that hold two numbers each.
struct DotNibbles {
  Quads low, high;
};

INLINE DotNibbles load_nibbles(const uint8_t* p) {
  const Ints bytes = load_ints(p);
  return {bytes & 0x0f0f0f0f, bytes >> 4 & 0x0f0f0f0f};
}

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
#define WIDENS_NIBBLES
typedef Ints NibbleSums;  // in 16 bits

INLINE NibbleSums add_nibbles(NibbleSums sums, const DotNibbles& weights, const uint8_t* x) {
  const __m512i low = _mm512_set1_epi32(load_int(x)), high = _mm512_set1_epi32(load_int(x + 4));
  const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights.low), low),
                                         _mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights.high), high));
  return reinterpret_cast<Ints>(_mm512_add_epi16(reinterpret_cast<__m512i>(sums), pairs));
}

INLINE DotSums add_widened(DotSums sums, NibbleSums more) {
  return sums + reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(more), _mm512_set1_epi16(1)));
}
#else
// Adds the products of the low halves with the four bytes at x, and of the high halves with the next four.
INLINE DotSums add_nibbles(DotSums sums, const DotNibbles& weights, const uint8_t* x) {
  return dot4(dot4(sums, weights.low, splat_int(load_int(x))), weights.high, splat_int(load_int(x + 4)));
}
#endif

#endif

// Adds the sums of `lines` lines of nibbles, each at most LARGEST; `add(sums, first, count)` adds those of `count` lines
// from `first` on.
template <int LARGEST, int M, int P, class Add>
INLINE void add_lines(DotSums (&sums)[M][P], int lines, const Add& add) {
#if defined(WIDENS_NIBBLES)
  constexpr int MOST = 32767 / (4 * LARGEST * 128);  // lines of four products, whose sums fit 16 bits
  for (int first = 0; first < lines; first += MOST) {
    NibbleSums some[M][P] = {};
    add(some, first, lines - first < MOST ? lines - first : MOST);
    for (int m = 0; m < M; m++)
      for (int p = 0; p < P; p++) sums[m][p] = add_widened(sums[m][p], some[m][p]);
  }
#else
  add(sums, 0, lines);
#endif
}

}  // namespace PENSTOCK_LEVEL
