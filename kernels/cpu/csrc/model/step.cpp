// A step from token ids to chosen tokens; its layers are in model/layer.cpp.
#include <cmath>
#include <cstring>

#include "model/step.h"

namespace penstock {

namespace {

// Rows of logits in memory at a time. The head's weights are read once for this many rows.
constexpr int HEAD_ROWS = 64;

// The number of requested rows from `begin` on that the head computes at once.
int head_rows(const Step& step, int begin) {
  int left = step.num_logits_wanted() - begin;
  return left < HEAD_ROWS ? left : HEAD_ROWS;
}

// Ids are checked at admission. Clamping makes sure that an id out of range never becomes an address.
int within(int64_t id, int num) { return id < 0 ? 0 : id < num ? static_cast<int>(id) : num - 1; }

// Whether the attention of two layers is divided alike.
bool have_same_plan(const DecoderLayer& one, const DecoderLayer& other) {
  return one.window == other.window && one.kv.kv_heads == other.kv.kv_heads && one.kv.head_dim == other.kv.head_dim;
}

int64_t widest_input(const Kernels& kernels, const PackedLinear& linear, int64_t so_far) {
  for (int i = 0; i < linear.num_parts; i++) {
    const Matrix& part = linear.parts[i];
    int64_t bytes = kernels.input_bytes(part.format, part.columns, part.group);
    so_far = bytes > so_far ? bytes : so_far;
  }
  return so_far;
}

}  // namespace

Program::Program(const DecoderModel& model, const Placement& placement) : model_(model), threads_(placement) {}

Program::~Program() = default;

void Program::begin(const Step& step, int num_threads) {
  threads_.use(num_threads);
  arena_.reset();
  run_.reset(new StepRun(*this, step));
  run_->begin();
}

void Program::finish() {
  run_->finish();
  run_.reset();
}

StepRun::StepRun(Program& program, const Step& step)
    : program_(program), model_(program.model_), kernels_(*program.model_.kernels), step_(step),
      threads_(program.threads_), arena_(program.arena_), num_rows_(step.num_tokens) {}

void StepRun::spent_on(Stage stage) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  program_.seconds[stage] += static_cast<double>(now.tv_sec - clock_.tv_sec) +
                             static_cast<double>(now.tv_nsec - clock_.tv_nsec) * 1e-9;
  clock_ = now;
}

void StepRun::begin() {
  clock_gettime(CLOCK_MONOTONIC, &clock_);
  lay_out();
  find_pages();
  find_angles();
  if (step_.adapters) group_adapted(step_.adapters);
  if (step_.hidden && !model_.fc.num_parts) {
    copy_rows(step_.hidden, step_.num_tokens, x_, model_.hidden_size);
  } else {
    embed(model_.fc.num_parts ? embeddings_ : x_);
    if (model_.position_table) add_positions(x_);
    if (model_.fc.num_parts) take_hidden();
  }
  if (model_.input_size) find_layer_inputs();
  spent_on(STAGE_EMBED);
  for (int i = 0; i < model_.num_layers; i++) {
    // Once all keys and values are written, only tokens are computed whose logits or hidden states are requested.
    if (i == first_without_kv_ && step_.num_features == 0) {
      if (step_.num_wanted() == 0) return;
      keep_wanted_queries(i);
    }
    record(i);
    layer(model_.layers[i], i);
  }
  if (step_.num_vectors > 0) pool();
  if (step_.hidden_out) copy_rows(x_, step_.num_sampled, step_.hidden_out, model_.hidden_size);
  if (num_logits() == 0) return;
  lay_out_head();
  multiply_head(0);
}

void StepRun::finish() {
  clock_gettime(CLOCK_MONOTONIC, &clock_);
  for (int begin = 0; begin < num_logits(); begin += HEAD_ROWS) {
    if (begin > 0) multiply_head(begin);
    score(begin);
  }
}

