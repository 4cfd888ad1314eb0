// The pool of compute threads, which includes the caller. Threads claim items of a job one at a time, so a thread that
// the system preempts delays only the item that it holds; the others do the rest.
//
// Threads form groups of at most GROUP_THREADS, each on one NUMA node. A group claims from a word of its own and counts
// what it has done there, and only whole groups are counted in a word that all share: a tree of two levels. So no cache
// line is written by more threads than a group has, except by those that are done with their own items and help others.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace penstock {

// Where the threads of a pool run and find their memory.
struct Placement {
  int32_t num;                // threads, the caller's included
  const int32_t* nodes;       // (num,): the NUMA node of each thread, those of a node side by side; null: one node
  const int32_t* cpu_starts;  // (num + 1,): thread i may run on cpus[cpu_starts[i] .. cpu_starts[i + 1]), everywhere if
  const int32_t* cpus;        // that is empty; null: all threads run everywhere. The caller's thread is never moved.
};

class Threads {
 public:
  explicit Threads(const Placement& placement);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  // The thread numbers passed to bodies are below this.
  int num() const { return num_; }

  // Limits the following jobs to `num` threads, the caller's included.
  void use(int num) { used_.store(num < num_ ? num : num_, std::memory_order_relaxed); }

  // The number of threads that work on a job, by which work is divided.
  int used() const { return used_.load(std::memory_order_relaxed); }

  int num_groups() const { return num_groups_; }

  // The number of threads of a group that work on a job, at least 1.
  int used_in(int group) const {
    int end = groups_[group].end < used() ? groups_[group].end : used();
    return end > groups_[group].begin ? end - groups_[group].begin : 1;
  }

  // Group g's part of `units` units of memory is [share(g, units), share(g + 1, units)): in proportion to its threads,
  // and always the same, so that each group finds what it reads on its own node. Parts begin at even numbers.
  int share(int group, int units) const {
    if (group >= num_groups_) return units;
    return static_cast<int>(static_cast<int64_t>(units) * groups_[group].begin / num_) / 2 * 2;
  }

  // Whether all threads are on one NUMA node, or on nodes that are not known.
  bool on_one_node() const { return groups_[0].node == groups_[num_groups_ - 1].node; }

  // Calls body(item, thread) once for every item in [0, items) and returns when all are done. One caller at a time.
  // Groups take turns, so that each has early and late items.
  template <typename Body>
  void run(int items, Body&& body) {
    if (items <= 0) return;
    if (items == 1 || used() == 1) return run_here(items, body);
    run_job(items, nullptr, true, &call<std::remove_reference_t<Body>>, address(body));
  }

  // The same; group g gets the items from ends[g - 1] (0 for the first) to ends[g]. With `helps`, threads whose group is
  // done take items of others, those of their own node first.
  template <typename Body>
  void run_divided(const int32_t* ends, bool helps, Body&& body) {
    int items = ends[num_groups_ - 1];
    if (items <= 0) return;
    if ((items == 1 && helps) || used() == 1) return run_here(items, body);
    run_job(items, ends, helps, &call<std::remove_reference_t<Body>>, address(body));
  }

  // Writes `units` units of memory for the first time: the system takes each from the node of the thread that writes it,
  // so on several nodes no group does the work of another.
  template <typename Body>
  void first_touch(int units, Body&& body) {
    std::vector<int32_t> ends;
    for (int group = 0; group < num_groups_; group++) ends.push_back(share(group + 1, units));
    run_divided(ends.data(), on_one_node(), body);
  }

 private:
  using Function = void (*)(void* context, int item, int thread);

  static constexpr int GROUP_THREADS = 8;
  static constexpr int MAX_GROUPS = 64;  // more threads than 64 groups of eight make larger groups
  static constexpr uint32_t NUM_JOBS = 4;

  // Threads [begin, end). `newest` is the number of the group's newest job and a futex; `parked` threads sleep on it.
  struct alignas(64) Group {
    std::atomic<uint32_t> newest{0};
    alignas(64) std::atomic<int32_t> parked{0};
    alignas(64) int begin = 0;
    int end = 0, node = 0;
    std::vector<int> others;  // in the order in which its threads help them
  };

  // A group's items of one job: begin, begin + stride, and so on. Claims carry the number of the job, so that a late
  // thread cannot claim items of the next job in this place.
  struct alignas(64) Items {
    std::atomic<uint64_t> claims{0};  // number of the job << 32 | items that are not claimed yet
    std::atomic<Function> function{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int32_t> begin{0}, stride{0}, count{0}, done{0};
  };

  struct alignas(64) Job {
    std::atomic<int32_t> groups_left{0};  // groups whose items are not all done
    std::atomic<uint64_t> open{0};        // a bit for each group with items that others may claim
  };

  template <typename Body>
  static void call(void* context, int item, int thread) {
    (*static_cast<Body*>(context))(item, thread);
  }
  template <typename Body>
  static void* address(Body& body) {
    return const_cast<void*>(static_cast<const void*>(&body));
  }
  template <typename Body>
  static void run_here(int items, Body& body) {
    for (int item = 0; item < items; item++) body(item, 0);
  }

  void make_groups(const Placement& placement);
  void run_job(int items, const int32_t* ends, bool helps, Function function, void* context);
  int fill(int items, const int32_t* ends, bool helps, Function function, void* context);
  void start(int active);
  void work(int group, uint32_t number, int thread);
  void work_on(int group, uint32_t number, int thread);
  void serve(int group, int thread);
  uint32_t next_job(Group& group, uint32_t seen);

  Job& job(uint32_t number) { return jobs_[number % NUM_JOBS]; }
  Items& items_of(uint32_t number, int group) {
    return items_[number % NUM_JOBS * static_cast<uint32_t>(num_groups_) + static_cast<uint32_t>(group)];
  }

  // Read by all threads, and hardly ever written.
  int num_, num_groups_ = 0;
  std::atomic<int> used_;
  std::atomic<bool> over_{false};
  std::unique_ptr<Group[]> groups_;
  std::unique_ptr<Items[]> items_;  // of each group, for each of NUM_JOBS
  Job jobs_[NUM_JOBS];
  alignas(64) uint32_t number_ = 0;  // of the newest job
  std::vector<std::thread> threads_;
};

}  // namespace penstock
