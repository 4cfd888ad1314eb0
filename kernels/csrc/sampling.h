#pragma once
namespace PENSTOCK_LEVEL {
using namespace penstock;
static int64_t sampling_scratch(int) { return 0; }
static void sample(float*, int, const SamplingRow&, uint8_t*, SampledToken*, int32_t*, float*) {}
static void logprobs(const float*, int, int, int, uint8_t*, float*, int32_t*, float*) {}
}
