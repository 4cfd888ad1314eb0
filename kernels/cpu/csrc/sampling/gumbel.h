// Draws from the softmax of scores: the argmax of score plus Gumbel noise. The noise is a pure function of (seed,
// position, token id), so the token does not depend on where it is drawn.
//
// The noise is computed exactly, in float64, only for entries that may win. For u in (0, 1), -ln u >= 1 - u, so the
// noise -ln(-ln u) is at most -ln(1 - u), and an entry beats the best so far, b, only if 1 - u <= e^{x - b}. This test
// needs the hash and one exponential in float32. About as many entries pass it as set a new best, some twenty in a
// vocabulary.
#pragma once

#include "core/kernel_table.h"

#include "sampling/simd.h"

namespace PENSTOCK_LEVEL {

static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio, the increment of SplitMix64
static constexpr float NOISE_MAX = 22.2f;                // u is at most 2^32 / (2^32 + 1): 22.181
static constexpr float MARGIN = 1.0001f;                 // covers the error of the float32 test, a few 1e-7

// SplitMix64's finaliser, a bijection of 64 bits (Steele, Lea, Flood 2014), for integers and for lanes.
template <typename T>
INLINE T mix64(T x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// The winning entry so far.
struct Draw {
  uint64_t stream;
  const int32_t* noise_ids;
  double score;
  int id;
  float bound;  // an entry may win only if 2^32 (1 - u) <= bound e^x
};

// The noise of a token: -ln(-ln u) with u = (h + 1) / (2^32 + 1), where h is the upper half of the hash.
INLINE double gumbel(uint64_t stream, int id) {
  uint64_t upper = mix64(stream + (static_cast<uint64_t>(id) + 1) * GOLDEN) >> 32;
  return -__builtin_log(-__builtin_log((static_cast<double>(upper) + 1.0) / 4294967297.0));
}

INLINE double noise_of(const Draw& draw, int id) {
  return gumbel(draw.stream, draw.noise_ids ? draw.noise_ids[id] : id);
}

static void consider(Draw& draw, int id, float x) {
  double score = noise_of(draw, id) + static_cast<double>(x);
  if (score < draw.score || (score == draw.score && id >= draw.id)) return;
  draw.score = score;
  draw.id = id;
  draw.bound = static_cast<float>(4294967296.0 * __builtin_exp(-score)) * MARGIN;
}

INLINE void consider_lanes(Draw& draw, Ints ids, Floats x) {
  Ints keys = ids;
  if (draw.noise_ids) {
    int32_t named[16];
    store_ints(named, ids);
    for (int i = 0; i < 16; i++) named[i] = draw.noise_ids[named[i]];
    keys = load_ints(named);
  }
  // The hashes of even and of odd lanes. Their upper halves need no shuffle to get into place.
  Longs pairs;
  store_ints(&pairs, keys);
  Longs even = mix64(((pairs & 0xffffffffu) + 1) * GOLDEN + draw.stream);
  Longs odd = mix64(((pairs >> 32) + 1) * GOLDEN + draw.stream);
  const Longs both = (even >> 32) | (odd & 0xffffffff00000000u);
  const Words upper = as_words(load_ints(&both));
  // 2^32 - h, rounded down to its upper 24 bits, which fit a float32 exactly.
  Floats rest = to_floats(as_ints(~upper >> 8)) * 256.0f;
  for (uint32_t lanes = lanes_at_least(exp(x) * draw.bound, rest); lanes; lanes &= lanes - 1) {
    int i = __builtin_ctz(lanes);
    consider(draw, ids[i], x[i]);
  }
}

// Begins with the best entry, whose score is 0, since it sets a high bound for the others.
static Draw begin_draw(const penstock::SamplingRow& row, int best_id) {
  const uint64_t stream = mix64(mix64(row.seed) + static_cast<uint64_t>(row.position) * GOLDEN);
  Draw draw = {stream, row.noise_ids, -__builtin_inf(), 0, 0.0f};
  consider(draw, best_id, 0.0f);
  return draw;
}

static int draw_from_row(const Scores& scores, Draw draw) {
  for (int begin = 0; begin < scores.n; begin += GROUP) {
    Floats maxima = scaled(scores, load(scores.maxima + begin / 16));
    if (largest(maxima) + NOISE_MAX < draw.score) continue;
    int end = begin + GROUP < scores.n ? begin + GROUP : scores.n;
    for (int at = begin; at < end; at += 16)
      consider_lanes(draw, ids_from(at), scaled(scores, load_entries(scores.logits, at, scores.n)));
  }
  return draw.id;
}

static int draw_from_entries(const Entries& entries, Draw draw) {
  for (int at = 0; at < entries.n; at += 16) consider_lanes(draw, load_ints(entries.ids + at), load(entries.x + at));
  return draw.id;
}

}  // namespace PENSTOCK_LEVEL
