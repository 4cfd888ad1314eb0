#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

#define PENSTOCK_LEVEL level_amx
#define PENSTOCK_LEVEL_NAME "amx"
#include "target/table.h"

const penstock::Kernels* penstock::kernels_amx() { return &PENSTOCK_LEVEL::TABLE; }

#else  // another kind of machine

#include "core/kernel_table.h"

const penstock::Kernels* penstock::kernels_amx() { return nullptr; }

#endif
