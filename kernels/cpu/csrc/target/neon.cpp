#if defined(__aarch64__)

#define PENSTOCK_LEVEL level_neon
#define PENSTOCK_LEVEL_NAME "neon"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_neon() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_neon() { return nullptr; }

#endif
