#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#define PENSTOCK_LEVEL level_avx512_bf16
#define PENSTOCK_LEVEL_NAME "avx512_bf16"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_avx512_bf16() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_avx512_bf16() { return nullptr; }

#endif
