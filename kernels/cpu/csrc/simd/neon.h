// Sixteen lanes in four NEON registers, which every 64-bit Arm processor has. Has the operations of gcc's vectors that
// kernels use, like simd/avx2.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define LANES_INLINE friend inline __attribute__((always_inline))

namespace PENSTOCK_LEVEL {

template <class Number>
struct Lanes {
  typedef Number Quarter __attribute__((vector_size(16), may_alias));
  Quarter q0, q1, q2, q3;

  LANES_INLINE Lanes operator+(Lanes a, Lanes b) { return {a.q0 + b.q0, a.q1 + b.q1, a.q2 + b.q2, a.q3 + b.q3}; }
  LANES_INLINE Lanes operator-(Lanes a, Lanes b) { return {a.q0 - b.q0, a.q1 - b.q1, a.q2 - b.q2, a.q3 - b.q3}; }
  LANES_INLINE Lanes operator*(Lanes a, Lanes b) { return {a.q0 * b.q0, a.q1 * b.q1, a.q2 * b.q2, a.q3 * b.q3}; }
  LANES_INLINE Lanes operator/(Lanes a, Lanes b) { return {a.q0 / b.q0, a.q1 / b.q1, a.q2 / b.q2, a.q3 / b.q3}; }
  LANES_INLINE Lanes operator&(Lanes a, Lanes b) { return {a.q0 & b.q0, a.q1 & b.q1, a.q2 & b.q2, a.q3 & b.q3}; }
  LANES_INLINE Lanes operator|(Lanes a, Lanes b) { return {a.q0 | b.q0, a.q1 | b.q1, a.q2 | b.q2, a.q3 | b.q3}; }
  LANES_INLINE Lanes operator^(Lanes a, Lanes b) { return {a.q0 ^ b.q0, a.q1 ^ b.q1, a.q2 ^ b.q2, a.q3 ^ b.q3}; }
  LANES_INLINE Lanes operator-(Lanes a) { return {-a.q0, -a.q1, -a.q2, -a.q3}; }
  LANES_INLINE Lanes operator~(Lanes a) { return {~a.q0, ~a.q1, ~a.q2, ~a.q3}; }

  // A number is broadcast to all lanes.
  LANES_INLINE Lanes operator+(Lanes a, Number b) { return {a.q0 + b, a.q1 + b, a.q2 + b, a.q3 + b}; }
  LANES_INLINE Lanes operator-(Lanes a, Number b) { return {a.q0 - b, a.q1 - b, a.q2 - b, a.q3 - b}; }
  LANES_INLINE Lanes operator*(Lanes a, Number b) { return {a.q0 * b, a.q1 * b, a.q2 * b, a.q3 * b}; }
  LANES_INLINE Lanes operator/(Lanes a, Number b) { return {a.q0 / b, a.q1 / b, a.q2 / b, a.q3 / b}; }
  LANES_INLINE Lanes operator&(Lanes a, Number b) { return {a.q0 & b, a.q1 & b, a.q2 & b, a.q3 & b}; }
  LANES_INLINE Lanes operator-(Number a, Lanes b) { return {a - b.q0, a - b.q1, a - b.q2, a - b.q3}; }
  LANES_INLINE Lanes operator*(Number a, Lanes b) { return b * a; }
  LANES_INLINE Lanes operator/(Number a, Lanes b) { return {a / b.q0, a / b.q1, a / b.q2, a / b.q3}; }
  LANES_INLINE Lanes operator<<(Lanes a, int bits) { return {a.q0 << bits, a.q1 << bits, a.q2 << bits, a.q3 << bits}; }
  LANES_INLINE Lanes operator>>(Lanes a, int bits) { return {a.q0 >> bits, a.q1 >> bits, a.q2 >> bits, a.q3 >> bits}; }

  template <class Other>
  LANES_INLINE Lanes& operator+=(Lanes& a, Other b) { return a = a + b; }
  template <class Other>
  LANES_INLINE Lanes& operator*=(Lanes& a, Other b) { return a = a * b; }
  LANES_INLINE Lanes& operator|=(Lanes& a, Lanes b) { return a = a | b; }

