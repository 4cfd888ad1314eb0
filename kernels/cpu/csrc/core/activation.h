// The activation functions of MLPs, in float32.
#pragma once

#include "core/kernel_table.h"

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::Activation;

INLINE Floats silu(Floats x) { return x * sigmoid(x); }

// x P(X <= x) for a normal X, computed as max(x, 0) - |x| P(X > |x|), which keeps its relative precision where the
// result is small. P(X > t) = e^{-t^2/2} p(1 / (1 + c t)), in the form of Abramowitz and Stegun 7.1.26 with a
// polynomial of degree 8, fitted to a relative error of 5e-8 on [0, 14]; beyond 14 the exponential is 0.
INLINE Floats gelu(Floats x) {
  const Floats t = max(x, -x);
  const Floats w = splat(1.0f) / fma(t, splat(0.23f), splat(1.0f));
  Floats p = splat(-0.0784674808f);
  p = fma(p, w, splat(0.290414214f));
  p = fma(p, w, splat(-0.278127104f));
  p = fma(p, w, splat(0.301472902f));
  p = fma(p, w, splat(-0.0329202376f));
  p = fma(p, w, splat(0.119514063f));
  p = fma(p, w, splat(0.0857629180f));
  p = fma(p, w, splat(0.0923784599f));
  p = fma(p, w, splat(-2.77624258e-5f));
  return max(x, Floats{}) - t * (exp(t * t * splat(-0.5f)) * p);
}

// x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
INLINE Floats gelu_tanh(Floats x) {
  const Floats inner = fma(x * x, splat(0.0713548163f), splat(1.59576912f));
  return x * sigmoid(x * inner);
}

INLINE Floats activate(Floats x, Activation activation) {
  switch (activation) {
    case penstock::ACTIVATION_GELU: return gelu(x);
    case penstock::ACTIVATION_GELU_TANH: return gelu_tanh(x);
    case penstock::ACTIVATION_RELU: return max(Floats{}, x);  // for NaN, the second operand
    case penstock::ACTIVATION_RELU_SQUARED: return max(Floats{}, x) * max(Floats{}, x);
    default: return silu(x);
  }
}

}  // namespace PENSTOCK_LEVEL
