// The differences between KV formats: how a query is converted to factors of keys, a sum to a score, and a row of weights
// to factors of values. A factor has the numbers that are multiplied with those of a word.
//
// BF16 rounds queries and weights to bfloat16. The rounded weights are summed, so that the result is still a weighted
// mean. INT8 keeps queries and weights in two bytes each, 15 and 16 bits. That costs two dot products of 4, where BF16
// needs two dot products of 2 for as many numbers. Processors without dot products of 4 multiply numbers of 16 bits
// instead, with weights of 15 bits. The only error is that of the stored keys and values.
#pragma once

#include "attention/lanes.h"
#include "core/kernel_table.h"
#include "attention/kv_page.h"
#include "core/simd.h"

namespace PENSTOCK_LEVEL {

namespace paged {

// One query head of one token.
struct Query {
  float factor;             // of scores: the attention's scale and, for INT8, the query's
  int32_t high_sum, low_sum;  // INT8: of the query's bytes, or of all of it and 0, to undo the EXCESS of keys
};

// The result of computing the weights of one query in one split.
struct Weights {
  float sum;
  float factor;  // of the sums of values
#if defined(SIGNED_DOT4)
  int32_t high_sum = 0, low_sum = 0;  // INT8: of the weights' bytes, to undo the 128 added to values
#endif
};

constexpr int SPLIT_BYTES = SPLIT * WORD;  // of a row of scores, and of the weights that replace it

INLINE Floats load_floats(const void* p) { return as_floats(load_ints(p)); }

struct F32Kv {
  static constexpr int PER = 1;   // numbers in a word
  static constexpr int ROWS = 1;  // rows of factors per query
  static constexpr int FACTOR_BYTES = WORD;
  typedef FloatPart Sum;

  INLINE IntPart spread(const uint8_t* factor) { return spread_word(factor); }
  INLINE Sum add_keys(Sum sum, IntPart keys, IntPart query) { return add_floats(sum, keys, query); }
  INLINE Sum add_values(Sum sum, IntPart values, IntPart weights) { return add_floats(sum, values, weights); }

  static Query prepare_query(const float* x, int head_dim, int padded, float scale, uint8_t* factors) {
    for (int dim = 0; dim < padded; dim += LANES)
      store_ints(factors + dim * WORD, as_ints(load_up_to(x + dim, head_dim - dim)));
    return {scale, 0, 0};
  }

  INLINE Floats score(const uint8_t* scores, int page, const Query& query, const uint8_t*, int64_t) {
    return load_floats(scores + page * VECTOR) * query.factor;
  }

  // Replaces scores by weights e^(score - largest), in place.
  static Weights weigh(uint8_t* scores, int num_pages, float largest, const uint8_t* const*, int64_t) {
    Floats sum = {};
    for (int page = 0; page < num_pages; page++) {
      Floats weights = exp(load_floats(scores + page * VECTOR) - largest);
      store_ints(scores + page * VECTOR, as_ints(weights));
      sum += weights;
    }
    return {PENSTOCK_LEVEL::sum(sum), 1};
  }

  INLINE Floats value(const uint8_t* sums, int64_t, const Weights&) { return load_floats(sums); }

