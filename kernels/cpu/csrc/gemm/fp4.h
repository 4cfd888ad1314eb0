// Products with MXFP4 weights: four-bit floats (E2M1), of which 32 columns share a power of two. Twice a value is a
// whole number, so that bytes are multiplied as for int4, with int8 inputs of one scale per chunk of 32 columns.
//
// A panel has for every 128 columns a line of 64 bytes, [4 chunks][16 rows] exponents plus 127, and then lines of codes
// in int4's layout (gemm/int4_panel.h): 17 bytes for 32 columns of a row, as in the checkpoint. A prepared row is
//   bytes [K filled up to 64] | half the scales [chunks] | what each chunk's sum starts from, int32 [chunks]
//
// The dot product over a chunk is exact in int32; chunks are added in float32, in their order.
#pragma once

#include "gemm/int_tiles.h"

namespace PENSTOCK_LEVEL {

constexpr int FP4_CHUNK = 32, FP4_BLOCK = 128;
// Bytes are twice a value plus FP4_ZERO, so that none is negative.
constexpr int FP4_ZERO = 12, FP4_LARGEST = 24;

alignas(16) constexpr uint8_t FP4_BYTES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

static int64_t fp4_panel_bytes(int columns) {
  return (divide_up(columns, FP4_BLOCK) + divide_up(columns, 8)) * int64_t{64};
}

static int64_t fp4_input_bytes(int columns) { return row_bytes(filled(columns) + divide_up(columns, FP4_CHUNK) * 8); }

// ------------------------------------------------------------------------------------------------------------- packing

// Scales are powers of two, of which only the exponents are stored: 2^-127 becomes zero.
static void fp4_pack_codes(int columns, const uint8_t* const codes[LANES], const float* const scales[LANES],
                           uint8_t* panel) {
  memset(panel, 0, static_cast<size_t>(fp4_panel_bytes(columns)));
  for (int begin = 0; begin < columns; begin += FP4_BLOCK) {
    const int n = columns - begin < FP4_BLOCK ? columns - begin : FP4_BLOCK;
    for (int row = 0; row < LANES; row++) {
      if (!codes[row]) continue;
      for (int k = 0; k < n; k += FP4_CHUNK) {
        uint32_t bits;
        memcpy(&bits, scales[row] + (begin + k) / FP4_CHUNK, 4);
        panel[k / FP4_CHUNK * LANES + row] = static_cast<uint8_t>(bits >> 23);
      }
      uint8_t* to = panel + 64 + row * 4;
      for (int k = 0; k < n; k += 8, to += 64) {
        uint32_t halves[2] = {};
        memcpy(halves, codes[row] + begin + k, static_cast<size_t>(n - k < 8 ? n - k : 8));
        const uint32_t both = (halves[0] & 0x0f0f0f0fu) | (halves[1] & 0x0f0f0f0fu) << 4;
        memcpy(to, &both, 4);
      }
    }
    panel += 64 + divide_up(n, 8) * 64;
  }
}

static void fp4_unpack_row(const Matrix& matrix, int row, float* out) {
  const uint8_t* panel = matrix.panels + row / LANES * matrix.panel_bytes;
  const int lane = row % LANES;
  for (int begin = 0; begin < matrix.columns; begin += FP4_BLOCK) {
    const int n = matrix.columns - begin < FP4_BLOCK ? matrix.columns - begin : FP4_BLOCK;
    for (int k = 0; k < n; k++) {
      const uint8_t pair = panel[64 + k / 8 * 64 + lane * 4 + k % 4];
      const int doubled = FP4_BYTES[k % 8 < 4 ? pair & 15 : pair >> 4] - FP4_ZERO;
      const uint32_t bits = static_cast<uint32_t>(panel[k / FP4_CHUNK * LANES + lane]) << 23;
      float scale;
      memcpy(&scale, &bits, 4);
      out[begin + k] = 0.5f * static_cast<float>(doubled) * scale;
    }
    panel += 64 + divide_up(n, 8) * 64;
  }
}

// ------------------------------------------------------------------------------------------------------------- product

static void fp4_prepare(int columns, const float* x, uint8_t* out) {
  uint8_t* scale_at = out + filled(columns);
  uint8_t* at = quantize_row(columns, FP4_CHUNK, x, out);
  for (int begin = 0; begin < columns; begin += FP4_CHUNK) {
    const int n = columns - begin < FP4_CHUNK ? columns - begin : FP4_CHUNK;
    const int32_t offset = -FP4_ZERO * sum_bytes(out + begin, n);
    const float half = 0.5f * load_float(scale_at);
    memcpy(at, &offset, 4);
    memcpy(scale_at, &half, 4);
    at += 4;
    scale_at += 4;
  }
}

// 16 scales.
INLINE Floats fp4_scales(const uint8_t* exponents) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
#elif defined(TWO_REGISTERS)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), 23))};
#else
  Words bits;
  for (int i = 0; i < LANES; i++) bits[i] = static_cast<uint32_t>(exponents[i]) << 23;
  return as_floats(as_ints(bits));
#endif
}

