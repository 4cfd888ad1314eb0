// Allocates large blocks of memory, in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Maps zeroed memory, aligned to 2 MiB, whose pages the system commits on first write; null on failure.
uint8_t* map_memory(int64_t bytes);
void unmap_memory(void* memory, int64_t bytes);
// Commits the pages of a block now; other threads may read and write there meanwhile.
void populate_memory(void* memory, int64_t bytes);
// Has the system take the pages of a block from these NUMA nodes in rotation. Returns whether it agreed: containers may
// forbid the call. To be called before the pages are committed.
bool interleave_memory(void* memory, int64_t bytes, const int32_t* nodes, int num);

// The working memory of a step. Pieces are allocated one after another and freed together, or back to a mark; the arena
// keeps the memory for the next step.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  struct Mark {
    int num_chunks;
    int64_t used;
  };

  // Frees all pieces.
  void reset();

  // Frees the pieces that were allocated after the mark. Marks are valid until the end of the step.
  Mark mark() const { return {num_chunks_, used_}; }
  void give_back(Mark mark) {
    // A chunk that was added after the mark holds no older pieces.
    used_ = mark.num_chunks == num_chunks_ ? mark.used : 0;
  }

  // Allocates a piece, aligned to 64 bytes and not initialised.
  template <typename T>
  T* take(int64_t count) {
    return reinterpret_cast<T*>(piece(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  struct Chunk {
    uint8_t* memory;
    int64_t bytes;
  };
  static constexpr int MAX_CHUNKS = 64;

  uint8_t* piece(int64_t bytes);

  Chunk chunks_[MAX_CHUNKS];
  int num_chunks_ = 0;
  int64_t used_ = 0;   // of the last chunk
  int64_t total_ = 0;  // of all chunks
};

}  // namespace penstock
