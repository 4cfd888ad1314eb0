#include "core/arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "core/kernel_table.h"

namespace penstock {

namespace {

constexpr int64_t HUGE = 2 << 20;
// Of the system's interface, which only libnuma's headers name.
constexpr int INTERLEAVE = 3, MAX_NODES = 1024;

int64_t rounded(int64_t bytes) { return (bytes + HUGE - 1) / HUGE * HUGE; }

}  // namespace

uint8_t* map_memory(int64_t bytes) {
  // The system aligns only to its own page size, so the parts outside an aligned block are unmapped.
  size_t size = static_cast<size_t>(rounded(bytes)), slack = static_cast<size_t>(HUGE);
  void* found = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  uintptr_t begin = reinterpret_cast<uintptr_t>(found), aligned = (begin + slack - 1) / slack * slack;
  if (aligned > begin) munmap(found, aligned - begin);
  if (begin + slack > aligned) munmap(reinterpret_cast<void*>(aligned + size), begin + slack - aligned);
  madvise(reinterpret_cast<void*>(aligned), size, MADV_HUGEPAGE);
  return reinterpret_cast<uint8_t*>(aligned);
}

void unmap_memory(void* memory, int64_t bytes) {
  if (memory) munmap(memory, static_cast<size_t>(rounded(bytes)));
}

void populate_memory(void* memory, int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  uintptr_t begin = reinterpret_cast<uintptr_t>(memory) / 4096 * 4096;
  // On kernels that are too old for this, pages are committed on first write.
  madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(memory) - begin + static_cast<size_t>(bytes),
          MADV_POPULATE_WRITE);
#else
  (void)memory;
  (void)bytes;
#endif
}

bool interleave_memory(void* memory, int64_t bytes, const int32_t* nodes, int num) {
  unsigned long mask[MAX_NODES / (8 * sizeof(unsigned long))] = {};
  for (int i = 0; i < num; i++)
    if (nodes[i] >= 0 && nodes[i] < MAX_NODES)
      mask[static_cast<size_t>(nodes[i]) / (8 * sizeof(mask[0]))] |= 1UL << nodes[i] % static_cast<int>(8 * sizeof(mask[0]));
  // The kernel reads one bit less than this number.
  return syscall(SYS_mbind, memory, static_cast<unsigned long>(rounded(bytes)), INTERLEAVE, mask,
                 static_cast<unsigned long>(MAX_NODES + 1), 0U) == 0;
}

Arena::~Arena() {
  for (int i = 0; i < num_chunks_; i++) unmap_memory(chunks_[i].memory, chunks_[i].bytes);
}

void Arena::reset() {
  used_ = 0;
  if (num_chunks_ <= 1) return;
  // The last step needed several chunks: replace them with one of the same total size.
  int64_t total = total_;
  for (int i = 0; i < num_chunks_; i++) unmap_memory(chunks_[i].memory, chunks_[i].bytes);
  num_chunks_ = 0;
  total_ = 0;
  piece(total);
  used_ = 0;
}

uint8_t* Arena::piece(int64_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (num_chunks_ == 0 || used_ + bytes > chunks_[num_chunks_ - 1].bytes) {
    int64_t size = rounded(bytes > total_ ? bytes : total_);
    uint8_t* memory = num_chunks_ < MAX_CHUNKS ? map_memory(size) : nullptr;
    if (!memory) {  // the worker ends; this is in its output
      fprintf(stderr, "penstock: a step needs %lld MiB more of memory, and the system gives none: raise the limit, or "
              "lower --max-num-seqs or --max-num-batched-tokens\n", static_cast<long long>(size >> 20));
      abort();
    }
    chunks_[num_chunks_++] = {memory, size};
    total_ += size;
    used_ = 0;
  }
  uint8_t* found = chunks_[num_chunks_ - 1].memory + used_;
  used_ += bytes;
  return found;
}

}  // namespace penstock

PENSTOCK_API void* penstock_map(int64_t bytes) { return penstock::map_memory(bytes); }
// One huge page at a time, so that threads waiting for the process's memory map wait for one page at most.
PENSTOCK_API void penstock_populate(uint8_t* memory, int64_t bytes) {
  for (int64_t offset = 0; offset < bytes; offset += penstock::HUGE)
    penstock::populate_memory(memory + offset, bytes - offset < penstock::HUGE ? bytes - offset : penstock::HUGE);
}
PENSTOCK_API void penstock_unmap(void* memory, int64_t bytes) { penstock::unmap_memory(memory, bytes); }
PENSTOCK_API int32_t penstock_interleave(void* memory, int64_t bytes, const int32_t* nodes, int32_t num) {
  return penstock::interleave_memory(memory, bytes, nodes, num);
}
