// Attention over pages, one item at a time: for each split the scores of a tile of queries, their softmax, and the
// weighted values. The result of a split for one query head is a record of floats: the largest score, the sum of the
// weights, 14 unused floats, and D weighted values. `merge_record` merges the records of a query's splits in order of
// position, either immediately, if an item has all the splits, or later, from memory, by `merge`. Both give the same
// bits.
//
// In memory the records of a tile of queries are [split][query][head of the group], beginning with the tile's first
// split that is computed. An item whose splits begin later has its first record
//   (split_begin - first split) * (query_end - query_begin) * (num_heads / kv_heads) * partial_floats
// floats after the tile's first; `merge` is passed the tile's first. The tile may begin at any split if the splits
// before it are outside the window of all the tile's queries. A record of a split that is completely masked has no
// effect.
#pragma once

#include "attention/amx.h"
#include "attention/kv_formats.h"
#include "attention/tiles.h"
#include "core/kernel_table.h"
#include "attention/kv_page.h"
#include "core/simd.h"

namespace PENSTOCK_LEVEL {

namespace paged {

constexpr int RECORD_HEAD = LANES;  // floats before a record's values
constexpr int RECORD_SUM = 1;

INLINE int group_size(const PagedAttention& attention) { return attention.num_heads / attention.kv.kv_heads; }

INLINE int64_t record_floats(const PagedAttention& attention) { return RECORD_HEAD + padded_head(attention.kv); }

// ---------------------------------------------------------------------------------------------------------- records

INLINE void clear_record(float* record, int64_t floats) {
  memset(record, 0, static_cast<size_t>(floats) * sizeof(float));
  record[0] = -__builtin_inff();
}

// Not inlined, so that both callers round alike. The first record that is not completely masked becomes the total.
__attribute__((noinline)) static void merge_record(float* total, const float* record, int64_t floats) {
  if (record[0] == -__builtin_inff()) return;
  if (total[0] == -__builtin_inff()) {
    memcpy(total, record, static_cast<size_t>(floats) * sizeof(float));
    return;
  }
  const float top = record[0] > total[0] ? record[0] : total[0];
  const Floats old = exp(splat(total[0] - top)), more = exp(splat(record[0] - top));
  total[0] = top;
  for (int64_t i = RECORD_HEAD; i < floats; i += LANES)
    store(total + i, fma(load(record + i), more, load(total + i) * old));
  total[RECORD_SUM] = record[RECORD_SUM] * more[0] + total[RECORD_SUM] * old[0];
}

// Writes the output of one query head. A sink is one more weight, without a value.
__attribute__((noinline)) static void write_output(const PagedAttention& attention, int head, const float* total,
                                                   float* out) {
  float by = 1 / total[RECORD_SUM];
  if (attention.sinks) {
    const float sink = attention.sinks[head], top = sink > total[0] ? sink : total[0];
    const float kept = exp(splat(total[0] - top))[0];
    by = kept / (total[RECORD_SUM] * kept + exp(splat(sink - top))[0]);
  }
  const int head_dim = attention.kv.head_dim;
  const float* values = total + RECORD_HEAD;
  alignas(VECTOR) float transformed[MAX_HEAD_DIM];
  if (transforms_heads(attention.kv.format)) {
    hadamard(values, head_dim, transformed);
    by /= static_cast<float>(hadamard_block(head_dim));
    values = transformed;
  }
  for (int dim = 0; dim < head_dim; dim += LANES) {
    const Floats scaled = load(values + dim) * by;
    if (dim + LANES <= head_dim)
      store(out + dim, scaled);
    else
      store_some(out + dim, scaled, head_dim - dim);
  }
}

// ------------------------------------------------------------------------------------------------------------ an item

// Offsets in the scratch memory, in bytes.
struct Scratch {
  int64_t queries;  // factors of all rows of the item
  int64_t query;    // one Query per row
  int64_t totals;   // one record per row
  int64_t result;   // one record
  int64_t scores;   // of a block
  int64_t values;   // of a block
  int64_t turned;   // keys of a split in the layout of values, if they are the values
  int64_t bytes;
};

INLINE Scratch scratch_of(const PagedAttention& attention) {
  const int64_t rows = static_cast<int64_t>(QUERY_TILE) * group_size(attention), padded = padded_head(attention.kv);
  const int64_t record = record_floats(attention) * WORD;
  Scratch at = {};
  at.query = at.queries + rows * padded * WORD;  // enough for every format
  at.totals = at.query + (rows * static_cast<int64_t>(sizeof(Query)) + VECTOR - 1) / VECTOR * VECTOR;
  at.result = at.totals + rows * record;
  at.scores = at.result + record;
  at.values = at.scores + BLOCK_ROWS * SPLIT_BYTES;
  at.turned = at.values + BLOCK_ROWS * padded * WORD;
  at.bytes = at.turned + (attention.kv.is_latent ? SPLIT_PAGES * section_bytes(attention.kv) : 0);
  return at;
}

// An item's work for one of its KV heads. Its rows are queries times heads of the group.
struct Work {
  const PagedAttention& attention;
  const AttentionRow& row;
  const AttentionItem& item;
  int kv_head;
  int group;
  int rows;
  int64_t record;  // floats
  Scratch at;
  uint8_t* scratch;
  float* partials;

