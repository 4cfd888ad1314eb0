// Products with float32 and bfloat16 weights. A float32 panel is [columns][16], a bfloat16 panel [columns / 2][16][2].
//
// An output is one chain of multiply-adds over the columns in order, so its bits depend only on its row, its column and
// the instruction set. Inputs are float32 rows, rounded to bfloat16 for a bfloat16 matrix, and stored as bfloat16 only
// if the instruction set multiplies it.
#pragma once

#include "gemm/float_panel.h"
#include "core/kernel_table.h"
#include "gemm/epilogue.h"

#include "core/simd.h"

namespace PENSTOCK_LEVEL {

using penstock::Inputs;

namespace float_product {

// A tile has sums in registers for at most TILE_ROWS rows of inputs by TILE_PANELS panels.
#if defined(__AVX512F__)
typedef Floats Part;
constexpr int TILE_ROWS = 12, TILE_PANELS = 2;
#elif defined(__AVX2__)
typedef float Part __attribute__((vector_size(32), may_alias));
constexpr int TILE_ROWS = 6, TILE_PANELS = 1;
#elif defined(__aarch64__)
typedef float Part __attribute__((vector_size(16), may_alias));
constexpr int TILE_ROWS = 5, TILE_PANELS = 1;
#else
typedef float Part __attribute__((vector_size(16), may_alias));
constexpr int TILE_ROWS = 3, TILE_PANELS = 1;
#endif
constexpr int PARTS = sizeof(Floats) / sizeof(Part);  // registers for the 16 columns of a panel

constexpr int LINE = 64;  // bytes of a panel per step
constexpr int GROUP = 2;  // panels that all rows are multiplied with before the next ones
// The maximum sizes of a block. Its inputs, its sums and two groups of its weights stay in the L2 cache.
constexpr int BLOCK_ROWS = 128, BLOCK_PANELS = 16, BLOCK_STEPS = 768;

INLINE Part load_part(const uint8_t* p) { return *reinterpret_cast<const Part*>(p); }

INLINE Part fma(const uint8_t* a, Part b, Part c) {  // a b + c
  float factor;
  memcpy(&factor, a, sizeof factor);
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(_mm512_set1_ps(factor), b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(_mm256_set1_ps(factor), b, c);
#else
  return factor * b + c;
#endif
}

#define UNROLLED _Pragma("GCC unroll 16")

// One column of float32.
struct FloatStep {
  static constexpr int COLUMNS = 1, INPUT_BYTES = 4;

  // Multiplies the next column of R rows with the next column of the panels in C registers.
  template <int R, int C>
  INLINE void add(Part (&sums)[R][C], const uint8_t* weights, int64_t panel_bytes, const uint8_t* x, int64_t stride) {
    Part w[C];
    UNROLLED for (int c = 0; c < C; c++) w[c] = load_part(weights + c / PARTS * panel_bytes + c % PARTS * sizeof(Part));
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) sums[r][c] = fma(x + r * stride, w[c], sums[r][c]);
  }
};

// Two columns of bfloat16.
struct PairStep {
#if defined(MULTIPLIES_BF16)
  static constexpr int COLUMNS = 2, INPUT_BYTES = 4;
  typedef int32_t PairPart __attribute__((vector_size(sizeof(Part)), may_alias));
  typedef int32_t PairPartAnywhere __attribute__((vector_size(sizeof(Part)), may_alias, aligned(1)));

  template <int R, int C>
  INLINE void add(Part (&sums)[R][C], const uint8_t* weights, int64_t panel_bytes, const uint8_t* x, int64_t stride) {
    PairPart w[C];
    UNROLLED for (int c = 0; c < C; c++)
      w[c] = *reinterpret_cast<const PairPartAnywhere*>(weights + c / PARTS * panel_bytes + c % PARTS * sizeof(Part));
    UNROLLED for (int r = 0; r < R; r++) {
      int32_t both;
      memcpy(&both, x + r * stride, sizeof both);
      const PairPart pair = PairPart{} + both;
      UNROLLED for (int c = 0; c < C; c++) sums[r][c] = dot2(sums[r][c], w[c], pair);
    }
  }
#else
  static constexpr int COLUMNS = 2, INPUT_BYTES = 8;

