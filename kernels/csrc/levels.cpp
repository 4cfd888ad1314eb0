// Which instruction sets this machine has, and the C functions by which Python reaches a table of kernels.
#include <cstring>

#include "kernels.h"

namespace penstock {

namespace {

struct Level {
  const char* name;
  const Kernels* (*kernels)();  // with instructions of its own: called only where they are
};

// From the best on.
const Level LEVELS[] = {
    {"avx512_bf16", kernels_avx512_bf16},
    {"avx512", kernels_avx512},
    {"avx2", kernels_avx2},
    {"generic", kernels_generic},
};

bool runs_here(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!strcmp(name, "avx512_bf16"))
    return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (!strcmp(name, "avx512")) return avx512;
  if (!strcmp(name, "avx2")) return avx2;
#endif
  return !strcmp(name, "generic");
}

}  // namespace

// The named table, or the best for null; null where there is none of that name that runs here.
const Kernels* find_kernels(const char* name) {
  for (const Level& level : LEVELS) {
    if ((name && strcmp(name, level.name)) || !runs_here(level.name)) continue;
    if (const Kernels* kernels = level.kernels()) return kernels;
  }
  return nullptr;
}

}  // namespace penstock

PENSTOCK_API const penstock::Kernels* penstock_kernels(const char* name) { return penstock::find_kernels(name); }
