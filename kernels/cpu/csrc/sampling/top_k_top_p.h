// Top-k, top-p and min-p filters, by thresholds. The vocabulary is never sorted.
#pragma once

#include "sampling/simd.h"

namespace PENSTOCK_LEVEL {

static constexpr int NUM_BINS = 2048;
static constexpr double BINNED_NATS = 26.0;  // below the best; entries further below are in the last bin

// The scratch memory of selections. Each array has room for a row of logits, rounded up to 16, plus 16.
struct SelectionRoom {
  float* floats;
  uint64_t* keys[2];
  double* masses;  // NUM_BINS
};

// ------------------------------------------------------------------------------------------------------------- order

// Increases with x; 0 and -0 give the same.
INLINE uint32_t ordered_bits(float x) {
  float same = x + 0.0f;
  uint32_t bits;
  memcpy(&bits, &same, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Decreases with x; for equal x increases with the id.
INLINE uint64_t descending_key(float x, int32_t id) {
  return static_cast<uint64_t>(~ordered_bits(x)) << 32 | static_cast<uint32_t>(id);
}

INLINE float value_of_key(uint64_t key) {
  uint32_t bits = ~static_cast<uint32_t>(key >> 32);
  bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Sorts n keys whose lower halves are ascending already. Returns the array that holds the result, `keys` or `room`.
static const uint64_t* sort_keys(uint64_t* keys, int n, uint64_t* room) {
  if (n <= 48) {
    for (int i = 1; i < n; i++) {
      uint64_t key = keys[i];
      int at = i;
      for (; at > 0 && keys[at - 1] > key; at--) keys[at] = keys[at - 1];
      keys[at] = key;
    }
    return keys;
  }
  for (int shift = 32; shift < 64; shift += 8) {
    int32_t places[256] = {};
    for (int i = 0; i < n; i++) places[keys[i] >> shift & 255]++;
    if (places[keys[0] >> shift & 255] == n) continue;
    for (int digit = 0, before = 0; digit < 256; digit++) {
      int32_t count = places[digit];
      places[digit] = before;
      before += count;
    }
    for (int i = 0; i < n; i++) room[places[keys[i] >> shift & 255]++] = keys[i];
    uint64_t* sorted = room;
    room = keys;
    keys = sorted;
  }
  return keys;
}

// An entry's score, and how many of the entries equal to it are kept, lowest ids first.
struct Pivot {
  float value;
  int num_equal;
};

// The k-th largest of n values, 1 <= k <= n, found digit by digit of their ordered bits, highest digit first.
static Pivot kth_largest(const float* values, int n, int k, float* room) {
  const int shifts[3] = {21, 10, 0};
  uint32_t counts[2048];
  for (int step = 0; step < 3 && n > 1; step++) {
    const int shift = shifts[step];
    const uint32_t mask = shift ? 2047 : 1023;
    memset(counts, 0, sizeof(counts));
    for (int i = 0; i < n; i++) counts[ordered_bits(values[i]) >> shift & mask]++;
    uint32_t digit = mask;
    for (; counts[digit] < static_cast<uint32_t>(k); digit--) k -= static_cast<int>(counts[digit]);
    int kept = 0;
    for (int i = 0; i < n; i++) {
      float value = values[i];
      room[kept] = value;  // never past the place it was read from
      kept += (ordered_bits(value) >> shift & mask) == digit;
    }
    values = room;
    n = kept;
  }
  return {values[0], k};
}

// ----------------------------------------------------------------------------------------------------------- filters

// Keeps the entries above the pivot, and the pivot's number of those equal to it. The pivot is above minus infinity.
static void keep_to_pivot(Entries& entries, Pivot pivot) {
  Floats value = splat(pivot.value);
  int left = pivot.num_equal, kept = 0;
  for (int at = 0; at < entries.n; at += 16) {
    Floats x = load(entries.x + at);
    Ints ids = load_ints(entries.ids + at);
    uint32_t equal = lanes_equal(x, value);
    const uint32_t above = lanes_at_least(x, value) & ~equal;
    while (__builtin_popcount(equal) > left) equal ^= 0x80000000u >> __builtin_clz(equal);
    left -= __builtin_popcount(equal);
    const uint32_t lanes = above | equal;
    store_picked(entries.x + kept, x, lanes);
    store_picked(entries.ids + kept, ids, lanes);
    kept += __builtin_popcount(lanes);
  }
  entries.n = kept;
  fill_up(entries);
}

// Lists the k largest finite entries, 1 <= k, or all if there are fewer. Ties go to the lowest ids.
static void collect_top_k(const Scores& scores, int k, Entries& entries, const SelectionRoom& room) {
  // At least k entries reach the k-th largest maximum, and for a small k not many more do.
  int num_maxima = 16 * num_groups(scores.n);
  float floor = -INFINITE;
  if (k <= num_maxima / 2) floor = kth_largest(scores.maxima, num_maxima, k, room.floats).value;
  collect(scores, (floor - scores.best) / scores.temperature, entries);
  if (entries.n > k) keep_to_pivot(entries, kth_largest(entries.x, entries.n, k, room.floats));
}

// ln of the sum of e^x in float32, rounded like the distances that it is subtracted from.
static float log_total(const Entries& entries) {
  Doubles total = {};
  for (int at = 0; at < entries.n; at += 16) {
    const SixteenDoubles masses = exp_wide(load(entries.x + at));
    total += masses.low + masses.high;
  }
  return static_cast<float>(__builtin_log(sum(total)));
}

INLINE Ints bins_of(Floats x) {
  const float bins_per_nat = static_cast<float>(NUM_BINS / BINNED_NATS);
  return to_ints_nearest(min(x * -bins_per_nat, splat(NUM_BINS - 1)));
}

// The last entry that top-p keeps: the first one at which `before` plus the sum so far reaches the target. `ranked` is
// descending and padded with minus infinity to a multiple of 16.
static Pivot pivot_of_bin(const float* ranked, int count, float total, double before, double target) {
  int last = count - 1;
  double sum = 0.0;
  for (int at = 0; at < count; at += 16) {
    const SixteenDoubles sixteen = exp_wide(load(ranked + at) - total);
    double masses[16];
    memcpy(masses, &sixteen, sizeof(masses));
    const int end = count - at < 16 ? count - at : 16;
    for (int i = 0; i < end; i++) {
      sum += masses[i];
      if (before + sum < target) continue;
      last = at + i;
      at = count;
      break;
    }
  }
  int first = last;
  while (first > 0 && ranked[first - 1] == ranked[last]) first--;
  return {ranked[last], last - first + 1};
}

// Keeps the smallest set of the likeliest entries whose probability reaches `target`, and always the likeliest. The
// best score is 0. A histogram over distances from the best finds the bin with the last entry; only that bin is sorted.
static void keep_top_p(Entries& entries, double target, const SelectionRoom& room) {
  const float total = log_total(entries);
  double* masses = room.masses;
  memset(masses, 0, NUM_BINS * sizeof(double));
  for (int at = 0; at < entries.n; at += 16) {
    Floats x = load(entries.x + at);
    const SixteenDoubles sixteen = exp_wide(x - total);
    int32_t bins[16];
    double mass[16];
    store_ints(bins, bins_of(x));
    memcpy(mass, &sixteen, sizeof(mass));
    for (int i = 0; i < 16; i++) masses[bins[i]] += mass[i];
  }
  double before = 0.0;
  int crossing = 0;
  for (; crossing < NUM_BINS && before + masses[crossing] < target; crossing++) before += masses[crossing];
  if (crossing == NUM_BINS) return;  // because of rounding, even the sum of all falls short

  int count = 0;
  for (int at = 0; at < entries.n; at += 16) {
    Floats x = load(entries.x + at);
    uint32_t lanes = lanes_equal(to_floats(bins_of(x)), splat(static_cast<float>(crossing)));
    for (; lanes; lanes &= lanes - 1) {
      int i = __builtin_ctz(lanes);
      if (at + i < entries.n) room.keys[0][count++] = descending_key(x[i], 0);
    }
  }
  const uint64_t* keys = sort_keys(room.keys[0], count, room.keys[1]);
  float* ranked = room.floats;
  for (int i = 0; i < count; i++) ranked[i] = value_of_key(keys[i]);
  store(ranked + count, splat(-INFINITE));
  keep_to_pivot(entries, pivot_of_bin(ranked, count, total, before, target));
}

// Keeps the entries at least `min_p` times as likely as the likeliest, whose score is 0; min_p > 0.
static void keep_min_p(Entries& entries, float min_p) {
  keep_to_pivot(entries, {static_cast<float>(__builtin_log(static_cast<double>(min_p))), entries.n});
}

}  // namespace PENSTOCK_LEVEL
