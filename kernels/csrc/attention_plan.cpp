// Cuts a step's attention into items, so that every thread has work: long contexts of few rows are spread over threads
// by their splits.
#include "step_run.h"

namespace penstock {

namespace {

// Items for each thread that are enough to keep all of them busy to the end; half as many are, if none is long.
constexpr int ITEMS_PER_THREAD = 8;
// Splits of the longest item that need not be cut then.
constexpr int MOST_SPLITS = 16;
// Room for partial results, at most. What does not fit is not cut: with so much to do, all threads are busy anyway.
constexpr int64_t MOST_PARTIAL_FLOATS = 1 << 25;

// Query positions [begin, end) of a row, with the splits that they see.
struct Tile {
  int32_t row, begin, end, first_split, last_split;
};

}  // namespace

AttentionPlan StepRun::plan_attention(const Layer& layer) {
  int kv_heads = model_.num_kv_heads;
  int64_t num_tiles = 0;
  for (int r = 0; r < step_.num_rows; r++) num_tiles += (rows_[r].end - rows_[r].start) / QUERY_TILE + 2;
  Tile* tiles = arena_.take<Tile>(num_tiles);
  num_tiles = 0;
  int64_t num_splits = 0;
  for (int r = 0; r < step_.num_rows; r++)
    for (int begin = rows_[r].start; begin < rows_[r].end;) {
      int next = (begin / QUERY_TILE + 1) * QUERY_TILE;
      int end = next < rows_[r].end ? next : rows_[r].end;
      int seen = layer.window > 0 && begin + 1 > layer.window ? begin + 1 - layer.window : 0;
      tiles[num_tiles++] = {r, begin, end, seen / SPLIT, (end - 1) / SPLIT + 1};
      num_splits += tiles[num_tiles - 1].last_split - tiles[num_tiles - 1].first_split;
      begin = end;
    }

  // With few tiles, a long one is cut: into pieces of so many splits that there are items enough.
  int64_t enough = static_cast<int64_t>(ITEMS_PER_THREAD) * threads_.used(), uncut = num_tiles * kv_heads;
  int64_t piece = num_splits;
  if (uncut < enough / 2)
    piece = num_splits * kv_heads / enough + 1;
  else if (uncut < enough && piece > MOST_SPLITS)
    piece = MOST_SPLITS;
  int64_t most = 0, cut = 0;
  for (int i = 0; i < num_tiles; i++) {
    int64_t splits = tiles[i].last_split - tiles[i].first_split;
    most += (splits + piece - 1) / piece * kv_heads;
    cut += kv_heads;
  }
  AttentionItem* items = arena_.take<AttentionItem>(most);
  AttentionItem* merges = arena_.take<AttentionItem>(cut);
  int32_t* merge_splits = arena_.take<int32_t>(cut);
  AttentionPlan plan = {items, 0, merges, merge_splits, 0, 0};
  Attention attention = {model_.kv, nullptr, model_.num_heads, 0, 0, 0, nullptr, nullptr, 0, nullptr, 0};
  int64_t split_floats = kernels_.partial_floats(attention) * (model_.num_heads / kv_heads);
  // From the last tile on: those of a prompt see more the later they are, and what is long should begin early.
  for (int64_t i = num_tiles - 1; i >= 0; i--)
    for (int head = 0; head < kv_heads; head++) {
      const Tile& tile = tiles[i];
      AttentionItem item = {tile.row, head, tile.begin, tile.end, tile.first_split, tile.last_split, -1};
      int splits = tile.last_split - tile.first_split;
      int64_t floats = split_floats * (tile.end - tile.begin);
      if (splits <= piece || plan.num_partial_floats + splits * floats > MOST_PARTIAL_FLOATS) {
        items[plan.num_items++] = item;
        continue;
      }
      for (int split = tile.first_split; split < tile.last_split; split += static_cast<int>(piece)) {
        item.split_begin = split;
        item.split_end = split + piece < tile.last_split ? split + static_cast<int>(piece) : tile.last_split;
        item.partial = plan.num_partial_floats + (split - tile.first_split) * floats;
        items[plan.num_items++] = item;
      }
      item.split_begin = tile.first_split;
      item.split_end = tile.last_split;
      item.partial = plan.num_partial_floats;
      merges[plan.num_merges] = item;
      merge_splits[plan.num_merges++] = splits;
      plan.num_partial_floats += splits * floats;
    }
  return plan;
}

}  // namespace penstock