  // Writes a page's keys in the layout of values.
  static void turn_keys(const uint8_t* keys, int padded, uint8_t* values) {
    for (int dim = 0; dim < padded; dim++)
      for (int token = 0; token < LANES; token++)
        memcpy(values + (token * padded + dim) * WORD, keys + dim * VECTOR + token * WORD, WORD);
  }
};

// e^(x - largest) within 2^-18, for weights that are rounded to 8 bits: 2^n times the best polynomial of its degree
// that maps 0 to 1. Below 2^-126 the result is 0; for NaN it is NaN.
INLINE Floats rough_weight(Floats x, float largest) {
  constexpr float LOG2_E = 1.44269504f;
  const Floats low = splat(-126.0f), power = fma(x, splat(LOG2_E), splat(-largest * LOG2_E));
  const Floats clamped = max(low, power);  // for NaN, the second operand
  const Ints n = to_ints_nearest(clamped);
  const Floats r = clamped - to_floats(n);
  Floats p = splat(0.00958285f);
  p = fma(p, r, splat(0.05590643f));
  p = fma(p, r, splat(0.24024099f));
  p = fma(p, r, splat(0.69312419f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(power, low, _CMP_NLT_UQ), p, to_floats(n));
#else
  return where_less(power, low, Floats{}, p * as_floats((n + 127) << 23));
#endif
}

struct Bf16Kv {
  static constexpr int PER = 2;
  static constexpr int ROWS = 1;
  static constexpr int FACTOR_BYTES = PER * BF16_FACTOR_BYTES;
  typedef FloatPart Sum;

  INLINE SpreadPair spread(const uint8_t* factor) { return spread_pair(factor); }
  INLINE Sum add_keys(Sum sum, IntPart keys, SpreadPair query) { return add_pairs(sum, keys, query); }
  INLINE Sum add_values(Sum sum, IntPart values, SpreadPair weights) { return add_pairs(sum, values, weights); }

  static Query prepare_query(const float* x, int head_dim, int padded, float scale, uint8_t* factors) {
    for (int dim = 0; dim < padded; dim += LANES)
      store_bf16_factors(factors + dim * BF16_FACTOR_BYTES, load_up_to(x + dim, head_dim - dim));
    return {scale, 0, 0};
  }

  INLINE Floats score(const uint8_t* scores, int page, const Query& query, const uint8_t*, int64_t) {
    return load_floats(scores + page * VECTOR) * query.factor;
  }

  static Weights weigh(uint8_t* scores, int num_pages, float largest, const uint8_t* const*, int64_t) {
    Floats sum = {};
    for (int page = 0; page < num_pages; page++) {
      uint8_t* out = scores + page * LANES * BF16_FACTOR_BYTES;  // never past the scores that are already read
      store_bf16_factors(out, rough_weight(load_floats(scores + page * VECTOR), largest));
      sum += load_bf16_factors(out);
    }
    return {PENSTOCK_LEVEL::sum(sum), 1};
  }

  INLINE Floats value(const uint8_t* sums, int64_t, const Weights&) { return load_floats(sums); }

  static void turn_keys(const uint8_t* keys, int padded, uint8_t* values) {
    constexpr uint64_t OUTER = 0xffff00000000ffff, INNER = 0xffff0000;
    for (int pair = 0; pair < LANES / 2; pair++)
      for (int dim = 0; dim < padded; dim += 2) {
        uint64_t four;  // two dimensions of a token, then of the next one
        memcpy(&four, keys + dim / 2 * VECTOR + pair * 2 * WORD, sizeof four);
        four = (four & OUTER) | (four >> 16 & INNER) | (four & INNER) << 16;
        memcpy(values + (pair * padded + dim) * WORD, &four, sizeof four);
      }
  }
};

// Replaces scores by weights e^(score - largest) times the scale of the token's value, in place. Returns the sum of the
// weights themselves, and sets `range` to the largest product.
INLINE float scaled_weights(uint8_t* scores, int num_pages, float largest, const uint8_t* const* values,
                            int64_t section, float& range) {
  Floats sum = {}, best = {};
  for (int page = 0; page < num_pages; page++) {
    Floats weights = exp(load_floats(scores + page * VECTOR) - largest);
    sum += weights;
    weights *= load(value_scales(values[page], section));
    store_ints(scores + page * VECTOR, as_ints(weights));
    best = max(best, weights);
  }
  range = PENSTOCK_LEVEL::largest(best);
  return PENSTOCK_LEVEL::sum(sum);
}

#if defined(MULTIPLIES_WORDS)

// Queries and weights have two bytes per number, 15 bits with a sign.
struct Int8Kv {
  static constexpr int PER = 4;
  static constexpr int ROWS = 1;
  static constexpr int FACTOR_BYTES = 8;
  static constexpr float QUERY_LARGEST = 127.0f * 128, WEIGHT_LARGEST = 32767.0f;
  typedef IntPart Sum;

  INLINE SpreadPair spread(const uint8_t* factor) { return spread_pair(factor); }
  INLINE Sum add_keys(Sum sum, IntPart keys, SpreadPair query) { return add_unsigned_bytes(sum, keys, query); }
  INLINE Sum add_values(Sum sum, IntPart values, SpreadPair weights) { return add_signed_bytes(sum, values, weights); }

  static Query prepare_query(const float* x, int head_dim, int padded, float scale, uint8_t* factors) {
    const float range = largest_magnitude(x, head_dim);
    const float by = range > 0 ? QUERY_LARGEST / range : 0;
    Ints sum = {};
    for (int dim = 0; dim < padded; dim += LANES) {
      const Ints code = to_ints_nearest(load_up_to(x + dim, head_dim - dim) * by);
      store_word_factors(factors + dim * 2, code);
      sum += code;
    }
    return {scale * (range / QUERY_LARGEST), sum_ints(sum), 0};
  }

  // At most 127 * 127 * 128 * 1024, within 31 bits, even if the sum with the EXCESS has overflowed.
  INLINE Floats score(const uint8_t* scores, int page, const Query& query, const uint8_t* keys, int64_t section) {
    const Ints sum = load_ints(scores + page * VECTOR) - EXCESS * query.high_sum;
    return to_floats(sum) * query.factor * load(key_scales(keys, section));
  }

  static Weights weigh(uint8_t* scores, int num_pages, float largest, const uint8_t* const* values, int64_t section) {
    float range;
    const float sum = scaled_weights(scores, num_pages, largest, values, section, range);
    const float by = range > 0 ? WEIGHT_LARGEST / range : 0;
    for (int page = 0; page < num_pages; page++) {
      const Ints code = to_ints_nearest(load_floats(scores + page * VECTOR) * by);
      store_word_factors(scores + page * LANES * 2, code);  // never past the scores that are already read
    }
    return {sum, range / WEIGHT_LARGEST};
  }

  // At most 32767 * 127 * 256: within 31 bits.
  INLINE Floats value(const uint8_t* sums, int64_t, const Weights& weights) {
    return to_floats(load_ints(sums)) * weights.factor;
  }
};

#else

// Two bytes per number, in two rows: the high bytes, then the low bytes.
struct Int8Kv {
  static constexpr int PER = 4;
  static constexpr int ROWS = 2;
  static constexpr int FACTOR_BYTES = WORD;
  static constexpr int QUERY_BASE = 128, WEIGHT_BASE = 256;
  static constexpr float QUERY_LARGEST = 127.0f * QUERY_BASE, WEIGHT_LARGEST = 65535.0f;
  typedef IntPart Sum;

  INLINE IntPart spread(const uint8_t* factor) { return spread_word(factor); }
  INLINE Sum add_keys(Sum sum, IntPart keys, IntPart query) { return add_quads(sum, with_excess(keys), query); }
  INLINE Sum add_values(Sum sum, IntPart values, IntPart weights) { return add_weighted(sum, weights, values); }

  static Query prepare_query(const float* x, int head_dim, int padded, float scale, uint8_t* factors) {
    const float range = largest_magnitude(x, head_dim);
    const float by = range > 0 ? QUERY_LARGEST / range : 0;
    Ints high_sum = {}, low_sum = {};
    for (int dim = 0; dim < padded; dim += LANES) {
      Ints code = to_ints_nearest(load_up_to(x + dim, head_dim - dim) * by);
      Ints high = (code + QUERY_BASE / 2) >> 7, low = code - high * QUERY_BASE;
      store_bytes(factors + dim, high);
      store_bytes(factors + padded + dim, low);
      high_sum += high;
      low_sum += low;
    }
    return {scale * (range / QUERY_LARGEST), sum_ints(high_sum), sum_ints(low_sum)};
  }

  // At most 127 * 127 * 128 * 1024, and the low byte's 64 * 127 * 1024: within 31 bits.
  INLINE Floats score(const uint8_t* scores, int page, const Query& query, const uint8_t* keys, int64_t section) {
    Ints high = load_ints(scores + page * VECTOR) - EXCESS * query.high_sum;
    Ints low = load_ints(scores + SPLIT_BYTES + page * VECTOR) - EXCESS * query.low_sum;
    return to_floats(high * QUERY_BASE + low) * query.factor * load(key_scales(keys, section));
  }

  // A weight is multiplied by its value's scale before it is rounded.
  static Weights weigh(uint8_t* scores, int num_pages, float largest, const uint8_t* const* values, int64_t section) {
    float range;
    const float sum = scaled_weights(scores, num_pages, largest, values, section, range);
    const float by = range > 0 ? WEIGHT_LARGEST / range : 0;
    Weights result = {sum, range / WEIGHT_LARGEST};
    for (int page = 0; page < num_pages; page++) {
      Ints code = to_ints_nearest(load_floats(scores + page * VECTOR) * by);
      store_bytes(scores + page * LANES, code >> 8);
      store_bytes(scores + SPLIT_BYTES + page * LANES, code & 255);
#if defined(SIGNED_DOT4)
      result.high_sum += sum_ints(code >> 8);
      result.low_sum += sum_ints(code & 255);
#endif
    }
    return result;
  }

  // At most 65535 * 127 * 256: within 31 bits.
  INLINE Floats value(const uint8_t* sums, int64_t row_bytes, const Weights& weights) {
    Ints high = load_ints(sums), low = load_ints(sums + row_bytes);
#if defined(SIGNED_DOT4)
    high = high - 128 * weights.high_sum;
    low = low - 128 * weights.low_sum;
#endif
    return to_floats(high * WEIGHT_BASE + low) * weights.factor;
  }
};

#endif

}  // namespace paged

}  // namespace PENSTOCK_LEVEL
