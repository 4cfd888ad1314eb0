// LoRA adapters: adds B A x to the products of the rows that have one. Rows without an adapter are not touched, and
// each row is computed by itself, so no bits depend on what else is in the batch.
#include <cstring>

#include "model/step.h"

namespace penstock {

namespace {

// Rows of one item. The matrices of an adapter are small, so they are read again for every block of rows.
constexpr int BLOCK_ROWS = 32;
// Panels of B of one item.
constexpr int PIECE_PANELS = 16;

int num_panels(const Matrix& matrix) { return (matrix.rows + LANES - 1) / LANES; }

// The panels [begin, end) of a matrix, as a matrix.
Matrix part_of(const Matrix& matrix, int begin, int end) {
  Matrix part = matrix;
  part.panels += begin * matrix.panel_bytes;
  part.rows = (end * LANES < matrix.rows ? end * LANES : matrix.rows) - begin * LANES;
  return part;
}

}  // namespace

void StepRun::group_adapted(const int32_t* slots) {
  slots_ = slots;
  adapted_rows_ = arena_.take<int32_t>(num_rows_);
  adapted_blocks_ = arena_.take<AdaptedBlock>(num_rows_);
  num_adapted_rows_ = num_adapted_blocks_ = 0;
  int32_t most = 0;
  for (int row = 0; row < num_rows_; row++) most = slots[row] > most ? slots[row] : most;
  for (int32_t slot = 1; slot <= most; slot++) {
    int begin = num_adapted_rows_;
    for (int row = 0; row < num_rows_; row++)
      if (slots[row] == slot) adapted_rows_[num_adapted_rows_++] = row;
    for (; begin < num_adapted_rows_; begin += BLOCK_ROWS)
      adapted_blocks_[num_adapted_blocks_++] = {
          slot, begin, begin + BLOCK_ROWS < num_adapted_rows_ ? begin + BLOCK_ROWS : num_adapted_rows_};
  }
}

void StepRun::add_adapters(const LoraTarget* targets, int num_targets, const float* x, int64_t stride, int columns,
                           const Norm& norm, float* out, int64_t out_stride) {
  if (num_adapted_rows_ == 0) return;
  const DecoderModel& m = model_;
  auto format = static_cast<Format>(m.adapter_format);
  Arena::Mark before = arena_.mark();
  int64_t bytes = kernels_.input_bytes(format, columns, 0);
  int64_t inner_bytes = kernels_.input_bytes(format, m.adapter_rank, 0);
  int64_t inner_stride = (m.adapter_rank + LANES - 1) / LANES * LANES;
  int64_t num_inner = static_cast<int64_t>(num_targets) * num_adapted_rows_;
  uint8_t* inputs = arena_.take<uint8_t>(num_adapted_rows_ * bytes);
  float* inner = arena_.take<float>(num_inner * inner_stride);
  uint8_t* inner_inputs = arena_.take<uint8_t>(num_inner * inner_bytes);
  float** rooms = arena_.take<float*>(threads_.num());
  for (int i = 0; i < threads_.num(); i++) rooms[i] = arena_.take<float>(BLOCK_ROWS * PIECE_PANELS * LANES);
  auto pair_of = [&](const AdaptedBlock& block, int target) -> const LoraPair& {
    int64_t layer = static_cast<int64_t>(block.slot - 1) * m.num_layers + layer_index_;
    return m.adapters[layer * NUM_LORA_MODULES + targets[target].module];
  };

  each(num_adapted_rows_, [&](int i, int thread) {
    const float* source = x + adapted_rows_[i] * stride;
    if (norm.weight) {
      this->norm(norm, source, columns, row_room_[thread]);
      source = row_room_[thread];
    }
    kernels_.prepare(format, columns, 0, source, inputs + i * bytes);
  });

  // A x, rounded for the second product.
  threads_.run(num_adapted_blocks_ * num_targets, [&](int item, int) {
    const AdaptedBlock& block = adapted_blocks_[item / num_targets];
    const LoraPair& pair = pair_of(block, item % num_targets);
    if (pair.a.rows == 0) return;
    int64_t first = static_cast<int64_t>(item % num_targets) * num_adapted_rows_ + block.begin;
    int rows = block.end - block.begin;
    Inputs some = {inputs + block.begin * bytes, bytes, rows};
    GemmOutput to = {inner + first * inner_stride, inner_stride, OUTPUT_STORE, ACTIVATION_SILU, 0, 0};
    kernels_.product(pair.a, some, 0, num_panels(pair.a), to);
    for (int64_t row = first; row < first + rows; row++)
      kernels_.prepare(format, pair.b.columns, 0, inner + row * inner_stride, inner_inputs + row * inner_bytes);
  });

  int most = 0;
  for (int i = 0; i < num_adapted_blocks_ * num_targets; i++) {
    int panels = num_panels(pair_of(adapted_blocks_[i / num_targets], i % num_targets).b);
    most = panels > most ? panels : most;
  }
  int pieces = (most + PIECE_PANELS - 1) / PIECE_PANELS;
  threads_.run(num_adapted_blocks_ * num_targets * pieces, [&](int item, int thread) {
    const AdaptedBlock& block = adapted_blocks_[item / pieces / num_targets];
    int which = item / pieces % num_targets, begin = item % pieces * PIECE_PANELS;
    const LoraPair& pair = pair_of(block, which);
    if (pair.a.rows == 0 || begin >= num_panels(pair.b)) return;
    int end = begin + PIECE_PANELS < num_panels(pair.b) ? begin + PIECE_PANELS : num_panels(pair.b);
    const Matrix piece = part_of(pair.b, begin, end);
    int64_t first = static_cast<int64_t>(which) * num_adapted_rows_ + block.begin;
    Inputs some = {inner_inputs + first * inner_bytes, inner_bytes, block.end - block.begin};
    float* delta = rooms[thread];
    GemmOutput to = {delta, PIECE_PANELS * LANES, OUTPUT_STORE, ACTIVATION_SILU, 0, 0};
    kernels_.product(piece, some, 0, end - begin, to);
    const LoraTarget& target = targets[which];
    for (int row = block.begin; row < block.end; row++, delta += PIECE_PANELS * LANES) {
      float* at = out + adapted_rows_[row] * out_stride + target.column + begin * target.step;
      if (target.step == LANES) {
        kernels_.add(at, delta, piece.rows);
        continue;
      }
      for (int column = 0; column < piece.rows; column += LANES)
        kernels_.add(at + column / LANES * target.step, delta + column,
                     column + LANES < piece.rows ? LANES : piece.rows - column);
    }
  });
  arena_.give_back(before);
}

// inner = act(gate) * up of x after a norm, for gate and up in alternating panels. The adapters come before the
// activation, so the product stores both; the other rows have the bits of a gated product.
void StepRun::adapted_gate_up(const PackedLinear& gate_up, const Prepared& inputs, int64_t stride, const Norm& norm) {
  Arena::Mark before = arena_.mark();
  float* both = arena_.take<float>(num_rows_ * 2 * stride);
  product(gate_up, inputs, both, 2 * stride, OUTPUT_STORE);
  const LoraTarget targets[] = {{LORA_GATE, 0, 2 * LANES}, {LORA_UP, LANES, 2 * LANES}};
  add_adapters(targets, 2, x_, model_.hidden_size, model_.hidden_size, norm, both, 2 * stride);
  each(num_rows_, [&](int row, int thread) {
    const float* from = both + row * 2 * stride;
    float *gate = row_room_[thread], *up = gate + row_floats_;
    for (int64_t at = 0; at < stride; at += LANES, from += 2 * LANES) {
      memcpy(gate + at, from, LANES * sizeof(float));
      memcpy(up + at, from + LANES, LANES * sizeof(float));
    }
    kernels_.gated(gate, up, static_cast<int>(stride), static_cast<Activation>(model_.activation),
                   inner_ + row * stride);
  });
  arena_.give_back(before);
}

}  // namespace penstock
