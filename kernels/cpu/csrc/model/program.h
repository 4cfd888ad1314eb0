// A model as data, and one step of it. Python fills these structs (kernels/cpu/program.py mirrors them) and keeps their
// addresses valid while the model is used.
#pragma once

#include <memory>

#include "core/kernel_table.h"
#include "core/arena.h"
#include "core/threads.h"

namespace penstock {

// One product, or several side by side if their inputs need different orders.
struct PackedLinear {
  int32_t num_parts;  // 0: there is none
  Matrix parts[3];
};

// A LoRA adapter of one linear: B A x is added to its output. Without rows of A, there is none.
struct LoraPair {
  Matrix a;  // (rank, columns of the linear)
  Matrix b;  // (rows of the linear, rank)
};

// The linears of a layer that adapters change.
enum LoraModule : int32_t { LORA_Q, LORA_K, LORA_V, LORA_O, LORA_GATE, LORA_UP, LORA_DOWN, NUM_LORA_MODULES };

enum QkNorm : int32_t { QK_NORM_NONE = 0, QK_NORM_HEAD = 1, QK_NORM_ALL = 2, QK_NORM_EACH_HEAD = 3 };

// A norm of the model's kind. Without a weight, there is none.
struct Norm {
  const float* weight;
  const float* bias;  // or null
};

// The angles of a rotary embedding.
struct Rope {
  const float* frequencies;  // (half,): angle per position
  float scale;               // of cosines and sines
  int32_t half;              // pairs of dimensions that are rotated
};

// An MLP, or one expert. Gate and up are one part in alternating panels, or two parts: gate, then up. An MLP without a
// gate has only up.
struct PackedMlp {
  PackedLinear gate_up, down;
};

// Latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form: all query heads attend to one vector for each
// token, `rotary` dimensions and then a latent of `rank`. The layer's qkv computes it, and after it all query heads, or
// the input of `query`, which does. A query head has `rotary` dimensions, and then `unrotated` ones, which `absorb` maps
// to those of the latent. `expand` maps the weighted mean of latents to the head's value.
struct Latent {
  int32_t rank;  // 0: the layer has ordinary attention
  int32_t rotary, unrotated, value_size;
  float norm_eps;
  const float* norm;        // (rank,): of the latent
  const float* query_norm;  // of the input of `query`
  PackedLinear query;       // or no parts
  const Matrix* absorb;     // (num_heads,): each (rank, unrotated)
  const Matrix* expand;     // (num_heads,): each (value_size, rank)
};

enum RecurrentKind : int32_t {
  RECURRENT_NONE = 0, RECURRENT_CONVOLUTION = 1, RECURRENT_DELTA_NET = 2, RECURRENT_MAMBA2 = 3
};

// A recurrent mixer, in place of attention or beside it; see models/architecture/recurrent.py. A state is that of the convolution, (taps - 1, channels), and after it matrices,
// (heads, key_size, value_size padded to 16).
struct Recurrent {
  PackedLinear input, output;
  int32_t kind;                                    // RecurrentKind
  int32_t channels, taps;                          // of the convolution
  int32_t key_heads, heads, key_size, value_size;  // of the matrices; key heads are the groups of Mamba-2
  // The first columns of the parts of what `input` computes: the inputs of the convolution, z, beta and the decay. A short convolution's z
  // is c, and its b is at 0.
  int32_t inputs, z, beta, decay;
  int32_t queries, keys, values;  // the first channels of these
  float norm_eps, least_step, most_step;
  const float* weights;                              // (taps, channels): of the convolution
  const float* bias;                                 // (channels,) or null
  const float *key_scales, *query_scales;            // (key_size,): for RMS norms of a delta net's keys and queries
  const float *decay_biases, *rates, *skips;         // (heads,), thrice
  const float* norm;                                 // (value_size,), or (heads * value_size,), or null
  int64_t state;  // from the start of a slot to the layer's state, in floats
};

struct DecoderLayer {
  // Norms before the sublayers and after them.
  Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;
  // For an EAGLE-3 head: the input of qkv is the embedding after attention_norm and, beside it, x after this norm.
  Norm hidden_norm;
  Norm query_norm, key_norm;  // (head_dim,), (heads, head_dim), or over all heads; or none
  Norm value_norm;            // (head_dim,)
  const float* sinks;                  // (num_heads,) or null
  int32_t window;                      // 0: none
  int32_t rope;                        // index
  int32_t scales_queries;
  int32_t has_kv;           // else it attends to the keys and values of an earlier layer, and qkv has only queries
  int32_t values_are_keys;  // before any norm: qkv has no values
  int32_t intermediate_size;
  int32_t kv_group;  // of the layer's keys and values: see Step::window_tables
  KvLayout kv;
  int64_t kv_offset;  // from the start of a page to the layer's keys and values, or to those that it attends to
  PackedLinear qkv, output;  // of attention; or no parts
  Recurrent recurrent;
  PackedMlp mlp;        // no parts in layers that have only experts
  Norm mlp_inner_norm;  // of the MLP's output where there are experts beside it
  // For a mixture of experts: the norms of the router's input and of the experts', and of the experts' output.
  Norm router_norm, expert_norm, expert_post_norm;
  PackedLinear router;  // for a mixture of experts; else no parts
  const PackedMlp* experts;
  const float* selection_bias;  // (num_experts,): added to scores for the choice only; or null
  const float* expert_scales;   // (num_experts,): factors of the experts' weights; or null
  PackedMlp shared;          // also runs on every token; or no parts
  PackedLinear shared_gate;  // its output is multiplied by the sigmoid of this; or no parts
  // x += norm(projection(act(gate(x)) * input)), where the input is the layer's own; or no parts.
  PackedLinear input_gate, input_projection;
  Norm input_norm;
  float scalar;  // the factor of the layer's output
  Latent latent;
};

struct DecoderModel {
  const Kernels* kernels;
  int32_t vocab_size, num_logits, hidden_size;
  int32_t intermediate_size;  // the largest of the layers'
  int32_t num_layers, num_heads, num_ropes;
  int32_t num_experts, experts_per_token, expert_size, normalise_experts, shared_size;
  int32_t scores_are_sigmoids;  // of experts; else a softmax
  int32_t num_groups, groups_per_token;
  int32_t expert_activation;  // Activation
  int32_t qk_norm;            // QkNorm
  int32_t qk_norm_is_last;    // after the rotation
  int32_t activation;         // Activation
  int32_t gated_attention;    // qkv ends with as many columns as queries; the sigmoids of these multiply the attention
  int32_t gated_mlp, layer_norms, parallel_layers;
  int32_t chunked_windows;        // see PagedAttention
  int32_t scales_expert_inputs;   // by the experts' weights, which otherwise multiply their outputs
  int32_t block_size;  // of block tables; a multiple of 16
  // Queries are scaled by 1 + beta ln(1 + floor((position + shift) / positions)) in some layers.
  int32_t query_scaling_positions, query_scaling_shift;
  float query_scaling_beta, expert_scale;
  float norm_eps, embedding_scale, attention_scale, attention_soft_cap, logit_scale, logit_soft_cap;
  float gate_alpha, gate_limit;  // for experts with the clamped activation
  int32_t embedding_format;  // of `embedding`: FORMAT_F32 or FORMAT_BF16
  const uint8_t* embedding;  // (vocab_size, hidden_size); null: `packed_embedding` is looked up
  Matrix packed_embedding;
  const float* position_table;  // (rows, hidden_size): row p + position_offset is added at position p; or null
  int32_t position_offset;
  // The inputs of all layers, `input_size` floats each: (norm(linear(x) / sqrt(hidden_size)) + embedding
  // sqrt(input_size)) / sqrt(2).
  int32_t input_size;           // 0: there are none
  int32_t input_vocab_size;
  float input_embedding_scale;
  const uint8_t* input_embedding;  // (input_vocab_size, num_layers * input_size), in the format of `embedding`
  PackedLinear input_linear;
  Norm input_linear_norm;  // (input_size,)
  PackedLinear fc;           // for a draft head: from features to x; else no parts
  // For an MTP head: the input of fc is instead the embedding after a norm and, beside it, features or hidden states
  // after another; or none.
  Norm embedding_norm, hidden_norm;
  int32_t continues_after_norm;  // whether a step's hidden_out is x after the last norm
  // Only the first num_logits rows are multiplied, of a tied embedding that may have more. No parts: it is elsewhere.
  PackedLinear head;
  Norm norm;
  const DecoderLayer* layers;
  const Rope* ropes;
  uint8_t* pages;
  int64_t page_bytes;  // of 16 tokens in all layers
  const LoraPair* adapters;  // (slots, num_layers, NUM_LORA_MODULES): slot s is at s - 1; or null
  int32_t adapter_format;    // of their matrices: FORMAT_F32 or FORMAT_BF16
  int32_t adapter_rank;      // the largest that a slot may have
  float* states;             // the slots of recurrent states, or null
  int64_t state_floats;      // of a slot
};

// How recurrent states of rows advance. The first `certain` tokens of a row advance its state; those after them are
// computed from a copy.
struct StateRows {
  int32_t num_rows;
  const int64_t* slots;          // (num_rows,)
  const int64_t *starts, *ends;  // (num_rows,): the indices of a row's first token and after its last one, ascending
  const int64_t* certain;        // (num_rows,)
  const int64_t* save_starts;    // (num_rows + 1,)
  const int64_t* saves;  // pairs, ascending: a number of certain tokens, and the slot to copy the state to then
};

// R rows of T tokens, built by models/batch/batch.py, and the requested outputs.
struct Step {
  int32_t num_tokens, num_rows, num_sampled, num_scored;
  const int64_t* token_ids;     // (T,)
  const int64_t* starts;        // (R,)
  const int64_t* ends;          // (R,)
  const int64_t* token_starts;  // (R + 1,)
  const int64_t* tables;        // (R, table_stride) block ids
  int64_t table_stride;
  // (num_window_groups, R, table_stride): the block ids of groups 1, 2, ... of layers, none of which has a window above
  // `window`. Those of blocks that a row's tokens do not see are not read. Group 0 has `tables`.
  const int64_t* window_tables;
  int64_t num_window_groups, window;
  // No token of the batch is in more than one of `sampled`, `scored` and `pooled`, so there is room for T in total.
  // Rows whose next token is chosen, with their parameters and results; each has room for `room` likeliest tokens.
  const int64_t* sampled;  // (num_sampled,) index in the batch of the row's last token
  const SamplingRow* sampling;
  SampledToken* tokens;
  int64_t room;
  int32_t* top_ids;
  float* tops;
  // Prompt tokens whose log-probability is requested: the position that predicts each, its id, and the number of
  // likeliest tokens to add.
  const int64_t* scored;   // (num_scored,) index in the batch of the previous token
  const int64_t* targets;  // (num_scored,)
  const int64_t* num_tops;
  int64_t scored_room;
  float* chosen;
  int32_t* scored_top_ids;
  float* scored_tops;
  // Tokens whose hidden states after the last norm are added to vectors; those of a vector are adjacent.
  int32_t num_vectors, num_pooled;
  const int64_t* pooled;         // (num_pooled,) index in the batch
  const int64_t* pooled_starts;  // (num_vectors + 1,): vector i sums tokens [pooled_starts[i], pooled_starts[i + 1])
  float* const* vectors;         // (num_vectors,) of (hidden_size,)
  // Features of every token: x before some of the layers; for the number of layers, x after the last norm.
  int32_t num_features;
  const int32_t* feature_layers;  // (num_features,)
  float* features;                // (T, num_features, hidden_size)
  // The input of the first layer, in place of the embeddings. For a draft head, one of these two is set; other models
  // have `hidden` if the layers before are computed elsewhere, and their `hidden_out` is the input of the layers after.
  const float* features_in;  // (T, num_features * hidden_size): features of the target model
  const float* hidden;       // (T, hidden_size): the output of the previous step, or of the layers before
  float* hidden_out;         // (num_sampled, hidden_size): x after the last layer, or after the last norm; or null
  const int32_t* adapters;   // (T,): the slot of each token's adapter, 0: none; or null: no token has one
  StateRows states;          // of the R rows, if the model has recurrent layers

