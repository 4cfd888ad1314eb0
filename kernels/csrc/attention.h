#pragma once
namespace PENSTOCK_LEVEL {
using namespace penstock;
static void write_kv(const KvLayout&, uint8_t*, int, const float*, const float*) {}
static int64_t attention_scratch(const Attention&) { return 0; }
static int64_t partial_floats(const Attention&) { return 0; }
static void attend(const Attention&, const AttentionRow&, const AttentionItem&, uint8_t*, float*) {}
static void merge(const Attention&, const AttentionRow&, const AttentionItem&, int, const float*) {}
}
