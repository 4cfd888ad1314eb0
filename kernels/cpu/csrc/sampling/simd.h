// The sampler's additions to core/simd.h: lanes of 64 bits, lanes selected by a mask, a row of logits, and a list of
// its entries.
#pragma once

#include "core/simd.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace PENSTOCK_LEVEL {

typedef double Doubles __attribute__((vector_size(64), may_alias));
typedef uint64_t Longs __attribute__((vector_size(64), may_alias));
typedef float EightFloats __attribute__((vector_size(32), may_alias, aligned(4)));

static constexpr float INFINITE = __builtin_inff();
static constexpr float LOWEST = -3.402823466e+38f;  // lowest finite number

INLINE Doubles splat_double(double x) { return Doubles{} + x; }
INLINE Doubles load_eight(const float* p) {
  return __builtin_convertvector(*reinterpret_cast<const EightFloats*>(p), Doubles);
}

INLINE double sum(Doubles x) {  // lanes i and i + 4 first, then those 2 and 1 apart
  double lanes[8];
  memcpy(lanes, &x, sizeof(lanes));
  for (int half = 4; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

// e^x for -708 <= x <= 0 within 2 ulp: x = n ln 2 + r, with the Taylor series of e^r up to r^13.
INLINE Doubles exp(Doubles x) {
  const Doubles magic = splat_double(6755399441055744.0);  // 1.5 * 2^52
  Doubles shifted = x * 1.4426950408889634 + magic;  // the rounded integer is in the low bits
  Doubles n = shifted - magic;
  Doubles r = x - n * 6.93147180369123816490e-01;  // the first 32 bits of ln 2, so that the product is exact
  r = r - n * 1.90821492927058770002e-10;
  Doubles p = splat_double(1.0 / 6227020800);
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  Longs power = (reinterpret_cast<Longs>(shifted) - reinterpret_cast<Longs>(magic) + 1023) << 52;
  return p * reinterpret_cast<Doubles>(power);
}

struct SixteenDoubles {
  Doubles low, high;
};

// e^x for x <= 0 in float64; results below 1e-304 are only known to be at most that.
INLINE SixteenDoubles exp_wide(Floats x) {
  float lanes[16];
  store(lanes, max(x, splat(-700.0f)));
  return {exp(load_eight(lanes)), exp(load_eight(lanes + 8))};
}

// ------------------------------------------------------------------------------------------------------- picked lanes

// Bit i is set if lane i of a is at least, or equals, that of b. In pieces, like `where_less`.
#if defined(__AVX512F__)
INLINE uint32_t lanes_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE uint32_t lanes_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
#elif defined(TWO_REGISTERS)
INLINE uint32_t lanes_where(__m256 low, __m256 high) {
  return static_cast<uint32_t>(_mm256_movemask_ps(low)) | static_cast<uint32_t>(_mm256_movemask_ps(high)) << 8;
}
INLINE uint32_t lanes_at_least(Floats a, Floats b) {
  return lanes_where(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
}
INLINE uint32_t lanes_equal(Floats a, Floats b) {
  return lanes_where(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
}
#elif defined(__aarch64__)
INLINE uint32_t lanes_where(uint32x4_t q0, uint32x4_t q1, uint32x4_t q2, uint32x4_t q3) {
  const uint8_t places[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t low = vcombine_u16(vmovn_u32(q0), vmovn_u32(q1)), high = vcombine_u16(vmovn_u32(q2), vmovn_u32(q3));
  const uint8x16_t bits = vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), vld1q_u8(places));
  return static_cast<uint32_t>(vaddv_u8(vget_low_u8(bits))) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}
INLINE uint32_t lanes_at_least(Floats a, Floats b) {
  return lanes_where(vcgeq_f32(a.q0, b.q0), vcgeq_f32(a.q1, b.q1), vcgeq_f32(a.q2, b.q2), vcgeq_f32(a.q3, b.q3));
}
INLINE uint32_t lanes_equal(Floats a, Floats b) {
  return lanes_where(vceqq_f32(a.q0, b.q0), vceqq_f32(a.q1, b.q1), vceqq_f32(a.q2, b.q2), vceqq_f32(a.q3, b.q3));
}
#elif defined(__SSE2__)
INLINE uint32_t lanes_at_least(Floats a, Floats b) {
  const __m128 *x = reinterpret_cast<const __m128*>(&a), *y = reinterpret_cast<const __m128*>(&b);
  uint32_t bits = 0;
  for (int i = 0; i < 4; i++) bits |= static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpge_ps(x[i], y[i]))) << (4 * i);
  return bits;
}
INLINE uint32_t lanes_equal(Floats a, Floats b) {
  const __m128 *x = reinterpret_cast<const __m128*>(&a), *y = reinterpret_cast<const __m128*>(&b);
  uint32_t bits = 0;
  for (int i = 0; i < 4; i++) bits |= static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpeq_ps(x[i], y[i]))) << (4 * i);
  return bits;
}
#else
INLINE uint32_t lanes_at_least(Floats a, Floats b) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; i++) bits |= static_cast<uint32_t>(a[i] >= b[i]) << i;
  return bits;
}
INLINE uint32_t lanes_equal(Floats a, Floats b) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; i++) bits |= static_cast<uint32_t>(a[i] == b[i]) << i;
  return bits;
}
#endif

