// The types of the CPU library, and the table of its kernels: one table for each instruction set, chosen at load.
//
// Everything is 16 wide: a panel of weights has 16 columns, a KV page has 16 tokens. Activations between kernels are
// float32 rows, whatever the model's dtype; `prepare` rounds a product's inputs to the format that the product
// multiplies. No result depends on which other rows, columns or queries are computed in the same call.
#pragma once

#include <cstddef>
#include <cstdint>

// Marks the functions that Python calls.
#define PENSTOCK_API extern "C" __attribute__((visibility("default")))

namespace penstock {

constexpr int LANES = 16;

enum Format : int32_t {
  FORMAT_F32 = 0,
  FORMAT_BF16 = 1,
  FORMAT_INT8 = 2,
  FORMAT_INT4 = 3,
  FORMAT_FP4 = 4,
  FORMAT_Q4_0 = 5,
};
// act(gate) * up; or, clamped, g sigmoid(alpha g) (u + 1), where g is the gate, at most `limit`, and u is up, clamped
// to +-limit.
enum Activation : int32_t {
  ACTIVATION_SILU = 0,
  ACTIVATION_GELU = 1,
  ACTIVATION_GELU_TANH = 2,
  ACTIVATION_CLAMPED = 3,  // only in gated products
  ACTIVATION_RELU = 4,
  ACTIVATION_RELU_SQUARED = 5,
};

// -------------------------------------------------------------------------------------------------------------- products

// y = x W^T + b, where W is (rows, columns), that is outputs by inputs. W is stored as consecutive panels of 16 rows.
// Each panel holds its scales, so that a product reads a single stream of memory. Rows and columns that pad panels and
// groups are zero.
struct Matrix {
  Format format;
  int32_t rows;
  int32_t columns;
  int32_t group;          // columns that share a scale: 32 (FP4, Q4_0), a multiple of 32 (int4); 0: one scale per row, or none
  int64_t panel_bytes;    // see `panel_bytes` of the table
  const uint8_t* panels;  // aligned to 64 bytes
  const float* bias;      // one per row, padded to whole panels; or null
  const int32_t* order;   // column c of the panels is column order[c] of W, and inputs are permuted alike; or null
};

// Prepared rows, one after another.
struct Inputs {
  const uint8_t* data;  // aligned to 64 bytes, as is the stride
  int64_t stride;       // bytes
  int32_t rows;
  const uint8_t* following = nullptr;  // what the thread probably reads after the product's panels; null: unknown
};

enum OutputMode : int32_t {
  OUTPUT_STORE = 0,  // data[m][n] = y
  OUTPUT_ADD = 1,    // data[m][n] += y
  OUTPUT_GATED = 2,  // panels alternate gate and up: column 16 i + j of data is the activation of panels 2i and 2i + 1
};

struct GemmOutput {
  float* data;  // column 0 of row 0
  int64_t stride;  // floats
  OutputMode mode;
  Activation activation;
  float alpha, limit;  // for the clamped activation
};

// ------------------------------------------------------------------------------------------------------------- attention

// A page holds 16 tokens of one layer: for each KV head its keys, then its values. D is the head size, padded to 16:
//   F32   K [D][16]          V [16][D]
// BF16 K [D/2][16][2] V [8][D][2] (pairs of dimensions, pairs of tokens: the layout of the dot products)
//   INT8  K [D/4][16][4]     V [4][D][4], then 16 float32 scales of keys and 16 of values
// A page of latent attention holds no values: the keys are the values too, of one head that all query heads attend to.
// Then kv_heads is the number of groups of query heads that are computed apart. INT8 is not for it.
// BF16 and INT8 store the Hadamard transform of heads (core/hadamard.h), over the largest power of two that divides
// their size. The first write to a page is to its slot 0 and zeroes its values, or what is in their place, since the zero
// weight of a masked slot needs finite values.
struct KvLayout {
  Format format;
  int32_t kv_heads;
  int32_t head_dim;
  int64_t head_bytes;  // one head's keys and values in one page; a multiple of 64
  int64_t page_bytes;  // from one page to the next of the same layer
  int32_t is_latent;
};

// One layer's attention over a batch of rows.
struct PagedAttention {
  KvLayout kv;
  uint8_t* pages;  // of this layer
  int32_t num_heads;
  int32_t window;   // 0: all positions before; w: the last w positions, its own included
  int32_t chunked;  // the window is the size of chunks, and a query sees the positions before it in its own chunk
  float scale;      // of scores
  float soft_cap;   // 0: none; c: scores become c tanh(score / c)
  const float* sinks;    // one score per query head, which takes part in the softmax without a value; or null
  const float* queries;  // (T, stride), rotated; heads one after another, head_dim floats each
  int64_t query_stride;
  float* output;  // (T, stride), in the same order
  int64_t output_stride;
};

// The first position that a query sees.
static inline int first_seen(int position, int window, bool chunked) {
  if (window == 0) return 0;
  if (chunked) return position / window * window;
  return position < window ? 0 : position + 1 - window;
}

// A row of the batch: tokens [token, token + end - start) of the batch are at its positions [start, end).
struct AttentionRow {
  const int32_t* pages;  // page of positions [16 i, 16 i + 16)
  int32_t token;
  int32_t start;
  int32_t end;
};

// KV is read in splits of SPLIT positions, from position 0 on, and their results are merged in that order, however the
// splits are distributed over threads. This makes results independent of the batch.
constexpr int SPLIT = 256;
// The maximum number of query tokens of a row in one item.
constexpr int QUERY_TILE = 16;

// A piece of one row's attention: some queries of some KV heads' groups against some splits. An item with all the
// splits of its queries writes the output. Other items have one KV head and write partial results, to be merged.
struct AttentionItem {
  int32_t row;
  int32_t kv_head_begin, kv_head_end;
  int32_t query_begin, query_end;  // positions
  int32_t split_begin, split_end;
  int64_t partial;  // offset of the first one in `partials`, in floats; -1: writes the output
};

// -------------------------------------------------------------------------------------------------------------- sampling

// The sampling parameters of one row, with the meaning and the order of SamplingParams in scheduler/plan.py. Python
// passes the memory of this struct, so fields have 8 bytes or come in pairs.
struct SamplingRow {
  double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  uint64_t seed;
  int64_t position;  // of the token to be chosen
  int64_t top_k;     // 0: all
  int64_t num_logprobs;  // -1: none; k: of the token and of the k likeliest
  const int64_t* seen_ids;     // distinct tokens of prompt and output, if there are penalties
  const int64_t* seen_counts;  // the count of each in the output
  int64_t num_seen;
  const int64_t* bias_ids;
  const double* biases;
  int64_t num_biases;
  const int64_t* allowed;  // or null: all
  int64_t num_allowed;
  const uint32_t* mask;  // instead of `allowed`: bit v % 32 of word v / 32 is set if token v is allowed; null: all
  const int64_t* forbidden;  // stops before min_tokens, and bad words; ignored if they leave no token
  int64_t num_forbidden;
  const int32_t* noise_ids;  // the id whose noise each entry has, padded to 16 entries; null: its own
};

struct SampledToken {
  int64_t token_id;
  float logprob;     // from the model's logits, if requested
  int32_t num_top;
  double noise;      // with which it was drawn; 0: it was not drawn
};

// ------------------------------------------------------------------------------------------------------ recurrent layers

// Some tokens of one head of a recurrent layer, and its state S, (key_size, state_stride) with value_size columns. For
// each token: S = a S; S += k beta (v - k S), or without `subtracts` S += k beta v; y = q S + skip v. Queries, keys and
// values of successive tokens are `stride` floats apart.
struct StateScan {
  int32_t key_size, value_size, subtracts;
  float skip;
  const float *queries, *keys, *values;  // of the first token
  int64_t stride;
  const float *decays, *betas;  // a and beta of the first token
  int64_t gate_stride;
  float* state;
  int64_t state_stride;  // a multiple of 16; columns from value_size on are zero
  float* output;         // of the first token; or null
  int64_t output_stride;
};

// --------------------------------------------------------------------------------------------------------------- a table

struct Kernels {
  const char* name;

