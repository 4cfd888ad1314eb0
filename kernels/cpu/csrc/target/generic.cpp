#define PENSTOCK_LEVEL level_generic
#define PENSTOCK_LEVEL_NAME "generic"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_generic() { return &PENSTOCK_LEVEL::TABLE; }
