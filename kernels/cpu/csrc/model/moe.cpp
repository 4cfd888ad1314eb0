// A mixture of experts: each token is computed by the few experts that its router rates highest.
#include <cmath>
#include <cstring>

#include "model/step.h"

namespace penstock {

namespace {

// Panels per piece; even, for gated products.
constexpr int PANELS_AT_ONCE = 6;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// A work item: some panels of one expert.
struct ExpertItem {
  int32_t expert, begin, end;
};

}  // namespace

// Chooses the experts that rank highest for each token: by sigmoid plus bias, or by logit, in the chosen groups; ties
// go to the lowest number. Their weights are the softmax over all experts, or their sigmoids; normalised, they are
// divided by their sum. Finally they are multiplied by the layer's factors, if it has any.
void StepRun::choose_experts(const DecoderLayer& layer, const float* logits, int32_t* chosen, float* weights) {
  int num = model_.num_experts, wanted = model_.experts_per_token;
  bool normalise = model_.normalise_experts, sigmoids = model_.scores_are_sigmoids;
  each(num_rows_, [&](int token, int thread) {
    const float* row = logits + static_cast<int64_t>(token) * num;
    int32_t* ids = chosen + static_cast<int64_t>(token) * wanted;
    float* shares = weights + static_cast<int64_t>(token) * wanted;
    const float* ranks = row;
    if (layer.selection_bias || model_.num_groups > 1) {
      rank_experts(row, layer.selection_bias, row_room_[thread]);
      ranks = row_room_[thread];
    }
    for (int k = 0; k < wanted; k++) {
      int best = -1;
      for (int e = 0; e < num; e++) {
        bool taken = false;
        for (int j = 0; j < k; j++) taken = taken || ids[j] == e;
        if (!taken && (best < 0 || ranks[e] > ranks[best])) best = e;
      }
      ids[k] = best;
    }
    // Sigmoids may all be zero.
    float total = !sigmoids ? 0.0f : normalise ? 1e-20f : 1.0f;
    for (int e = 0; e < num && !normalise && !sigmoids; e++) total += std::exp(row[e] - row[ids[0]]);
    for (int k = 0; k < wanted; k++) shares[k] = sigmoids ? sigmoid(row[ids[k]]) : std::exp(row[ids[k]] - row[ids[0]]);
    for (int k = 0; k < wanted && normalise; k++) total += shares[k];
    for (int k = 0; k < wanted; k++) shares[k] *= model_.expert_scale / total;
    for (int k = 0; k < wanted && layer.expert_scales; k++) shares[k] *= layer.expert_scales[ids[k]];
  });
}

// ranks = sigmoid(logits) + bias, or the logits of a softmax; -infinity for experts of groups that are not chosen. The
// groups chosen are those whose two highest ranks have the largest sums, or of a softmax those with the highest ranks.
void StepRun::rank_experts(const float* logits, const float* bias, float* ranks) {
  int num = model_.num_experts, groups = model_.num_groups, size = num / groups;
  bool sigmoids = model_.scores_are_sigmoids;
  for (int e = 0; e < num; e++) ranks[e] = sigmoids ? sigmoid(logits[e]) + (bias ? bias[e] : 0.0f) : logits[e];
  if (groups == 1) return;
  float* sums = ranks + num;
  for (int g = 0; g < groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; e++) {
      float rank = ranks[e];
      if (rank > first) {
        second = first;
        first = rank;
      } else if (rank > second) {
        second = rank;
      }
    }
    sums[g] = sigmoids ? first + second : first;
  }
  for (int g = 0; g < groups; g++) {
    int better = 0;
    for (int other = 0; other < groups; other++)
      better += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
    for (int e = g * size; e < (g + 1) * size && better >= model_.groups_per_token; e++) ranks[e] = -INFINITY;
  }
}

