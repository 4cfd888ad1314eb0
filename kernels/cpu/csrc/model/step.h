// The state of one step, shared by its stages.
#pragma once

#include <time.h>

#include "model/program.h"

namespace penstock {

// The inputs of a PackedLinear's parts, each rounded to the format that the part multiplies.
struct Prepared {
  Inputs parts[3];
};

// The positions [begin, end) that a row writes to one page.
struct PageItem {
  int32_t row, begin, end;
};

// Ids are checked at admission. Clamping makes sure that an id out of range never becomes an address.
inline int within(int64_t id, int num) { return id < 0 ? 0 : id < num ? static_cast<int>(id) : num - 1; }

// The routing of tokens to experts. A pair is a token and one of its experts; the pairs of a token are adjacent.
struct Routing {
  int num_pairs;
  const int32_t* starts;  // (experts + 1,): the rows of expert e are [starts[e], starts[e + 1])
  const int32_t* places;  // one per pair: its row among the rows of all experts
  const float* weights;   // one per pair
};

// Rows of x with the adapter in one slot: those in [begin, end) of the list of rows with adapters.
struct AdaptedBlock {
  int32_t slot, begin, end;
};

// Where a linear's output goes: its columns [16 i, 16 i + 16) are at `column` + i * `step` of a row.
struct LoraTarget {
  LoraModule module;
  int64_t column;
  int64_t step;
};

// Parts of rows, one for each head. Strides are in floats.
struct HeadRows {
  float* data;
  int64_t row_stride, head_stride;
};

// What the state of a recurrent layer reads of its tokens: rows of floats, and the first columns of its parts.
struct RecurrentInputs {
  const float* data;
  int64_t stride;
  int inputs, beta, decay;  // see Recurrent
};

// The division of attention for one window into items.
struct AttentionPlan {
  const AttentionItem* items;
  int32_t num_items;
  // The queries whose splits are distributed over several items, to be merged: for each any one item, and the number of
  // splits.
  const AttentionItem* merges;
  const int32_t* merge_splits;
  int32_t num_merges;
  int64_t num_partial_floats;
};

class StepRun {
 public:
  StepRun(Program& program, const Step& step);

  // Everything before tokens are chosen.
  void begin();
  void finish();
  void commit(const StateRows& rows);

 private:
  // model/step.cpp
  void lay_out();
  void find_pages();
  void plan_layers(int first);
  void find_angles();
  void record(int layer);
  void give_hidden();
  void copy_rows(const float* x, int rows, float* out, int64_t stride);
  void lay_out_head();
  void multiply_head(int begin);
  void score(int begin);
  void pool();

  // model/inputs.cpp
  void embed(float* out);
  void look_up(const uint8_t* table, int64_t row, int64_t size, float* out);
  void find_layer_inputs();
  void add_positions(float* out);
  void take_hidden();

  // model/layer.cpp
  void layer(const DecoderLayer& layer, int index);
  void take_sizes(const DecoderLayer& layer);
  Prepared prepare_joined(const PackedLinear& linear, const Norm& embedding_norm, const float* hidden,
                          const Norm& hidden_norm);
  void rotate_and_write(const DecoderLayer& layer, uint8_t* pages);
  void write_kv(const DecoderLayer& layer, uint8_t* page, int slot, int tokens, const float* keys, float* values);
  void attend(const DecoderLayer& layer, uint8_t* pages);
  const int32_t* wanted_slots(int wanted);
  float* wanted_rows(const float* rows, int64_t size);
  void keep_wanted_rows(bool has_mixed);
  void keep_wanted_queries(int index);
  void add_mixers(const DecoderLayer& layer);
  void add_attention(const DecoderLayer& layer, float* out, OutputMode mode);
  void feed_forward(const DecoderLayer& layer);
  void add_layer_input(const DecoderLayer& layer, int index);
  void norm_rows(const Norm& norm, float* x);
  void mlp(const PackedMlp& mlp, int inner, const Norm& norm, float* out, OutputMode mode);
  void add_sublayer(const Norm& post_norm);
  void norm(const Norm& norm, const float* x, int size, float* out);

  // model/latent.cpp
  void find_latents(const DecoderLayer& layer, uint8_t* pages);
  const float* expand_latents(const Latent& latent);
  void multiply_heads(const Matrix* matrices, const HeadRows& x, const HeadRows& out);

  // model/recurrent.cpp
  void recur(const DecoderLayer& layer, int index);
  void add_recurrent(const Recurrent& mixer, float* out, OutputMode mode);
  void keep_uncertain(const Recurrent& mixer, const RecurrentInputs& inputs, int index);
  void advance(const Recurrent& mixer, const RecurrentInputs& inputs, const StateRows& rows, float* out,
               int64_t out_stride);
  void convolve(const Recurrent& mixer, const RecurrentInputs& inputs, const StateRows& rows, float* out,
                int64_t out_stride, float* gates);
  void find_gates(const Recurrent& mixer, const float* betas, const float* decays, float* gates);
  void scan(const Recurrent& mixer, const StateRows& rows, const float* mixed, const float* gates, float* out,
            int64_t out_stride);