  template <int R, int C>
  INLINE void add(Part (&sums)[R][C], const uint8_t* weights, int64_t panel_bytes, const uint8_t* x, int64_t stride) {
    typedef uint32_t Bits __attribute__((vector_size(sizeof(Part)), may_alias));
    Part w[C];
    UNROLLED for (int half = 0; half < 2; half++) {
#if defined(__clang__)
      __asm__("" : "+r"(weights));  // to be read twice: clang would keep what it read, and a sum in memory instead
#endif
      UNROLLED for (int c = 0; c < C; c++) {
        const Part both = load_part(weights + c / PARTS * panel_bytes + c % PARTS * sizeof(Part));
        const Bits bits = reinterpret_cast<const Bits&>(both);
        w[c] = reinterpret_cast<Part>(half ? bits & 0xffff0000u : bits << 16);
      }
      UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) sums[r][c] = fma(x + r * stride + half * 4, w[c], sums[r][c]);
    }
  }
#endif
};

// A tile's work: steps of R rows times P panels. Meanwhile it prefetches weights for later: one line of each panel
// every `ahead_every` steps, from `ahead` on, and after step `turn` from `after_turn` on.
struct Sweep {
  const uint8_t* weights;
  int64_t panel_bytes;
  const uint8_t* inputs;
  int64_t stride;
  int64_t steps;
  const uint8_t* ahead;
  int64_t ahead_every;
  int64_t turn;
  const uint8_t* after_turn;
};

// Tiles with at most this many rows are bound by memory, and prefetching several lines at a time raises its throughput.
constexpr int FEW_ROWS = 4, LINES_AT_ONCE = 4;

// The P panels' sums are kept in `sums`, (R, stride) float32; they start at zero if `first`.
template <typename Step, int R, int P>
static void multiply_tile(const Sweep& sweep, float* sums, int64_t sums_stride, bool first) {
  constexpr int C = P * PARTS;
  constexpr int64_t PART_LANES = LANES / PARTS;
  const uint8_t *weights = sweep.weights, *x = sweep.inputs, *ahead = sweep.ahead;
  const int64_t panel_bytes = sweep.panel_bytes, stride = sweep.stride, steps = sweep.steps;
  Part kept[R][C] = {};
  if (!first) {
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int c = 0; c < C; c++) kept[r][c] = *reinterpret_cast<Part*>(sums + r * sums_stride + c * PART_LANES);
  }
  for (int64_t step = 0; step < steps;) {
    if (step == sweep.turn) ahead = sweep.after_turn;
    const int64_t end = step < sweep.turn ? sweep.turn : steps;
    if (R <= FEW_ROWS && sweep.ahead_every == 1 && step + LINES_AT_ONCE <= end) {
      UNROLLED for (int line = 0; line < LINES_AT_ONCE; line++)
        UNROLLED for (int p = 0; p < P; p++) prefetch(ahead + p * panel_bytes + line * LINE);
      ahead += LINES_AT_ONCE * LINE;
      UNROLLED for (int line = 0; line < LINES_AT_ONCE; line++) {
        Step::add(kept, weights, panel_bytes, x, stride);
        weights += LINE;
        x += Step::INPUT_BYTES;
      }
      step += LINES_AT_ONCE;
      continue;
    }
    UNROLLED for (int p = 0; p < P; p++) prefetch(ahead + p * panel_bytes);
    ahead += LINE;
    const int64_t stop = step + sweep.ahead_every < steps ? step + sweep.ahead_every : steps;
    for (; step < stop; step++) {
      Step::add(kept, weights, panel_bytes, x, stride);
      weights += LINE;
      x += Step::INPUT_BYTES;
    }
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int c = 0; c < C; c++) *reinterpret_cast<Part*>(sums + r * sums_stride + c * PART_LANES) = kept[r][c];
}

typedef void (*TileFunction)(const Sweep& sweep, float* sums, int64_t sums_stride, bool first);

template <typename Step, int P, int R = TILE_ROWS>
INLINE TileFunction find_tile(int rows) {
  if constexpr (R > 1) {
    if (rows < R) return find_tile<Step, P, R - 1>(rows);
  }
  return multiply_tile<Step, R, P>;
}

// A block's work: rows [row, row + rows) times panels [begin, end), in successive pieces of `piece_steps` steps.
struct Block {
  int row, rows, begin, end;
  int64_t steps, piece_steps;

