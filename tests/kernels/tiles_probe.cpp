// Does with each case that comes in what the arguments say: load, pairs, quads, store, zero, release. A case is how the
// tiles are configured, and four blocks of 16 rows of 64 bytes: sums of floats, sums of integers, a and b, each for the
// tile of its number. All blocks are written after it. Ends with status 77 on a processor without tiles.
#include <cstdio>
#include <cstring>

#if !defined(PENSTOCK_SOFTWARE_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PENSTOCK_LEVEL probe
#include "core/amx.h"

namespace {

using namespace probe;

enum { FLOATS, INTEGERS, A, B };

struct Case {
  TileShapes shapes;
  uint8_t blocks[4][TILE_LINES][TILE_LINE];
};

// Whether the system lets this process use them.
bool has_tiles() {
#if defined(PENSTOCK_SOFTWARE_TILES)
  return true;
#else
  constexpr int ASK_FOR_STATE = 0x1023, TILE_DATA = 18;
  return !syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA);
#endif
}

template <int TILE>
void access(const char* what, Case& one) {
  if (!strcmp(what, "load")) load_tile<TILE>(one.blocks[TILE], TILE_LINE);
  if (!strcmp(what, "store")) store_tile<TILE>(one.blocks[TILE], TILE_LINE);
  if (!strcmp(what, "zero")) zero_tile<TILE>();
}

void execute(const char* what, Case& one) {
  access<FLOATS>(what, one);
  access<INTEGERS>(what, one);
  access<A>(what, one);
  access<B>(what, one);
  if (!strcmp(what, "pairs")) add_tile_pairs<FLOATS, A, B>();
  if (!strcmp(what, "quads")) add_tile_quads<INTEGERS, A, B>();
  if (!strcmp(what, "release")) release_tiles();
}

}  // namespace

int main(int count, char** arguments) {
  if (!has_tiles()) return 77;
  Case one;
  while (fread(&one, sizeof(one), 1, stdin)) {
    configure_tiles(one.shapes);
    for (int i = 1; i < count; i++) execute(arguments[i], one);
    fwrite(one.blocks, sizeof(one.blocks), 1, stdout);
  }
  return 0;
}
