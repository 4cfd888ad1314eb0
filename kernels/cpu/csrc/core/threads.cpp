#include "core/threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <utility>

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

// If this fails, the system chooses.
void stay_on(const int32_t* begin, const int32_t* end) {
  if (begin == end) return;
  int most = 0;
  for (const int32_t* cpu = begin; cpu < end; cpu++) most = *cpu > most ? *cpu : most;
  cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(most) + 1);  // cpu_set_t itself ends at 1024
  if (!set) return;
  size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(most) + 1);
  CPU_ZERO_S(bytes, set);
  for (const int32_t* cpu = begin; cpu < end; cpu++) CPU_SET_S(static_cast<size_t>(*cpu), bytes, set);
  pthread_setaffinity_np(pthread_self(), bytes, set);
  CPU_FREE(set);
}

}  // namespace

Threads::Threads(const Placement& placement) : num_(placement.num), used_(placement.num) {
  make_groups(placement);
  items_.reset(new Items[NUM_JOBS * static_cast<size_t>(num_groups_)]);
  // The caller may free the placement before all threads have started.
  for (int group = 0; group < num_groups_; group++)
    for (int thread = groups_[group].begin; thread < groups_[group].end; thread++) {
      if (thread == 0) continue;
      std::vector<int32_t> cpus;
      if (placement.cpu_starts)
        cpus.assign(placement.cpus + placement.cpu_starts[thread], placement.cpus + placement.cpu_starts[thread + 1]);
      threads_.emplace_back([this, group, thread, cpus = std::move(cpus)] {
        stay_on(cpus.data(), cpus.data() + cpus.size());
        serve(group, thread);
      });
    }
}

// Divides the threads of each node evenly.
void Threads::make_groups(const Placement& placement) {
  const int size = num_ > GROUP_THREADS * MAX_GROUPS / 2 ? num_ / (MAX_GROUPS / 2) + 1 : GROUP_THREADS;
  struct Range {
    int begin, end, node;
  };
  std::vector<Range> ranges;
  for (int begin = 0, end; begin < num_; begin = end) {
    const int node = placement.nodes ? placement.nodes[begin] : 0;
    for (end = begin; end < num_ && (!placement.nodes || placement.nodes[end] == node);) end++;
    const int parts = (end - begin + size - 1) / size;
    for (int i = 0; i < parts; i++)
      ranges.push_back({begin + (end - begin) * i / parts, begin + (end - begin) * (i + 1) / parts, node});
  }
  if (ranges.size() > MAX_GROUPS) ranges = {{0, num_, 0}};  // more nodes than any machine has
  num_groups_ = static_cast<int>(ranges.size());
  groups_.reset(new Group[ranges.size()]);
  for (int g = 0; g < num_groups_; g++) {
    Group& group = groups_[g];
    const Range& range = ranges[static_cast<size_t>(g)];
    group.begin = range.begin;
    group.end = range.end;
    group.node = range.node;
    for (bool near : {true, false})
      for (int i = 1; i < num_groups_; i++) {
        const int other = (g + i) % num_groups_;
        if ((ranges[static_cast<size_t>(other)].node == group.node) == near) group.others.push_back(other);
      }
  }
}

Threads::~Threads() {
  over_.store(true);
  for (int group = 0; group < num_groups_; group++) {
    groups_[group].newest.fetch_add(1);
    wake_all(groups_[group].newest);
  }
  for (auto& thread : threads_) thread.join();
}

void Threads::run_job(int items, const int32_t* ends, bool helps, Function function, void* context) {
  number_++;
  start(fill(items, ends, helps, function, context));
  work(0, number_, 0);
  for (int spins = 0; job(number_).groups_left.load(std::memory_order_acquire) > 0; spins++) {
    pause();
    // The thread that holds the last item may be waiting for this core.
    if (spins > 2000) sched_yield();
  }
}

