// Elementwise operations between matrix products, on float32 rows of any length.
#pragma once

#include "core/kernel_table.h"

#include "core/activation.h"
#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::Activation;

// Loads 16 lanes of x from `at` on; lanes past the n entries of x are zero.
INLINE Floats load_lanes(const float* x, int at, int n) {
  return at + 16 <= n ? load(x + at) : load_some(x + at, n - at);
}

INLINE void store_lanes(float* x, int at, int n, Floats value) {
  if (at + 16 <= n) {
    store(x + at, value);
  } else {
    store_some(x + at, value, n - at);
  }
}

static void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  Floats squares[4] = {};  // of columns 64 i + 16 j; four sums, to break the dependency chain
  int at = 0;
  for (; at + 64 <= n; at += 64)
    for (int j = 0; j < 4; j++) {
      const Floats lanes = load(x + at + 16 * j);
      squares[j] = fma(lanes, lanes, squares[j]);
    }
  for (; at < n; at += 16) {
    const Floats lanes = load_lanes(x, at, n);
    squares[0] = fma(lanes, lanes, squares[0]);
  }
  const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(n);
  const float factor = 1.0f / __builtin_sqrtf(mean + eps);
  for (at = 0; at < n; at += 16) store_lanes(out, at, n, load_lanes(x, at, n) * factor * load_lanes(weight, at, n));
}

// x - mean in the first n lanes, zero in the others.
INLINE Floats load_some_from(const float* x, Floats mean, int n) {
  float lanes[16] = {};
  store(lanes, load_some(x, n) - mean);
  for (int i = n; i < 16; i++) lanes[i] = 0;
  return load(lanes);
}

INLINE float mean_of(const float* x, int n) {
  Floats total = {};
  for (int at = 0; at < n; at += 16) total = total + load_lanes(x, at, n);
  return sum(total) / static_cast<float>(n);
}

static void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, float* out) {
  const Floats mean = splat(mean_of(x, n));
  Floats squares = {};
  for (int at = 0; at < n; at += 16) {
    // Lanes past the end stay zero.
    const Floats lanes = at + 16 <= n ? load(x + at) - mean : load_some_from(x + at, mean, n - at);
    squares = fma(lanes, lanes, squares);
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps);
  for (int at = 0; at < n; at += 16) {
    const Floats normed = (load_lanes(x, at, n) - mean) * factor * load_lanes(weight, at, n);
    store_lanes(out, at, n, bias ? normed + load_lanes(bias, at, n) : normed);
  }
}

static void add(float* x, const float* y, int n) {
  for (int at = 0; at < n; at += 16) store_lanes(x, at, n, load_lanes(x, at, n) + load_lanes(y, at, n));
}

static void scale(float* x, float factor, int n) {
  for (int at = 0; at < n; at += 16) store_lanes(x, at, n, load_lanes(x, at, n) * factor);
}

// The relative error is at most 3e-7. NaN stays NaN, so that a broken model remains visible in its logits. Near 0 this
// is x + x^3 p(x^2) with the polynomial of Cephes' tanhf, else 1 - 2 / (e^{2 |x|} + 1).
INLINE Floats tanh(Floats x) {
  const Floats square = x * x, size = max(x, -x);
  Floats p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const Floats near = fma(p * square, x, x);
  const Floats far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  const Floats rising = where_less(size, splat(0.625f), near, where_less(x, Floats{}, -far, far));
  const Floats ends = min(splat(1.0f), max(splat(-1.0f), x));  // for NaN, the second operand
  return where_less(size, splat(20.0f), rising, ends);
}

static void soft_cap(float* x, float cap, int n) {
  for (int at = 0; at < n; at += 16) store_lanes(x, at, n, cap * tanh(load_lanes(x, at, n) / cap));
}

INLINE void gated_by(const float* gate, const float* up, int n, Activation activation, float* out) {
  for (int at = 0; at < n; at += 16)
    store_lanes(out, at, n, activate(load_lanes(gate, at, n), activation) * load_lanes(up, at, n));
}

INLINE void activated_by(float* x, int n, Activation activation) {
  for (int at = 0; at < n; at += 16) store_lanes(x, at, n, activate(load_lanes(x, at, n), activation));
}

static void activated(float* x, int n, Activation activation) {
  switch (activation) {
    case penstock::ACTIVATION_GELU: return activated_by(x, n, penstock::ACTIVATION_GELU);
    case penstock::ACTIVATION_GELU_TANH: return activated_by(x, n, penstock::ACTIVATION_GELU_TANH);
    case penstock::ACTIVATION_RELU: return activated_by(x, n, penstock::ACTIVATION_RELU);
    case penstock::ACTIVATION_RELU_SQUARED: return activated_by(x, n, penstock::ACTIVATION_RELU_SQUARED);
    default: return activated_by(x, n, penstock::ACTIVATION_SILU);
  }
}

static void gated(const float* gate, const float* up, int n, Activation activation, float* out) {
  // One loop for each activation, so that it is not tested again for every 16 entries.
  switch (activation) {
    case penstock::ACTIVATION_GELU: return gated_by(gate, up, n, penstock::ACTIVATION_GELU, out);
    case penstock::ACTIVATION_GELU_TANH: return gated_by(gate, up, n, penstock::ACTIVATION_GELU_TANH, out);
    case penstock::ACTIVATION_RELU: return gated_by(gate, up, n, penstock::ACTIVATION_RELU, out);
    case penstock::ACTIVATION_RELU_SQUARED: return gated_by(gate, up, n, penstock::ACTIVATION_RELU_SQUARED, out);
    default: return gated_by(gate, up, n, penstock::ACTIVATION_SILU, out);
  }
}

static void rotate(float* head, const float* cosines, const float* sines, int half) {
  for (int at = 0; at < half; at += 16) {
    const Floats x = load_lanes(head, at, half), y = load_lanes(head + half, at, half);
    const Floats cosine = load_lanes(cosines, at, half), sine = load_lanes(sines, at, half);
    store_lanes(head, at, half, x * cosine - y * sine);
    store_lanes(head + half, at, half, y * cosine + x * sine);
  }
}

}  // namespace PENSTOCK_LEVEL
