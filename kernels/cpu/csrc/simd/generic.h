// Sixteen lanes without any particular instruction set.
#pragma once

#include <cstdint>

#include "simd/wide.h"

namespace PENSTOCK_LEVEL {

INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }

// In pieces, since GCC splits a wider comparison into single lanes.
INLINE Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  typedef float Piece __attribute__((vector_size(16), may_alias));
  Floats chosen;
  const Piece *left = reinterpret_cast<Piece*>(&a), *right = reinterpret_cast<Piece*>(&b);
  const Piece *first = reinterpret_cast<Piece*>(&yes), *second = reinterpret_cast<Piece*>(&no);
  for (unsigned i = 0; i < sizeof(Floats) / sizeof(Piece); i++)
    reinterpret_cast<Piece*>(&chosen)[i] = left[i] < right[i] ? first[i] : second[i];
  return chosen;
}

INLINE Floats max(Floats a, Floats b) { return where_less(b, a, a, b); }
INLINE Floats min(Floats a, Floats b) { return where_less(a, b, a, b); }

INLINE float sum(Floats x) {
  float lanes[16];
  store(lanes, x);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

INLINE float largest(Floats x) {
  float lanes[16], best;
  store(lanes, x);
  best = lanes[0];
  for (int i = 1; i < 16; i++) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

INLINE Ints to_ints_nearest(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  return as_ints(x + magic) - as_ints(magic);
}

INLINE Floats load_bf16(const uint16_t* p) {
  Words bits;
  for (int i = 0; i < 16; i++) bits[i] = static_cast<uint32_t>(p[i]) << 16;
  return reinterpret_cast<Floats>(bits);
}
INLINE void store_halves(void* p, Words x) {
  for (int i = 0; i < 16; i++) static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(x[i]);
}
INLINE void store_bytes(void* p, Ints x) {
  for (int i = 0; i < 16; i++) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(x[i]);
}

INLINE Ints dot4(Ints sum, Ints a, Ints b) {
  typedef int16_t Shorts __attribute__((vector_size(64), may_alias));
  Ints even_a = a & 0x00ff00ff, odd_a = as_ints(as_words(a) >> 8) & 0x00ff00ff;
  Shorts y = reinterpret_cast<Shorts>(b);
  Ints even_b = reinterpret_cast<Ints>((y << 8) >> 8), odd_b = reinterpret_cast<Ints>(y >> 8);
  // Each lane now holds two 16-bit numbers: low halves by sign extension, high halves by arithmetic shift.
  sum += ((even_a << 16) >> 16) * ((even_b << 16) >> 16) + (even_a >> 16) * (even_b >> 16);
  return sum + ((odd_a << 16) >> 16) * ((odd_b << 16) >> 16) + (odd_a >> 16) * (odd_b >> 16);
}

}  // namespace PENSTOCK_LEVEL
