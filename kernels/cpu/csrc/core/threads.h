// The threads that compute. The caller is one of them. Items of a job are claimed one at a time, so a thread that the
// system gives to somebody else delays no more than the item it holds: the others do the rest.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace penstock {

class Threads {
 public:
  // `num` threads, the caller's included. With `cores`, thread i stays on cores[i] (the caller is left alone).
  Threads(int num, const int32_t* cores);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  // Numbers of threads that bodies are told are below this.
  int num() const { return num_; }

  // From now on jobs are for so many threads, the caller's included.
  void use(int num) { used_.store(num < num_ ? num : num_, std::memory_order_relaxed); }

  // So many threads work on a job: work is cut for them.
  int used() const { return used_.load(std::memory_order_relaxed); }

  // Calls body(item, thread) for every item in [0, items), each once; returns when all are done. For one caller at a
  // time.
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

  // Claims carry the number of the job, so that a late thread can claim nothing of the next job.
  struct alignas(64) Job {
    std::atomic<Function> function{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int32_t> items{0};
    alignas(64) std::atomic<uint64_t> claims{0};  // number of the job << 32 | items that nobody has claimed
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
  alignas(64) std::atomic<uint32_t> newest_{0};  // number of the newest job; a futex
  alignas(64) std::atomic<int32_t> parked_{0};
  std::atomic<bool> over_{false};
  std::vector<std::thread> threads_;
};

}  // namespace penstock
