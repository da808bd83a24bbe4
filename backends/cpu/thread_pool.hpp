// The thread pool of the CPU backend. All multi-threaded work of this folder runs on it; libraries
// called from here run single-threaded inside its tasks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "function_ref.hpp"

namespace te_fl::cpu {

// A fixed number of threads, including the calling thread, that share the work of one parallel call
// at a time. Worker threads start on the first call that has work for them. Idle workers spin
// briefly, then sleep.
//
// Threading: every member is thread-safe. A call from a second application thread while the pool is
// occupied, and a call from inside a task, run on the calling thread. This does not affect how the
// work is divided: results depend only on the arguments and on num_threads().
//
// Fork: a child process has no workers and starts its own on its first parallel call, whatever the
// parent's threads were doing. A task that forks must not return into the pool in the child; if it
// does, parallel_for throws std::runtime_error there.
class ThreadPool {
 public:
  static constexpr int kMaxThreads = 1024;

  // The pool of the process. Its workers are joined at exit, or when the library is unloaded; later
  // calls run on the calling thread.
  static ThreadPool& instance();

  // `threads`: as for configure().
  explicit ThreadPool(int threads = 0);

  // Waits for a call in progress and joins the workers. No call may start during or after it.
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Sets the number of threads, including the caller. With a value <= 0, uses the CPUs available to
  // the process (affinity mask, cgroup quota). Waits for a call in progress. Throws
  // std::invalid_argument above kMaxThreads, and std::logic_error inside a task.
  void configure(int threads);

  // Number of threads over which a parallel call is split, including the caller; at least 1.
  int num_threads() const {
    const int threads = threads_.load(std::memory_order_relaxed);
    return threads != 0 ? threads : count_cpus();
  }

  // True while the calling thread runs a task of a split parallel call. Parallel calls made now run
  // on this thread only, so they need not be split.
  static bool inside_task();

  // Number of ranges that parallel_for(n, grain, f) makes.
  int64_t num_ranges(int64_t n, int64_t grain) const {
    return std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, num_threads());
  }

  // Calls f(begin, end) for contiguous ranges that cover [0, n) once. There are at most
  // num_threads() ranges; none is shorter than grain (unless n is), and their lengths differ by at
  // most one. Returns when all are done. Does nothing if n <= 0. If f throws, ranges that have not
  // started are dropped and one of the exceptions is rethrown.
  template <typename F>
  void parallel_for(int64_t n, int64_t grain, F&& f) {
    if (n <= 0) return;
    const int64_t ranges = num_ranges(n, grain);
    const int64_t length = n / ranges;
    const int64_t longer = n % ranges;
    run(ranges, [&](int64_t i) {
      const int64_t begin = i * length + std::min(i, longer);
      f(begin, begin + length + (i < longer ? 1 : 0));
    });
  }

  // Calls f(i) once for each i in [0, count), in any order and on any thread. For tasks of uneven
  // length. Exceptions as for parallel_for().
  template <typename F>
  void parallel_tasks(int64_t count, F&& f) {
    if (count > 0) run(count, f);
  }

 private:
  friend class ProcessPool;
  struct Crew;  // the workers of one process and their job

  void run(int64_t count, FunctionRef<void(int64_t)> task);
  Crew& crew_of_this_process();
  int count_cpus() const;
  void shut_down();

  mutable std::atomic<int> threads_{0};  // 0: not yet counted, because loading the library must
                                         // read no file
  std::atomic<bool> stopped_{false};
  std::atomic<Crew*> crew_;
  // The first process's crew is stored here, so that unloading the library leaks nothing. Those of
  // forked children are on the heap.
  alignas(64) unsigned char first_crew_[320];
};

}  // namespace te_fl::cpu
