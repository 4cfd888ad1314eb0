// Detects the machine's instruction sets, and returns the tables of kernels to Python.
#include <cstring>

#include "core/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace penstock {

namespace {

struct Level {
  const char* name;
  const Kernels* (*kernels)();  // may use its instruction set: called only if the machine has it
};

// Best first. The levels of other kinds of machines are null.
const Level LEVELS[] = {
    {"amx", kernels_amx},
    {"avx512_bf16", kernels_avx512_bf16},
    {"avx512_vnni", kernels_avx512_vnni},
    {"avx512", kernels_avx512},
    {"avx_vnni", kernels_avx_vnni},
    {"avx2", kernels_avx2},
    {"neon_bf16", kernels_neon_bf16},
    {"neon_dot", kernels_neon_dot},
    {"neon", kernels_neon},
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

struct Extensions {
  bool avx2 = false, avx_vnni = false, avx512 = false, avx512_vnni = false, avx512_bf16 = false;
};

bool has(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

// What the processor has and the system saves for each thread. Read from the processor, because not every compiler's
// runtime library implements __builtin_cpu_supports: Zig's reports nothing.
Extensions read_extensions() {
  constexpr unsigned FMA = 1u << 12, OSXSAVE = 1u << 27, F16C = 1u << 29;                    // leaf 1, ecx
  constexpr unsigned AVX2 = 1u << 5, BMI2 = 1u << 8;                                         // leaf 7, ebx
  constexpr unsigned F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31;              // leaf 7, ebx
  constexpr unsigned VNNI = 1u << 11;                                                        // leaf 7, ecx
  constexpr unsigned AVX_VNNI = 1u << 4, BF16 = 1u << 5;                                     // leaf 7, subleaf 1, eax
  constexpr unsigned YMM = 0x06, ZMM = 0xe6;                                                 // XCR0
  Extensions found;
  unsigned a, b, c, d, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, FMA | OSXSAVE | F16C)) return found;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!has(saved, YMM) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = has(b, AVX2 | BMI2);
  found.avx512 = found.avx2 && has(saved, ZMM) && has(b, F | DQ | BW | VL);
  found.avx512_vnni = found.avx512 && has(c, VNNI);
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) a = 0;
  found.avx512_bf16 = found.avx512_vnni && has(a, BF16);
#if defined(PENSTOCK_SOFTWARE_DOT)
  a |= AVX_VNNI;
#endif
  found.avx_vnni = found.avx2 && has(a, AVX_VNNI);
  return found;
}

bool is_from_intel() {
  unsigned highest, name[3];
  return __get_cpuid(0, &highest, &name[0], &name[2], &name[1]) && !memcmp(name, "GenuineIntel", sizeof name);
}

// Whether a level that runs here is slower than a later one. Intel's cores start a VDPBF16PS every second cycle, and two
// multiply-adds of float32 per cycle, which multiply twice as many pairs. Where AMX exists but is hidden, as some virtual
// machines do, that makes avx512_bf16 half as fast as avx512_vnni. AMD's cores start a VDPBF16PS per cycle.
bool is_slow_here(const char* name) {
  static const bool from_intel = is_from_intel();
  return from_intel && !strcmp(name, "avx512_bf16");
}

#else

bool is_slow_here(const char*) { return false; }

#endif

bool runs_here(const char* name) {
#if defined(__x86_64__)
  static const Extensions here = read_extensions();
  if (!strcmp(name, "amx")) return here.avx512_bf16 && has_tiles();
  if (!strcmp(name, "avx512_bf16")) return here.avx512_bf16;
  if (!strcmp(name, "avx512_vnni")) return here.avx512_vnni;
  if (!strcmp(name, "avx512")) return here.avx512;
  if (!strcmp(name, "avx_vnni")) return here.avx_vnni;
  if (!strcmp(name, "avx2")) return here.avx2;
  return !strcmp(name, "generic");
#elif defined(__aarch64__)
  // Bits of Linux's AT_HWCAP and AT_HWCAP2.
  constexpr unsigned long DOTPROD = 1u << 20, I8MM = 1u << 13, BF16 = 1u << 14;
  const bool has_dotprod = getauxval(AT_HWCAP) & DOTPROD;
  if (!strcmp(name, "neon_bf16")) return has_dotprod && (getauxval(AT_HWCAP2) & (I8MM | BF16)) == (I8MM | BF16);
  if (!strcmp(name, "neon_dot")) return has_dotprod;
  return !strcmp(name, "neon");
#else
  return !strcmp(name, "generic");
#endif
}

}  // namespace

// The named table, or the best one if `name` is null; null if no table of that name runs here.
const Kernels* find_kernels(const char* name) {
  for (const Level& level : LEVELS) {
    if (name ? strcmp(name, level.name) != 0 : is_slow_here(level.name)) continue;
    if (!runs_here(level.name)) continue;
    if (const Kernels* kernels = level.kernels()) return kernels;
  }
  return nullptr;
}

}  // namespace penstock

PENSTOCK_API const penstock::Kernels* penstock_kernels(const char* name) { return penstock::find_kernels(name); }
