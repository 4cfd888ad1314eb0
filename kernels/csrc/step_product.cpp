// Products of a step: inputs rounded row by row, outputs cut into pieces that keep every thread busy.
#include "step_run.h"

namespace penstock {

namespace {

// Rows that share a panel while it is in the cache; with more, pieces are cut across rows too, which evens out the work.
constexpr int ROWS_AT_ONCE = 64;
// Panels in a piece: a multiple of every tile's width, and even, as gated products need it.
constexpr int PANELS_AT_ONCE = 6;

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
    int pieces = (panels + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE;
    int blocks = (rows.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    // Neighbouring items share panels, so that the second block of rows finds them in the cache.
    threads_.run(pieces * blocks, [&](int item, int) {
      int begin = item / blocks * PANELS_AT_ONCE, first = item % blocks * ROWS_AT_ONCE;
      int end = begin + PANELS_AT_ONCE < panels ? begin + PANELS_AT_ONCE : panels;
      int count = rows.rows - first < ROWS_AT_ONCE ? rows.rows - first : ROWS_AT_ONCE;
      Inputs some = {rows.data + first * rows.stride, rows.stride, count};
      Output to = {out + first * stride, stride, mode, static_cast<Activation>(model_.activation), 0, 0};
      kernels_.product(part, some, begin, end, to);
    });
    out += part.rows;
  }
}

}  // namespace penstock
