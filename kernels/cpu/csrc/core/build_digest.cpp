// What the library was built from, so that it can be told from one that other sources make.
#include "core/kernel_table.h"

// The digest that build_cpu.py makes of the sources.
PENSTOCK_API const char* penstock_sources() { return PENSTOCK_SOURCES; }
