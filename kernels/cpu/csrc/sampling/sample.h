// Chooses a row's next token from its logits. Each step has the meaning, order and precision of
// models/backends/torch_common/sampler.py, so the token is the same.
#pragma once

#include "core/kernel_table.h"

#include "sampling/top_k_top_p.h"
#include "sampling/logprobs.h"
#include "sampling/gumbel.h"

namespace PENSTOCK_LEVEL {

using penstock::SampledToken;
using penstock::SamplingRow;

// The scratch memory of a call.
struct SamplingRoom {
  float* maxima;  // of groups
  float* own;     // a copy of the model's logits, if the row's are modified and log-probabilities are requested
  uint32_t* mask;  // for a row with a list of allowed tokens
  Entries entries;
  SelectionRoom selection;
  int64_t bytes;  // total size
};

static SamplingRoom lay_out(uint8_t* scratch, int vocab_size) {
  // As integers, since the function is also called without memory, to compute the size.
  const uintptr_t base = reinterpret_cast<uintptr_t>(scratch);
  const int64_t maxima = 16 * static_cast<int64_t>(num_groups(vocab_size));
  const int64_t entries = (static_cast<int64_t>(vocab_size) + 31) / 16 * 16 + 16;
  const int64_t sizes[] = {
      maxima * 4,  entries * 4, entries / 8 + 4, entries * 4,  entries * 4,
      entries * 4, entries * 8, entries * 8,     NUM_BINS * 8,
  };
  constexpr int NUM_PLACES = sizeof(sizes) / sizeof(sizes[0]);
  uintptr_t places[NUM_PLACES];
  int64_t bytes = 0;
  for (int i = 0; i < NUM_PLACES; i++) {
    places[i] = base + static_cast<uintptr_t>(bytes);
    bytes += (sizes[i] + 63) / 64 * 64;
  }
  return {
      reinterpret_cast<float*>(places[0]),
      reinterpret_cast<float*>(places[1]),
      reinterpret_cast<uint32_t*>(places[2]),
      {reinterpret_cast<float*>(places[3]), reinterpret_cast<int32_t*>(places[4]), 0},
      {reinterpret_cast<float*>(places[5]),
       {reinterpret_cast<uint64_t*>(places[6]), reinterpret_cast<uint64_t*>(places[7])},
       reinterpret_cast<double*>(places[8])},
      bytes,
  };
}

static int64_t sampling_scratch(int vocab_size) { return lay_out(nullptr, vocab_size).bytes; }

// ---------------------------------------------------------------------------------------- penalties, biases and masks

// A prompt may contain ids that the logits do not have.
INLINE bool is_known(int64_t id, int vocab_size) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(vocab_size);
}

// Forces rounding: keeps the compiler from fusing the operation that produced the number with the next one.
template <typename T>
INLINE T rounded(T x) {
  __asm__("" : "+m"(x));
  return x;
}

// Repetition (prompt and output): x / p if x > 0, else x p. Then x - frequency * count - presence * (count > 0).
static void penalise(float* logits, int vocab_size, const SamplingRow& row) {
  const float factor = static_cast<float>(row.repetition_penalty);
  for (int64_t i = 0; i < row.num_seen; i++) {
    const int64_t id = row.seen_ids[i], count = row.seen_counts[i];
    if (!is_known(id, vocab_size)) continue;
    const double frequency = rounded(row.frequency_penalty * static_cast<double>(count));
    const double lowered = frequency + (count > 0 ? row.presence_penalty : 0.0);
    const float x = logits[id];
    logits[id] = rounded(x > 0.0f ? x / factor : x * factor) - static_cast<float>(lowered);
  }
}

static void add_biases(float* logits, int vocab_size, const SamplingRow& row) {
  for (int64_t i = 0; i < row.num_biases; i++)
    if (is_known(row.bias_ids[i], vocab_size)) logits[row.bias_ids[i]] += static_cast<float>(row.biases[i]);
}

// The mask of allowed tokens; null: all are allowed.
static const uint32_t* find_mask(int vocab_size, const SamplingRow& row, uint32_t* room) {
  if (row.mask || !row.allowed) return row.mask;
  memset(room, 0, static_cast<size_t>(vocab_size + 31) / 32 * 4);
  for (int64_t i = 0; i < row.num_allowed; i++)
    if (is_known(row.allowed[i], vocab_size)) room[row.allowed[i] / 32] |= 1u << row.allowed[i] % 32;
  return room;
}

INLINE RowMax find_max_allowed(float* logits, int vocab_size, const uint32_t* mask, float* maxima) {
  return mask ? find_max_masked(logits, vocab_size, mask, maxima) : find_max(logits, vocab_size, maxima);
}

