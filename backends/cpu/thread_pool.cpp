#include "thread_pool.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_count.hpp"

namespace te_fl::cpu {
namespace {

// The time that idle threads spin before they sleep: longer than the gap between two ops of a
// layer, and short enough to cost little.
constexpr auto kSpin = std::chrono::microseconds(30);

// Number of forks between the first process and this one. A crew records the fork number of its
// process; a child that inherits a crew starts its own.
std::atomic<uint32_t> fork_number{0};

void count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++fork_number; });
  if (registered != 0)
    throw std::system_error(registered, std::generic_category(), "pthread_atfork");
}

// True while this thread runs a task of any pool.
thread_local bool in_task = false;

struct InsideTask {
  InsideTask() { in_task = true; }
  ~InsideTask() { in_task = before; }
  const bool before = in_task;
};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Done>
bool spin_until(bool allowed, Done done) {
  if (done()) return true;
  if (!allowed) return false;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      pause();
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int threads) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

void run_inline(int64_t count, FunctionRef<void(int64_t)> task) {
  const InsideTask inside;
  for (int64_t i = 0; i < count; ++i) task(i);
}

}  // namespace

// The pool's workers, which run one job (a parallel call) at a time. `occupied` is true while a
// caller uses the workers. `gate` consists of the flag kOpen and a count of the workers that access
// the job. A worker increments the count, accesses the job only if the gate was open, and
// decrements the count when it is done. When all tasks are claimed, the caller closes the gate and
// waits until the count is zero, so no worker can access the job while the next one is written.
struct ThreadPool::Crew {
  static constexpr uint32_t kOpen = 1u << 31;
  static constexpr uint32_t kCallerSleeps = 1u << 30;
  static constexpr uint32_t kWorkers = kCallerSleeps - 1;

  struct Job {
    FunctionRef<void(int64_t)> task;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
  };

  explicit Crew(Crew* inherited) : of_fork(fork_number.load()), abandoned(inherited) {}
  ~Crew() { stop(); }

  void start(int threads);
  void stop();
  void work();
  void leave();
  void run(Job& job);
  void wait_for_workers();
  static void claim_tasks(Job& job);
  bool mine() const { return of_fork == fork_number.load(std::memory_order_relaxed); }

  const uint32_t of_fork;
  Crew* const abandoned;  // the parent process's crew, whose threads do not exist here: kept,
                          // never used
  std::atomic<bool> occupied{false};
  std::vector<std::thread> workers;
  Job* job = nullptr;
  bool spin = true;
  alignas(64) std::atomic<uint32_t> generation{0};
  std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> stopping{false};
  alignas(64) std::atomic<uint32_t> gate{0};
};

void ThreadPool::Crew::start(int threads) {
  if (!workers.empty() || threads <= 1) return;
  // Spins only if there are enough CPUs; otherwise a spinning thread would delay threads that have
  // work.
  spin = threads <= affinity_cpu_count();
  // Blocks all signals in the workers, because signals are meant for the application's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    workers.reserve(static_cast<size_t>(threads) - 1);
    while (workers.size() + 1 < static_cast<size_t>(threads)) {
      workers.emplace_back([this] { work(); });
      pthread_setname_np(workers.back().native_handle(), "te_fl_cpu");
    }
  } catch (const std::exception&) {
    // A process or memory limit was reached: fewer threads run the same tasks.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ThreadPool::Crew::stop() {
  stopping.store(true);
  generation.fetch_add(1);
  futex_wake(generation, INT_MAX);
  for (std::thread& worker : workers) worker.join();
  std::vector<std::thread>().swap(workers);  // frees the memory too: the library may be unloaded
                                             // next
  stopping.store(false);
}

void ThreadPool::Crew::work() {
  uint32_t seen = 0;  // a worker that starts late finds the gate open, or waits for the next job
  for (;;) {
    if (stopping.load()) return;
    const uint32_t now = generation.load();
    if (now == seen) {
      if (!spin_until(spin, [&] { return generation.load(std::memory_order_relaxed) != seen; })) {
        sleepers.fetch_add(1);
        futex_wait(generation, seen);
        sleepers.fetch_sub(1);
      }
      continue;
    }
    seen = now;
    if (gate.fetch_add(1) & kOpen) claim_tasks(*job);
    leave();
  }
}

void ThreadPool::Crew::leave() {
  const uint32_t before = gate.fetch_sub(1);
  if ((before & kWorkers) == 1 && (before & kCallerSleeps)) futex_wake(gate, 1);
}

void ThreadPool::Crew::claim_tasks(Job& job) {
  const InsideTask inside;
  for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) {
    try {
      job.task(i);
    } catch (...) {
      if (!job.failed.exchange(true)) job.error = std::current_exception();
      job.next.store(job.count, std::memory_order_relaxed);
    }
  }
}

