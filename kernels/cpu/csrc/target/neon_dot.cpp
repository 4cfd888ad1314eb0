#if defined(__ARM_FEATURE_DOTPROD)

#define PENSTOCK_LEVEL level_neon_dot
#define PENSTOCK_LEVEL_NAME "neon_dot"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_neon_dot() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_neon_dot() { return nullptr; }

#endif
