#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#define PENSTOCK_LEVEL level_avx512
#define PENSTOCK_LEVEL_NAME "avx512"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_avx512() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_avx512() { return nullptr; }

#endif