void StepRun::lay_out() {
  const DecoderModel& m = model_;
  int64_t tokens = step_.num_tokens;
  x_ = arena_.take<float>(tokens * m.hidden_size);
  delta_ = arena_.take<float>(tokens * m.hidden_size);
  most_angles_ = 0;
  for (int i = 0; i < m.num_ropes; i++)
    most_angles_ = 2 * m.ropes[i].half > most_angles_ ? 2 * m.ropes[i].half : most_angles_;
  angles_ = arena_.take<float>(m.num_ropes * tokens * most_angles_);
  first_without_kv_ = m.num_layers;
  while (first_without_kv_ > 0 && !m.layers[first_without_kv_ - 1].has_kv) first_without_kv_--;
  int64_t widest_qkv = 0, widest_query = 0;
  int64_t inner = m.intermediate_size > m.shared_size ? m.intermediate_size : m.shared_size;
  inner_ = arena_.take<float>(tokens * ((inner + LANES - 1) / LANES * LANES));
  int64_t widest_row = m.hidden_size, inputs = widest_input(kernels_, m.input_linear, widest_input(kernels_, m.head, 0));
  int most_parts = 1;
  if (m.fc.num_parts) {
    inputs = widest_input(kernels_, m.fc, inputs);
    widest_row = m.fc.parts[0].columns;
    embeddings_ = arena_.take<float>(tokens * m.hidden_size);
    joined_ = arena_.take<float>(tokens * 2 * m.hidden_size);
  }
  for (int i = 0; i < m.num_layers; i++) {
    const DecoderLayer& layer = m.layers[i];
    take_sizes(layer);
    widest_qkv = qkv_size_ > widest_qkv ? qkv_size_ : widest_qkv;
    widest_query = query_size_ > widest_query ? query_size_ : widest_query;
    widest_row = kv_size_ > widest_row ? kv_size_ : widest_row;
    const PackedLinear* linears[] = {&layer.qkv, &layer.output, &layer.mlp.gate_up, &layer.mlp.down, &layer.router,
                                     &layer.shared.gate_up, &layer.shared.down, &layer.shared_gate,
                                     &layer.input_gate, &layer.input_projection,
                                     layer.experts ? &layer.experts->gate_up : &layer.router};
    for (const PackedLinear* linear : linears) {
      inputs = widest_input(kernels_, *linear, inputs);
      most_parts = linear->num_parts > most_parts ? linear->num_parts : most_parts;
      for (int part = 0; part < linear->num_parts; part++)
        widest_row = linear->parts[part].columns > widest_row ? linear->parts[part].columns : widest_row;
    }
  }
  qkv_ = arena_.take<float>(tokens * widest_qkv);
  mixed_ = arena_.take<float>(tokens * widest_query);
  for (int i = 0; i < 3; i++) inputs_[i] = i < most_parts ? arena_.take<uint8_t>(tokens * inputs) : nullptr;
  gate_up_ = most_parts > 1 ? arena_.take<float>(tokens * 2 * inner) : nullptr;
  // For the ranks of experts and of their groups.
  widest_row = m.num_experts + m.num_groups > widest_row ? m.num_experts + m.num_groups : widest_row;
  row_floats_ = (widest_row + LANES - 1) / LANES * LANES;
  row_room_ = arena_.take<float*>(threads_.num());
  for (int i = 0; i < threads_.num(); i++) row_room_[i] = arena_.take<float>(2 * row_floats_);
}

