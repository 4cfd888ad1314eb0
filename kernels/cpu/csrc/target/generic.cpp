#if !defined(__aarch64__)

#define PENSTOCK_LEVEL level_generic
#define PENSTOCK_LEVEL_NAME "generic"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_generic() { return &PENSTOCK_LEVEL::TABLE; }

#else  // where NEON is always there

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_generic() { return nullptr; }

#endif
