// Large pieces of memory, in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Zeroed memory aligned to 2 MiB, taken page by page when first written; null where there is none.
uint8_t* map_memory(int64_t bytes);
void unmap_memory(void* memory, int64_t bytes);
// Takes the pages of a piece now, whatever others read and write there meanwhile.
void populate_memory(void* memory, int64_t bytes);

// What a step works in. Pieces are taken one after another, and given back all at once, or those since a mark; the
// memory stays for the next step.
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

  // Gives back all pieces.
  void reset();

  // Gives back what was taken after the mark was made. Marks end with the step.
  Mark mark() const { return {num_chunks_, used_}; }
  void give_back(Mark mark) {
    // A chunk that came after the mark holds nothing older.
    used_ = mark.num_chunks == num_chunks_ ? mark.used : 0;
  }

  // Aligned to 64 bytes; holds whatever was there.
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