// Converts block tables to tables of pages, and divides the tokens to be written by page.
void StepRun::find_pages() {
  int pages_per_block = model_.block_size / LANES;
  rows_ = arena_.take<AttentionRow>(step_.num_rows);
  num_attention_rows_ = step_.num_rows;
  page_items_ = arena_.take<PageItem>(step_.num_tokens + step_.num_rows);
  num_page_items_ = 0;
  for (int r = 0; r < step_.num_rows; r++) {
    int start = static_cast<int>(step_.starts[r]), end = static_cast<int>(step_.ends[r]);
    int num_pages = (end + LANES - 1) / LANES;
    int32_t* pages = arena_.take<int32_t>(num_pages);
    const int64_t* blocks = step_.tables + r * step_.table_stride;
    for (int i = 0; i < num_pages; i++)
      pages[i] = static_cast<int32_t>(blocks[i / pages_per_block]) * pages_per_block + i % pages_per_block;
    rows_[r] = {pages, static_cast<int32_t>(step_.token_starts[r]), start, end};
    for (int begin = start; begin < end;) {
      int next = (begin / LANES + 1) * LANES < end ? (begin / LANES + 1) * LANES : end;
      page_items_[num_page_items_++] = {r, begin, next};
      begin = next;
    }
  }
  kernel_room_ = arena_.take<uint8_t*>(threads_.num());
  plans_ = arena_.take<AttentionPlan>(model_.num_layers);
  plan_layers(0);
  int64_t room = 0;
  for (int i = 0; i < model_.num_layers; i++) {
    const KvLayout& kv = model_.layers[i].kv;
    PagedAttention attention = {kv, nullptr, model_.num_heads, 0, 0, 0, 0, nullptr, nullptr, 0, nullptr, 0};
    int64_t needed = kernels_.attention_scratch(attention);
    room = needed > room ? needed : room;
  }
  for (int i = 0; i < threads_.num(); i++) kernel_room_[i] = arena_.take<uint8_t>(room);
}

// Divides the attention of the layers from `first` on.
void StepRun::plan_layers(int first) {
  int64_t partials = 0;
  for (int i = first; i < model_.num_layers; i++) {
    int same = first;
    while (!have_same_plan(model_.layers[same], model_.layers[i])) same++;
    plans_[i] = same < i ? plans_[same] : plan_attention(model_.layers[i]);
    partials = plans_[i].num_partial_floats > partials ? plans_[i].num_partial_floats : partials;
  }
  partials_ = arena_.take<float>(partials);
}

// Computes the cosines and sines of every token for every rope. The angle is a float32 product, and its cosine is
// computed in float32, as in transformers.
void StepRun::find_angles() {
  each(num_page_items_, [&](int item, int) {
    const PageItem& page = page_items_[item];
    const AttentionRow& row = rows_[page.row];
    for (int i = 0; i < model_.num_ropes; i++) {
      const Rope& rope = model_.ropes[i];
      for (int position = page.begin; position < page.end; position++) {
        int64_t token = static_cast<int64_t>(i) * step_.num_tokens + row.token + position - row.start;
        float* to = angles_ + token * most_angles_;
        for (int j = 0; j < rope.half; j++) {
          float angle = static_cast<float>(position) * rope.frequencies[j];
          to[j] = std::cos(angle) * rope.scale;
          to[rope.half + j] = std::sin(angle) * rope.scale;
        }
      }
    }
  });
}

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

// Computes the input of a draft head: the given hidden states, or features through `fc`.
void StepRun::take_hidden() {
  if (step_.hidden) return copy_rows(step_.hidden, step_.num_tokens, x_, model_.hidden_size);
  int64_t columns = model_.fc.parts[0].columns;
  Prepared inputs = prepare(model_.fc, step_.features_in, columns, step_.num_tokens, Norm{});
  product(model_.fc, inputs, x_, model_.hidden_size, OUTPUT_STORE);
}

// Copies the input of a layer, if it is requested as a feature.
void StepRun::record(int layer) {
  for (int i = 0; i < step_.num_features; i++)
    if (step_.feature_layers[i] == layer)
      copy_rows(x_, step_.num_tokens, step_.features + i * model_.hidden_size,
                static_cast<int64_t>(step_.num_features) * model_.hidden_size);
}

// Copies contiguous rows of x to rows that are `stride` apart.
void StepRun::copy_rows(const float* x, int rows, float* out, int64_t stride) {
  int64_t size = model_.hidden_size;
  each(rows, [&](int row, int) { memcpy(out + row * stride, x + row * size, static_cast<size_t>(size) * 4); });
}

