#include "core/threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace penstock {

namespace {

// How long a waiting thread spins before it sleeps. This covers the serial code between two jobs of a step. Threads
// must sleep after that, since on a machine with few cores the service's event loop runs on the remaining CPU time.
constexpr int64_t SPIN_NS = 30'000;
// Pauses between two looks at the clock.
constexpr int PAUSES = 64;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void stay_on(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // if this fails, the system chooses
}

}  // namespace

Threads::Threads(int num, const int32_t* cores) : num_(num), used_(num) {
  for (int thread = 1; thread < num; thread++)
    threads_.emplace_back([this, thread, core = cores ? cores[thread] : -1] {
      if (core >= 0) stay_on(core);
      serve(thread);
    });
}

Threads::~Threads() {
  over_.store(true);
  newest_.fetch_add(1);
  wake_all(newest_);
  for (auto& thread : threads_) thread.join();
}

void Threads::run_job(int items, Function function, void* context) {
  uint32_t number = newest_.load(std::memory_order_relaxed) + 1;
  Job& job = jobs_[number % NUM_JOBS];
  job.function.store(function, std::memory_order_relaxed);
  job.context.store(context, std::memory_order_relaxed);
  job.items.store(items, std::memory_order_relaxed);
  job.done.store(0, std::memory_order_relaxed);
  job.claims.store(static_cast<uint64_t>(number) << 32 | static_cast<uint32_t>(items), std::memory_order_release);
  newest_.store(number, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) wake_all(newest_);
  work(job, number, 0);
  for (int spins = 0; job.done.load(std::memory_order_acquire) < items; spins++) {
    pause();
    // The thread that holds the last item may be waiting for this core.
    if (spins > 2000) sched_yield();
  }
}

void Threads::work(Job& job, uint32_t number, int thread) {
  uint64_t claims = job.claims.load(std::memory_order_acquire);
  Function function = job.function.load(std::memory_order_relaxed);
  void* context = job.context.load(std::memory_order_relaxed);
  int32_t items = job.items.load(std::memory_order_relaxed);
  // If a claim succeeds, the fields read belong to job `number`: while an item is left to claim, the job is not done
  // and its slot is not reused. The number of items left is part of the word, since `items` may belong to the next job
  // by now.
  while (static_cast<uint32_t>(claims >> 32) == number && static_cast<uint32_t>(claims) > 0) {
    if (!job.claims.compare_exchange_weak(claims, claims - 1, std::memory_order_acq_rel)) continue;
    function(context, items - static_cast<int32_t>(claims), thread);
    job.done.fetch_add(1, std::memory_order_release);
    claims = job.claims.load(std::memory_order_acquire);
  }
}

void Threads::serve(int thread) {
  for (uint32_t seen = 0; !over_.load(std::memory_order_relaxed);) {
    seen = next_job(seen);
    if (thread < used()) work(jobs_[seen % NUM_JOBS], seen, thread);
  }
}

uint32_t Threads::next_job(uint32_t seen) {
  int64_t until = now_ns() + SPIN_NS;
  while (now_ns() < until)
    for (int i = 0; i < PAUSES; i++) {
      uint32_t newest = newest_.load(std::memory_order_acquire);
      if (newest != seen) return newest;
      pause();
    }
  parked_.fetch_add(1, std::memory_order_seq_cst);
  while (newest_.load(std::memory_order_seq_cst) == seen) sleep_while(newest_, seen);
  parked_.fetch_sub(1, std::memory_order_relaxed);
  return newest_.load(std::memory_order_acquire);
}

}  // namespace penstock
