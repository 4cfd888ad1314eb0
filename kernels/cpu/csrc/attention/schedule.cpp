// Divides a step's attention into items, so that every thread has work. Long contexts of few rows are distributed over
// threads by splits.
#include "model/step.h"

namespace penstock {

namespace {

// Items per thread that are enough to keep all threads busy to the end. Half as many suffice if none is long.
constexpr int ITEMS_PER_THREAD = 8;
// The maximum number of splits in an item that does not count as long.
constexpr int MOST_SPLITS = 16;
// The maximum room for partial results. Work beyond it is not divided: with that much to do, all threads are busy
// anyway.
constexpr int64_t MOST_PARTIAL_FLOATS = 1 << 25;

// Query positions [begin, end) of a row, and the splits that they see.
struct Tile {
  int32_t row, begin, end, first_split, last_split;

  int splits() const { return last_split - first_split; }
};

// Divides rows into tiles; returns their number. Tiles begin with the row's first token, so a row with few tokens, such
// as one with drafts, reads its KV once, whatever its position.
int64_t find_tiles(const AttentionRow* rows, int num_rows, int window, bool chunked, Tile* tiles) {
  int64_t num_tiles = 0;
  for (int r = 0; r < num_rows; r++)
    for (int begin = rows[r].start; begin < rows[r].end;) {
      int end = begin + QUERY_TILE < rows[r].end ? begin + QUERY_TILE : rows[r].end;
      tiles[num_tiles++] = {r, begin, end, first_seen(begin, window, chunked) / SPLIT, (end - 1) / SPLIT + 1};
      begin = end;
    }
  return num_tiles;
}

// The items that tiles are divided into.
class Items {
 public:
  Items(Arena& arena, int64_t items, int64_t merges, int64_t piece, int64_t split_floats)
      : items_(arena.take<AttentionItem>(items)), merges_(arena.take<AttentionItem>(merges)),
        merge_splits_(arena.take<int32_t>(merges)), piece_(piece), split_floats_(split_floats),
        plan_{items_, 0, merges_, merge_splits_, 0, 0} {}

  const AttentionPlan& plan() const { return plan_; }

  // As one item, if no more are needed or there is no room for more.
  void add(const Tile& tile, int head, int head_end) {
    AttentionItem item = {tile.row, head, head_end, tile.begin, tile.end, tile.first_split, tile.last_split, -1};
    int64_t floats = split_floats_ * (tile.end - tile.begin), begin = plan_.num_partial_floats;
    if (tile.splits() <= piece_ || begin + tile.splits() * floats > MOST_PARTIAL_FLOATS) {
      items_[plan_.num_items++] = item;
      return;
    }
    for (int split = tile.first_split; split < tile.last_split; split += static_cast<int>(piece_)) {
      item.split_begin = split;
      item.split_end = split + piece_ < tile.last_split ? split + static_cast<int>(piece_) : tile.last_split;
      item.partial = begin + (split - tile.first_split) * floats;
      items_[plan_.num_items++] = item;
    }
    item.split_begin = tile.first_split;
    item.split_end = tile.last_split;
    item.partial = begin;
    merges_[plan_.num_merges] = item;
    merge_splits_[plan_.num_merges++] = tile.splits();
    plan_.num_partial_floats += tile.splits() * floats;
  }

 private:
  AttentionItem *items_, *merges_;
  int32_t* merge_splits_;
  int64_t piece_, split_floats_;
  AttentionPlan plan_;
};

}  // namespace

AttentionPlan StepRun::plan_attention(const DecoderLayer& layer) {
  int kv_heads = layer.kv.kv_heads;
  int64_t num_tiles = 0, num_splits = 0, most = 0;
  for (int r = 0; r < num_attention_rows_; r++) num_tiles += (rows_[r].end - rows_[r].start) / QUERY_TILE + 1;
  Tile* tiles = arena_.take<Tile>(num_tiles);
  num_tiles = find_tiles(rows_, num_attention_rows_, layer.window, model_.chunked_windows, tiles);
  for (int i = 0; i < num_tiles; i++) num_splits += tiles[i].splits();

  // With few tiles, long ones are divided, into pieces short enough to give all threads work.
  int64_t enough = static_cast<int64_t>(ITEMS_PER_THREAD) * threads_.used(), uncut = num_tiles * kv_heads;
  int64_t fair = num_splits * kv_heads / enough, piece = num_splits;
  if (uncut < enough / 2)
    piece = fair + 1;
  else if (uncut < enough && piece > MOST_SPLITS)
    piece = MOST_SPLITS;
  for (int i = 0; i < num_tiles; i++) most += (tiles[i].splits() + piece - 1) / piece * kv_heads;
  PagedAttention attention = {layer.kv, nullptr, model_.num_heads, 0, 0, 0, 0, nullptr, nullptr, 0, nullptr, 0};
  int64_t split_floats = kernels_.partial_floats(attention) * (model_.num_heads / kv_heads);
  Items items(arena_, most, uncut, piece, split_floats);
  // Last tile first: later tiles of a prompt see more positions, and long items should start early. The tiles of a row
  // read the same pages, head by head, so that these stay in cache. If a row has one tile, an item has several heads,
  // up to its share: the pages of a head are prefetched while the previous head is computed.
  for (int64_t last = num_tiles - 1, first; last >= 0; last = first - 1) {
    for (first = last; first > 0 && tiles[first - 1].row == tiles[last].row;) first--;
    int splits = tiles[last].splits();
    int heads = first < last || splits > piece || splits > fair ? 1 : static_cast<int>(fair / splits);
    for (int head = 0; head < kv_heads; head += heads)
      for (int64_t i = last; i >= first; i--)
        items.add(tiles[i], head, head + heads < kv_heads ? head + heads : kv_heads);
  }
  return items.plan();
}

}  // namespace penstock
