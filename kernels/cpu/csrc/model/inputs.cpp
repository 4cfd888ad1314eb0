// The input of the first layer, and the inputs of all layers, from token ids, positions and given hidden states.
#include <cmath>
#include <cstring>

#include "model/step.h"

namespace penstock {

// Writes the embeddings of all tokens.
void StepRun::embed(float* out) {
  const DecoderModel& m = model_;
  each(step_.num_tokens, [&](int token, int) {
    int64_t id = within(step_.token_ids[token], m.vocab_size);
    float* to = out + static_cast<int64_t>(token) * m.hidden_size;
    if (!m.embedding)
      kernels_.unpack_row(m.packed_embedding, static_cast<int>(id), to);
    else
      look_up(m.embedding, id, m.hidden_size, to);
    if (m.embedding_scale != 1.0f) kernels_.scale(to, m.embedding_scale, m.hidden_size);
  });
}

// Writes a row of a table in the embedding's format.
void StepRun::look_up(const uint8_t* table, int64_t row, int64_t size, float* out) {
  if (model_.embedding_format == FORMAT_F32) {
    memcpy(out, table + row * size * 4, static_cast<size_t>(size) * 4);
    return;
  }
  const uint8_t* from = table + row * size * 2;
  for (int64_t i = 0; i < size; i++) {
    uint16_t half;
    memcpy(&half, from + 2 * i, 2);
    uint32_t bits = static_cast<uint32_t>(half) << 16;
    memcpy(out + i, &bits, 4);
  }
}

// Computes the inputs of all layers, from the tokens and from x.
void StepRun::find_layer_inputs() {
  const DecoderModel& m = model_;
  int64_t width = static_cast<int64_t>(m.num_layers) * m.input_size;
  layer_inputs_ = arena_.take<float>(step_.num_tokens * width);
  Prepared inputs = prepare(m.input_linear, x_, m.hidden_size, step_.num_tokens, Norm{});
  product(m.input_linear, inputs, layer_inputs_, width, OUTPUT_STORE);
  float** embedded = arena_.take<float*>(threads_.num());
  for (int i = 0; i < threads_.num(); i++) embedded[i] = arena_.take<float>(width);
  float scale = 1.0f / std::sqrt(static_cast<float>(m.hidden_size));
  each(step_.num_tokens, [&](int token, int thread) {
    float *to = layer_inputs_ + token * width, *added = embedded[thread];
    look_up(m.input_embedding, within(step_.token_ids[token], m.input_vocab_size), width, added);
    kernels_.scale(added, m.input_embedding_scale, static_cast<int>(width));
    kernels_.scale(to, scale, static_cast<int>(width));
    for (int64_t i = 0; i < width; i += m.input_size) norm(m.input_linear_norm, to + i, m.input_size, to + i);
    kernels_.add(to, added, static_cast<int>(width));
    kernels_.scale(to, std::sqrt(0.5f), static_cast<int>(width));
  });
}

// Adds the embeddings of all tokens' positions.
void StepRun::add_positions(float* out) {
  int64_t size = model_.hidden_size;
  each(num_page_items_, [&](int item, int) {
    const PageItem& page = page_items_[item];
    const AttentionRow& row = rows_[page.row];
    for (int position = page.begin; position < page.end; position++) {
      int64_t token = row.token + position - row.start;
      kernels_.add(out + token * size, model_.position_table + (position + model_.position_offset) * size,
                   model_.hidden_size);
    }
  });
}

// Computes the input of a draft head: the given hidden states, or features through `fc`, or both beside embeddings.
void StepRun::take_hidden() {
  if (model_.hidden_norm.weight) {
    const float* given = step_.hidden ? step_.hidden : step_.features_in;
    Prepared inputs = prepare_joined(model_.fc, model_.embedding_norm, given, model_.hidden_norm);
    return product(model_.fc, inputs, x_, model_.hidden_size, OUTPUT_STORE);
  }
  if (step_.hidden) return copy_rows(step_.hidden, step_.num_tokens, x_, model_.hidden_size);
  int64_t columns = model_.fc.parts[0].columns;
  Prepared inputs = prepare(model_.fc, step_.features_in, columns, step_.num_tokens, Norm{});
  product(model_.fc, inputs, x_, model_.hidden_size, OUTPUT_STORE);
}

}  // namespace penstock
