// GGUF's Q4_0 weights: codes around 8, of which 32 columns share a float16. A weight takes 18 / 32 bytes, as in the
// file.
#pragma once

#include "gemm/int4_panel.h"
#include "gemm/block_scaled.h"

namespace PENSTOCK_LEVEL {

struct Q4_0 {
  static constexpr int LINE_COLUMNS = 64, ZERO = 8, LARGEST = 15;
  static constexpr float UNIT = 1.0f;

  static void store_scale(uint8_t* to, float scale) {
    const uint16_t half = to_half(scale);
    memcpy(to, &half, 2);
  }
  INLINE Floats load_scales(const uint8_t* line) { return load_half(line); }
  static int byte_of(int code) { return code; }
  INLINE DotNibbles load_bytes(const uint8_t* line) { return load_nibbles(line); }
};

}  // namespace PENSTOCK_LEVEL
