#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)

#define PENSTOCK_LEVEL level_avx512_vnni
#define PENSTOCK_LEVEL_NAME "avx512_vnni"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_avx512_vnni() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_avx512_vnni() { return nullptr; }

#endif