// Stores the lanes whose bits are set, one after another. Up to 16 lanes are written; the rest are garbage.
INLINE void store_picked(float* p, Floats x, uint32_t lanes) {
#if defined(__AVX512F__)
  // Not in one instruction, since a compressing store is slow on some machines.
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), x));
#else
  float all[16];
  store(all, x);
  for (; lanes; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
#endif
}

INLINE void store_picked(int32_t* p, Ints x, uint32_t lanes) {
#if defined(__AVX512F__)
  __m512i packed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(lanes), reinterpret_cast<__m512i>(x));
  _mm512_storeu_si512(p, packed);
#else
  int32_t all[16];
  store_ints(all, x);
  for (; lanes; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
#endif
}

// x in the lanes whose bits are set, minus infinity in the others. In pieces, like `where_less`.
INLINE Floats keep_lanes(Floats x, uint32_t lanes) {
#if defined(__AVX512F__)
  return _mm512_mask_mov_ps(splat(-INFINITE), static_cast<__mmask16>(lanes), x);
#elif defined(TWO_REGISTERS)
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), all = _mm256_set1_epi32(static_cast<int>(lanes));
  const __m256i low = _mm256_and_si256(all, bits), high = _mm256_and_si256(_mm256_srli_epi32(all, 8), bits);
  return where(ints_of(_mm256_cmpeq_epi32(low, bits), _mm256_cmpeq_epi32(high, bits)), x, splat(-INFINITE));
#elif defined(__aarch64__)
  const uint32_t places[4] = {1, 2, 4, 8};
  const uint32x4_t bits = vld1q_u32(places);
  const Words kept = {vtstq_u32(vdupq_n_u32(lanes), bits), vtstq_u32(vdupq_n_u32(lanes >> 4), bits),
                      vtstq_u32(vdupq_n_u32(lanes >> 8), bits), vtstq_u32(vdupq_n_u32(lanes >> 12), bits)};
  return where(as_ints(kept), x, splat(-INFINITE));
#else
  typedef int32_t Piece __attribute__((vector_size(16), may_alias));
  const Piece bits = {1, 2, 4, 8}, nothing = Piece{} + static_cast<int32_t>(0xff800000u);
  const Piece* all = reinterpret_cast<const Piece*>(&x);
  Floats kept;
  for (int i = 0; i < 4; i++) {
    const Piece kept_here = ((Piece{} + static_cast<int32_t>(lanes >> 4 * i)) & bits) == bits;
    reinterpret_cast<Piece*>(&kept)[i] = kept_here ? all[i] : nothing;
  }
  return kept;
#endif
}

INLINE Ints ids_from(int id) {
  return lane_numbers() + id;
}

// Entries [at, at + 16) of n; those past the end are minus infinity.
INLINE Floats load_entries(const float* p, int at, int n) {
  if (at + 16 <= n) return load(p + at);
#if defined(__AVX512F__)
  return _mm512_mask_loadu_ps(splat(-INFINITE), static_cast<__mmask16>((1u << (n - at)) - 1), p + at);
#else
  float lanes[16];
  store(lanes, splat(-INFINITE));
  memcpy(lanes, p + at, static_cast<size_t>(n - at) * sizeof(float));
  return load(lanes);
#endif
}

INLINE void store_entries(float* p, int at, int n, Floats x) {
  if (at + 16 <= n) return store(p + at, x);
  store_some(p + at, x, n - at);
}

// ------------------------------------------------------------------------------------------------------ rows and lists

// The number of entries that share a vector of maxima, in which lane i is the largest entry whose id is i modulo 16.
// The maxima allow skipping a group without relevant entries.
static constexpr int GROUP = 256;

INLINE int num_groups(int n) { return (n + GROUP - 1) / GROUP; }