// FP4_BYTES of each code.
#if defined(__AVX512BW__)
INLINE Quads fp4_bytes(Quads codes) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(FP4_BYTES)));
  return reinterpret_cast<Quads>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
}
#elif defined(__AVX2__)
INLINE DotPart fp4_bytes(DotPart codes) {
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(FP4_BYTES));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
#elif defined(__SSE2__)
// Without an instruction for tables: twice the magnitude is the code up to 4, then 6, 8 and 12.
INLINE DotPart fp4_bytes(DotPart codes) {
  const DotPart code = _mm_and_si128(codes, _mm_set1_epi8(7));
  const DotPart seven = _mm_and_si128(_mm_cmpeq_epi8(code, _mm_set1_epi8(7)), _mm_set1_epi8(2));
  const DotPart doubled = _mm_add_epi8(_mm_add_epi8(code, _mm_subs_epu8(code, _mm_set1_epi8(4))), seven);
  const DotPart negative = _mm_cmpgt_epi8(codes, _mm_set1_epi8(7));
  return _mm_add_epi8(_mm_sub_epi8(_mm_xor_si128(doubled, negative), negative), _mm_set1_epi8(FP4_ZERO));
}
#else
INLINE Quads fp4_bytes(Quads codes) {
  uint8_t bytes[64];
  store_ints(bytes, codes);
  for (int i = 0; i < 64; i++) bytes[i] = FP4_BYTES[bytes[i]];
  return load_ints(bytes);
}
#endif

INLINE DotNibbles fp4_load(const uint8_t* line) {
  DotNibbles weights = load_nibbles(line);
#if defined(DOT_IN_PARTS)
  for (int i = 0; i < DOT_PARTS; i++) {
    weights.low[i] = fp4_bytes(weights.low[i]);
    weights.high[i] = fp4_bytes(weights.high[i]);
  }
#else
  weights.low = fp4_bytes(weights.low);
  weights.high = fp4_bytes(weights.high);
#endif
  return weights;
}

struct Fp4 {
  // M rows of inputs with P panels.
  template <int M, int P>
  static void compute(const DotTile& tile) {
    const int columns = tile.matrix.columns;
    const int64_t bytes = tile.matrix.panel_bytes, stride = tile.stride, offsets = divide_up(columns, FP4_CHUNK) * 4;
    const uint8_t* scales = tile.inputs + filled(columns);
    const uint8_t *line = tile.panels, *exponents = nullptr;
    Ahead ahead = tile.ahead;
    Floats total[M][P] = {};
    for (int begin = 0; begin < columns; begin += FP4_CHUNK, scales += 4, exponents += LANES) {
      if (begin % FP4_BLOCK == 0) {
        exponents = line;
        line += 64;
        ahead.next();
      }
      const int lines = divide_up(columns - begin < FP4_CHUNK ? columns - begin : FP4_CHUNK, 8);
      DotSums dot[M][P];
      for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) dot[m][p] = sums_of(load_int(scales + m * stride + offsets));
      add_lines<FP4_LARGEST>(dot, lines, [&](auto& sums, int first, int count) __attribute__((always_inline)) {
        const uint8_t* x = tile.inputs + begin + first * 8;
        for (int i = 0; i < count; i++, line += 64, x += 8) {
          DotNibbles weights[P];
          for (int p = 0; p < P; p++) weights[p] = fp4_load(line + p * bytes);
          ahead.next();
          for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) sums[m][p] = add_nibbles(sums[m][p], weights[p], x + m * stride);
        }
      });
      Floats scale[P];
      for (int p = 0; p < P; p++) scale[p] = fp4_scales(exponents + p * bytes);
      for (int m = 0; m < M; m++) {
        const Floats input_scale = splat(load_float(scales + m * stride));
        for (int p = 0; p < P; p++)
          total[m][p] = fma(to_floats(dot_ints(dot[m][p])) * input_scale, scale[p], total[m][p]);
      }
    }
    for (int p = 0; p < P; p++)
      for (int m = 0; m < M; m++) store(tile.sums + m * tile.width + p * LANES, total[m][p]);
  }
};

}  // namespace PENSTOCK_LEVEL