  // model/moe.cpp
  void experts(const DecoderLayer& layer);
  Routing route(const DecoderLayer& layer);
  void choose_experts(const DecoderLayer& layer, const float* logits, int32_t* chosen, float* weights);
  void rank_experts(const float* scores, const float* bias, float* ranks);
  uint8_t* gather(const Routing& routing, const Inputs& inputs);
  uint8_t* gather_scaled(const Routing& routing, const DecoderLayer& layer);
  void multiply_experts(const Routing& routing, const DecoderLayer& layer, PackedLinear PackedMlp::*linear,
                        const uint8_t* inputs, float* out, int64_t stride, OutputMode mode);
  void combine(const Routing& routing, float* outputs);
  void add_dense(const DecoderLayer& layer);
  void add_shared(const DecoderLayer& layer);

  // model/linear.cpp Rounds `rows` rows of x for a product, after a norm if there is one.
  Prepared prepare(const PackedLinear& linear, const float* x, int64_t stride, int rows, const Norm& norm);
  void product(const PackedLinear& linear, const Prepared& inputs, float* out, int64_t stride, OutputMode mode);

  // model/adapters.cpp Groups the rows of x by the slots of their adapters, of which there is one for each row.
  void group_adapted(const int32_t* slots);
  // Adds the adapters of linears on the same inputs, the rows of x after a norm if there is one, to the rows of out.
  void add_adapters(const LoraTarget* targets, int num_targets, const float* x, int64_t stride, int columns,
                    const Norm& norm, float* out, int64_t out_stride);
  void adapted_gate_up(const PackedLinear& gate_up, const Prepared& inputs, int64_t stride, const Norm& norm);

  // attention/schedule.cpp
  AttentionPlan plan_attention(const DecoderLayer& layer);

  // Calls body(i, thread) for every i in [0, n), several at a time.
  template <typename Body>
  void each(int n, Body&& body) {
    int some = n / (4 * threads_.used());
    some = some < 1 ? 1 : some > 16 ? 16 : some;
    threads_.run((n + some - 1) / some, [&](int item, int thread) {
      int end = (item + 1) * some < n ? (item + 1) * some : n;
      for (int i = item * some; i < end; i++) body(i, thread);
    });
  }

  // The rows of logits: none in a stage without the head.
  int num_logits() const { return model_.head.num_parts ? step_.num_logits_wanted() : 0; }

  // Adds the time since the last call to a stage.
  void spent_on(Stage stage);

  Program& program_;
  const DecoderModel& model_;
  const Kernels& kernels_;
  const Step& step_;
  Threads& threads_;
  Arena& arena_;
  timespec clock_;

  int num_rows_;  // of x: all tokens; later only the requested ones
  bool only_wanted_ = false;  // whether they are the requested ones
  bool ends_in_feature_ = false;  // whether x after the last norm is requested of every token
  int first_without_kv_;      // from this layer on, none has keys and values of its own
  // Of the current layer; 0 for attention or a recurrent mixer that it does not have.
  int num_kv_heads_, head_dim_, query_size_, kv_size_, qkv_size_, read_size_, recurred_size_;
  float *embeddings_, *joined_;  // for a draft head
  float *x_, *qkv_, *mixed_, *delta_, *gate_up_, *inner_;
  float *read_, *recurred_;  // what a recurrent mixer's first linear writes, and what its last one reads
  float *queries_, *heads_;  // with latent attention: queries of the vectors that it caches; queries before, values after
  float** row_room_;  // per thread: room for one row of any kind
  int64_t row_floats_;
  uint8_t* inputs_[3];
  AttentionRow** group_rows_;  // of each group of layers
  int num_groups_;
  AttentionRow* rows_;  // of the current layer's group
  int num_attention_rows_;
  PageItem* page_items_;
  int num_page_items_;
  float* layer_inputs_;  // (rows of x, layers, input_size)
  int64_t most_angles_;  // cosines and sines of a token for the rope with the most
  float* angles_;  // (ropes, T, most_angles_): cosines, then sines
  AttentionPlan* plans_;  // one per layer
  float** kept_ = nullptr;  // for each recurrent layer: what it read of tokens that may be committed
  uint8_t** kernel_room_;  // per thread: scratch memory of attention, then of sampling
  float* partials_;
  float* logits_;  // of the requested rows that the head computes at once
  int64_t logits_stride_;
  int layer_index_ = 0;  // of the current layer
  const int32_t* slots_ = nullptr;  // of the adapter of each row of x; null: none has one
  int32_t* adapted_rows_ = nullptr;  // the rows of x with an adapter, by slot
  int num_adapted_rows_ = 0;
  AdaptedBlock* adapted_blocks_ = nullptr;
  int num_adapted_blocks_ = 0;
};

}  // namespace penstock
