// The kernels of recurrent layers, on float32. Tokens are computed one after another and columns independently, so a
// result does not depend on how a row is cut into calls.
#pragma once

#include "core/kernel_table.h"

#include "core/elementwise.h"
#include "core/simd.h"

namespace PENSTOCK_LEVEL {

static void multiply(float* x, const float* y, int n) {
  for (int at = 0; at < n; at += 16) store_lanes(x, at, n, load_lanes(x, at, n) * load_lanes(y, at, n));
}

static void multiply_sigmoid(float* x, const float* y, int n) {
  for (int at = 0; at < n; at += 16) store_lanes(x, at, n, load_lanes(x, at, n) * sigmoid(load_lanes(y, at, n)));
}

static void convolve(const float* const* inputs, const float* weights, const float* bias, int taps, int n, float* out) {
  for (int at = 0; at < n; at += 16) {
    Floats y = load_lanes(inputs[0], at, n) * load_lanes(weights, at, n);
    for (int tap = 1; tap < taps; tap++)
      y = fma(load_lanes(inputs[tap], at, n), load_lanes(weights + static_cast<int64_t>(tap) * n, at, n), y);
    store_lanes(out, at, n, bias ? y + load_lanes(bias, at, n) : y);
  }
}

// Columns [at, at + 16 VECTORS).
template <int VECTORS, bool SUBTRACTS>
INLINE void scan_columns(const penstock::StateScan& scan, int tokens, int at) {
  const int keys = scan.key_size, values = scan.value_size;
  for (int token = 0; token < tokens; token++) {
    const float* query = scan.queries + token * scan.stride;
    const float* key = scan.keys + token * scan.stride;
    const float* value = scan.values + token * scan.stride;
    const float decay = scan.decays[token * scan.gate_stride], beta = scan.betas[token * scan.gate_stride];
    Floats added[VECTORS] = {}, y[VECTORS];
    float* row = scan.state + at;
    for (int i = 0; SUBTRACTS && i < keys; i++, row += scan.state_stride)
      for (int j = 0; j < VECTORS; j++) added[j] = fma(load(row + 16 * j) * decay, splat(key[i]), added[j]);
    for (int j = 0; j < VECTORS; j++) {
      const Floats lanes = load_lanes(value, at + 16 * j, values);
      added[j] = (lanes - added[j]) * beta;
      y[j] = lanes * scan.skip;
    }
    row = scan.state + at;
    for (int i = 0; i < keys; i++, row += scan.state_stride)
      for (int j = 0; j < VECTORS; j++) {
        const Floats updated = fma(splat(key[i]), added[j], load(row + 16 * j) * decay);
        store(row + 16 * j, updated);
        y[j] = fma(updated, splat(query[i]), y[j]);
      }
    if (!scan.output) continue;
    float* out = scan.output + token * scan.output_stride;
    for (int j = 0; j < VECTORS; j++) store_lanes(out, at + 16 * j, values, y[j]);
  }
}

template <bool SUBTRACTS>
INLINE void scan_all_columns(const penstock::StateScan& scan, int tokens, int begin, int end) {
  int at = begin;
  for (; at + 64 <= end; at += 64) scan_columns<4, SUBTRACTS>(scan, tokens, at);
  for (; at < end; at += 16) scan_columns<1, SUBTRACTS>(scan, tokens, at);
}

static void scan_state(const penstock::StateScan& scan, int tokens, int begin, int end) {
  if (scan.subtracts)
    scan_all_columns<true>(scan, tokens, begin, end);
  else
    scan_all_columns<false>(scan, tokens, begin, end);
}

}  // namespace PENSTOCK_LEVEL
