// The Hadamard transform of a head, which spreads large entries in a few dimensions over many. Stored keys and values
// are transformed before they are rounded. Models attend by a few dimensions that are large in both queries and keys,
// where an error in the key counts most, and a few large entries of a value would make INT8 coarse for all others.
// Queries are transformed too, so scores change only by a constant factor. The weighted mean of values is transformed
// back, by the same transform.
#pragma once

#include "core/kernel_table.h"
#include "core/simd.h"

namespace PENSTOCK_LEVEL {

namespace paged {

// The number of dimensions that are transformed together: the largest power of two that divides the head size. The dot
// product of two transformed heads is their dot product times this number, and a head that is transformed twice is
// multiplied by this number.
constexpr int hadamard_block(int head_dim) { return head_dim & -head_dim; }

// Exchanges each lane with the lane whose number differs in bit H.
template <int H>
INLINE Floats exchanged(Floats x) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps(_mm512_xor_si512(reinterpret_cast<__m512i>(lane_numbers()), _mm512_set1_epi32(H)), x);
#elif defined(TWO_REGISTERS)
  if constexpr (H == 8) return {x.high, x.low};
  const __m256i lanes = _mm256_xor_si256(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(H));
  return {_mm256_permutevar8x32_ps(x.low, lanes), _mm256_permutevar8x32_ps(x.high, lanes)};
#elif defined(__aarch64__)
  if constexpr (H == 8) return {x.q2, x.q3, x.q0, x.q1};
  if constexpr (H == 4) return {x.q1, x.q0, x.q3, x.q2};
  if constexpr (H == 2)
    return {vextq_f32(x.q0, x.q0, 2), vextq_f32(x.q1, x.q1, 2), vextq_f32(x.q2, x.q2, 2), vextq_f32(x.q3, x.q3, 2)};
  return {vrev64q_f32(x.q0), vrev64q_f32(x.q1), vrev64q_f32(x.q2), vrev64q_f32(x.q3)};
#else
  float lanes[penstock::LANES], others[penstock::LANES];
  store(lanes, x);
  for (int i = 0; i < penstock::LANES; i++) others[i] = lanes[i ^ H];
  return load(others);
#endif
}

// Replaces each such pair by its sum and its difference.
template <int H>
INLINE Floats sums_and_differences(Floats x) {
  float signs[penstock::LANES];
  for (int i = 0; i < penstock::LANES; i++) signs[i] = i & H ? -1.0f : 1.0f;
  return fma(x, load(signs), exchanged<H>(x));
}

// Transforms VECTORS vectors together, a power of two.
template <int VECTORS>
INLINE void transform(Floats (&x)[VECTORS]) {
  for (int i = 0; i < VECTORS; i++)
    x[i] = sums_and_differences<8>(sums_and_differences<4>(sums_and_differences<2>(sums_and_differences<1>(x[i]))));
  for (int half = 1; half < VECTORS; half *= 2)
    for (int i = 0; i < VECTORS; i++) {
      if (i & half) continue;
      const Floats a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
}

// A head of VECTORS vectors, in registers.
template <int VECTORS>
INLINE void transform_head(const float* from, float* to) {
  constexpr int LANES = penstock::LANES;
  Floats x[VECTORS];
  for (int i = 0; i < VECTORS; i++) x[i] = load(from + i * LANES);
  transform(x);
  for (int i = 0; i < VECTORS; i++) store(to + i * LANES, x[i]);
}

// Transforms `from`, padded with zeros to whole vectors.
static void hadamard(const float* from, int head_dim, float* to) {
  constexpr int LANES = penstock::LANES;
  if (head_dim == 4 * LANES) return transform_head<4>(from, to);
  if (head_dim == 8 * LANES) return transform_head<8>(from, to);
  const int block = hadamard_block(head_dim);
  for (int dim = 0; dim < head_dim; dim += LANES) {
    Floats x = load_up_to(from + dim, head_dim - dim);
    if (block > 1) x = sums_and_differences<1>(x);
    if (block > 2) x = sums_and_differences<2>(x);
    if (block > 4) x = sums_and_differences<4>(x);
    if (block > 8) x = sums_and_differences<8>(x);
    store(to + dim, x);
  }
  for (int half = LANES; half < block; half *= 2) {
    for (int begin = 0; begin < head_dim; begin += 2 * half) {
      for (int dim = begin; dim < begin + half; dim += LANES) {
        const Floats a = load(to + dim), b = load(to + dim + half);
        store(to + dim, a + b);
        store(to + dim + half, a - b);
      }
    }
  }
}

}  // namespace paged

}  // namespace PENSTOCK_LEVEL
