// What a job of the thread pool costs: writes to shared cache lines by count (-DCOUNT), or the time of an empty job.
// Arguments: threads. Prints numbers that barrier.py names.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef COUNT
namespace {

// The lines that each thread has written, in order.
std::mutex mutex;
std::vector<std::vector<uintptr_t>*> all_writes;

void wrote(const void* address) {
  thread_local std::vector<uintptr_t>* mine = nullptr;
  std::lock_guard<std::mutex> lock(mutex);  // threads that go to sleep write after a job too
  if (!mine) all_writes.push_back(mine = new std::vector<uintptr_t>);
  mine->push_back(reinterpret_cast<uintptr_t>(address) / 64);
}

}  // namespace

namespace std {

// Counts read-modify-writes, including those that fail. Plain stores are the caller's alone.
template <typename T>
struct counted_atomic : atomic<T> {
  using atomic<T>::atomic;

  T fetch_add(T value, memory_order order = memory_order_seq_cst) { return wrote(this), atomic<T>::fetch_add(value, order); }
  T fetch_sub(T value, memory_order order = memory_order_seq_cst) { return wrote(this), atomic<T>::fetch_sub(value, order); }
  T fetch_and(T value, memory_order order = memory_order_seq_cst) { return wrote(this), atomic<T>::fetch_and(value, order); }
  bool compare_exchange_weak(T& seen, T value, memory_order order) {
    return wrote(this), atomic<T>::compare_exchange_weak(seen, value, order);
  }
};

}  // namespace std

#define atomic counted_atomic
#include "core/threads.cpp"
#undef atomic
#else
#include "core/threads.cpp"
#endif

namespace {

constexpr int ITEMS_PER_THREAD = 4;

#ifdef COUNT
// Items that wait until every thread has one, so that each thread does the same number, as on as many cores.
void count(int num) {
  constexpr int JOBS = 20;
  penstock::Threads threads({num, nullptr, nullptr, nullptr});
  std::atomic<int> arrived{0};
  auto job = [&] {
    arrived.store(0);
    threads.run(num * ITEMS_PER_THREAD, [&](int, int) {
      const int wanted = (arrived.fetch_add(1) / num + 1) * num;
      while (arrived.load() < wanted) sched_yield();
    });
  };
  size_t total = 0, most = 0, writers = 0;
  for (int i = 0; i < JOBS; i++) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (auto* writes : all_writes) writes->clear();
    }
    job();
    std::lock_guard<std::mutex> lock(mutex);
    std::map<uintptr_t, std::pair<size_t, std::set<void*>>> lines;
    for (auto* writes : all_writes)
      for (uintptr_t line : *writes) {
        lines[line].first++;
        lines[line].second.insert(writes);
        total++;
      }
    size_t busiest = 0;
    for (const auto& line : lines) {
      busiest = std::max(busiest, line.second.first);
      writers = std::max(writers, line.second.second.size());
    }
    most += busiest;
  }
  std::printf("%d %zu %zu %zu\n", threads.num_groups(), total / JOBS, most / JOBS, writers);
}
#else
int64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void time_jobs(int num) {
  penstock::Threads threads({num, nullptr, nullptr, nullptr});
  std::vector<int64_t> times;
  const int64_t until = clock_ns() + 500'000'000;
  for (int64_t begin = clock_ns(); begin < until && times.size() < 20'000;) {
    threads.run(num * ITEMS_PER_THREAD, [](int, int) {});
    const int64_t end = clock_ns();
    times.push_back(end - begin);
    begin = end;
  }
  std::sort(times.begin(), times.end());
  std::printf("%.3f %.3f\n", static_cast<double>(times[times.size() / 2]) * 1e-3,
              static_cast<double>(times[times.size() * 99 / 100]) * 1e-3);
}
#endif

}  // namespace

int main(int, char** arguments) {
#ifdef COUNT
  count(std::atoi(arguments[1]));
#else
  time_jobs(std::atoi(arguments[1]));
#endif
}
