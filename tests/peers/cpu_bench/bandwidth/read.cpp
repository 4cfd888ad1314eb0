// Reads memory with several threads, each of which follows one or more streams through its part of it.

#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));

constexpr int kMostStreams = 8;
constexpr ptrdiff_t kLineBytes = sizeof(Line);

void pin(int index) {
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof(allowed), &allowed)) return;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
}

// Takes a line of each stream in turn. Prefetches past the end of a stream, which is harmless.
template <int kStreams>
uint64_t read_streams(const char* data, size_t bytes, size_t ahead) {
  const size_t stream_bytes = bytes / kStreams / kLineBytes * kLineBytes;
  Line sums[kStreams] = {};
  for (size_t at = 0; at < stream_bytes; at += kLineBytes) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const char* line = data + stream * stream_bytes + at;
      if (ahead) __builtin_prefetch(line + ahead);
      sums[stream] ^= *reinterpret_cast<const Line*>(line);
    }
  }
  uint64_t sum = 0;
  for (int stream = 0; stream < kStreams; ++stream) {
    for (int lane = 0; lane < 8; ++lane) sum ^= sums[stream][lane];
  }
  return sum;
}

uint64_t read_part(const char* data, size_t bytes, int streams, size_t ahead) {
  switch (streams) {
    case 1: return read_streams<1>(data, bytes, ahead);
    case 2: return read_streams<2>(data, bytes, ahead);
    case 4: return read_streams<4>(data, bytes, ahead);
    default: return read_streams<kMostStreams>(data, bytes, ahead);
  }
}

}  // namespace

extern "C" {

// Returns zeroed memory whose pages exist, or null. `huge` asks for large pages, which the system may refuse.
char* allocate(size_t bytes, int huge) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  // Pages are written first, since untouched ones all map to the same page of zeros.
  for (size_t at = 0; at < bytes; at += 4096) static_cast<char*>(data)[at] = 1;
  return static_cast<char*>(data);
}

void release(char* data, size_t bytes) { munmap(data, bytes); }

// Returns the seconds of the fastest pass over the memory, from when all threads could begin until the last one has
// ended. Passes follow one another for `seconds`; there are at least two. Streams: 1, 2, 4 or 8 in each thread.
double fastest_pass(const char* data, size_t bytes, int threads, int streams, size_t ahead, double seconds) {
  std::atomic<int> ready{0}, done{0}, current_pass{0};
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> sums{0};
  const size_t part = bytes / threads / kLineBytes * kLineBytes;
  std::vector<std::thread> readers;
  for (int reader = 0; reader < threads; ++reader) {
    readers.emplace_back([&, reader] {
      pin(reader);
      for (int pass = 1;; ++pass) {
        ready.fetch_add(1);
        while (current_pass.load() < pass && !is_over.load()) std::this_thread::yield();
        if (is_over.load()) return;
        sums ^= read_part(data + reader * part, part, streams, ahead);
        done.fetch_add(1);
      }
    });
  }
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  double best = 1e30;
  for (int pass = 1; pass <= 2 || Clock::now() < end; ++pass) {
    while (ready.load() < threads * pass) std::this_thread::yield();
    const auto began = Clock::now();
    current_pass.store(pass);
    while (done.load() < threads * pass) std::this_thread::sleep_for(std::chrono::microseconds(20));
    const std::chrono::duration<double> took = Clock::now() - began;
    if (took.count() < best) best = took.count();
  }
  is_over.store(true);
  for (auto& reader : readers) reader.join();
  return best;
}

}  // extern "C"
