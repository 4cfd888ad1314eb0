#if defined(__AVX2__) && defined(__FMA__)

#define PENSTOCK_LEVEL level_avx2
#define PENSTOCK_LEVEL_NAME "avx2"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_avx2() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_avx2() { return nullptr; }

#endif
