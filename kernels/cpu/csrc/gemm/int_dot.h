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
constexpr int DOT_PANELS = 1;

struct DotSums {
  DotPart part[DOT_PARTS];
};
struct DotBytes {
  DotPart part[DOT_PARTS];
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

#if defined(MULTIPLIES_BYTES)
// Nibbles need two more registers for weights, and one for inputs.
constexpr int DOT_ROWS = 6, NIBBLE_ROWS = 4;
constexpr int DOT_STEPS = 1;

INLINE DotBytes load_weights(const uint8_t* p, int) { return {{load_part(p), load_part(p + 32)}}; }

INLINE DotSums add_products(DotSums sums, const DotBytes& weights, const uint8_t* x) {
  const DotPart inputs = part_of(load_int(x));
  for (int i = 0; i < DOT_PARTS; i++) sums.part[i] = dot4(sums.part[i], weights.part[i], inputs);
  return sums;
}

INLINE DotSums add_nibbles(DotSums sums, const DotNibbles& weights, const uint8_t* x) {
  const DotPart low = part_of(load_int(x)), high = part_of(load_int(x + 4));
  for (int i = 0; i < DOT_PARTS; i++)
    sums.part[i] = dot4(dot4(sums.part[i], weights.low[i], low), weights.high[i], high);
  return sums;
}

#else
constexpr int DOT_ROWS = DOT_PARTS == 2 ? 4 : 2, NIBBLE_ROWS = DOT_ROWS;
// Bytes are widened to 16-bit numbers, even and odd indices in a step each, so that no sum of two products overflows and
// few registers hold weights. Inputs are stored widened, since each is used with every panel.
constexpr int DOT_STEPS = 2;

INLINE DotBytes widen(const DotPart (&bytes)[DOT_PARTS], int step) {
  DotBytes weights;
  for (int i = 0; i < DOT_PARTS; i++) weights.part[i] = step ? right<8>(bytes[i]) : bits_and(bytes[i], part_of(0x00ff00ff));
  return weights;
}

INLINE DotBytes load_weights(const uint8_t* p, int step) {
  DotPart bytes[DOT_PARTS];
  for (int i = 0; i < DOT_PARTS; i++) bytes[i] = load_part(p + i * 64 / DOT_PARTS);
  return widen(bytes, step);
}

INLINE DotSums add_products(DotSums sums, const DotBytes& weights, DotPart x) {
  for (int i = 0; i < DOT_PARTS; i++) sums.part[i] = add_ints(sums.part[i], add_pairs(weights.part[i], x));
  return sums;
}

INLINE DotSums add_products(DotSums sums, const DotBytes& weights, const uint8_t* x) {
  return add_products(sums, weights, part_of(load_int(x)));
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
  sums = add_products(sums, widen(weights.low, 0), right_signed<8>(left<8>(low)));
  sums = add_products(sums, widen(weights.low, 1), right_signed<8>(low));
  sums = add_products(sums, widen(weights.high, 0), right_signed<8>(left<8>(high)));
  return add_products(sums, widen(weights.high, 1), right_signed<8>(high));
}
#endif
#endif

#else

#if defined(__aarch64__)
constexpr int DOT_ROWS = 4, DOT_PANELS = 1;
#else
constexpr int DOT_ROWS = 8, DOT_PANELS = 2;
#endif
constexpr int NIBBLE_ROWS = DOT_ROWS;

typedef Ints DotSums;
typedef Quads DotBytes;

INLINE DotSums sums_of(int32_t x) { return splat_int(x); }
INLINE Ints dot_ints(DotSums sums) { return sums; }

// The steps that add the products of a line of 64 bytes, four per lane. Each reads four bytes of inputs.
constexpr int DOT_STEPS = 1;

// What a step multiplies of a line.
INLINE DotBytes load_weights(const uint8_t* p, int) { return load_ints(p); }

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

// Adds the products of a line of P panels, `panel_bytes` apart, with M rows of inputs, `stride` bytes apart.
template <int M, int P>
INLINE void add_line(DotSums (&sums)[M][P], const uint8_t* line, int64_t panel_bytes, const uint8_t* x, int64_t stride) {
  for (int step = 0; step < DOT_STEPS; step++, x += 4) {
    DotBytes weights[P];
    for (int p = 0; p < P; p++) weights[p] = load_weights(line + p * panel_bytes, step);
    for (int m = 0; m < M; m++)
      for (int p = 0; p < P; p++) sums[m][p] = add_products(sums[m][p], weights[p], x + m * stride);
  }
}

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
