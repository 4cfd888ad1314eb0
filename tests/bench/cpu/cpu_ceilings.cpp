// What one core of this machine can do at best: read memory, and multiply in registers alone. Compiled where it runs.
#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#if defined(__AVX512F__)
typedef __m512 Register;
#define OPAQUE(x) asm volatile("" : "+v"(x))
#elif defined(__AVX2__)
typedef __m256 Register;
#define OPAQUE(x) asm volatile("" : "+x"(x))
#else
typedef float Register __attribute__((vector_size(16)));
#define OPAQUE(x) asm volatile("" : "+m"(x))
#endif

// Independent sums: more than an instruction's latency times its rate, and fewer than there are registers.
constexpr int CHAINS = sizeof(Register) == 64 ? 16 : 12;

enum Kind : int32_t { KIND_F32 = 0, KIND_BF16 = 1, KIND_INT8 = 2 };

// Multiplications and additions of one instruction, two for each product; 0 where the machine has no such instruction.
template <Kind kind>
constexpr int work() {
#if defined(__AVX512BF16__)
  if (kind == KIND_BF16) return 64;
#endif
#if defined(__AVX512VNNI__)
  if (kind == KIND_INT8) return 128;
#endif
  return kind == KIND_F32 ? sizeof(Register) / 4 * 2 : 0;
}

template <Kind kind>
Register multiply(Register sum, Register a, Register b) {
#if defined(__AVX512BF16__)
  if (kind == KIND_BF16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
#if defined(__AVX512VNNI__)
  if (kind == KIND_INT8)
    return _mm512_castsi512_ps(
        _mm512_dpbusd_epi32(_mm512_castps_si512(sum), _mm512_castps_si512(a), _mm512_castps_si512(b)));
#endif
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, sum);
#else
  return a * b + sum;
#endif
}

template <Kind kind>
int64_t run(int64_t rounds) {
  Register sums[CHAINS] = {}, a = {}, b = {};
  OPAQUE(a);
  OPAQUE(b);
  for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 16
    for (int j = 0; j < CHAINS; j++) {
      sums[j] = multiply<kind>(sums[j], a, b);
      OPAQUE(sums[j]);
    }
  return rounds * CHAINS * work<kind>();
}

}  // namespace

// Multiplies so many rounds; returns the operations that were done, 0 where there is no such instruction.
EXPORT int64_t compute(int32_t kind, int64_t rounds) {
  if (kind == KIND_BF16) return work<KIND_BF16>() ? run<KIND_BF16>(rounds) : 0;
  if (kind == KIND_INT8) return work<KIND_INT8>() ? run<KIND_INT8>(rounds) : 0;
  return run<KIND_F32>(rounds);
}

// Reads memory once, a multiple of 512 bytes.
EXPORT uint64_t read_memory(const uint64_t* memory, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(64), may_alias));
  Words sums[8] = {};
  for (int64_t i = 0; i < bytes; i += 512)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      const char* line = reinterpret_cast<const char*>(memory) + i + j * 64;
      __builtin_prefetch(line + 4096);
      sums[j] += *reinterpret_cast<const Words*>(line);
    }
  uint64_t sum = 0;
  for (auto& some : sums)
    for (int i = 0; i < 8; i++) sum += some[i];
  return sum;
}