// Divides the items of the newest job among the groups. Returns the number of groups that work on it.
int Threads::fill(int items, const int32_t* ends, bool helps, Function function, void* context) {
  int active = 0;
  while (active < num_groups_ && groups_[active].begin < used()) active++;
  // A group without threads needs help.
  if (active < num_groups_) helps = true;
  if (!ends && items < active) active = items;
  uint64_t open = 0;
  int filled = 0;
  const int parts = ends ? num_groups_ : active;
  for (int group = 0; group < parts; group++) {
    const int begin = !ends ? group : group > 0 ? ends[group - 1] : 0;
    const int count = ends ? ends[group] - begin : (items - group + active - 1) / active;
    if (count <= 0) continue;
    Items& some = items_of(number_, group);
    some.function.store(function, std::memory_order_relaxed);
    some.context.store(context, std::memory_order_relaxed);
    some.begin.store(begin, std::memory_order_relaxed);
    some.stride.store(ends ? 1 : active, std::memory_order_relaxed);
    some.count.store(count, std::memory_order_relaxed);
    some.done.store(0, std::memory_order_relaxed);
    some.claims.store(static_cast<uint64_t>(number_) << 32 | static_cast<uint32_t>(count), std::memory_order_release);
    open |= uint64_t{1} << group;
    filled++;
  }
  job(number_).open.store(helps ? open : 0, std::memory_order_relaxed);
  job(number_).groups_left.store(filled, std::memory_order_relaxed);
  return active;
}

// Starts the newest job in the first `active` groups.
void Threads::start(int active) {
  for (int group = 0; group < active; group++) groups_[group].newest.store(number_, std::memory_order_release);
  // Either this sees that a thread sleeps, or the thread sees the job before it does.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int group = 0; group < active; group++)
    if (groups_[group].parked.load(std::memory_order_relaxed) > 0) wake_all(groups_[group].newest);
}

void Threads::work(int group, uint32_t number, int thread) {
  work_on(group, number, thread);
  if (num_groups_ == 1) return;
  // A late thread may see the bits of another job, but claims nothing there.
  for (int other : groups_[group].others) {
    uint64_t open = job(number).open.load(std::memory_order_relaxed);
    if (open == 0) return;
    if (open >> other & 1) work_on(other, number, thread);
  }
}

void Threads::work_on(int group, uint32_t number, int thread) {
  Items& some = items_of(number, group);
  uint64_t claims = some.claims.load(std::memory_order_acquire);
  Function function = some.function.load(std::memory_order_relaxed);
  void* context = some.context.load(std::memory_order_relaxed);
  int32_t begin = some.begin.load(std::memory_order_relaxed), stride = some.stride.load(std::memory_order_relaxed);
  int32_t count = some.count.load(std::memory_order_relaxed), done = 0;
  // If a claim succeeds, the fields read belong to job `number`: while an item is left to claim, the job is not done
  // and its place is not reused. The number of items left is part of the word, since `count` may belong to the next job
  // by now.
  while (static_cast<uint32_t>(claims >> 32) == number && static_cast<uint32_t>(claims) > 0) {
    if (!some.claims.compare_exchange_weak(claims, claims - 1, std::memory_order_acq_rel)) continue;
    const int32_t left = static_cast<int32_t>(claims);
    if (left == 1 && num_groups_ > 1) job(number).open.fetch_and(~(uint64_t{1} << group), std::memory_order_relaxed);
    function(context, begin + (count - left) * stride, thread);
    done++;
    claims = some.claims.load(std::memory_order_acquire);
  }
  // Counted once a thread, not once an item: the job is not done before this thread's last item anyway.
  if (done > 0 && some.done.fetch_add(done, std::memory_order_acq_rel) + done == count)
    job(number).groups_left.fetch_sub(1, std::memory_order_release);
}

void Threads::serve(int group, int thread) {
  for (uint32_t seen = 0; !over_.load(std::memory_order_relaxed);) {
    seen = next_job(groups_[group], seen);
    if (thread < used()) work(group, seen, thread);
  }
}

uint32_t Threads::next_job(Group& group, uint32_t seen) {
  int64_t until = now_ns() + SPIN_NS;
  while (now_ns() < until)
    for (int i = 0; i < PAUSES; i++) {
      uint32_t newest = group.newest.load(std::memory_order_acquire);
      if (newest != seen) return newest;
      pause();
    }
  group.parked.fetch_add(1, std::memory_order_seq_cst);
  while (group.newest.load(std::memory_order_seq_cst) == seen) sleep_while(group.newest, seen);
  group.parked.fetch_sub(1, std::memory_order_relaxed);
  return group.newest.load(std::memory_order_acquire);
}

}  // namespace penstock
