// Products of a step: inputs rounded row by row, outputs cut into pieces that keep every thread busy.
#include "step_run.h"

namespace penstock {

namespace {

// Rows that share a panel while it is in the cache; with more, pieces are cut across rows too: this evens out the work.
constexpr int ROWS_AT_ONCE = 64;
// Pieces for each thread that are enough to keep all of them busy to the end.
constexpr int PIECES_PER_THREAD = 4;
// A longer piece reads memory no faster.
constexpr int MOST_PANELS = 12;

// Panels in a piece; even, as gated products need it.
int panels_at_once(int panels, int threads) {
  int some = panels / (PIECES_PER_THREAD * threads) / 2 * 2;
  return some < 2 ? 2 : some > MOST_PANELS ? MOST_PANELS : some;
}

}  // namespace

Prepared StepRun::prepare(const Linear& linear, const float* x, int64_t stride, int rows, const float* norm) {
  Prepared prepared;
  int distinct = 0;
  for (int i = 0; i < linear.num_parts; i++) {
    const Matrix& part = linear.parts[i];
    const Matrix& before = linear.parts[i > 0 ? i - 1 : 0];
    if (i > 0 && !part.order && !before.order && part.format == before.format && part.group == before.group) {
      prepared.parts[i] = prepared.parts[i - 1];
      continue;
    }
    prepared.parts[i] = {inputs_[distinct++], kernels_.input_bytes(part.format, part.columns, part.group), rows};
  }
  each(rows, [&](int row, int thread) {
    const float* source = x + row * stride;
    float* room = row_room_[thread];
    if (norm) {
      kernels_.rms_norm(source, norm, linear.parts[0].columns, model_.norm_eps, room);
      source = room;
    }
    for (int i = 0; i < linear.num_parts; i++) {
      const Matrix& part = linear.parts[i];
      const Inputs& to = prepared.parts[i];
      if (i > 0 && to.data == prepared.parts[i - 1].data) continue;
      const float* ordered = source;
      if (part.order) {
        float* second = room + row_floats_;
        for (int c = 0; c < part.columns; c++) second[c] = source[part.order[c]];
        ordered = second;
      }
      kernels_.prepare(part.format, part.columns, part.group, ordered, const_cast<uint8_t*>(to.data) + row * to.stride);
    }
  });
  return prepared;
}

void StepRun::product(const Linear& linear, const Prepared& inputs, float* out, int64_t stride, OutputMode mode) {
  for (int i = 0; i < linear.num_parts; i++) {
    const Matrix& part = linear.parts[i];
    const Inputs& rows = inputs.parts[i];
    int panels = (part.rows + LANES - 1) / LANES;
    int some_panels = panels_at_once(panels, threads_.used());
    int pieces = (panels + some_panels - 1) / some_panels;
    int blocks = (rows.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    // Neighbouring items share panels, so that the second block of rows finds them in the cache.
    threads_.run(pieces * blocks, [&](int item, int) {
      int begin = item / blocks * some_panels, first = item % blocks * ROWS_AT_ONCE;
      int end = begin + some_panels < panels ? begin + some_panels : panels;
      int count = rows.rows - first < ROWS_AT_ONCE ? rows.rows - first : ROWS_AT_ONCE;
      Inputs some = {rows.data + first * rows.stride, rows.stride, count};
      Output to = {out + first * stride, stride, mode, static_cast<Activation>(model_.activation), 0, 0};
      kernels_.product(part, some, begin, end, to);
    });
    out += part.rows;
  }
}

}  // namespace penstock
