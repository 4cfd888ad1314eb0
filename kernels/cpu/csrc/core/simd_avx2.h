// Sixteen lanes in two AVX2 registers, since gcc keeps a vector that is wider than a register in memory and copies it
// in pieces. Has the operations of gcc's vectors that kernels use.
#pragma once

#include <cstdint>

#define LANES_INLINE friend inline __attribute__((always_inline))

namespace PENSTOCK_LEVEL {

template <class Number>
struct Lanes {
  typedef Number Half __attribute__((vector_size(32), may_alias));
  Half low, high;

  LANES_INLINE Lanes operator+(Lanes a, Lanes b) { return {a.low + b.low, a.high + b.high}; }
  LANES_INLINE Lanes operator-(Lanes a, Lanes b) { return {a.low - b.low, a.high - b.high}; }
  LANES_INLINE Lanes operator*(Lanes a, Lanes b) { return {a.low * b.low, a.high * b.high}; }
  LANES_INLINE Lanes operator/(Lanes a, Lanes b) { return {a.low / b.low, a.high / b.high}; }
  LANES_INLINE Lanes operator&(Lanes a, Lanes b) { return {a.low & b.low, a.high & b.high}; }
  LANES_INLINE Lanes operator|(Lanes a, Lanes b) { return {a.low | b.low, a.high | b.high}; }
  LANES_INLINE Lanes operator-(Lanes a) { return {-a.low, -a.high}; }
  LANES_INLINE Lanes operator~(Lanes a) { return {~a.low, ~a.high}; }

  // A number is broadcast to all lanes.
  LANES_INLINE Lanes operator+(Lanes a, Number b) { return {a.low + b, a.high + b}; }
  LANES_INLINE Lanes operator-(Lanes a, Number b) { return {a.low - b, a.high - b}; }
  LANES_INLINE Lanes operator-(Number a, Lanes b) { return {a - b.low, a - b.high}; }
  LANES_INLINE Lanes operator*(Lanes a, Number b) { return {a.low * b, a.high * b}; }
  LANES_INLINE Lanes operator*(Number a, Lanes b) { return b * a; }
  LANES_INLINE Lanes operator/(Lanes a, Number b) { return {a.low / b, a.high / b}; }
  LANES_INLINE Lanes operator/(Number a, Lanes b) { return {a / b.low, a / b.high}; }
  LANES_INLINE Lanes operator&(Lanes a, Number b) { return {a.low & b, a.high & b}; }
  LANES_INLINE Lanes operator<<(Lanes a, int bits) { return {a.low << bits, a.high << bits}; }
  LANES_INLINE Lanes operator>>(Lanes a, int bits) { return {a.low >> bits, a.high >> bits}; }

  template <class Other>
  LANES_INLINE Lanes& operator+=(Lanes& a, Other b) { return a = a + b; }
  template <class Other>
  LANES_INLINE Lanes& operator*=(Lanes& a, Other b) { return a = a * b; }
  LANES_INLINE Lanes& operator|=(Lanes& a, Lanes b) { return a = a | b; }

  // All bits of a lane if the comparison holds, else none.
  LANES_INLINE Lanes<int32_t> operator>(Lanes a, Number b) { return Lanes<int32_t>{a.low > b, a.high > b}; }
  LANES_INLINE Lanes<int32_t> operator>=(Lanes a, Number b) { return Lanes<int32_t>{a.low >= b, a.high >= b}; }
  LANES_INLINE Lanes<int32_t> operator<=(Lanes a, Number b) { return Lanes<int32_t>{a.low <= b, a.high <= b}; }

  // For the few uses of single lanes.
  __attribute__((always_inline)) Number operator[](int i) const { return i < 8 ? low[i] : high[i - 8]; }
};

}  // namespace PENSTOCK_LEVEL

#undef LANES_INLINE