// Sorts the pairs by expert.
Routing StepRun::route(const DecoderLayer& layer) {
  const DecoderModel& m = model_;
  int num_pairs = num_rows_ * m.experts_per_token;
  float* logits = arena_.take<float>(static_cast<int64_t>(num_rows_) * m.num_experts);
  int32_t* chosen = arena_.take<int32_t>(num_pairs);
  float* weights = arena_.take<float>(num_pairs);
  Prepared inputs = prepare(layer.router, x_, m.hidden_size, num_rows_, layer.router_norm);
  product(layer.router, inputs, logits, m.num_experts, OUTPUT_STORE);
  choose_experts(layer, logits, chosen, weights);

  int32_t* starts = arena_.take<int32_t>(m.num_experts + 1);
  int32_t* places = arena_.take<int32_t>(num_pairs);
  memset(starts, 0, sizeof(int32_t) * static_cast<size_t>(m.num_experts + 1));
  for (int pair = 0; pair < num_pairs; pair++) starts[chosen[pair] + 1]++;
  for (int e = 0; e < m.num_experts; e++) starts[e + 1] += starts[e];
  int32_t* next = arena_.take<int32_t>(m.num_experts);
  memcpy(next, starts, sizeof(int32_t) * static_cast<size_t>(m.num_experts));
  for (int pair = 0; pair < num_pairs; pair++) places[pair] = next[chosen[pair]]++;
  return {num_pairs, starts, places, weights};
}

// Copies each pair's token to its place.
uint8_t* StepRun::gather(const Routing& routing, const Inputs& inputs) {
  uint8_t* gathered = arena_.take<uint8_t>(routing.num_pairs * inputs.stride);
  each(routing.num_pairs, [&](int pair, int) {
    memcpy(gathered + routing.places[pair] * inputs.stride,
           inputs.data + pair / model_.experts_per_token * inputs.stride, static_cast<size_t>(inputs.stride));
  });
  return gathered;
}

// Normalises each pair's token, multiplies it by the pair's weight, and rounds it into the pair's place.
uint8_t* StepRun::gather_scaled(const Routing& routing, const DecoderLayer& layer) {
  const Matrix& part = layer.experts[0].gate_up.parts[0];
  int hidden = model_.hidden_size;
  int64_t stride = kernels_.input_bytes(part.format, part.columns, part.group);
  uint8_t* gathered = arena_.take<uint8_t>(routing.num_pairs * stride);
  each(routing.num_pairs, [&](int pair, int thread) {
    const float* x = x_ + static_cast<int64_t>(pair / model_.experts_per_token) * hidden;
    float* scaled = row_room_[thread];
    if (layer.expert_norm.weight)
      norm(layer.expert_norm, x, hidden, scaled);
    else
      memcpy(scaled, x, static_cast<size_t>(hidden) * sizeof(float));
    kernels_.scale(scaled, routing.weights[pair], hidden);
    kernels_.prepare(part.format, part.columns, part.group, scaled, gathered + routing.places[pair] * stride);
  });
  return gathered;
}

// Computes one product of all experts, each with its rows of the prepared inputs.
void StepRun::multiply_experts(const Routing& routing, const DecoderLayer& layer, PackedLinear PackedMlp::*linear,
                               const uint8_t* inputs, float* out, int64_t stride, OutputMode mode) {
  const Matrix& first = (layer.experts[0].*linear).parts[0];
  int64_t bytes = kernels_.input_bytes(first.format, first.columns, first.group);
  int panels = (first.rows + LANES - 1) / LANES;
  int groups = threads_.num_groups(), pieces = panels / PANELS_AT_ONCE + groups;
  ExpertItem* items = arena_.take<ExpertItem>(static_cast<int64_t>(model_.num_experts) * pieces);
  int32_t* ends = arena_.take<int32_t>(groups);
  int num_items = 0;
  // Each group of threads has the panels of every expert that it packed, so they are on its own NUMA node.
  for (int group = 0; group < groups; group++) {
    int first = threads_.share(group, panels), last = threads_.share(group + 1, panels);
    for (int e = 0; e < model_.num_experts; e++)
      for (int begin = first; begin < last && routing.starts[e] < routing.starts[e + 1]; begin += PANELS_AT_ONCE)
        items[num_items++] = {e, begin, begin + PANELS_AT_ONCE < last ? begin + PANELS_AT_ONCE : last};
    ends[group] = num_items;
  }
  threads_.run_divided(ends, true, [&](int i, int) {
    const ExpertItem& item = items[i];
    int begin = routing.starts[item.expert];
    Inputs rows = {inputs + begin * bytes, bytes, routing.starts[item.expert + 1] - begin};
    GemmOutput to = {out + begin * stride, stride, mode, static_cast<Activation>(model_.expert_activation),
                 model_.gate_alpha, model_.gate_limit};
    kernels_.product((layer.experts[item.expert].*linear).parts[0], rows, item.begin, item.end, to);
  });
}