  // All bits of a lane if the comparison holds, else none.
  LANES_INLINE Lanes<int32_t> operator>(Lanes a, Number b) { return {a.q0 > b, a.q1 > b, a.q2 > b, a.q3 > b}; }
  LANES_INLINE Lanes<int32_t> operator>=(Lanes a, Number b) { return {a.q0 >= b, a.q1 >= b, a.q2 >= b, a.q3 >= b}; }
  LANES_INLINE Lanes<int32_t> operator<=(Lanes a, Number b) { return {a.q0 <= b, a.q1 <= b, a.q2 <= b, a.q3 <= b}; }

  // For the few uses of single lanes.
  __attribute__((always_inline)) Number operator[](int i) const {
    Number lanes[64 / sizeof(Number)];
    memcpy(lanes, this, sizeof(lanes));
    return lanes[i];
  }
};

#undef LANES_INLINE

typedef Lanes<float> Floats;
typedef Lanes<int32_t> Ints;
typedef Lanes<uint32_t> Words;

// A function of each register.
#define EACH(function, x) {function(x.q0), function(x.q1), function(x.q2), function(x.q3)}
#define EACH_TWO(function, x, y) \
  {function(x.q0, y.q0), function(x.q1, y.q1), function(x.q2, y.q2), function(x.q3, y.q3)}
#define EACH_THREE(function, x, y, z) \
  {function(x.q0, y.q0, z.q0), function(x.q1, y.q1, z.q1), function(x.q2, y.q2, z.q2), function(x.q3, y.q3, z.q3)}

// ------------------------------------------------------------------------------------------------------- load and store

INLINE Floats splat(float x) {
  const float32x4_t quarter = vdupq_n_f32(x);
  return {quarter, quarter, quarter, quarter};
}
INLINE Ints splat_int(int32_t x) {
  const int32x4_t quarter = vdupq_n_s32(x);
  return {quarter, quarter, quarter, quarter};
}
INLINE Floats load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
INLINE void store(float* p, Floats x) {
  vst1q_f32(p, x.q0);
  vst1q_f32(p + 4, x.q1);
  vst1q_f32(p + 8, x.q2);
  vst1q_f32(p + 12, x.q3);
}
INLINE int32x4_t load_quarter(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
INLINE Ints load_ints(const void* p) {
  const uint8_t* from = static_cast<const uint8_t*>(p);
  return {load_quarter(from), load_quarter(from + 16), load_quarter(from + 32), load_quarter(from + 48)};
}
INLINE void store_ints(void* p, Ints x) { memcpy(p, &x, sizeof(x)); }

template <class To, class From>
INLINE To bits_of(From x) {
  typedef typename To::Quarter Quarter;
  return {reinterpret_cast<Quarter>(x.q0), reinterpret_cast<Quarter>(x.q1), reinterpret_cast<Quarter>(x.q2),
          reinterpret_cast<Quarter>(x.q3)};
}
INLINE Floats as_floats(Ints x) { return bits_of<Floats>(x); }
INLINE Ints as_ints(Floats x) { return bits_of<Ints>(x); }
INLINE Ints as_ints(Words x) { return bits_of<Ints>(x); }
INLINE Words as_words(Ints x) { return bits_of<Words>(x); }

// ------------------------------------------------------------------------------------------------ arithmetic and choice

INLINE Floats fma(Floats a, Floats b, Floats c) { return EACH_THREE(vfmaq_f32, c, a, b); }

INLINE Floats where(Ints mask, Floats yes, Floats no) {
  const Words chosen = as_words(mask);
  return EACH_THREE(vbslq_f32, chosen, yes, no);
}

INLINE Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  const Words less = EACH_TWO(vcltq_f32, a, b);
  return EACH_THREE(vbslq_f32, less, yes, no);
}

// Not the instructions FMAX and FMIN, which give NaN if either operand is.
INLINE float32x4_t max_quarter(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE Floats max(Floats a, Floats b) { return EACH_TWO(max_quarter, a, b); }
INLINE Floats min(Floats a, Floats b) { return where_less(a, b, a, b); }

INLINE float sum(Floats x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.q0, x.q2), vaddq_f32(x.q1, x.q3));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE float largest(Floats x) {
  const float32x4_t four = max_quarter(max_quarter(x.q0, x.q2), max_quarter(x.q1, x.q3));
  const float32x4_t two = max_quarter(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(max_quarter(two, vextq_f32(two, two, 1)), 0);
}

// --------------------------------------------------------------------------------------------------------- conversions

INLINE Floats to_floats(Ints x) { return EACH(vcvtq_f32_s32, x); }
INLINE Ints to_ints_nearest(Floats x) { return EACH(vcvtnq_s32_f32, x); }

INLINE Floats load_bf16(const uint16_t* p) {
  const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
  const Words bits = {vshll_n_u16(vget_low_u16(low), 16), vshll_high_n_u16(low, 16),
                      vshll_n_u16(vget_low_u16(high), 16), vshll_high_n_u16(high, 16)};
  return bits_of<Floats>(bits);
}

INLINE uint16x8_t halves_of(Words::Quarter low, Words::Quarter high) {
  return vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
}
INLINE void store_halves(void* p, Words x) {
  const uint16x8_t low = halves_of(x.q0, x.q1), high = halves_of(x.q2, x.q3);
  memcpy(p, &low, 16);
  memcpy(static_cast<uint8_t*>(p) + 16, &high, 16);
}
INLINE void store_bytes(void* p, Ints x) {
  const Words words = as_words(x);
  const uint16x8_t low = halves_of(words.q0, words.q1), high = halves_of(words.q2, words.q3);
  vst1q_u8(static_cast<uint8_t*>(p), vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)));
}