  // Bytes of a panel, and of a prepared row of inputs (a multiple of 64).
  int64_t (*panel_bytes)(Format format, int columns, int group);
  int64_t (*input_bytes)(Format format, int columns, int group);
  // Packs 16 rows of float32 (missing ones null) into a panel; int8 and int4 quantise, and add the squares of the errors
  // and of the weights to error[0] and error[1].
  void (*pack_panel)(Format format, int columns, int group, const float* const rows[LANES], uint8_t* panel,
                     double error[2]);
  // The same from bfloat16 rows, only for FORMAT_BF16. The bits do not change.
  void (*pack_panel_bf16)(int columns, const uint16_t* const rows[LANES], uint8_t* panel);
  // The same for int8, int4, FP4 and Q4_0 from the codes of a quantised checkpoint: one byte per weight, and one scale
  // and one zero point (in units of the codes) per group; W = (code - zero) * scale. Codes of int8 are signed bytes,
  // those of int4 and Q4_0 are 0 to 15. Codes of FP4 are E2M1, with scales that are powers of two. The zero points of FP4
  // are always 0 and those of Q4_0 always 8, so neither stores them.
  void (*pack_panel_codes)(Format format, int columns, int group, const uint8_t* const codes[LANES],
                           const float* const scales[LANES], const float* const zeros[LANES], uint8_t* panel);
  // Writes a row of W as float32, for the lookup of an embedding.
  void (*unpack_row)(const Matrix& matrix, int row, float* out);
  // Rounds a float32 row to the format that the matrix's product multiplies.
  void (*prepare)(Format format, int columns, int group, const float* x, uint8_t* out);
  // Multiplies all rows with panels [begin, end). Begin and end are even if the output is gated.
  void (*product)(const Matrix& matrix, const Inputs& inputs, int begin, int end, const GemmOutput& output);
  // The maximum number of rows that a call should have. With more, a step splits its products across rows as well.
  int (*product_rows)(Format format);

