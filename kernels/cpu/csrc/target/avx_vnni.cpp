#if defined(__AVX2__) && defined(__FMA__) && (defined(__AVXVNNI__) || defined(PENSTOCK_SOFTWARE_DOT))

#define PENSTOCK_LEVEL level_avx_vnni
#define PENSTOCK_LEVEL_NAME "avx_vnni"
#define MULTIPLIES_BYTES
#include "target/table.h"

const penstock::Kernels* penstock::kernels_avx_vnni() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_avx_vnni() { return nullptr; }

#endif
