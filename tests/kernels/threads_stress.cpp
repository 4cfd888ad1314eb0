// Many short jobs: each item is called once, two calls at once have different numbers of threads, and all are over when
// `run` returns. Counters are plain, so that ThreadSanitizer sees two calls at once, and one that nobody waited for.
// Arguments: threads, rounds, and the number of NUMA nodes that the threads are said to be on.
#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace std {

// An atomic whose operations come late now and then, as if the system had taken the core away: it brings about orders
// of events that are else seen once in a week.
template <typename T>
struct slow_atomic : atomic<T> {
  using atomic<T>::atomic;

  static void wait() {
    thread_local uint32_t state = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(&state) >> 8) | 1;
    state = state * 1664525u + 1013904223u;
    const uint32_t drawn = state >> 22;
    if (drawn >= 12) return;
    timespec time = {0, 1000L << drawn * 2};
    drawn < 4 ? nanosleep(&time, nullptr) : sched_yield();
  }
  T load(memory_order order = memory_order_seq_cst) const { return wait(), atomic<T>::load(order); }
  void store(T value, memory_order order = memory_order_seq_cst) { wait(), atomic<T>::store(value, order); }
  T fetch_add(T value, memory_order order = memory_order_seq_cst) { return wait(), atomic<T>::fetch_add(value, order); }
  T fetch_sub(T value, memory_order order = memory_order_seq_cst) { return wait(), atomic<T>::fetch_sub(value, order); }
  T fetch_and(T value, memory_order order = memory_order_seq_cst) { return wait(), atomic<T>::fetch_and(value, order); }
  bool compare_exchange_weak(T& seen, T value, memory_order order) {
    return wait(), atomic<T>::compare_exchange_weak(seen, value, order);
  }
};

}  // namespace std

#define atomic slow_atomic
#include "core/threads.cpp"
#undef atomic

namespace {

constexpr int MOST_ITEMS = 13, MOST_THREADS = 64, PAD = 16;

void fail(const char* what, int round, int item) {
  std::printf("%s: round %d, item %d\n", what, round, item);
  std::fflush(stdout);
  std::_Exit(1);
}

void rest(long ns) {
  timespec time = {0, ns};
  nanosleep(&time, nullptr);
}

// Jobs of all sizes, one right after another.
void count_calls(penstock::Threads& threads, int* rooms, int round) {
  const int items = round * 31 % (MOST_ITEMS + 1);
  int calls[MOST_ITEMS] = {};
  threads.run(items, [&](int item, int thread) {
    if (item < 0 || item >= items) fail("an item of another job", round, item);
    if (thread < 0 || thread >= threads.num()) fail("a number that no thread has", round, thread);
    calls[item]++;
    rooms[thread * PAD]++;
  });
  for (int item = 0; item < items; item++)
    if (calls[item] != 1) fail("not called once", round, item);
}

// The same, with a range of items for each group, some of them empty.
void count_divided_calls(penstock::Threads& threads, int* rooms, int round) {
  const int most = MOST_ITEMS * MOST_THREADS;
  static int calls[most];
  std::vector<int32_t> ends(static_cast<size_t>(threads.num_groups()));
  int items = 0;
  for (size_t group = 0; group < ends.size(); group++)
    ends[group] = items += (round + static_cast<int>(group) * 5) * 31 % (MOST_ITEMS + 1);
  for (int item = 0; item < items; item++) calls[item] = 0;
  threads.run_divided(ends.data(), round % 3 != 0, [&](int item, int thread) {
    if (item < 0 || item >= items) fail("an item of another job", round, item);
    calls[item]++;
    rooms[thread * PAD]++;
  });
  for (int item = 0; item < items; item++)
    if (calls[item] != 1) fail("not called once", round, item);
}

// Items that wait for each other: every thread must come, even those that sleep.
void meet(penstock::Threads& threads, int num, int round) {
  std::atomic<int> here{0};
  threads.run(num, [&](int, int) {
    here.fetch_add(1);
    for (int spins = 0; here.load() < num; spins++) {
      if (spins > 2'000'000) fail("threads that did not come", round, here.load());
      if (spins % 64 == 63) rest(1000);
    }
  });
}

}  // namespace

int main(int, char** arguments) {
  const int num = std::atoi(arguments[1]), rounds = std::atoi(arguments[2]), num_nodes = std::atoi(arguments[3]);
  std::vector<int32_t> nodes;
  for (int thread = 0; thread < num; thread++) nodes.push_back(thread * num_nodes / num);
  static int rooms[MOST_THREADS * PAD];
  for (int pool = 0; pool < 4; pool++) {  // that ends with threads asleep, or in a job
    penstock::Threads threads({num, nodes.data(), nullptr, nullptr});
    for (int round = 0; round < rounds; round++) {
      const int used = num - round / 64 % num;
      threads.use(used);
      count_calls(threads, rooms, round);
      if (round % 2) count_divided_calls(threads, rooms, round);
      if (round % 512 == 100) rest(200'000);  // until all are asleep
      if (round % 512 == 100 || round % 512 == 300) meet(threads, used, round);
    }
  }
  std::printf("fine\n");
}