// A row of n logits, read as scores: distances below the best logit, divided by the temperature.
struct Scores {
  const float* logits;
  int n;
  const float* maxima;  // of logits, 16 per group
  float best;           // the best logit
  float temperature;
};

// In this order and precision, because ties decide what a filter keeps, and rounding creates ties.
INLINE Floats scaled(const Scores& scores, Floats x) { return (x - scores.best) / scores.temperature; }

// The entries that filters have left, in the order of their ids, padded with minus infinity to a multiple of 16.
struct Entries {
  float* x;      // scores, with room for n rounded up to 16, plus 16
  int32_t* ids;  // with the same room
  int n;
};

INLINE void fill_up(Entries& entries) {
  store(entries.x + entries.n, splat(-INFINITE));
  store_ints(entries.ids + entries.n, Ints{});
}

// The result of the first pass over a row.
struct RowMax {
  float best;
  bool has_nan;
};

// Whether the model computed logits from which no token can be chosen.
INLINE bool is_broken(const RowMax& found) { return found.has_nan || !(found.best >= LOWEST && found.best <= -LOWEST); }

// The maxima during a pass over a row: of every group, and of all.
struct MaxFinder {
  float* maxima;
  Floats best = splat(-INFINITE), largest_here = splat(-INFINITE);
  uint32_t ordered = 0xffff;  // lanes without NaN

  __attribute__((always_inline)) void add(Floats x) {
    ordered &= lanes_equal(x, x);
    largest_here = max(largest_here, x);
  }
  __attribute__((always_inline)) void end_group() {
    store(maxima, largest_here);
    maxima += 16;
    best = max(best, largest_here);
    largest_here = splat(-INFINITE);
  }
  __attribute__((always_inline)) RowMax found() const { return {largest(best), ordered != 0xffff}; }
};

static RowMax find_max(const float* logits, int n, float* maxima) {
  MaxFinder finder = {maxima};
  for (int begin = 0; begin < n; begin += GROUP) {
    int end = begin + GROUP < n ? begin + GROUP : n;
    for (int at = begin; at < end; at += 16) finder.add(load_entries(logits, at, n));
    finder.end_group();
  }
  return finder.found();
}

// Finds the maximum of the entries that a mask leaves. The other entries become minus infinity, except in groups of
// which nothing is left: their maxima are minus infinity, so they are never read.
static RowMax find_max_masked(float* logits, int n, const uint32_t* mask, float* maxima) {
  MaxFinder finder = {maxima};
  for (int begin = 0; begin < n; begin += GROUP) {
    const int end = begin + GROUP < n ? begin + GROUP : n;
    uint32_t any = 0, all = ~0u;
    for (int at = begin; at < end; at += 32) {
      any |= mask[at / 32];
      all &= mask[at / 32];
    }
    if (all == ~0u) {
      for (int at = begin; at < end; at += 16) finder.add(load_entries(logits, at, n));
    } else if (any) {
      for (int at = begin; at < end; at += 16) {
        const Floats kept = keep_lanes(load_entries(logits, at, n), mask[at / 32] >> at % 32 & 0xffff);
        store_entries(logits, at, n, kept);
        finder.add(kept);
      }
    }
    finder.end_group();
  }
  return finder.found();
}

// The lowest id that has the best logit.
static int first_best(const Scores& scores) {
  Floats best = splat(scores.best);
  for (int group = 0; group < num_groups(scores.n); group++) {
    if (!lanes_equal(load(scores.maxima + 16 * group), best)) continue;
    for (int at = group * GROUP; at < scores.n; at += 16) {
      uint32_t lanes = lanes_equal(load_entries(scores.logits, at, scores.n), best);
      if (lanes) return at + __builtin_ctz(lanes);
    }
  }
  return 0;
}

// Lists the entries whose score is finite and at least `floor`.
static void collect(const Scores& scores, float floor, Entries& entries) {
  Floats least = splat(floor > LOWEST ? floor : LOWEST);
  int kept = 0;
  for (int begin = 0; begin < scores.n; begin += GROUP) {
    if (!lanes_at_least(scaled(scores, load(scores.maxima + begin / 16)), least)) continue;
    int end = begin + GROUP < scores.n ? begin + GROUP : scores.n;
    for (int at = begin; at < end; at += 16) {
      Floats x = scaled(scores, load_entries(scores.logits, at, scores.n));
      uint32_t lanes = lanes_at_least(x, least);
      store_picked(entries.x + kept, x, lanes);
      store_picked(entries.ids + kept, ids_from(at), lanes);
      kept += __builtin_popcount(lanes);
    }
  }
  entries.n = kept;
  fill_up(entries);
}

}  // namespace PENSTOCK_LEVEL
