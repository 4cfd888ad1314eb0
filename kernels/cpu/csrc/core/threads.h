// The pool of compute threads, which includes the caller. Threads claim items of a job one at a time, so a thread that
// the system preempts delays only the item that it holds; the others do the rest.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace penstock {

class Threads {
 public:
  // `num` threads, the caller's included. With `cores`, thread i is pinned to cores[i], except the caller.
  Threads(int num, const int32_t* cores);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  // The thread numbers passed to bodies are below this.
  int num() const { return num_; }

  // Limits the following jobs to `num` threads, the caller's included.
  void use(int num) { used_.store(num < num_ ? num : num_, std::memory_order_relaxed); }

  // The number of threads that work on a job, by which work is divided.
  int used() const { return used_.load(std::memory_order_relaxed); }

  // Calls body(item, thread) once for every item in [0, items) and returns when all are done. One caller at a time.
  template <typename Body>
  void run(int items, Body&& body) {
    using Type = std::remove_reference_t<Body>;
    if (items <= 0) return;
    if (items == 1 || used() == 1) {
      for (int item = 0; item < items; item++) body(item, 0);
      return;
    }
    run_job(items, [](void* context, int item, int thread) { (*static_cast<Type*>(context))(item, thread); },
            const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Function = void (*)(void* context, int item, int thread);

  // Claims carry the number of the job, so that a late thread cannot claim items of the next job.
  struct alignas(64) Job {
    std::atomic<Function> function{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int32_t> items{0};
    alignas(64) std::atomic<uint64_t> claims{0};  // number of the job << 32 | items that are not claimed yet
    alignas(64) std::atomic<int32_t> done{0};
  };
  static constexpr uint32_t NUM_JOBS = 4;

  void run_job(int items, Function function, void* context);
  void work(Job& job, uint32_t number, int thread);
  void serve(int thread);
  uint32_t next_job(uint32_t seen);

  int num_;
  std::atomic<int> used_;
  Job jobs_[NUM_JOBS];
  alignas(64) std::atomic<uint32_t> newest_{0};  // number of the newest job; used as a futex
  alignas(64) std::atomic<int32_t> parked_{0};
  std::atomic<bool> over_{false};
  std::vector<std::thread> threads_;
};

}  // namespace penstock
