// The matrix products of a step: inputs are rounded row by row, outputs are divided into pieces that keep every thread
// busy.
#include "model/step.h"

namespace penstock {

namespace {

// Limits on the panels of a piece. Longer pieces read memory no faster, and with several blocks of rows a piece must
// fit into the caches. Short pieces restart too often, unless there would be too few of them. Gated products need even
// numbers.
constexpr int MOST_PANELS = 96, MOST_SHARED_PANELS = 12, SHORT_PANELS = 4, LEAST_PANELS = 2;
// A piece has the remaining panels divided by this many times the threads. Pieces become shorter towards the end, so
// that no thread waits long for the last piece of another one.
constexpr int ROUNDS = 2;

// Divides the panels [begin, end) into pieces. Writes the start of each piece, and `end` after the last one; returns the
// number of pieces.
int cut_panels(int begin, int end, int threads, int most, int32_t* begins) {
  int pieces = 0, least = end - begin < ROUNDS * threads * SHORT_PANELS ? LEAST_PANELS : SHORT_PANELS;
  while (begin < end) {
    begins[pieces++] = begin;
    int some = (end - begin) / (ROUNDS * threads) / LEAST_PANELS * LEAST_PANELS;
    begin += some < least ? least : some > most ? most : some;
  }
  begins[pieces] = end;
  return pieces;
}

}  // namespace

Prepared StepRun::prepare(const PackedLinear& linear, const float* x, int64_t stride, int rows, const Norm& norm) {
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
    if (norm.weight) {
      this->norm(norm, source, linear.parts[0].columns, room);
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

void StepRun::product(const PackedLinear& linear, const Prepared& inputs, float* out, int64_t stride, OutputMode mode) {
  for (int i = 0; i < linear.num_parts; i++) {
    const Matrix& part = linear.parts[i];
    const Inputs& rows = inputs.parts[i];
    int panels = (part.rows + LANES - 1) / LANES;
    int groups = threads_.num_groups(), pieces = 0;
    int32_t* begins = arena_.take<int32_t>(panels / LEAST_PANELS + groups + 2);
    int32_t* ends = arena_.take<int32_t>(groups);
    int most = kernels_.product_rows(part.format), blocks = (rows.rows + most - 1) / most;
    // Each group of threads has the panels that it packed, so they are on its own NUMA node.
    for (int group = 0; group < groups; group++) {
      pieces += cut_panels(threads_.share(group, panels), threads_.share(group + 1, panels), threads_.used_in(group),
                           blocks > 1 ? MOST_SHARED_PANELS : MOST_PANELS, begins + pieces);
      ends[group] = pieces * blocks;
    }
    // Adjacent items share panels, so that the second block of rows finds them in cache. Threads claim items in turn, so
    // a thread's next item is probably as far away as there are threads.
    threads_.run_divided(ends, true, [&](int item, int) {
      int piece = item / blocks, later = (item + threads_.used_in(0)) / blocks;
      int first = rows.rows * (item % blocks) / blocks, count = rows.rows * (item % blocks + 1) / blocks - first;
      const uint8_t* following = later < pieces ? part.panels + begins[later] * part.panel_bytes : nullptr;
      Inputs some = {rows.data + first * rows.stride, rows.stride, count, following};
      GemmOutput to = {out + first * stride, stride, mode, static_cast<Activation>(model_.activation), 0, 0};
      kernels_.product(part, some, begins[piece], begins[piece + 1], to);
    });
    out += part.rows;
  }
}

}  // namespace penstock