// delta = the sum of each token's outputs, weighted unless the inputs were, in the order of its choices.
void StepRun::combine(const Routing& routing, float* outputs) {
  int hidden = model_.hidden_size, wanted = model_.experts_per_token;
  each(num_rows_, [&](int token, int) {
    float* sum = delta_ + static_cast<int64_t>(token) * hidden;
    memset(sum, 0, sizeof(float) * static_cast<size_t>(hidden));
    for (int pair = token * wanted; pair < (token + 1) * wanted; pair++) {
      float* output = outputs + static_cast<int64_t>(routing.places[pair]) * hidden;
      if (!model_.scales_expert_inputs) kernels_.scale(output, routing.weights[pair], hidden);
      kernels_.add(sum, output, hidden);
    }
  });
}

// delta += the output of the MLP that every token runs through.
void StepRun::add_shared(const DecoderLayer& layer) {
  if (!layer.shared_gate.num_parts) return mlp(layer.shared, model_.shared_size, layer.mlp_norm, delta_, OUTPUT_ADD);
  int64_t size = model_.hidden_size;
  Arena::Mark before = arena_.mark();
  float* output = arena_.take<float>(num_rows_ * size);
  float* gates = arena_.take<float>(static_cast<int64_t>(num_rows_) * LANES);
  Prepared inputs = prepare(layer.shared_gate, x_, size, num_rows_, layer.mlp_norm);
  product(layer.shared_gate, inputs, gates, LANES, OUTPUT_STORE);
  mlp(layer.shared, model_.shared_size, layer.mlp_norm, output, OUTPUT_STORE);
  each(num_rows_, [&](int row, int) {
    kernels_.scale(output + row * size, sigmoid(gates[row * LANES]), model_.hidden_size);
    kernels_.add(delta_ + row * size, output + row * size, model_.hidden_size);
  });
  arena_.give_back(before);
}

// delta += the output of the MLP beside the experts, after its norm.
void StepRun::add_dense(const DecoderLayer& layer) {
  int64_t size = model_.hidden_size;
  Arena::Mark before = arena_.mark();
  float* output = arena_.take<float>(num_rows_ * size);
  mlp(layer.mlp, layer.intermediate_size, layer.mlp_norm, output, OUTPUT_STORE);
  norm_rows(layer.mlp_inner_norm, output);
  each(num_rows_, [&](int row, int) { kernels_.add(delta_ + row * size, output + row * size, model_.hidden_size); });
  arena_.give_back(before);
}

void StepRun::experts(const DecoderLayer& layer) {
  const DecoderModel& m = model_;
  Arena::Mark before = arena_.mark();
  Routing routing = route(layer);
  // All experts need inputs in the same format.
  uint8_t* inputs =
      m.scales_expert_inputs
          ? gather_scaled(routing, layer)
          : gather(routing, prepare(layer.experts[0].gate_up, x_, m.hidden_size, num_rows_, layer.expert_norm).parts[0]);
  int64_t stride = (m.expert_size + LANES - 1) / LANES * LANES;  // a gated product writes whole panels
  float* inner = arena_.take<float>(routing.num_pairs * stride);
  OutputMode mode = m.gated_mlp ? OUTPUT_GATED : OUTPUT_STORE;
  multiply_experts(routing, layer, &PackedMlp::gate_up, inputs, inner, stride, mode);

  const Matrix& down = layer.experts[0].down.parts[0];
  int64_t bytes = kernels_.input_bytes(down.format, down.columns, down.group);
  uint8_t* inner_inputs = arena_.take<uint8_t>(routing.num_pairs * bytes);
  each(routing.num_pairs, [&](int row, int) {
    if (!m.gated_mlp)
      kernels_.activate(inner + row * stride, m.expert_size, static_cast<Activation>(m.expert_activation));
    kernels_.prepare(down.format, down.columns, down.group, inner + row * stride, inner_inputs + row * bytes);
  });
  float* outputs = arena_.take<float>(static_cast<int64_t>(routing.num_pairs) * m.hidden_size);
  multiply_experts(routing, layer, &PackedMlp::down, inner_inputs, outputs, m.hidden_size, OUTPUT_STORE);
  combine(routing, outputs);
  arena_.give_back(before);
  if (layer.expert_post_norm.weight) norm_rows(layer.expert_post_norm, delta_);
  spent_on(STAGE_EXPERTS);
  if (layer.mlp.down.num_parts) add_dense(layer);
  if (layer.shared.down.num_parts) add_shared(layer);
  add_sublayer(layer.mlp_post_norm);
  spent_on(STAGE_EXPERTS);
}

}  // namespace penstock