  // out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  // out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias; `bias` may be null, out may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int n, float eps, float* out);
  // x += y.
  void (*add)(float* x, const float* y, int n);
  // x *= factor.
  void (*scale)(float* x, float factor, int n);
  // x = cap tanh(x / cap).
  void (*soft_cap)(float* x, float cap, int n);
  // out = act(gate) * up.
  void (*gated)(const float* gate, const float* up, int n, Activation activation, float* out);
  // x = act(x).
  void (*activate)(float* x, int n, Activation activation);
  // x *= y, and x *= sigmoid(y).
  void (*multiply)(float* x, const float* y, int n);
  void (*multiply_sigmoid)(float* x, const float* y, int n);
  // out = sum over taps of inputs[tap] * weights[tap] + bias, where `weights` is (taps, n); `bias` may be null.
  void (*convolve)(const float* const* inputs, const float* weights, const float* bias, int taps, int n, float* out);
  // Computes columns [begin, end) of the states and outputs, both multiples of 16.
  void (*scan_state)(const StateScan& scan, int tokens, int begin, int end);
  // Rotates the first 2 * half dimensions of a head in place: (x_i, x_{i+half}) is rotated by the angle with the given
  // cosine and sine.
  void (*rotate)(float* head, const float* cosines, const float* sines, int half);
  // Writes the keys and values of `tokens` tokens, kv_heads * head_dim floats each and `stride` floats apart, to a page
  // from a slot on; slot 0 zeroes the page.
  void (*write_kv)(const KvLayout& layout, uint8_t* page, int slot, int tokens, const float* keys, const float* values,
                   int64_t stride);

  // The bytes of scratch memory that `attend` needs, and the floats of one query head's partial result of one split.
  int64_t (*attention_scratch)(const PagedAttention& attention);
  int64_t (*partial_floats)(const PagedAttention& attention);
  void (*attend)(const PagedAttention& attention, const AttentionRow& row, const AttentionItem& item, uint8_t* scratch,
                 float* partials);
  // Merges the partial results of splits [0, splits) of the item's queries. The first one is at item.partial.
  void (*merge)(const PagedAttention& attention, const AttentionRow& row, const AttentionItem& item, int splits,
                const float* partials);

  // The bytes of scratch memory that `sample` needs.
  int64_t (*sampling_scratch)(int vocab_size);
  // Chooses the next token of a row; modifies the logits. `top_ids` and `top` have room for num_logprobs entries.
  void (*sample)(float* logits, int vocab_size, const SamplingRow& row, uint8_t* scratch, SampledToken* out,
                 int32_t* top_ids, float* top);
  // Computes the log-probabilities of `target` and of the num_top likeliest tokens, from the model's unmodified logits.
  void (*logprobs)(const float* logits, int vocab_size, int target, int num_top, uint8_t* scratch, float* chosen,
                   int32_t* top_ids, float* top);
};

// Null if the library was built without them, or the machine lacks the instructions.
const Kernels* kernels_amx();
const Kernels* kernels_avx512_bf16();
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx_vnni();
const Kernels* kernels_avx2();
const Kernels* kernels_neon_bf16();
const Kernels* kernels_neon_dot();
const Kernels* kernels_neon();
const Kernels* kernels_generic();

}  // namespace penstock
