// Runs the recurrent mixer of a layer, which reads what attention would. A row's convolution reads its inputs of this
// step and the last ones before it; then the states of convolutions advance, and the matrices are scanned, some columns
// of a head at a time.
#include <cmath>
#include <cstring>

#include "model/step.h"

namespace penstock {

namespace {

// Added to the squared length of a delta net's queries and keys.
constexpr float UNIT_EPS = 1e-6f;
// Columns of a state that a thread scans at once: those of a head with 128 keys take 32 KiB of cache.
constexpr int SCAN_COLUMNS = 64;
constexpr int MOST_TAPS = 64;

int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

int num_tokens(const StateRows& rows, int row) { return static_cast<int>(rows.ends[row] - rows.starts[row]); }

int num_uncertain(const StateRows& rows, int row) {
  return num_tokens(rows, row) - static_cast<int>(rows.certain[row]);
}

// What is kept of a token: the inputs of the convolution, and the gates.
RecurrentInputs kept_inputs(const Recurrent& mixer, const float* data) {
  int channels = mixer.channels;
  return {data, channels + 2 * static_cast<int64_t>(mixer.heads), 0, channels, channels + mixer.heads};
}

// The i-th, oldest first, of the taps - 1 last inputs of a row's convolution before its token `index`, and its own as
// the last. Tokens count from the row's first one in this step, `first`; `tail` has the inputs before it.
const float* last_input(const Recurrent& mixer, const RecurrentInputs& inputs, int64_t first, const float* tail,
                        int index, int i) {
  int at = index - (mixer.taps - 1) + i;
  if (at < 0) return tail + static_cast<int64_t>(mixer.taps - 1 + at) * mixer.channels;
  return inputs.data + (first + at) * inputs.stride + inputs.inputs;
}

// Writes the last inputs of a row's convolution before its token `index` to `to`, which may be `tail`.
void write_tail(const Recurrent& mixer, const RecurrentInputs& inputs, int64_t first, const float* tail, int index,
                float* to) {
  size_t bytes = static_cast<size_t>(mixer.channels) * sizeof(float);
  for (int i = 0; i < mixer.taps - 1; i++)
    memmove(to + static_cast<int64_t>(i) * mixer.channels, last_input(mixer, inputs, first, tail, index, i), bytes);
}

}  // namespace

void StepRun::recur(const DecoderLayer& layer, int index) {
  const Recurrent& mixer = layer.recurrent;
  Prepared prepared = prepare(mixer.input, x_, model_.hidden_size, num_rows_, layer.attention_norm);
  spent_on(STAGE_NORM);
  product(mixer.input, prepared, read_, read_size_, OUTPUT_STORE);
  spent_on(STAGE_QKV);
  RecurrentInputs inputs = {read_, read_size_, mixer.inputs, mixer.beta, mixer.decay};
  int values = mixer.heads * mixer.value_size;
  if (mixer.kind == RECURRENT_CONVOLUTION)
    each(step_.num_tokens, [&](int token, int) {
      float* read = read_ + static_cast<int64_t>(token) * read_size_;
      kernels_.multiply(read + mixer.inputs, read, mixer.channels);
    });
  keep_uncertain(mixer, inputs, index);
  advance(mixer, inputs, step_.states, recurred_, recurred_size_);
  each(step_.num_tokens, [&](int token, int) {
    float* mixed = recurred_ + static_cast<int64_t>(token) * recurred_size_;
    const float* z = read_ + static_cast<int64_t>(token) * read_size_ + mixer.z;
    auto norm_parts = [&](int size, int norms) {
      for (int i = 0; i < values / size; i++) {
        float* at = mixed + i * size;
        kernels_.rms_norm(at, mixer.norm + (norms > 1 ? i * size : 0), size, mixer.norm_eps, at);
      }
    };
    switch (mixer.kind) {
      case RECURRENT_CONVOLUTION: return kernels_.multiply(mixed, z, mixer.channels);
      case RECURRENT_DELTA_NET:
        norm_parts(mixer.value_size, 1);
        return kernels_.gated(z, mixed, values, ACTIVATION_SILU, mixed);
      default:
        kernels_.gated(z, mixed, values, ACTIVATION_SILU, mixed);
        if (mixer.norm) norm_parts(values / mixer.key_heads, mixer.key_heads);
    }
  });
}

void StepRun::add_recurrent(const Recurrent& mixer, float* out, OutputMode mode) {
  Prepared inputs = prepare(mixer.output, recurred_, recurred_size_, num_rows_, Norm{});
  product(mixer.output, inputs, out, model_.hidden_size, mode);
}

// Keeps what the layer reads of tokens that are not certain, until the next step begins.
void StepRun::keep_uncertain(const Recurrent& mixer, const RecurrentInputs& inputs, int index) {
  const StateRows& rows = step_.states;
  int64_t total = 0;
  for (int row = 0; row < rows.num_rows; row++) total += num_uncertain(rows, row);
  if (!total) return;
  if (!kept_) {
    kept_ = arena_.take<float*>(model_.num_layers);
    for (int i = 0; i < model_.num_layers; i++) kept_[i] = nullptr;
  }
  RecurrentInputs kept = kept_inputs(mixer, nullptr);
  float* to = kept_[index] = arena_.take<float>(total * kept.stride);
  auto copy = [&](const float* from, int column, int count) {
    memcpy(to + column, from, static_cast<size_t>(count) * sizeof(float));
  };
  for (int row = 0; row < rows.num_rows; row++)
    for (int64_t token = rows.starts[row] + rows.certain[row]; token < rows.ends[row]; token++, to += kept.stride) {
      const float* from = inputs.data + token * inputs.stride;
      copy(from + inputs.inputs, kept.inputs, mixer.channels);
      copy(from + inputs.beta, kept.beta, mixer.heads);
      copy(from + inputs.decay, kept.decay, mixer.heads);
    }
}

void StepRun::commit(const StateRows& rows) {
  for (int i = 0; kept_ && i < model_.num_layers; i++) {
    const Recurrent& mixer = model_.layers[i].recurrent;
    if (kept_[i]) advance(mixer, kept_inputs(mixer, kept_[i]), rows, nullptr, 0);
  }
}

// Advances the states of rows, and computes the outputs of all their tokens unless `out` is null.
void StepRun::advance(const Recurrent& mixer, const RecurrentInputs& inputs, const StateRows& rows, float* out,
                      int64_t out_stride) {
  Arena::Mark before = arena_.mark();
  int64_t tokens = rows.ends[rows.num_rows - 1];
  float* mixed = mixer.heads ? arena_.take<float>(tokens * mixer.channels) : out;
  float* gates = arena_.take<float>(tokens * 2 * mixer.heads);
  if (mixed) convolve(mixer, inputs, rows, mixed, mixer.heads ? mixer.channels : out_stride, gates);
  each(rows.num_rows, [&](int row, int) {
    float* tail = model_.states + rows.slots[row] * model_.state_floats + mixer.state;
    int64_t first = rows.starts[row];
    for (int64_t i = rows.save_starts[row]; i < rows.save_starts[row + 1]; i++)
      write_tail(mixer, inputs, first, tail, static_cast<int>(rows.saves[2 * i]),
                 model_.states + rows.saves[2 * i + 1] * model_.state_floats + mixer.state);
    write_tail(mixer, inputs, first, tail, static_cast<int>(rows.certain[row]), tail);
  });
  if (mixer.heads) scan(mixer, rows, mixed, gates, out, out_stride);
  arena_.give_back(before);
}

// Computes the convolutions of all tokens, and makes of them what the scan reads.
void StepRun::convolve(const Recurrent& mixer, const RecurrentInputs& inputs, const StateRows& rows, float* out,
                       int64_t out_stride, float* gates) {
  int64_t tokens = rows.ends[rows.num_rows - 1];
  int32_t* row_of = arena_.take<int32_t>(tokens);
  for (int64_t token = 0; token < tokens; token++) row_of[token] = -1;  // some tokens may belong to no row
  for (int row = 0; row < rows.num_rows; row++)
    for (int64_t token = rows.starts[row]; token < rows.ends[row]; token++) row_of[token] = row;
  each(static_cast<int>(tokens), [&](int token, int) {
    int row = row_of[token];
    if (row < 0) return;
    int64_t first = rows.starts[row];
    const float* tail = model_.states + rows.slots[row] * model_.state_floats + mixer.state;
    const float* parts[MOST_TAPS];
    for (int i = 0; i < mixer.taps; i++)
      parts[i] = last_input(mixer, inputs, first, tail, static_cast<int>(token - first), i);
    float* mixed = out + token * out_stride;
    kernels_.convolve(parts, mixer.weights, mixer.bias, mixer.taps, mixer.channels, mixed);
    if (!mixer.heads) return;
    kernels_.activate(mixed, mixer.channels, ACTIVATION_SILU);
    if (mixer.kind == RECURRENT_DELTA_NET)
      for (int head = 0; head < mixer.key_heads; head++) {
        float *query = mixed + mixer.queries + head * mixer.key_size, *key = mixed + mixer.keys + head * mixer.key_size;
        float eps = UNIT_EPS / static_cast<float>(mixer.key_size);
        kernels_.rms_norm(query, mixer.query_scales, mixer.key_size, eps, query);
        kernels_.rms_norm(key, mixer.key_scales, mixer.key_size, eps, key);
      }
    const float* read = inputs.data + token * inputs.stride;
    find_gates(mixer, read + inputs.beta, read + inputs.decay, gates + static_cast<int64_t>(token) * 2 * mixer.heads);
  });
}

// Writes a token's decays of the states, and the factors of what is added to them.
void StepRun::find_gates(const Recurrent& mixer, const float* betas, const float* decays, float* gates) {
  for (int head = 0; head < mixer.heads; head++) {
    float step = softplus(decays[head] + mixer.decay_biases[head]), factor = step;
    if (mixer.kind == RECURRENT_DELTA_NET) {
      factor = 1.0f / (1.0f + std::exp(-betas[head]));
    } else {
      factor = step = step < mixer.least_step ? mixer.least_step : step > mixer.most_step ? mixer.most_step : step;
    }
    gates[head] = std::exp(mixer.rates[head] * step);
    gates[mixer.heads + head] = factor;
  }
}

void StepRun::scan(const Recurrent& mixer, const StateRows& rows, const float* mixed, const float* gates, float* out,
                   int64_t out_stride) {
  int64_t width = padded(mixer.value_size), matrix = mixer.key_size * width;
  int64_t matrices = mixer.state + static_cast<int64_t>(mixer.taps - 1) * mixer.channels;
  int pieces = static_cast<int>((width + SCAN_COLUMNS - 1) / SCAN_COLUMNS), group = mixer.heads / mixer.key_heads;
  float** copies = arena_.take<float*>(threads_.num());
  for (int i = 0; i < threads_.num(); i++) copies[i] = arena_.take<float>(matrix);
  threads_.run(rows.num_rows * mixer.heads * pieces, [&](int item, int thread) {
    int row = item / (mixer.heads * pieces), head = item / pieces % mixer.heads;
    int begin = item % pieces * SCAN_COLUMNS;
    int end = begin + SCAN_COLUMNS < width ? begin + SCAN_COLUMNS : static_cast<int>(width);
    int64_t place = matrices + head * matrix;
    float* state = model_.states + rows.slots[row] * model_.state_floats + place;
    auto copy = [&](float* to) {
      for (int64_t i = begin; i < matrix; i += width)
        memcpy(to + i, state + i, static_cast<size_t>(end - begin) * sizeof(float));
    };
    auto run = [&](float* on, int from, int to) {
      int64_t token = rows.starts[row] + from;
      const float *at = mixed + token * mixer.channels, *gate = gates + token * 2 * mixer.heads + head;
      int key = head / group * mixer.key_size, value = head * mixer.value_size;
      StateScan some = {mixer.key_size, mixer.value_size, mixer.kind == RECURRENT_DELTA_NET,
                        mixer.skips ? mixer.skips[head] : 0.0f, at + mixer.queries + key, at + mixer.keys + key,
                        at + mixer.values + value, mixer.channels, gate, gate + mixer.heads,
                        2 * static_cast<int64_t>(mixer.heads), on, width,
                        out ? out + token * out_stride + value : nullptr, out_stride};
      kernels_.scan_state(some, to - from, begin, end);
    };
    int done = 0, certain = static_cast<int>(rows.certain[row]);
    for (int64_t i = rows.save_starts[row]; i < rows.save_starts[row + 1]; i++) {
      int next = static_cast<int>(rows.saves[2 * i]);
      run(state, done, next);
      copy(model_.states + rows.saves[2 * i + 1] * model_.state_floats + place);
      done = next;
    }
    run(state, done, certain);
    if (certain == num_tokens(rows, row)) return;
    copy(copies[thread]);
    run(copies[thread], certain, num_tokens(rows, row));
  });
}

}  // namespace penstock