  Query* query() const { return reinterpret_cast<Query*>(scratch + at.query); }
  float* total(int index) const { return reinterpret_cast<float*>(scratch + at.totals) + index * record; }
  // The place of a row's record of a split: among the partial results, or in the total if it is the first; else null.
  float* record_of(int split, int index) const {
    const int64_t before = static_cast<int64_t>(split - item.split_begin) * rows;
    if (item.partial >= 0) return partials + item.partial + (before + index) * record;
    return before == 0 ? total(index) : nullptr;
  }
  // The place of a page's keys in the layout of values.
  uint8_t* turned(int page) const {
    return scratch + at.turned + page % SPLIT_PAGES * section_bytes(attention.kv);
  }
  // The positions that a row attends to: [first, last).
  int last(int index) const { return item.query_begin + index / group + 1; }
  int first(int index) const { return first_seen(last(index) - 1, attention.window, attention.chunked); }
};

// The factors of the queries from row `index` on.
template <class Kv>
INLINE uint8_t* factors_of(const Work& work, int index) {
  const int64_t row_bytes = Kv::ROWS * padded_head(work.attention.kv) / Kv::PER * Kv::FACTOR_BYTES;
  return work.scratch + work.at.queries + index * row_bytes;
}

template <class Kv>
static void prepare_queries(const Work& work) {
  const PagedAttention& attention = work.attention;
  const int head_dim = attention.kv.head_dim, padded = padded_head(attention.kv);
  const bool transforms = transforms_heads(attention.kv.format);
  const float scale = transforms ? attention.scale / static_cast<float>(hadamard_block(head_dim)) : attention.scale;
  for (int i = 0; i < work.rows; i++) {
    const int64_t token = work.row.token + work.item.query_begin - work.row.start + i / work.group;
    const int head = work.kv_head * work.group + i % work.group;
    const float* x = attention.queries + token * attention.query_stride + static_cast<int64_t>(head) * head_dim;
    alignas(VECTOR) float transformed[MAX_HEAD_DIM];
    if (transforms) {
      hadamard(x, head_dim, transformed);
      x = transformed;
    }
    work.query()[i] = Kv::prepare_query(x, head_dim, padded, scale, factors_of<Kv>(work, i));
  }
}

// Computes rows [begin, end) against the pages of a split that any of them attends to.
template <class Kv>
static Block make_block(const Work& work, int split, int begin, int end) {
  const PagedAttention& attention = work.attention;
  const KvLayout& layout = attention.kv;
  const int padded = padded_head(layout);
  Block block;
  block.rows = (end - begin) * Kv::ROWS;
  block.padded = padded;
  block.section = section_bytes(layout);
  block.streams = begin == 0;
  block.queries = factors_of<Kv>(work, begin);
  block.scores = work.scratch + work.at.scores;
  block.values = work.scratch + work.at.values;
  block.first_page = larger(work.first(begin), split * SPLIT) / LANES;
  const int end_page = (smaller(work.last(end - 1), (split + 1) * SPLIT) + LANES - 1) / LANES;
  block.num_pages = larger(end_page - block.first_page, 0);
  const int64_t head_bytes = layout.is_latent ? 0 : layout.head_bytes;  // to the next head
  const uint8_t* head = attention.pages + work.kv_head * head_bytes;
  for (int i = 0; i < block.num_pages; i++) {
    block.sections[i] = head + work.row.pages[block.first_page + i] * layout.page_bytes;
    block.sections[block.num_pages + i] =
        layout.is_latent ? work.turned(block.first_page + i) : block.sections[i] + block.section;
  }
  // After it comes the next split, or the next head's first.
  const int last_page = (smaller(work.last(work.rows - 1), work.item.split_end * SPLIT) - 1) / LANES;
  int next = block.first_page + block.num_pages;
  if (next > last_page && work.kv_head + 1 < work.item.kv_head_end) {
    next = larger(work.first(0), work.item.split_begin * SPLIT) / LANES;
    head += head_bytes;
  }
  for (int i = 0; i < AHEAD; i++)
    block.sections[2 * block.num_pages + i] =
        next + i <= last_page ? head + work.row.pages[next + i] * layout.page_bytes : nullptr;
  return block;
}

// Writes the keys of the pages of a split that any row attends to in the layout of values.
template <class Kv>
static void turn_pages(const Work& work, int split) {
  const PagedAttention& attention = work.attention;
  const int end = (smaller(work.last(work.rows - 1), (split + 1) * SPLIT) + LANES - 1) / LANES;
  for (int page = larger(work.first(0), split * SPLIT) / LANES; page < end; page++)
    Kv::turn_keys(attention.pages + work.row.pages[page] * attention.kv.page_bytes, padded_head(attention.kv),
                  work.turned(page));
}

// Scales the scores of one row and masks all but positions [first, last), counted from the block's first; returns the
// largest.
template <class Kv>
static float mask_scores(const Block& block, uint8_t* scores, const Query& query, float soft_cap, int first, int last) {
  const float nothing = -__builtin_inff();
  Floats best = splat(nothing);
  for (int page = 0; page < block.num_pages; page++) {
    Floats x = Kv::score(scores, page, query, block.keys()[page], block.section);
    if (soft_cap != 0) x = splat(soft_cap) - 2 * soft_cap / (exp(x * (2 / soft_cap)) + 1);
    const int begin = page * LANES;
    if (begin < first || begin + LANES > last) {
      const Floats position = to_floats(lane_numbers() + begin);
      x = where_less(position, splat(static_cast<float>(first)), splat(nothing), x);
      x = where_less(position, splat(static_cast<float>(last)), x, splat(nothing));
    }
    store_ints(scores + page * VECTOR, as_ints(x));
    best = max(best, x);
  }
  return largest(best);
}

template <class Kv>
static void attend_block(const Work& work, int split, int begin, int end) {
  Block block = make_block<Kv>(work, split, begin, end);
  if (block.num_pages == 0) {
    for (int i = begin; i < end; i++) {
      if (float* record = work.record_of(split, i)) clear_record(record, work.record);
    }
    return;
  }
  multiply_keys<Kv>(block);
  Weights weights[BLOCK_ROWS];
  float tops[BLOCK_ROWS];
  const int origin = block.first_page * LANES;
  for (int i = begin; i < end; i++) {
    uint8_t* scores = block.scores + (i - begin) * Kv::ROWS * SPLIT_BYTES;
    const float top = mask_scores<Kv>(block, scores, work.query()[i], work.attention.soft_cap, work.first(i) - origin,
                                      work.last(i) - origin);
    // If everything is masked, every weight is e^-inf, whatever is subtracted.
    tops[i - begin] = top;
    weights[i - begin] = Kv::weigh(scores, block.num_pages, top > -__builtin_inff() ? top : 0,
                                   block.page_values(), block.section);
  }
  multiply_values<Kv>(block);
  for (int i = begin; i < end; i++) {
    float* const place = work.record_of(split, i);
    float* const record = place ? place : reinterpret_cast<float*>(work.scratch + work.at.result);
    const uint8_t* values = block.values + static_cast<int64_t>(i - begin) * Kv::ROWS * block.padded * WORD;
    clear_record(record, RECORD_HEAD);
    record[0] = tops[i - begin];
    record[RECORD_SUM] = weights[i - begin].sum;
    for (int dim = 0; dim < block.padded; dim += LANES)
      store(record + RECORD_HEAD + dim, Kv::value(values + dim * WORD, block.padded * WORD, weights[i - begin]));
    if (!place) merge_record(work.total(i), record, work.record);
  }
}

INLINE void write_row(const Work& work, int index, const float* total) {
  const PagedAttention& attention = work.attention;
  const int64_t token = work.row.token + work.item.query_begin - work.row.start + index / work.group;
  const int head = work.kv_head * work.group + index % work.group;
  float* out = attention.output + token * attention.output_stride + static_cast<int64_t>(head) * attention.kv.head_dim;
  write_output(attention, head, total, out);
}

template <class Kv>
static void attend_head(const Work& work) {
  prepare_queries<Kv>(work);
  constexpr int STEP = BLOCK_ROWS / Kv::ROWS;
  for (int split = work.item.split_begin; split < work.item.split_end; split++) {
    if constexpr (Kv::PER < 4) {  // latents are not stored as INT8
      if (work.attention.kv.is_latent) turn_pages<Kv>(work, split);
    }
    for (int begin = 0; begin < work.rows; begin += STEP)
      attend_block<Kv>(work, split, begin, smaller(begin + STEP, work.rows));
  }
  for (int i = 0; work.item.partial < 0 && i < work.rows; i++) write_row(work, i, work.total(i));
}

static Work make_work(const PagedAttention& attention, const AttentionRow& row, const AttentionItem& item, int kv_head,
                      uint8_t* scratch, float* partials) {
  const int group = group_size(attention), rows = (item.query_end - item.query_begin) * group;
  return {attention, row, item, kv_head, group, rows, record_floats(attention), scratch_of(attention), scratch,
          partials};
}

}  // namespace paged

static int64_t attention_scratch(const penstock::PagedAttention& attention) {
  return paged::scratch_of(attention).bytes;
}

static int64_t partial_floats(const penstock::PagedAttention& attention) { return paged::record_floats(attention); }

static void attend(const penstock::PagedAttention& attention, const penstock::AttentionRow& row,
                   const penstock::AttentionItem& item, uint8_t* scratch, float* partials) {
  using namespace paged;
  for (int head = item.kv_head_begin; head < item.kv_head_end; head++) {
    const Work work = make_work(attention, row, item, head, scratch, partials);
    if (attention.kv.format == FORMAT_F32)
      attend_head<F32Kv>(work);
    else if (attention.kv.format == FORMAT_BF16)
      attend_head<Bf16Kv>(work);
    else
      attend_head<Int8Kv>(work);
  }
#if defined(__AMX_BF16__)
  release_tiles();
#endif
}

static void merge(const penstock::PagedAttention& attention, const penstock::AttentionRow& row,
                  const penstock::AttentionItem& item, int splits, const float* partials) {
  using namespace paged;
  const Work work = make_work(attention, row, item, item.kv_head_begin, nullptr, nullptr);
  for (int i = 0; i < work.rows; i++) {
    float total[RECORD_HEAD + MAX_HEAD_DIM];
    clear_record(total, work.record);
    for (int split = 0; split < splits; split++)
      merge_record(total, partials + item.partial + (static_cast<int64_t>(split) * work.rows + i) * work.record,
                   work.record);
    write_row(work, i, total);
  }
}

}  // namespace PENSTOCK_LEVEL