void StepRun::lay_out_head() {
  logits_stride_ = (model_.num_logits + LANES - 1) / LANES * LANES;
  logits_ = arena_.take<float>(head_rows(step_, 0) * logits_stride_);
  int64_t room = kernels_.sampling_scratch(model_.num_logits);
  for (int i = 0; i < threads_.num(); i++) kernel_room_[i] = arena_.take<uint8_t>(room);
}

// Computes the logits of requested rows from `begin` on.
void StepRun::multiply_head(int begin) {
  PackedLinear head = model_.head;
  head.parts[0].rows = model_.num_logits;
  const float* x = x_ + static_cast<int64_t>(begin) * model_.hidden_size;
  Prepared inputs = prepare(head, x, model_.hidden_size, head_rows(step_, begin), model_.norm);
  spent_on(STAGE_NORM);
  product(head, inputs, logits_, logits_stride_, OUTPUT_STORE);
  spent_on(STAGE_HEAD);
}

// Chooses their tokens, or computes log-probabilities.
void StepRun::score(int begin) {
  threads_.run(head_rows(step_, begin), [&](int i, int thread) {
    float* logits = logits_ + i * logits_stride_;
    int row = begin + i;
    uint8_t* room = kernel_room_[thread];
    if (model_.logit_scale != 1.0f) kernels_.scale(logits, model_.logit_scale, model_.num_logits);
    if (model_.logit_soft_cap != 0.0f) kernels_.soft_cap(logits, model_.logit_soft_cap, model_.num_logits);
    if (row < step_.num_sampled) {
      kernels_.sample(logits, model_.num_logits, step_.sampling[row], room, step_.tokens + row,
                      step_.top_ids + row * step_.room, step_.tops + row * step_.room);
    } else {
      row -= step_.num_sampled;
      kernels_.logprobs(logits, model_.num_logits, within(step_.targets[row], model_.num_logits),
                        static_cast<int>(step_.num_tops[row]), room, step_.chosen + row,
                        step_.scored_top_ids + row * step_.scored_room, step_.scored_tops + row * step_.scored_room);
    }
  });
  spent_on(STAGE_SAMPLE);
}

// Adds the hidden states of pooled tokens to their vectors, in order, whatever else is in the batch.
void StepRun::pool() {
  int size = model_.hidden_size;
  const float* states = x_ + static_cast<int64_t>(step_.num_logits_wanted()) * size;
  threads_.run(step_.num_vectors, [&](int i, int thread) {
    float* room = row_room_[thread];
    for (int64_t token = step_.pooled_starts[i]; token < step_.pooled_starts[i + 1]; token++) {
      norm(model_.norm, states + token * size, size, room);
      kernels_.add(step_.vectors[i], room, size);
    }
  });
  spent_on(STAGE_NORM);
}

}  // namespace penstock

PENSTOCK_API penstock::Program* penstock_program(const penstock::DecoderModel* model,
                                                 const penstock::Placement* placement) {
  return new penstock::Program(*model, *placement);
}
PENSTOCK_API void penstock_program_end(penstock::Program* program) { delete program; }
// Runs a step in two calls, for sampling parameters that become known while its layers run.
PENSTOCK_API void penstock_step_begin(penstock::Program* program, const penstock::Step* step, int32_t num_threads) {
  program->begin(*step, num_threads);
}
PENSTOCK_API void penstock_step_finish(penstock::Program* program) { program->finish(); }
PENSTOCK_API void penstock_step(penstock::Program* program, const penstock::Step* step, int32_t num_threads) {
  program->begin(*step, num_threads);
  program->finish();
}
// Writes the seconds spent in each stage so far; returns the number of stages.
PENSTOCK_API int32_t penstock_stages(const penstock::Program* program, double* seconds) {
  memcpy(seconds, program->seconds, sizeof(program->seconds));
  return penstock::NUM_STAGES;
}
