// A mixture of experts: each token goes through the few experts that its router rates highest.
#include <cmath>
#include <cstring>

#include "step_run.h"

namespace penstock {

namespace {

// Panels in a piece; even, as gated products need it.
constexpr int PANELS_AT_ONCE = 6;

// Work on some panels of one expert.
struct ExpertItem {
  int32_t expert, begin, end;
};

}  // namespace

// Of each token the experts with the largest logits, equal ones by lowest number, and their weights: the softmax over all,
// or over the chosen ones where they are normalised.
void StepRun::choose_experts(const float* logits, int32_t* chosen, float* weights) {
  int num = model_.num_experts, wanted = model_.experts_per_token;
  each(num_rows_, [&](int token, int) {
    const float* row = logits + static_cast<int64_t>(token) * num;
    int32_t* ids = chosen + static_cast<int64_t>(token) * wanted;
    float* shares = weights + static_cast<int64_t>(token) * wanted;
    for (int k = 0; k < wanted; k++) {
      int best = -1;
      for (int e = 0; e < num; e++) {
        bool taken = false;
        for (int j = 0; j < k; j++) taken = taken || ids[j] == e;
        if (!taken && (best < 0 || row[e] > row[best])) best = e;
      }
      ids[k] = best;
    }
    float total = 0;
    for (int e = 0; e < num && !model_.normalise_experts; e++) total += std::exp(row[e] - row[ids[0]]);
    for (int k = 0; k < wanted; k++) shares[k] = std::exp(row[ids[k]] - row[ids[0]]);
    for (int k = 0; k < wanted && model_.normalise_experts; k++) total += shares[k];
    for (int k = 0; k < wanted; k++) shares[k] /= total;
  });
}

void StepRun::experts(const Layer& layer) {
  const Model& m = model_;
  int num_pairs = num_rows_ * m.experts_per_token;
  float* logits = arena_.take<float>(static_cast<int64_t>(num_rows_) * m.num_experts);
  int32_t* chosen = arena_.take<int32_t>(num_pairs);
  float* weights = arena_.take<float>(num_pairs);
  Prepared routed = prepare(layer.router, x_, m.hidden_size, num_rows_, layer.mlp_norm);
  product(layer.router, routed, logits, m.num_experts, OUTPUT_STORE);
  choose_experts(logits, chosen, weights);

  // Pairs of token and choice, sorted by expert: place[pair] is where a pair's row lies, [starts[e], starts[e + 1]) are
  // the rows of expert e.
  int32_t* starts = arena_.take<int32_t>(m.num_experts + 1);
  int32_t* place = arena_.take<int32_t>(num_pairs);
  memset(starts, 0, sizeof(int32_t) * static_cast<size_t>(m.num_experts + 1));
  for (int pair = 0; pair < num_pairs; pair++) starts[chosen[pair] + 1]++;
  for (int e = 0; e < m.num_experts; e++) starts[e + 1] += starts[e];
  int32_t* next = arena_.take<int32_t>(m.num_experts);
  memcpy(next, starts, sizeof(int32_t) * static_cast<size_t>(m.num_experts));
  for (int pair = 0; pair < num_pairs; pair++) place[pair] = next[chosen[pair]]++;

  const Matrix& first = layer.experts[0].gate_up.parts[0];
  Prepared inputs = prepare(layer.experts[0].gate_up, x_, m.hidden_size, num_rows_, layer.mlp_norm);
  int64_t stride = inputs.parts[0].stride;
  uint8_t* gathered = arena_.take<uint8_t>(num_pairs * stride);
  each(num_pairs, [&](int pair, int) {
    memcpy(gathered + place[pair] * stride, inputs.parts[0].data + pair / m.experts_per_token * stride,
           static_cast<size_t>(stride));
  });
  int64_t inner_floats = (m.expert_size + LANES - 1) / LANES * LANES;  // a gated product writes whole panels
  float* inner = arena_.take<float>(num_pairs * inner_floats);
  const Matrix& second = layer.experts[0].down.parts[0];
  int64_t inner_stride = kernels_.input_bytes(second.format, second.columns, second.group);
  uint8_t* inner_inputs = arena_.take<uint8_t>(num_pairs * inner_stride);
  float* outputs = arena_.take<float>(static_cast<int64_t>(num_pairs) * m.hidden_size);

  auto multiply = [&](bool down, const uint8_t* data, int64_t bytes, float* out, int64_t floats, OutputMode mode) {
    int panels = ((down ? second.rows : first.rows) + LANES - 1) / LANES;
    int pieces = (panels + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE;
    ExpertItem* items = arena_.take<ExpertItem>(static_cast<int64_t>(m.num_experts) * pieces);
    int num_items = 0;
    for (int e = 0; e < m.num_experts; e++)
      for (int piece = 0; piece < pieces && starts[e] < starts[e + 1]; piece++) {
        int begin = piece * PANELS_AT_ONCE;
        items[num_items++] = {e, begin, begin + PANELS_AT_ONCE < panels ? begin + PANELS_AT_ONCE : panels};
      }
    threads_.run(num_items, [&](int i, int) {
      const ExpertItem& item = items[i];
      const Expert& expert = layer.experts[item.expert];
      const Matrix& matrix = (down ? expert.down : expert.gate_up).parts[0];
      int begin = starts[item.expert];
      Inputs rows = {data + begin * bytes, bytes, starts[item.expert + 1] - begin};
      Output to = {out + begin * floats, floats, mode, static_cast<Activation>(m.expert_activation), m.gate_alpha,
                   m.gate_limit};
      kernels_.product(matrix, rows, item.begin, item.end, to);
    });
  };
  multiply(false, gathered, stride, inner, inner_floats, OUTPUT_GATED);
  each(num_pairs, [&](int pair, int) {
    kernels_.prepare(second.format, second.columns, second.group, inner + pair * inner_floats,
                     inner_inputs + pair * inner_stride);
  });
  multiply(true, inner_inputs, inner_stride, outputs, m.hidden_size, OUTPUT_STORE);

  each(num_rows_, [&](int token, int) {
    float* sum = delta_ + static_cast<int64_t>(token) * m.hidden_size;
    memset(sum, 0, sizeof(float) * static_cast<size_t>(m.hidden_size));
    for (int k = 0; k < m.experts_per_token; k++) {
      int pair = token * m.experts_per_token + k;
      float* output = outputs + static_cast<int64_t>(place[pair]) * m.hidden_size;
      kernels_.scale(output, weights[pair], m.hidden_size);
      kernels_.add(sum, output, m.hidden_size);
    }
  });
  add_sublayer(layer.mlp_post_norm);
  spent_on(STAGE_EXPERTS);
}

}  // namespace penstock
