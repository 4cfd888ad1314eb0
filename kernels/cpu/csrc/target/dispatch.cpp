// Detects the machine's instruction sets, and returns the tables of kernels to Python.
#include <cstring>

#include "core/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace penstock {

namespace {

struct Level {
  const char* name;
  const Kernels* (*kernels)();  // may use its instruction set: called only if the machine has it
};

// Best first.
const Level LEVELS[] = {
    {"amx", kernels_amx},
    {"avx512_bf16", kernels_avx512_bf16},
    {"avx512", kernels_avx512},
    {"avx2", kernels_avx2},
    {"generic", kernels_generic},
};

#if defined(__x86_64__)

// Whether the processor has tiles of bfloat16 and of bytes, and the system lets this process use them. Linux requires a
// process to request them, once for all threads, since the tiles make the saved state of its threads larger.
bool has_tiles() {
#if defined(PENSTOCK_SOFTWARE_TILES)
  return true;
#elif defined(__linux__) && defined(SYS_arch_prctl)
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;
  constexpr int ASK_FOR_STATE = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE | INT8)) != (BF16 | TILE | INT8)) return false;
  return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
#else
  return false;
#endif
}

#endif

bool runs_here(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (!strcmp(name, "amx")) return avx512_bf16 && has_tiles();
  if (!strcmp(name, "avx512_bf16")) return avx512_bf16;
  if (!strcmp(name, "avx512")) return avx512;
  if (!strcmp(name, "avx2")) return avx2;
#endif
  return !strcmp(name, "generic");
}

}  // namespace

// The named table, or the best one if `name` is null; null if no table of that name runs here.
const Kernels* find_kernels(const char* name) {
  for (const Level& level : LEVELS) {
    if ((name && strcmp(name, level.name)) || !runs_here(level.name)) continue;
    if (const Kernels* kernels = level.kernels()) return kernels;
  }
  return nullptr;
}

}  // namespace penstock

PENSTOCK_API const penstock::Kernels* penstock_kernels(const char* name) { return penstock::find_kernels(name); }
