// A KV page in the layout of core/kernel_table.h, and writing a token to it.
//
// In units of 4-byte words all formats are alike: a word holds PER numbers of one token (keys) or of one dimension
// (values), the keys of a head are words [D / PER][16 tokens], and its values are words [16 / PER][D]. Keys of INT8 are
// stored with 128 added, since one operand of dot4 is unsigned.
#pragma once

#include "core/hadamard.h"
#include "core/kernel_table.h"
#include "core/simd.h"

namespace PENSTOCK_LEVEL {

namespace paged {

using namespace penstock;

constexpr int MAX_HEAD_DIM = 1024;
constexpr int WORD = 4;                  // bytes
constexpr int VECTOR = LANES * WORD;     // bytes
constexpr float INT8_LARGEST = 127.0f;

// The head size, padded to 16.
INLINE int padded_head(const KvLayout& layout) { return (layout.head_dim + LANES - 1) / LANES * LANES; }

// Whether a format stores the Hadamard transform of keys and values: all that round do.
constexpr bool transforms_heads(Format format) { return format != FORMAT_F32; }

// The numbers in a word.
INLINE int numbers_in_word(Format format) { return format == FORMAT_F32 ? 1 : format == FORMAT_BF16 ? 2 : 4; }

// The bytes of a head's keys in a page, and also of its values, which follow. The scales of INT8 come last.
INLINE int64_t section_bytes(const KvLayout& layout) {
  return static_cast<int64_t>(padded_head(layout)) * VECTOR / numbers_in_word(layout.format);
}

// The scales of the 16 tokens' values. The scales of their keys come before.
INLINE const float* value_scales(const uint8_t* values, int64_t section) {
  return reinterpret_cast<const float*>(values + section) + LANES;
}
INLINE const float* key_scales(const uint8_t* keys, int64_t section) {
  return reinterpret_cast<const float*>(keys + 2 * section);
}

// Spreads 64 or fewer bytes of one token's keys over the words of consecutive dimensions.
INLINE void scatter_words(uint8_t* keys, const void* numbers, int words) {
  for (int i = 0; i < words; i++) memcpy(keys + i * VECTOR, static_cast<const uint8_t*>(numbers) + i * WORD, WORD);
}

// Replaces the number of `bits` bits at `shift` in every word.
INLINE void replace_bits(uint8_t* words, Ints numbers, int bits, int shift) {
  const int32_t mask = static_cast<int32_t>(((1u << bits) - 1) << shift);
  store_ints(words, (load_ints(words) & ~mask) | ((numbers << shift) & mask));
}

static void write_f32(uint8_t* keys, uint8_t* values, int slot, int head_dim, const float* key, const float* value) {
  const int padded = (head_dim + LANES - 1) / LANES * LANES;
  for (int dim = 0; dim < head_dim; dim += LANES) {
    float lanes[LANES];
    store(lanes, load_up_to(key + dim, head_dim - dim));
    scatter_words(keys + dim * VECTOR + slot * WORD, lanes, LANES);
    if (values) store_ints(values + (slot * padded + dim) * WORD, as_ints(load_up_to(value + dim, head_dim - dim)));
  }
}

static void write_bf16(uint8_t* keys, uint8_t* values, int slot, int head_dim, const float* key, const float* value) {
  const int padded = (head_dim + LANES - 1) / LANES * LANES;
  for (int dim = 0; dim < head_dim; dim += LANES) {
    bf16 lanes[LANES];
    store_bf16(lanes, load_up_to(key + dim, head_dim - dim));
    scatter_words(keys + dim / 2 * VECTOR + slot * WORD, lanes, LANES / 2);
    if (!values) continue;
    Ints rounded = as_ints(narrowed(load_up_to(value + dim, head_dim - dim)));
    replace_bits(values + (slot / 2 * padded + dim) * WORD, rounded, 16, slot % 2 * 16);
  }
}

static void write_int8(uint8_t* keys, uint8_t* values, int slot, int head_dim, const float* key, const float* value) {
  const int padded = (head_dim + LANES - 1) / LANES * LANES;
  const float key_range = largest_magnitude(key, head_dim), value_range = largest_magnitude(value, head_dim);
  const float by_key = key_range > 0 ? INT8_LARGEST / key_range : 0;
  const float by_value = value_range > 0 ? INT8_LARGEST / value_range : 0;
  for (int dim = 0; dim < head_dim; dim += LANES) {
    Ints codes = to_ints_nearest(load_up_to(key + dim, head_dim - dim) * by_key) + 128;
    uint8_t lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = static_cast<uint8_t>(codes[i]);
    scatter_words(keys + dim / 4 * VECTOR + slot * WORD, lanes, LANES / 4);
    codes = to_ints_nearest(load_up_to(value + dim, head_dim - dim) * by_value);
    replace_bits(values + (slot / 4 * padded + dim) * WORD, codes, 8, slot % 4 * 8);
  }
  const float scales[2] = {key_range / INT8_LARGEST, value_range / INT8_LARGEST};
  uint8_t* at = values + padded * LANES + slot * WORD;
  memcpy(at, &scales[0], WORD);
  memcpy(at + VECTOR, &scales[1], WORD);
}

// Writes one head of a token; only its key if `values` is null.
INLINE void write_token(Format format, uint8_t* keys, uint8_t* values, int slot, int head_dim, const float* key,
                        const float* value) {
  alignas(VECTOR) float transformed[2][MAX_HEAD_DIM];
  if (transforms_heads(format)) {
    hadamard(key, head_dim, transformed[0]);
    key = transformed[0];
    if (values) hadamard(value, head_dim, transformed[1]);
    value = transformed[1];
  }
  if (format == FORMAT_F32)
    write_f32(keys, values, slot, head_dim, key, value);
  else if (format == FORMAT_BF16)
    write_bf16(keys, values, slot, head_dim, key, value);
  else
    write_int8(keys, values, slot, head_dim, key, value);
}

}  // namespace paged

// The tokens of a page share words, so one thread writes all of them, slot 0 first. Slot 0 zeroes the values and the
// scales. Keys of slots that are still empty may have any value, since masked scores are replaced.
static void write_kv(const penstock::KvLayout& layout, uint8_t* page, int slot, int tokens, const float* keys,
                     const float* values, int64_t stride) {
  using namespace paged;
  const int64_t section = section_bytes(layout);
  const int head_dim = layout.head_dim, end = slot + tokens, heads = layout.is_latent ? 1 : layout.kv_heads;
  // Head by head, so that the lines of a head stay in the L1 cache for all tokens.
  for (int head = 0; head < heads; head++, keys += head_dim, values += head_dim) {
    uint8_t* key_section = page + head * layout.head_bytes;
    uint8_t* value_section = layout.is_latent ? nullptr : key_section + section;
    const int64_t kept = layout.is_latent ? 0 : section;
    if (slot == 0) memset(key_section + kept, 0, static_cast<size_t>(layout.head_bytes - kept));
    const float *key = keys, *value = values;
    for (int at = slot; at < end; at++, key += stride, value += stride)
      write_token(layout.format, key_section, value_section, at, head_dim, key, value);
  }
}

}  // namespace PENSTOCK_LEVEL
