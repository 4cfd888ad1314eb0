#define PENSTOCK_LEVEL level_avx512
#define PENSTOCK_LEVEL_NAME "avx512"
#include "level.h"

const penstock::Kernels* penstock::kernels_avx512() { return &PENSTOCK_LEVEL::TABLE; }