  int tiles() const { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
};

// Sets what a tile prefetches. A tile that is the only one to use its weights, or the first of a call, prefetches its
// own weights, at the distance that was measured to be best. Otherwise the tiles of a group share the prefetching of
// the next group.
INLINE void look_ahead(const Block& block, bool cold, int tile, int rows, const uint8_t* next, Sweep& sweep) {
  const int tiles = block.tiles();
  if (tiles == 1 || (cold && tile == 0)) {
    const int64_t distance = rows <= 8 ? 64 : 96;
    sweep.ahead = sweep.weights + distance * LINE;
    sweep.ahead_every = 1;
    sweep.turn = sweep.steps > distance ? sweep.steps - distance : 0;
    sweep.after_turn = sweep.weights + TILE_PANELS * sweep.panel_bytes;
  } else {
    const int sharing = tiles - cold;
    sweep.ahead = next + sweep.steps * (tile - cold) / sharing * LINE;
    sweep.ahead_every = sharing;
    sweep.turn = -1;
    sweep.after_turn = nullptr;
  }
}

// Multiplies steps [step, step + sweep.steps) of all rows and one or two panels. `sums` holds the sums of the block's
// rows between pieces; with a single piece it holds one tile's sums at a time.
template <typename Step>
static void multiply_group(const Matrix& matrix, const Inputs& inputs, const Block& block, int64_t step, int panel,
                           const GemmOutput& output, Sweep sweep, const uint8_t* next, float* sums) {
  const int panels = block.end - panel < GROUP ? block.end - panel : GROUP, tiles = block.tiles();
  const bool pieces = block.piece_steps < block.steps, ends = step + sweep.steps == block.steps;
  const uint8_t* weights = matrix.panels + panel * matrix.panel_bytes + step * LINE;
  for (int tile = 0; tile < tiles; tile++) {
    const int top = block.rows * tile / tiles, rows = block.rows * (tile + 1) / tiles - top;
    float* kept = pieces ? sums + top * panels * LANES : sums;
    sweep.inputs = inputs.data + (block.row + top) * inputs.stride + step * Step::INPUT_BYTES;
    for (int p = 0; p < panels; p += TILE_PANELS) {
      sweep.weights = weights + p * matrix.panel_bytes;
      look_ahead(block, step == 0 && panel == block.begin, tile, rows, next + p * matrix.panel_bytes, sweep);
      const bool whole = panels - p >= TILE_PANELS;
      const TileFunction multiply = whole ? find_tile<Step, TILE_PANELS>(rows) : find_tile<Step, 1>(rows);
      multiply(sweep, kept + p * LANES, panels * LANES, step == 0);
    }
    if (ends) write_tile(matrix, output, block.row + top, rows, panel, panels, kept);
  }
}

template <typename Step>
static void multiply_block(const Matrix& matrix, const Inputs& inputs, const Block& block, const GemmOutput& output,
                           float* sums) {
  Sweep sweep = {};
  sweep.panel_bytes = matrix.panel_bytes;
  sweep.stride = inputs.stride;
  for (int64_t step = 0; step < block.steps; step += block.piece_steps) {
    const int64_t left = block.steps - step;
    sweep.steps = left < block.piece_steps ? left : block.piece_steps;
    for (int panel = block.begin; panel < block.end; panel += GROUP) {
      // After the last group of a piece comes the first group of the next piece; after the last piece, the next panels
      // of the matrix.
      const bool turns = panel + GROUP >= block.end && sweep.steps < left;
      const int64_t next_panel = turns ? block.begin : panel + GROUP, next_step = turns ? step + sweep.steps : step;
      const bool exists = next_panel * LANES < matrix.rows;
      const uint8_t* next = matrix.panels + (exists ? next_panel * matrix.panel_bytes + next_step * LINE : 0);
      float* kept = block.piece_steps < block.steps ? sums + (panel - block.begin) * block.rows * LANES : sums;
      multiply_group<Step>(matrix, inputs, block, step, panel, output, sweep, next, kept);
    }
  }
}

// Multiplies a block whose sums are in memory between its pieces.
template <typename Step>
static __attribute__((noinline)) void multiply_in_pieces(const Matrix& matrix, const Inputs& inputs, Block block,
                                                         const GemmOutput& output) {
  alignas(64) float sums[BLOCK_ROWS * BLOCK_PANELS * LANES];
  for (const int end = block.end; block.begin < end; block.begin += BLOCK_PANELS) {
    block.end = end - block.begin < BLOCK_PANELS ? end : block.begin + BLOCK_PANELS;
    multiply_block<Step>(matrix, inputs, block, output, sums);
  }
}

template <typename Step>
static void multiply(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
  const int64_t steps = (matrix.columns + Step::COLUMNS - 1) / Step::COLUMNS;
  const int64_t pieces = inputs.rows > TILE_ROWS ? (steps + BLOCK_STEPS - 1) / BLOCK_STEPS : 1;
  const int64_t blocks = (inputs.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (int64_t i = 0; i < blocks; i++) {
    const int row = static_cast<int>(inputs.rows * i / blocks);
    const int rows = static_cast<int>(inputs.rows * (i + 1) / blocks) - row;
    const Block block = {row, rows, begin, end, steps, (steps + pieces - 1) / pieces};
    if (pieces > 1) {
      multiply_in_pieces<Step>(matrix, inputs, block, output);
    } else {
      alignas(64) float sums[TILE_ROWS * GROUP * LANES];
      multiply_block<Step>(matrix, inputs, block, output, sums);
    }
  }
}

#undef UNROLLED

}  // namespace float_product

static void f32_product(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
  float_product::multiply<float_product::FloatStep>(matrix, inputs, begin, end, output);
}

#if !defined(__AMX_BF16__)
static void bf16_product(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output) {
  float_product::multiply<float_product::PairStep>(matrix, inputs, begin, end, output);
}
#endif

}  // namespace PENSTOCK_LEVEL
