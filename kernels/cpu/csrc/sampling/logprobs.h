// Log-probabilities of a token and of the likeliest ones, from the model's unmodified logits.
#pragma once

#include "sampling/top_k_top_p.h"

namespace PENSTOCK_LEVEL {

// ln p = x - best - log_sum. If the logits are not finite, log_sum and all log-probabilities are NaN.
struct LogTotal {
  double best, log_sum;
};

INLINE float logprob(const LogTotal& total, float x) {
  return static_cast<float>(static_cast<double>(x) - total.best - total.log_sum);
}

// Adds float32 exponentials in float64, one group at a time.
static LogTotal log_total(const float* logits, int n, const RowMax& found) {
  if (is_broken(found)) return {0.0, __builtin_nan("")};
  Doubles total = {};
  for (int begin = 0; begin < n; begin += GROUP) {
    Floats group = {};
    int end = begin + GROUP < n ? begin + GROUP : n;
    for (int at = begin; at < end; at += 16) group += exp(load_entries(logits, at, n) - found.best);
    float lanes[16];
    store(lanes, group);
    total += load_eight(lanes) + load_eight(lanes + 8);
  }
  return {found.best, __builtin_log(sum(total))};
}

// Lists the k likeliest tokens, 1 <= k <= n, likeliest first; ties go to the lowest ids. For a broken row, lists the
// first k ids.
static void top_logprobs(const Scores& scores, const LogTotal& total, int k, Entries& entries,
                         const SelectionRoom& room, int32_t* ids, float* values) {
  int kept = 0;
  if (total.log_sum == total.log_sum) {
    collect_top_k(scores, k, entries, room);
    for (int i = 0; i < entries.n; i++) room.keys[0][i] = descending_key(entries.x[i], entries.ids[i]);
    const uint64_t* keys = sort_keys(room.keys[0], entries.n, room.keys[1]);
    for (; kept < entries.n; kept++) {
      ids[kept] = static_cast<int32_t>(keys[kept]);
      values[kept] = logprob(total, value_of_key(keys[kept]));
    }
  }
  // The remaining entries are minus infinity or NaN.
  for (int id = 0; kept < k; id++) {
    if (total.log_sum == total.log_sum && scores.logits[id] != -INFINITE) continue;
    ids[kept] = id;
    values[kept++] = logprob(total, scores.logits[id]);
  }
}

}  // namespace PENSTOCK_LEVEL