  int num_logits_wanted() const { return num_sampled + num_scored; }
  int num_wanted() const { return num_logits_wanted() + num_pooled; }
  // The index in the batch of the i-th token whose output of the last layer is requested: sampled, scored, pooled.
  int64_t wanted(int i) const {
    if (i < num_sampled) return sampled[i];
    return i < num_logits_wanted() ? scored[i - num_sampled] : pooled[i - num_logits_wanted()];
  }
};

enum Stage {
  STAGE_EMBED, STAGE_NORM, STAGE_QKV, STAGE_ROPE_KV, STAGE_ATTENTION, STAGE_OUTPUT, STAGE_EXPERTS, STAGE_GATE_UP,
  STAGE_DOWN, STAGE_HEAD, STAGE_SAMPLE, NUM_STAGES
};

class StepRun;

// Runs steps of one model. Not thread-safe.
class Program {
 public:
  Program(const DecoderModel& model, const Placement& placement);
  ~Program();

  // Computes the layers and logits. The step and everything it points to must stay in place until `finish` or the next
  // `begin`; the sampling parameters may change until then.
  void begin(const Step& step, int num_threads);
  // Advances recurrent states by tokens that the last step computed from copies: their indices in `rows` are those among
  // all such tokens of the step. No more than once per step.
  void commit(const StateRows& rows);
  // Chooses the tokens of the step that began last.
  void finish();

  double seconds[NUM_STAGES] = {};  // spent in each stage since the program was created

 private:
  friend class StepRun;

  DecoderModel model_;
  Threads threads_;
  Arena arena_;
  std::unique_ptr<StepRun> run_;  // the step that began last
};

}  // namespace penstock
