// Latent attention: what it computes before and after attention to the vectors that it caches (see Latent).
#include <cstring>

#include "model/step.h"

namespace penstock {

// Computes all tokens' queries of cached vectors, and writes these to their pages.
void StepRun::find_latents(const DecoderLayer& layer, uint8_t* pages) {
  const Latent& latent = layer.latent;
  const int64_t size = latent.rotary + latent.unrotated;
  HeadRows queries = {qkv_ + kv_size_, qkv_size_, size};
  if (latent.query.num_parts) {
    each(num_rows_, [&](int row, int) {
      float* x = queries.data + row * queries.row_stride;
      kernels_.rms_norm(x, latent.query_norm, latent.query.parts[0].columns, latent.norm_eps, x);
    });
    Prepared inputs = prepare(latent.query, queries.data, queries.row_stride, num_rows_, Norm{});
    queries = {heads_, model_.num_heads * size, size};
    product(latent.query, inputs, queries.data, queries.row_stride, OUTPUT_STORE);
  }
  multiply_heads(latent.absorb, {queries.data + latent.rotary, queries.row_stride, queries.head_stride},
                 {queries_ + latent.rotary, query_size_, head_dim_});
  spent_on(STAGE_QKV);

  const int half = model_.ropes[layer.rope].half;
  const float* angles = angles_ + layer.rope * step_.num_tokens * most_angles_;
  // One thread writes a whole page, since its slots are interleaved.
  each(num_page_items_, [&](int i, int) {
    const PageItem& item = page_items_[i];
    const AttentionRow& row = rows_[item.row];
    const int64_t first = row.token + item.begin - row.start;
    const int count = item.end - item.begin;
    for (int64_t token = first; token < first + count; token++) {
      const float* cosines = angles + token * most_angles_;
      float* cached = qkv_ + token * qkv_size_;
      kernels_.rotate(cached, cosines, cosines + half, half);
      kernels_.rms_norm(cached + latent.rotary, latent.norm, latent.rank, latent.norm_eps, cached + latent.rotary);
      for (int head = 0; head < model_.num_heads; head++) {
        float* query = queries_ + token * query_size_ + head * head_dim_;
        memcpy(query, queries.data + token * queries.row_stride + head * queries.head_stride,
               static_cast<size_t>(latent.rotary) * sizeof(float));
        kernels_.rotate(query, cosines, cosines + half, half);
      }
    }
    const float* cached = qkv_ + first * qkv_size_;
    uint8_t* page = pages + row.pages[item.begin / LANES] * model_.page_bytes;
    kernels_.write_kv(layer.kv, page, item.begin % LANES, count, cached, cached, qkv_size_);
  });
}

// Returns the values of all heads, (rows, heads, value_size), from the weighted means of latents.
const float* StepRun::expand_latents(const Latent& latent) {
  const int64_t size = latent.value_size;
  multiply_heads(latent.expand, {mixed_ + latent.rotary, query_size_, head_dim_},
                 {heads_, model_.num_heads * size, size});
  return heads_;
}

// out = the head's matrix times x, for each row and head. All matrices have the same shape and format.
void StepRun::multiply_heads(const Matrix* matrices, const HeadRows& x, const HeadRows& out) {
  const Matrix& first = matrices[0];
  const int64_t bytes = kernels_.input_bytes(first.format, first.columns, first.group);
  const int rows = num_rows_, num_heads = model_.num_heads;
  Arena::Mark before = arena_.mark();
  uint8_t* inputs = arena_.take<uint8_t>(static_cast<int64_t>(num_heads) * rows * bytes);
  each(num_heads * rows, [&](int i, int) {
    const float* from = x.data + i % rows * x.row_stride + i / rows * x.head_stride;
    kernels_.prepare(first.format, first.columns, first.group, from, inputs + i * bytes);
  });
  threads_.run(num_heads, [&](int head, int) {
    Inputs of_head = {inputs + static_cast<int64_t>(head) * rows * bytes, bytes, rows};
    GemmOutput to = {out.data + head * out.head_stride, out.row_stride, OUTPUT_STORE, ACTIVATION_SILU, 0, 0};
    kernels_.product(matrices[head], of_head, 0, (first.rows + LANES - 1) / LANES, to);
  });
  arena_.give_back(before);
}

}  // namespace penstock