INLINE int32_t sum_ints(Ints x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.q0, x.q1), vaddq_s32(x.q2, x.q3))); }

// ------------------------------------------------------------------------------------------------------------- products

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MULTIPLIES_BF16
INLINE void store_bf16(uint16_t* p, Floats x) {
  const bfloat16x8_t low = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.q0), x.q1);
  const bfloat16x8_t high = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.q2), x.q3);
  memcpy(p, &low, 16);
  memcpy(p + 8, &high, 16);
}

INLINE float32x4_t dot2(float32x4_t sum, int32x4_t a, int32x4_t b) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b));
}
#endif

// One register of dot4. On processors without USDOT, `a` has signed bytes as well, and -128 times -128 is not allowed
// twice side by side: the widening products are added in pairs in 16 bits.
INLINE int32x4_t dot4(int32x4_t sum, int32x4_t a, int32x4_t b) {
  const int8x16_t y = vreinterpretq_s8_s32(b);
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_s32(sum, vreinterpretq_u8_s32(a), y);
#else
  const int8x16_t x = vreinterpretq_s8_s32(a);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, x, y);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
#endif
}
INLINE Ints dot4(Ints sum, Ints a, Ints b) { return EACH_THREE(dot4, sum, a, b); }

#if !defined(__ARM_FEATURE_MATMUL_INT8)
#define SIGNED_DOT4

// The same for unsigned bytes in both operands.
INLINE int32x4_t dot4_unsigned(int32x4_t sum, int32x4_t a, int32x4_t b) {
  const uint8x16_t x = vreinterpretq_u8_s32(a), y = vreinterpretq_u8_s32(b);
#if defined(__ARM_FEATURE_DOTPROD)
  return vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(sum), x, y));
#else
  const uint32x4_t low = vpaddlq_u16(vmull_u8(vget_low_u8(x), vget_low_u8(y))), high = vpaddlq_u16(vmull_high_u8(x, y));
  return vaddq_s32(sum, vreinterpretq_s32_u32(vpaddq_u32(low, high)));
#endif
}

#endif

}  // namespace PENSTOCK_LEVEL

#undef EACH
#undef EACH_TWO
#undef EACH_THREE
