#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)

#define PENSTOCK_LEVEL level_neon_bf16
#define PENSTOCK_LEVEL_NAME "neon_bf16"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_neon_bf16() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_neon_bf16() { return nullptr; }

#endif
