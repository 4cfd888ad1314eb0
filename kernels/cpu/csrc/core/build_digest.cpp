// Identifies the sources that the library was built from.
#include "core/kernel_table.h"

// The digest of the sources, computed by build.py.
PENSTOCK_API const char* penstock_sources() { return PENSTOCK_SOURCES; }
