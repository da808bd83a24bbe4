// The one thread pool of the CPU backend. Everything in this folder that runs on several threads
// runs on it; libraries called from here run single-threaded inside its tasks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "function_ref.hpp"

namespace te_fl::cpu {

// A fixed number of threads that share the work of one parallel call at a time; the calling thread
// is one of them. Worker threads start at the first call that has work for them, and sleep when
// idle after a short spin.
//
// Threading: every member may be called from any thread at any time. A second application thread
// that calls while the pool is occupied, and a call from inside a task, do their work on their own
// thread. How the work is split never depends on that: results are a function of the arguments and
// of num_threads() only.
//
// Fork: a child starts with no workers and starts its own at its first parallel call, whatever the
// parent's threads were doing. A task that itself forks must not return into the pool in the child;
// if the child does, its parallel_for throws std::runtime_error.
class ThreadPool {
 public:
  static constexpr int kMaxThreads = 1024;

  // The pool of the process. Its workers are joined at exit, or when the library is unloaded;
  // calls made after that run on their own thread.
  static ThreadPool& instance();

  // threads: as configure().
  explicit ThreadPool(int threads = 0);

  // Waits for a call in progress and joins the workers. No call may start during or after it.
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Sets the number of threads, the caller included; <= 0 chooses the CPUs available to the
  // process (affinity mask, cgroup quota). Waits for a call in progress.
  // Throws std::invalid_argument above kMaxThreads, std::logic_error from inside a task.
  void configure(int threads);

  // Threads that a parallel call is split over, the caller included; at least 1.
  int num_threads() const {
    const int threads = threads_.load(std::memory_order_relaxed);
    return threads != 0 ? threads : count_cpus();
  }

  // True while the calling thread runs a task of a parallel call that was split: what it starts
  // now runs on this thread alone, so it need not be split either.
  static bool inside_task();

  // Number of ranges that parallel_for(n, grain, f) makes.
  int64_t num_ranges(int64_t n, int64_t grain) const {
    return std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, num_threads());
  }

  // Calls f(begin, end) for contiguous ranges that cover [0, n) once. There are at most
  // num_threads() ranges, none shorter than grain (unless n is), and they differ in length by at
  // most one. Returns when all are done. n <= 0 does nothing. If f throws, ranges not yet begun
  // are dropped and one of the exceptions is rethrown here.
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

  // Calls f(i) for i in [0, count), each once, in any order and on any thread: for tasks of uneven
  // length. Exceptions as parallel_for.
  template <typename F>
  void parallel_tasks(int64_t count, F&& f) {
    if (count > 0) run(count, f);
  }

 private:
  friend class ProcessPool;
  struct Crew;  // The workers of one process and the job they share.

  void run(int64_t count, FunctionRef<void(int64_t)> task);
  Crew& crew_of_this_process();
  int count_cpus() const;
  void shut_down();

  mutable std::atomic<int> threads_{0};  // 0: not counted yet; loading the library reads no file.
  std::atomic<bool> stopped_{false};
  std::atomic<Crew*> crew_;
  // The first process's crew lives here, so that unloading the library leaks nothing; those of
  // forked children are on the heap.
  alignas(64) unsigned char first_crew_[320];
};

}  // namespace te_fl::cpu