void ThreadPool::Crew::run(Job& new_job) {
  job = &new_job;
  gate.fetch_or(kOpen);
  generation.fetch_add(1);
  if (sleepers.load() != 0) {
    futex_wake(generation, static_cast<int>(std::min<int64_t>(new_job.count - 1, INT_MAX)));
  }
  claim_tasks(new_job);
  gate.fetch_and(~kOpen);
  wait_for_workers();
  job = nullptr;
}

void ThreadPool::Crew::wait_for_workers() {
  const auto idle = [&] { return (gate.load() & kWorkers) == 0; };
  if (!mine()) return;
  if (spin_until(spin, idle)) return;
  gate.fetch_or(kCallerSleeps);
  for (uint32_t now; ((now = gate.load()) & kWorkers) != 0;) futex_wait(gate, now);
  gate.fetch_and(~kCallerSleeps);
}

// The pool of the process, created when the library is loaded. If it were created on first use, a
// fork during the creation on another thread would make the child wait for ever. The pool is shut
// down at exit or when the library is unloaded. It is never destroyed, because the application's
// threads may still call it during exit.
class ProcessPool {
 public:
  ProcessPool() { new (storage_) ThreadPool(); }
  ~ProcessPool() { pool().shut_down(); }
  ThreadPool& pool() { return *std::launder(reinterpret_cast<ThreadPool*>(storage_)); }

 private:
  alignas(ThreadPool) unsigned char storage_[sizeof(ThreadPool)];
};

namespace {
// Constructed before the library's other static objects, which may use it.
[[gnu::init_priority(101)]] ProcessPool process_pool;
}  // namespace

ThreadPool& ThreadPool::instance() { return process_pool.pool(); }

bool ThreadPool::inside_task() { return in_task; }

ThreadPool::ThreadPool(int threads) {
  static_assert(sizeof(Crew) <= sizeof(first_crew_) && alignof(Crew) <= 64);
  count_forks();
  crew_ = new (first_crew_) Crew(nullptr);
  if (threads > 0) configure(threads);
}

ThreadPool::~ThreadPool() {
  shut_down();
  Crew* crew = crew_.load();
  if (!crew->mine()) return;  // its threads do not exist in this process, so they cannot be joined
  if (crew->abandoned == nullptr) {
    crew->~Crew();
  } else {
    delete crew;
  }
}

ThreadPool::Crew& ThreadPool::crew_of_this_process() {
  Crew* crew = crew_.load();
  while (!crew->mine()) {
    auto fresh = std::make_unique<Crew>(crew);
    if (crew_.compare_exchange_strong(crew, fresh.get())) return *fresh.release();
  }
  return *crew;
}

int ThreadPool::count_cpus() const {
  int uncounted = 0;
  threads_.compare_exchange_strong(uncounted, std::min(available_cpu_count(), kMaxThreads));
  return threads_.load();
}

void ThreadPool::configure(int threads) {
  if (threads > kMaxThreads) {
    throw std::invalid_argument("thread count " + std::to_string(threads) +
                                " is above the limit of " + std::to_string(kMaxThreads));
  }
  if (in_task) throw std::logic_error("the thread count cannot be changed from inside a task");
  threads = std::max(threads, 0);
  Crew& crew = crew_of_this_process();
  while (crew.occupied.exchange(true)) std::this_thread::yield();
  if (threads != threads_.load()) crew.stop();
  threads_.store(threads);
  crew.occupied.store(false);
}

void ThreadPool::run(int64_t count, FunctionRef<void(int64_t)> task) {
  if (count == 1) return task(0);  // not split, so calls made by the task may still be split
  if (in_task || num_threads() == 1) return run_inline(count, task);
  Crew& crew = crew_of_this_process();
  if (crew.occupied.exchange(true)) return run_inline(count, task);
  if (stopped_.load()) {
    crew.occupied.store(false);
    return run_inline(count, task);
  }
  crew.start(num_threads());
  Crew::Job job{task, count, {}, {}, {}};
  crew.run(job);
  const bool same_process = crew.mine();
  crew.occupied.store(false);
  if (!same_process) {
    throw std::runtime_error("a task forked and returned in the child: its other tasks are lost");
  }
  if (job.error) std::rethrow_exception(job.error);
}

void ThreadPool::shut_down() {
  if (stopped_.exchange(true)) return;
  Crew* crew = crew_.load();
  // Returns if there is nothing to join: this is a forked child that has made no parallel call, or
  // a task has called exit().
  if (!crew->mine() || in_task) return;
  while (crew->occupied.exchange(true)) std::this_thread::yield();
  crew->stop();
  crew->occupied.store(false);
}

}  // namespace te_fl::cpu
