// The accumulators of attention's tiles: vectors as wide as the machine's registers, since gcc keeps wider ones in
// memory.
#pragma once

#include "core/simd.h"

#if !defined(__AVX512F__) && !defined(__AVX2__) && defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace PENSTOCK_LEVEL {

namespace paged {

#if defined(__AVX512F__)
constexpr int PART_BYTES = 64;
#elif defined(__AVX2__)
constexpr int PART_BYTES = 32;
#else
constexpr int PART_BYTES = 16;
#endif
constexpr int PARTS = 64 / PART_BYTES;  // for 16 lanes

typedef float FloatPart __attribute__((vector_size(PART_BYTES), may_alias));
typedef int32_t IntPart __attribute__((vector_size(PART_BYTES), may_alias));
typedef int32_t IntPartAnywhere __attribute__((vector_size(PART_BYTES), may_alias, aligned(1)));

INLINE IntPart load_part(const uint8_t* p) { return *reinterpret_cast<const IntPartAnywhere*>(p); }
INLINE void store_part(uint8_t* p, IntPart x) { *reinterpret_cast<IntPartAnywhere*>(p) = x; }
INLINE void store_part(uint8_t* p, FloatPart x) { store_part(p, reinterpret_cast<IntPart>(x)); }
INLINE void reload_part(const uint8_t* p, IntPart& x) { x = load_part(p); }
INLINE void reload_part(const uint8_t* p, FloatPart& x) { x = reinterpret_cast<FloatPart>(load_part(p)); }

// Turns stored keys, signed bytes with 128 added, into bytes with EXCESS added.
INLINE IntPart with_excess(IntPart keys) {
  return EXCESS == 128 ? keys : keys ^ static_cast<int32_t>(0x80808080u);
}

// Broadcasts a word to all lanes.
INLINE IntPart spread_word(const uint8_t* p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return IntPart{} + word;
}

// Two factors of bfloat16, each broadcast to all lanes.
#if defined(MULTIPLIES_BF16)
typedef IntPart SpreadPair;
INLINE SpreadPair spread_pair(const uint8_t* p) { return spread_word(p); }
#else
struct SpreadPair {
  IntPart first, second;
};
INLINE SpreadPair spread_pair(const uint8_t* p) { return {spread_word(p), spread_word(p + BF16_FACTOR_BYTES)}; }
#endif

INLINE FloatPart add_product(FloatPart sum, FloatPart a, FloatPart b) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#else
  return a * b + sum;
#endif
}

INLINE FloatPart add_floats(FloatPart sum, IntPart a, IntPart b) {
  return add_product(sum, reinterpret_cast<FloatPart>(a), reinterpret_cast<FloatPart>(b));
}

// sum + the products of two bfloat16, in each lane.
INLINE FloatPart add_pairs(FloatPart sum, IntPart a, SpreadPair b) {
#if defined(MULTIPLIES_BF16)
  return dot2(sum, a, b);
#else
  return add_floats(add_floats(sum, a << 16, b.first), a & static_cast<int32_t>(0xffff0000u), b.second);
#endif
}

#if defined(__SSE2__) && !defined(__AVX512VNNI__) && !defined(MULTIPLIES_BYTES)
#define MULTIPLIES_WORDS
// Without dot4, bytes are widened to 16 bits, since sums of byte products in 16 bits would saturate. Each byte is then
// multiplied by a factor of 16 bits at once.
typedef int16_t WordPart __attribute__((vector_size(PART_BYTES), may_alias));
typedef uint16_t UnsignedWordPart __attribute__((vector_size(PART_BYTES), may_alias));

// The sum of the products of two numbers of 16 bits, in each lane.
template <class Words>
INLINE IntPart multiply_words(Words a, IntPart b) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntPart>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntPart>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return reinterpret_cast<IntPart>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#endif
}

// sum + the products of four bytes with four numbers of 16 bits, in each lane.
INLINE IntPart add_unsigned_bytes(IntPart sum, IntPart bytes, SpreadPair factors) {
  const UnsignedWordPart words = reinterpret_cast<UnsignedWordPart>(bytes);
  return sum + multiply_words(words & 255, factors.first) + multiply_words(words >> 8, factors.second);
}

INLINE IntPart add_signed_bytes(IntPart sum, IntPart bytes, SpreadPair factors) {
  const WordPart words = reinterpret_cast<WordPart>(bytes);
  return sum + multiply_words((words << 8) >> 8, factors.first) + multiply_words(words >> 8, factors.second);
}

// Writes 16 numbers in the order in which these read them: of each four the first and third, then the others.
INLINE void store_word_factors(uint8_t* out, Ints numbers) {
  constexpr uint64_t LOW = 0x0000ffff0000ffff;
  uint64_t pairs[LANES / 2];
  store_ints(pairs, numbers);
  for (int i = 0; i < LANES / 4; i++) {
    const uint64_t word = (pairs[2 * i] & LOW) | (pairs[2 * i + 1] & LOW) << 16;
    memcpy(out + i * 8, &word, 8);
  }
}

#else

// Like dot4.
INLINE IntPart add_quads(IntPart sum, IntPart a, IntPart b) {
#if defined(__AVX512F__) || defined(__aarch64__)
  return dot4(sum, a, b);
#elif defined(MULTIPLIES_BYTES)
  return reinterpret_cast<IntPart>(
      dot4(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  for (int byte = 0; byte < 32; byte += 8) sum += ((a >> byte) & 255) * ((b << (24 - byte)) >> 24);
  return sum;
#endif
}

// The same for weights, unsigned bytes, and values, signed ones. Where dot4 takes no unsigned bytes, 128 is added to the
// values, so that both are unsigned.
INLINE IntPart add_weighted(IntPart sum, IntPart weights, IntPart values) {
#if defined(SIGNED_DOT4)
  return dot4_unsigned(sum, weights, values ^ static_cast<int32_t>(0x80808080u));
#else
  return add_quads(sum, weights, values);
#endif
}

#endif

}  // namespace paged

}  // namespace PENSTOCK_LEVEL