// Removes tokens that the mask does not allow, and forbidden tokens unless no others are left. Returns the maximum of
// the rest.
static RowMax restrain(float* logits, int vocab_size, const SamplingRow& row, const uint32_t* mask,
                       const SamplingRoom& room) {
  int masked = 0;
  for (int64_t i = 0; i < row.num_forbidden; i++) {
    const int64_t id = row.forbidden[i];
    if (!is_known(id, vocab_size) || logits[id] == -INFINITE) continue;  // an id may be listed twice
    room.entries.ids[masked] = static_cast<int32_t>(id);
    room.entries.x[masked++] = logits[id];
    logits[id] = -INFINITE;
  }
  RowMax found = find_max_allowed(logits, vocab_size, mask, room.maxima);
  if (masked == 0 || found.best != -INFINITE || found.has_nan) return found;
  for (int i = 0; i < masked; i++) logits[room.entries.ids[i]] = room.entries.x[i];
  return find_max_allowed(logits, vocab_size, mask, room.maxima);
}

// Whether the logit of the chosen token may differ from the model's.
INLINE bool changes_chosen(const SamplingRow& row) { return row.num_seen > 0 || row.num_biases > 0; }

// ------------------------------------------------------------------------------------------------------------- tokens

static int64_t lowest_allowed(const uint32_t* mask, int vocab_size) {
  for (int id = 0; mask && id < vocab_size; id++)
    if (mask[id / 32] >> id % 32 & 1) return id;
  return 0;
}

// Lists the entries that the filters leave. At least one filter is set.
static void filter(const Scores& scores, const SamplingRow& row, int top_k, const SamplingRoom& room,
                   Entries& entries) {
  if (top_k) {
    collect_top_k(scores, top_k, entries, room.selection);
  } else {
    collect(scores, -INFINITE, entries);
  }
  // In float32, like the other parameters.
  if (row.top_p != 1.0) keep_top_p(entries, static_cast<float>(row.top_p), room.selection);
  if (static_cast<float>(row.min_p) > 0.0f) keep_min_p(entries, static_cast<float>(row.min_p));
}

// Takes the argmax, or draws. If the row's best logit is not finite, takes the lowest allowed token.
static void choose(const float* logits, int vocab_size, const SamplingRow& row, const uint32_t* mask,
                   const RowMax& found, const SamplingRoom& room, SampledToken& out) {
  if (is_broken(found)) {
    out.token_id = lowest_allowed(mask, vocab_size);
    return;
  }
  const Scores scores = {logits, vocab_size, room.maxima, found.best, static_cast<float>(row.temperature)};
  const int best_id = first_best(scores);
  out.token_id = best_id;
  if (!(scores.temperature > 0.0f)) return;
  const int top_k = row.top_k > 0 && row.top_k < vocab_size ? static_cast<int>(row.top_k) : 0;
  const Draw draw = begin_draw(row, best_id);
  if (!top_k && row.top_p == 1.0 && row.min_p == 0.0) {
    out.token_id = draw_from_row(scores, draw);
  } else {
    Entries entries = room.entries;
    filter(scores, row, top_k, room, entries);
    out.token_id = draw_from_entries(entries, draw);
  }
  out.noise = noise_of(draw, static_cast<int>(out.token_id));
}

// Ranks the likeliest tokens, and returns the total from which other log-probabilities follow.
static LogTotal rank_logprobs(const float* logits, int vocab_size, int num_top, const SamplingRoom& room,
                              int32_t* top_ids, float* top) {
  const LogTotal total = log_total(logits, vocab_size, find_max(logits, vocab_size, room.maxima));
  const Scores scores = {logits, vocab_size, room.maxima, 0.0f, 1.0f};
  Entries entries = room.entries;
  if (num_top > 0) top_logprobs(scores, total, num_top, entries, room.selection, top_ids, top);
  return total;
}

// Chooses the next token of a row; see `Kernels`.
static void sample(float* logits, int vocab_size, const SamplingRow& row, uint8_t* scratch, SampledToken* out,
                   int32_t* top_ids, float* top) {
  const SamplingRoom room = lay_out(scratch, vocab_size);
  const bool wanted = row.num_logprobs >= 0;
  const float* own = logits;
  LogTotal total = {};
  *out = {0, 0.0f, 0, 0.0};
  if (wanted) {
    out->num_top = static_cast<int32_t>(row.num_logprobs < vocab_size ? row.num_logprobs : vocab_size);
    total = rank_logprobs(logits, vocab_size, out->num_top, room, top_ids, top);
    if (changes_chosen(row)) {
      memcpy(room.own, logits, static_cast<size_t>(vocab_size) * sizeof(float));
      own = room.own;
    }
  }
  penalise(logits, vocab_size, row);
  add_biases(logits, vocab_size, row);
  const uint32_t* mask = find_mask(vocab_size, row, room.mask);
  const RowMax found = restrain(logits, vocab_size, row, mask, room);
  choose(logits, vocab_size, row, mask, found, room, *out);
  if (wanted) out->logprob = logprob(total, own[out->token_id]);
}

// Computes log-probabilities of a token and of the likeliest ones; see `Kernels`.
static void logprobs(const float* logits, int vocab_size, int target, int num_top, uint8_t* scratch, float* chosen,
                     int32_t* top_ids, float* top) {
  const SamplingRoom room = lay_out(scratch, vocab_size);
  *chosen = logprob(rank_logprobs(logits, vocab_size, num_top, room, top_ids, top), logits[target]);
}

}  // namespace PENSTOCK_LEVEL
