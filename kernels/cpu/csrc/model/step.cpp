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

// Whether the attention of two layers is divided alike.
bool have_same_plan(const DecoderLayer& one, const DecoderLayer& other) {
  return one.qkv.num_parts && one.window == other.window && one.kv.kv_heads == other.kv.kv_heads &&
         one.kv.head_dim == other.kv.head_dim;
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

void Program::commit(const StateRows& rows) { run_->commit(rows); }

void Program::finish() {
  run_->finish();
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
  for (int i = 0; i < step_.num_features; i++)
    if (step_.feature_layers[i] == model_.num_layers) ends_in_feature_ = true;
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
  if (ends_in_feature_) {
    record(model_.num_layers);
    keep_wanted_rows(false);
  }
  if (step_.num_vectors > 0) pool();
  if (step_.hidden_out) give_hidden();
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
  auto keeps = [&](const DecoderLayer& layer) { return layer.has_kv || layer.recurrent.kind; };
  while (first_without_kv_ > 0 && !keeps(m.layers[first_without_kv_ - 1])) first_without_kv_--;
  int64_t widest_qkv = 0, widest_query = 0, widest_head = 0, widest_read = 0, widest_recurred = 0;
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
    widest_read = read_size_ > widest_read ? read_size_ : widest_read;
    widest_recurred = recurred_size_ > widest_recurred ? recurred_size_ : widest_recurred;
    widest_row = kv_size_ > widest_row ? kv_size_ : widest_row;
    const Latent& latent = layer.latent;
    int64_t query = latent.rotary + latent.unrotated, wider = query > latent.value_size ? query : latent.value_size;
    widest_head = latent.rank && wider > widest_head ? wider : widest_head;
    const PackedLinear* linears[] = {&layer.qkv, &layer.output, &layer.mlp.gate_up, &layer.mlp.down, &layer.router,
                                     &layer.shared.gate_up, &layer.shared.down, &layer.shared_gate,
                                     &layer.input_gate, &layer.input_projection, &latent.query,
                                     &layer.recurrent.input, &layer.recurrent.output,
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
  read_ = arena_.take<float>(tokens * widest_read);
  recurred_ = arena_.take<float>(tokens * widest_recurred);
  queries_ = widest_head ? arena_.take<float>(tokens * widest_query) : nullptr;
  heads_ = arena_.take<float>(tokens * m.num_heads * widest_head);
  for (int i = 0; i < 3; i++) inputs_[i] = i < most_parts ? arena_.take<uint8_t>(tokens * inputs) : nullptr;
  gate_up_ = most_parts > 1 ? arena_.take<float>(tokens * 2 * inner) : nullptr;
  // For the ranks of experts and of their groups.
  widest_row = m.num_experts + m.num_groups > widest_row ? m.num_experts + m.num_groups : widest_row;
  row_floats_ = (widest_row + LANES - 1) / LANES * LANES;
  row_room_ = arena_.take<float*>(threads_.num());
  for (int i = 0; i < threads_.num(); i++) row_room_[i] = arena_.take<float>(2 * row_floats_);
}

// Converts the block tables of all groups to tables of pages, and divides the tokens to be written by page.
void StepRun::find_pages() {
  int pages_per_block = model_.block_size / LANES;
  num_groups_ = 1 + static_cast<int>(step_.num_window_groups);
  group_rows_ = arena_.take<AttentionRow*>(num_groups_);
  for (int group = 0; group < num_groups_; group++) group_rows_[group] = arena_.take<AttentionRow>(step_.num_rows);
  rows_ = group_rows_[0];
  num_attention_rows_ = step_.num_rows;
  page_items_ = arena_.take<PageItem>(step_.num_tokens + step_.num_rows);
  num_page_items_ = 0;
  for (int r = 0; r < step_.num_rows; r++) {
    int start = static_cast<int>(step_.starts[r]), end = static_cast<int>(step_.ends[r]);
    int num_pages = (end + LANES - 1) / LANES;
    for (int group = 0; group < num_groups_; group++) {
      int32_t* pages = arena_.take<int32_t>(num_pages);
      int64_t row = r + static_cast<int64_t>(group - 1) * step_.num_rows;
      const int64_t* blocks = group ? step_.window_tables + row * step_.table_stride
                                    : step_.tables + r * step_.table_stride;
      int first = group && start >= step_.window ? (start + 1 - static_cast<int>(step_.window)) / LANES : 0;
      for (int i = first; i < num_pages; i++)
        pages[i] = static_cast<int32_t>(blocks[i / pages_per_block]) * pages_per_block + i % pages_per_block;
      group_rows_[group][r] = {pages, static_cast<int32_t>(step_.token_starts[r]), start, end};
    }
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
    if (!model_.layers[i].qkv.num_parts) continue;
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
    if (!model_.layers[i].qkv.num_parts) continue;
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

// Copies the input of a layer, if it is requested as a feature; after the last layer, x after the norm.
void StepRun::record(int layer) {
  int64_t stride = static_cast<int64_t>(step_.num_features) * model_.hidden_size;
  for (int i = 0; i < step_.num_features; i++) {
    if (step_.feature_layers[i] != layer) continue;
    float* to = step_.features + i * model_.hidden_size;
    copy_rows(x_, step_.num_tokens, to, stride);
    if (layer < model_.num_layers) continue;
    each(step_.num_tokens, [&](int row, int) {
      norm(model_.norm, to + row * stride, model_.hidden_size, to + row * stride);
    });
  }
}

// Copies what the next step of a draft head, or the next stage, continues from.
void StepRun::give_hidden() {
  copy_rows(x_, step_.num_sampled, step_.hidden_out, model_.hidden_size);
  if (!model_.continues_after_norm) return;
  each(step_.num_sampled, [&](int row, int) {
    float* at = step_.hidden_out + static_cast<int64_t>(row) * model_.hidden_size;
    norm(model_.norm, at, model_.hidden_size, at);
  });
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
PENSTOCK_API void penstock_commit(penstock::Program* program, const penstock::StateRows* rows) {
  program->commit(*rows);
}
PENSTOCK_API void penstock_step(penstock::Program* program, const penstock::Step* step, int32_t num_threads) {
  program->begin(*step, num_threads);
  program->finish();
}
// Writes the seconds spent in each stage so far; returns the number of stages.
PENSTOCK_API int32_t penstock_stages(const penstock::Program* program, double* seconds) {
  memcpy(seconds, program->seconds, sizeof(program->seconds));
  return penstock::NUM_STAGES;
}
