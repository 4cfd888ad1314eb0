// Runs one layer of a step.
#include <cmath>
#include <cstring>

#include "model/step.h"

namespace penstock {

void StepRun::layer(const DecoderLayer& layer, int index) {
  layer_index_ = index;
  rows_ = group_rows_[layer.kv_group];
  take_sizes(layer);
  uint8_t* pages = model_.pages + layer.kv_offset;
  bool last = index == model_.num_layers - 1;
  bool attends = layer.qkv.num_parts;
  if (attends) {
    Prepared inputs = layer.hidden_norm.weight
                          ? prepare_joined(layer.qkv, layer.attention_norm, x_, layer.hidden_norm)
                          : prepare(layer.qkv, x_, model_.hidden_size, num_rows_, layer.attention_norm);
    spent_on(STAGE_NORM);
    product(layer.qkv, inputs, qkv_, qkv_size_, OUTPUT_STORE);
    if (!layer.latent.rank) {
      const LoraTarget targets[] = {{LORA_Q, 0, LANES}, {LORA_K, query_size_, LANES},
                                    {LORA_V, query_size_ + kv_size_, LANES}};
      add_adapters(targets, !layer.has_kv ? 1 : layer.values_are_keys ? 2 : 3, x_, model_.hidden_size,
                   model_.hidden_size, layer.attention_norm, qkv_, qkv_size_);
    }
    spent_on(STAGE_QKV);
    if (layer.latent.rank)
      find_latents(layer, pages);
    else
      rotate_and_write(layer, pages);
    spent_on(STAGE_ROPE_KV);
  }
  if (layer.recurrent.kind) recur(layer, index);
  // After the last layer's KV is written, only rows whose logits or hidden states are requested are computed.
  if (last && step_.num_wanted() == 0 && !ends_in_feature_) return;
  if (attends) attend(layer, pages);
  if (last && !only_wanted_ && !ends_in_feature_) keep_wanted_rows(true);
  spent_on(STAGE_ATTENTION);
  if (!model_.parallel_layers) add_mixers(layer);
  if (layer.mlp.gate_up.num_parts || layer.router.num_parts) feed_forward(layer);
  // The MLP has read x by now.
  if (model_.parallel_layers) add_mixers(layer);
  if (layer.input_gate.num_parts) add_layer_input(layer, index);
  if (layer.scalar != 1.0f)
    each(num_rows_, [&](int row, int) {
      kernels_.scale(x_ + static_cast<int64_t>(row) * model_.hidden_size, layer.scalar, model_.hidden_size);
    });
}

void StepRun::take_sizes(const DecoderLayer& layer) {
  num_kv_heads_ = head_dim_ = query_size_ = kv_size_ = qkv_size_ = read_size_ = 0;
  recurred_size_ = layer.recurrent.output.parts[0].columns;  // 0 without a mixer
  for (int i = 0; i < layer.recurrent.input.num_parts; i++) read_size_ += layer.recurrent.input.parts[i].rows;
  if (!layer.qkv.num_parts) return;
  num_kv_heads_ = layer.kv.is_latent ? 1 : layer.kv.kv_heads;
  head_dim_ = layer.kv.head_dim;
  query_size_ = model_.num_heads * head_dim_;
  kv_size_ = num_kv_heads_ * head_dim_;
  if (layer.latent.rank) {
    for (int i = 0; i < layer.qkv.num_parts; i++) qkv_size_ += layer.qkv.parts[i].rows;
    return;
  }
  qkv_size_ = query_size_ + (!layer.has_kv ? 0 : layer.values_are_keys ? kv_size_ : 2 * kv_size_);
  if (model_.gated_attention) qkv_size_ += query_size_;
}

// Adds the outputs of attention and of the recurrent mixer, as many as the layer has.
void StepRun::add_mixers(const DecoderLayer& layer) {
  bool direct = !layer.attention_post_norm.weight, attends = layer.output.num_parts, recurs = layer.recurrent.kind;
  if (!attends && !recurs) return;
  float* out = direct ? x_ : delta_;
  OutputMode mode = direct ? OUTPUT_ADD : OUTPUT_STORE;
  if (attends) add_attention(layer, out, mode);
  if (recurs) add_recurrent(layer.recurrent, out, attends ? OUTPUT_ADD : mode);
  if (!direct) add_sublayer(layer.attention_post_norm);
  spent_on(STAGE_OUTPUT);
}

void StepRun::add_attention(const DecoderLayer& layer, float* out, OutputMode mode) {
  const float* values = mixed_;
  int64_t size = query_size_;
  if (layer.latent.rank) {
    values = expand_latents(layer.latent);
    size = static_cast<int64_t>(model_.num_heads) * layer.latent.value_size;
  }
  Prepared inputs = prepare(layer.output, values, size, num_rows_, Norm{});
  product(layer.output, inputs, out, model_.hidden_size, mode);
  const LoraTarget target = {LORA_O, 0, LANES};
  add_adapters(&target, 1, values, size, static_cast<int>(size), Norm{}, out, model_.hidden_size);
}

void StepRun::feed_forward(const DecoderLayer& layer) {
  if (layer.router.num_parts) return experts(layer);
  bool direct = !layer.mlp_post_norm.weight;
  mlp(layer.mlp, layer.intermediate_size, layer.mlp_norm, direct ? x_ : delta_, direct ? OUTPUT_ADD : OUTPUT_STORE);
  if (!direct) add_sublayer(layer.mlp_post_norm);
  spent_on(STAGE_DOWN);
}

// Adds what the layer computes from the token's input for this layer (see DecoderModel::input_size).
void StepRun::add_layer_input(const DecoderLayer& layer, int index) {
  const DecoderModel& m = model_;
  Arena::Mark before = arena_.mark();
  int64_t width = static_cast<int64_t>(m.num_layers) * m.input_size;
  float* gates = arena_.take<float>(static_cast<int64_t>(num_rows_) * m.input_size);
  Prepared inputs = prepare(layer.input_gate, x_, m.hidden_size, num_rows_, Norm{});
  product(layer.input_gate, inputs, gates, m.input_size, OUTPUT_STORE);
  each(num_rows_, [&](int row, int) {
    float* gate = gates + static_cast<int64_t>(row) * m.input_size;
    const float* input = layer_inputs_ + row * width + static_cast<int64_t>(index) * m.input_size;
    kernels_.gated(gate, input, m.input_size, static_cast<Activation>(m.activation), gate);
  });
  inputs = prepare(layer.input_projection, gates, m.input_size, num_rows_, Norm{});
  product(layer.input_projection, inputs, delta_, m.hidden_size, OUTPUT_STORE);
  arena_.give_back(before);
  add_sublayer(layer.input_norm);
  spent_on(STAGE_DOWN);
}

void StepRun::norm_rows(const Norm& norm, float* x) {
  each(num_rows_, [&](int row, int) {
    float* at = x + static_cast<int64_t>(row) * model_.hidden_size;
    this->norm(norm, at, model_.hidden_size, at);
  });
}

void StepRun::norm(const Norm& norm, const float* x, int size, float* out) {
  if (model_.layer_norms)
    kernels_.layer_norm(x, norm.weight, norm.bias, size, model_.norm_eps, out);
  else
    kernels_.rms_norm(x, norm.weight, size, model_.norm_eps, out);
}

// Prepares embeddings and hidden states side by side, each after its norm.
Prepared StepRun::prepare_joined(const PackedLinear& linear, const Norm& embedding_norm, const float* hidden,
                                 const Norm& hidden_norm) {
  int64_t size = model_.hidden_size;
  each(num_rows_, [&](int row, int) {
    float* to = joined_ + row * 2 * size;
    norm(embedding_norm, embeddings_ + row * size, model_.hidden_size, to);
    norm(hidden_norm, hidden + row * size, model_.hidden_size, to + size);
  });
  return prepare(linear, joined_, 2 * size, num_rows_, Norm{});
}

void StepRun::rotate_and_write(const DecoderLayer& layer, uint8_t* pages) {
  const DecoderModel& m = model_;
  int half = m.ropes[layer.rope].half, num_heads = m.num_heads + (layer.has_kv ? num_kv_heads_ : 0);
  bool by_head = layer.query_norm.weight && (m.qk_norm == QK_NORM_HEAD || m.qk_norm == QK_NORM_EACH_HEAD);
  const float* angles = angles_ + layer.rope * step_.num_tokens * most_angles_;
  // One thread writes a whole page, since its slots are interleaved.
  each(num_page_items_, [&](int i, int thread) {
    const PageItem& item = page_items_[i];
    const AttentionRow& row = rows_[item.row];
    uint8_t* page = pages + row.pages[item.begin / LANES] * m.page_bytes;
    for (int position = item.begin; position < item.end; position++) {
      int token = row.token + position - row.start;
      float* query = qkv_ + static_cast<int64_t>(token) * qkv_size_;
      float* key = query + query_size_;
      float* value = key + kv_size_;
      if (layer.has_kv && layer.values_are_keys) {
        value = row_room_[thread];
        memcpy(value, key, static_cast<size_t>(kv_size_) * sizeof(float));
      }
      if (m.qk_norm == QK_NORM_ALL) {
        kernels_.rms_norm(query, layer.query_norm.weight, query_size_, m.norm_eps, query);
        kernels_.rms_norm(key, layer.key_norm.weight, kv_size_, m.norm_eps, key);
      }
      const float* cosines = angles + token * most_angles_;
      for (int head = 0; head < num_heads; head++) {
        float* at = query + head * head_dim_;
        bool is_query = head < m.num_heads;
        Norm of_head = is_query ? layer.query_norm : layer.key_norm;
        if (m.qk_norm == QK_NORM_EACH_HEAD) of_head.weight += (is_query ? head : head - m.num_heads) * head_dim_;
        if (by_head && !m.qk_norm_is_last) norm(of_head, at, head_dim_, at);
        kernels_.rotate(at, cosines, cosines + half, half);
        if (by_head && m.qk_norm_is_last) norm(of_head, at, head_dim_, at);
      }
      if (layer.scales_queries) {
        int periods = (position + m.query_scaling_shift) / m.query_scaling_positions;
        float beyond = std::log(1.0f + static_cast<float>(periods));
        if (beyond > 0) kernels_.scale(query, 1.0f + m.query_scaling_beta * beyond, query_size_);
      }
      if (layer.has_kv && layer.values_are_keys) write_kv(layer, page, position % LANES, 1, key, value);
    }
    if (!layer.has_kv || layer.values_are_keys) return;
    float* keys = qkv_ + static_cast<int64_t>(row.token + item.begin - row.start) * qkv_size_ + query_size_;
    write_kv(layer, page, item.begin % LANES, item.end - item.begin, keys, keys + kv_size_);
  });
}

void StepRun::write_kv(const DecoderLayer& layer, uint8_t* page, int slot, int tokens, const float* keys,
                       float* values) {
  for (int token = 0; token < tokens && layer.value_norm.weight; token++)
    for (int head = 0; head < num_kv_heads_; head++) {
      float* value = values + token * qkv_size_ + head * head_dim_;
      norm(layer.value_norm, value, head_dim_, value);
    }
  kernels_.write_kv(layer.kv, page, slot, tokens, keys, values, qkv_size_);
}

void StepRun::attend(const DecoderLayer& layer, uint8_t* pages) {
  const AttentionPlan& plan = plans_[&layer - model_.layers];
  const float* queries = layer.latent.rank ? queries_ : qkv_;
  int64_t query_stride = layer.latent.rank ? query_size_ : qkv_size_;
  PagedAttention attention = {layer.kv, pages, model_.num_heads, layer.window, model_.chunked_windows,
                              model_.attention_scale, model_.attention_soft_cap, layer.sinks, queries,
                              query_stride, mixed_, query_size_};
  threads_.run(plan.num_items, [&](int i, int thread) {
    const AttentionItem& item = plan.items[i];
    kernels_.attend(attention, rows_[item.row], item, kernel_room_[thread], partials_);
  });
  threads_.run(plan.num_merges, [&](int i, int) {
    const AttentionItem& item = plan.merges[i];
    kernels_.merge(attention, rows_[item.row], item, plan.merge_splits[i], partials_);
  });
  if (!model_.gated_attention) return;
  each(num_rows_, [&](int row, int) {
    const float* gate = qkv_ + static_cast<int64_t>(row + 1) * qkv_size_ - query_size_;
    kernels_.multiply_sigmoid(mixed_ + static_cast<int64_t>(row) * query_size_, gate, query_size_);
  });
}

// The slots of the requested rows.
const int32_t* StepRun::wanted_slots(int wanted) {
  int32_t* slots = arena_.take<int32_t>(wanted);
  for (int i = 0; i < wanted; i++) slots[i] = slots_[step_.wanted(i)];
  return slots;
}

// Copies the requested rows.
float* StepRun::wanted_rows(const float* rows, int64_t size) {
  int wanted = step_.num_wanted();
  float* kept = arena_.take<float>(wanted * size);
  for (int i = 0; i < wanted && size; i++)
    memcpy(kept + i * size, rows + step_.wanted(i) * size, static_cast<size_t>(size) * sizeof(float));
  return kept;
}

// Moves the requested rows of x to the front, and those of what the last layer mixes if it has. Those whose logits are
// requested are in the order in which the head reads them.
void StepRun::keep_wanted_rows(bool has_mixed) {
  int wanted = step_.num_wanted();
  bool same = wanted == num_rows_;  // true for a batch of decoding rows
  for (int i = 0; same && i < wanted; i++) same = step_.wanted(i) == i;
  if (same) return;
  x_ = wanted_rows(x_, model_.hidden_size);
  layer_inputs_ = wanted_rows(layer_inputs_, static_cast<int64_t>(model_.num_layers) * model_.input_size);
  if (has_mixed) {
    mixed_ = wanted_rows(mixed_, query_size_);
    recurred_ = wanted_rows(recurred_, recurred_size_);
  }
  num_rows_ = wanted;
  if (slots_) group_adapted(wanted_slots(wanted));
}

// Moves the requested rows of x to the front, in the same order, and divides the attention of the layers from `index` on
// for these alone: each is a row of one token.
void StepRun::keep_wanted_queries(int index) {
  int wanted = step_.num_wanted(), row = 0;
  if (wanted == num_rows_) return;  // a batch of decoding rows
  AttentionRow** group_rows = arena_.take<AttentionRow*>(num_groups_);
  for (int group = 0; group < num_groups_; group++) group_rows[group] = arena_.take<AttentionRow>(wanted);
  for (int i = 0; i < wanted; i++) {
    int64_t token = step_.wanted(i);
    while (token < step_.token_starts[row]) row--;
    while (token >= step_.token_starts[row + 1]) row++;
    int position = rows_[row].start + static_cast<int>(token - step_.token_starts[row]);
    for (int group = 0; group < num_groups_; group++)
      group_rows[group][i] = {group_rows_[group][row].pages, i, position, position + 1};
    page_items_[i] = {i, position, position + 1};
  }
  keep_wanted_rows(false);
  group_rows_ = group_rows;
  rows_ = group_rows_[0];
  num_attention_rows_ = wanted;
  num_page_items_ = wanted;
  only_wanted_ = true;
  find_angles();
  plan_layers(index);
}

// out = or += down(act(gate) * up), or down(act(up)), of x after a norm.
void StepRun::mlp(const PackedMlp& mlp, int inner, const Norm& norm, float* out, OutputMode mode) {
  // A gated product writes whole panels.
  int64_t stride = (inner + LANES - 1) / LANES * LANES;
  auto activation = static_cast<Activation>(model_.activation);
  bool adapted = num_adapted_rows_ > 0 && &mlp == &model_.layers[layer_index_].mlp;
  Prepared inputs = prepare(mlp.gate_up, x_, model_.hidden_size, num_rows_, norm);
  spent_on(STAGE_NORM);
  if (!model_.gated_mlp) {
    product(mlp.gate_up, inputs, inner_, stride, OUTPUT_STORE);
    const LoraTarget up = {LORA_UP, 0, LANES};
    if (adapted) add_adapters(&up, 1, x_, model_.hidden_size, model_.hidden_size, norm, inner_, stride);
    each(num_rows_, [&](int row, int) { kernels_.activate(inner_ + row * stride, inner, activation); });
  } else if (mlp.gate_up.num_parts == 1 && adapted) {
    adapted_gate_up(mlp.gate_up, inputs, stride, norm);
  } else if (mlp.gate_up.num_parts == 1) {
    product(mlp.gate_up, inputs, inner_, stride, OUTPUT_GATED);
  } else {
    product(mlp.gate_up, inputs, gate_up_, 2 * inner, OUTPUT_STORE);
    const LoraTarget targets[] = {{LORA_GATE, 0, LANES}, {LORA_UP, inner, LANES}};
    if (adapted) add_adapters(targets, 2, x_, model_.hidden_size, model_.hidden_size, norm, gate_up_, 2 * inner);
    each(num_rows_, [&](int row, int) {
      const float* gate = gate_up_ + static_cast<int64_t>(row) * 2 * inner;
      kernels_.gated(gate, gate + inner, inner, activation, inner_ + row * stride);
    });
  }
  spent_on(STAGE_GATE_UP);
  inputs = prepare(mlp.down, inner_, stride, num_rows_, Norm{});
  product(mlp.down, inputs, out, model_.hidden_size, mode);
  const LoraTarget down = {LORA_DOWN, 0, LANES};
  if (adapted) add_adapters(&down, 1, inner_, stride, inner, Norm{}, out, model_.hidden_size);
}

void StepRun::add_sublayer(const Norm& post_norm) {
  each(num_rows_, [&](int row, int) {
    float* delta = delta_ + static_cast<int64_t>(row) * model_.hidden_size;
    if (post_norm.weight) norm(post_norm, delta, model_.hidden_size, delta);
    kernels_.add(x_ + static_cast<int64_t>(row) * model_.hidden_size, delta, model_.hidden_size);
  });
}

}  // namespace penstock
