#include "backends/cpu/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "backends/cpu/cpu_count.hpp"
#include "support/rounds.hpp"
#include "support/sanitizers.hpp"

#if !TE_FL_TSAN && !TE_FL_ASAN
#define TE_FL_COUNTS_ALLOCATIONS 1
namespace {
std::atomic<int64_t> allocations{0};
}

[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
#endif

namespace te_fl::cpu::thread_pool_test {
namespace {

using Ranges = std::set<std::pair<int64_t, int64_t>>;

Ranges record_ranges(ThreadPool& pool, int64_t n, int64_t grain) {
  std::mutex mutex;
  Ranges ranges;
  pool.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    const std::lock_guard<std::mutex> lock(mutex);
    EXPECT_TRUE(ranges.emplace(begin, end).second);
  });
  return ranges;
}

// Runs body in a forked child; returns true if body returns true within the time limit.
template <typename F>
bool child_succeeds(F body, unsigned seconds = 5) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(seconds);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int64_t sum_in_parallel(ThreadPool& pool, int64_t n) {
  std::atomic<int64_t> sum{0};
  pool.parallel_for(n, 1, [&](int64_t begin, int64_t end) {
    int64_t part = 0;
    for (int64_t i = begin; i < end; ++i) part += i;
    sum += part;
  });
  return sum;
}

TEST(ThreadPool, CoversEveryIndexOnceInContiguousRangesOfEvenLength) {
  ThreadPool pool(4);
  for (const int64_t n : {1, 2, 3, 4, 5, 17, 1000, 4099}) {
    for (const int64_t grain : {-3, 0, 1, 2, 7, 1000, 100000}) {
      const Ranges ranges = record_ranges(pool, n, grain);
      EXPECT_EQ(int64_t(ranges.size()), pool.num_ranges(n, grain));
      EXPECT_LE(ranges.size(), 4u);
      int64_t next = 0, shortest = n, longest = 0;
      for (const auto& [begin, end] : ranges) {
        EXPECT_EQ(begin, next);
        next = end;
        shortest = std::min(shortest, end - begin);
        longest = std::max(longest, end - begin);
      }
      EXPECT_EQ(next, n);
      EXPECT_LE(longest - shortest, 1);
      EXPECT_GE(shortest, std::min(n, std::max<int64_t>(grain, 1)));
    }
  }
}

TEST(ThreadPool, DoesNothingForNothing) {
  ThreadPool pool(4);
  pool.parallel_for(0, 1, [](int64_t, int64_t) { FAIL(); });
  pool.parallel_for(-1, 1, [](int64_t, int64_t) { FAIL(); });
  pool.parallel_tasks(0, [](int64_t) { FAIL(); });
}

TEST(ThreadPool, HandlesSizesBeyond32Bits) {
  ThreadPool pool(3);
  const int64_t n = (int64_t{1} << 40) + 1;
  const Ranges ranges = record_ranges(pool, n, 1);
  EXPECT_EQ(ranges.size(), 3u);
  EXPECT_EQ(ranges.rbegin()->second, n);
}

TEST(ThreadPool, UsesSeveralThreadsAtOnce) {
  ThreadPool pool(4);
  // Each task waits until all four have begun, so only four threads can finish them.
  std::atomic<int> begun{0};
  pool.parallel_tasks(4, [&](int64_t) {
    ++begun;
    while (begun < 4) std::this_thread::yield();
  });
  EXPECT_EQ(begun, 4);
}

TEST(ThreadPool, SplitsTheSameWhenOccupiedAndWhenNested) {
  ThreadPool pool(4);
  const Ranges expected = record_ranges(pool, 1001, 10);
  pool.parallel_tasks(4, [&](int64_t) { EXPECT_EQ(record_ranges(pool, 1001, 10), expected); });
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&] {
      for (int j = 0; j < 200; ++j) EXPECT_EQ(record_ranges(pool, 1001, 10), expected);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPool, NestedCallsStayOnTheirThread) {
  ThreadPool pool(4);
  EXPECT_FALSE(ThreadPool::inside_task());
  pool.parallel_tasks(8, [&](int64_t) {
    EXPECT_TRUE(ThreadPool::inside_task());
    const auto here = std::this_thread::get_id();
    pool.parallel_tasks(8, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), here); });
  });
  EXPECT_FALSE(ThreadPool::inside_task());
}

TEST(ThreadPool, ACallThatIsNotSplitLetsItsTaskSplit) {
  ThreadPool pool(4);
  pool.parallel_tasks(1, [&](int64_t) {
    std::atomic<int> begun{0};
    pool.parallel_tasks(4, [&](int64_t) {
      ++begun;
      while (begun < 4) std::this_thread::yield();
    });
  });
}

TEST(ThreadPool, RethrowsAndWorksAgain) {
  ThreadPool pool(4);
  for (int round = 0; round < 100; ++round) {
    for (const int64_t count : {1, 3, 64}) {
      try {
        pool.parallel_tasks(count, [&](int64_t i) {
          if (i == count / 2) throw std::runtime_error("task " + std::to_string(i));
        });
        FAIL() << "no exception";
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(error.what(), "task " + std::to_string(count / 2));
      }
      EXPECT_FALSE(ThreadPool::inside_task());
    }
    EXPECT_EQ(sum_in_parallel(pool, 1000), 499500);
  }
}

TEST(ThreadPool, DropsTasksNotBegunAfterAnException) {
  ThreadPool pool(1);
  int64_t ran = 0;
  EXPECT_THROW(pool.parallel_tasks(100,
                                   [&](int64_t) {
                                     if (++ran == 3) throw std::runtime_error("third");
                                   }),
               std::runtime_error);
  EXPECT_EQ(ran, 3);
}

TEST(ThreadPool, ConfigureChangesTheThreadCount) {
  ThreadPool pool(2);
  EXPECT_EQ(pool.num_threads(), 2);
  for (const int threads : {4, 1, 3, 8}) {
    pool.configure(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    EXPECT_EQ(int(record_ranges(pool, 1000, 1).size()), threads);
  }
  pool.configure(0);
  EXPECT_EQ(pool.num_threads(), available_cpu_count());
  EXPECT_EQ(ThreadPool().num_threads(), available_cpu_count());
  EXPECT_THROW(pool.configure(ThreadPool::kMaxThreads + 1), std::invalid_argument);
  pool.configure(2);
  pool.parallel_tasks(2, [&](int64_t) { EXPECT_THROW(pool.configure(3), std::logic_error); });
}

TEST(ThreadPool, ConfigureWhileOthersCall) {
  ThreadPool pool(4);
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      while (!stop) EXPECT_EQ(sum_in_parallel(pool, 1000), 499500);
    });
  }
  for (int i = 0; i < 50; ++i) pool.configure(1 + i % 5);
  stop = true;
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPool, SleepsWhenIdle) {
  ThreadPool pool(4);
  sum_in_parallel(pool, 1000);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  getrusage(RUSAGE_SELF, &after);
  const auto micros = [](const rusage& r) {
    return (r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1000000L + r.ru_utime.tv_usec +
           r.ru_stime.tv_usec;
  };
  EXPECT_LT(micros(after) - micros(before), 30000);
}

#if TE_FL_COUNTS_ALLOCATIONS
TEST(ThreadPool, ACallAllocatesNothing) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  pool.parallel_for(100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  const int64_t before = allocations;
  for (int i = 0; i < 100; ++i) {
    pool.parallel_for(100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  }
  EXPECT_EQ(allocations, before);
  EXPECT_EQ(sum, 10100);
}
#endif

TEST(ThreadPoolFork, ChildOfAUsedPoolHasItsOwnThreads) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  ThreadPool pool(4);
  sum_in_parallel(pool, 1000);
  EXPECT_TRUE(child_succeeds([&] {
    std::atomic<int> begun{0};
    pool.parallel_tasks(4, [&](int64_t) {
      ++begun;
      while (begun < 4) std::this_thread::yield();
    });
    // The pool also works in a grandchild, which the forked child forks.
    return child_succeeds([&] { return sum_in_parallel(pool, 1000) == 499500; });
  }));
  EXPECT_EQ(sum_in_parallel(pool, 1000), 499500);
}

TEST(ThreadPoolFork, ChildWorksWhileTheParentsThreadsAreInThePool) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  ThreadPool pool(4);
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      while (!stop) sum_in_parallel(pool, 1000);
    });
  }
  for (int i = 0; i < te_fl::testing::rounds(50); ++i) {
    EXPECT_TRUE(child_succeeds([&] {
      const auto start = std::chrono::steady_clock::now();
      const bool right = sum_in_parallel(pool, 1000) == 499500;
      return right && std::chrono::steady_clock::now() - start < std::chrono::seconds(1);
    }));
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPoolFork, ChildMayReconfigureAndDestroy) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  ThreadPool pool(4);
  sum_in_parallel(pool, 1000);
  EXPECT_TRUE(child_succeeds([&] {
    pool.configure(2);
    if (sum_in_parallel(pool, 1000) != 499500 || pool.num_threads() != 2) return false;
    pool.~ThreadPool();
    return true;
  }));
}

TEST(ThreadPoolFork, ATaskThatReturnsInTheChildIsAnError) {
  ThreadPool pool(2);
  const pid_t parent = getpid();
  std::atomic<int> begun{0};
  std::atomic<pid_t> child{-1};
  const auto caller = std::this_thread::get_id();
  try {
    alarm(20);
    pool.parallel_tasks(2, [&](int64_t) {
      ++begun;
      while (begun < 2) std::this_thread::yield();
      if (std::this_thread::get_id() == caller && (child = fork()) == 0) alarm(5);
    });
    if (getpid() != parent) _exit(1);
  } catch (const std::runtime_error&) {
    if (getpid() != parent) _exit(0);
    FAIL() << "the parent must not fail";
  }
  alarm(0);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

bool uses_the_pool_at_exit = false;

struct UsesThePoolAtExit {
  ~UsesThePoolAtExit() {
    if (uses_the_pool_at_exit) {
      std::fprintf(stderr, "sum at exit %ld\n",
                   long(sum_in_parallel(ThreadPool::instance(), 1000)));
    }
  }
};
[[gnu::init_priority(102)]] UsesThePoolAtExit early_static;

TEST(ThreadPoolExit, TheProcessPoolIsJoinedAtExitAndRunsInlineAfterwards) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  // Runs the death tests in new processes: a forked child would inherit the state of other tests'
  // threads, but not the threads.
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  // A static object constructed before the pool is destroyed after it and can still run work.
  EXPECT_EXIT(
      {
        ThreadPool::instance().configure(4);
        sum_in_parallel(ThreadPool::instance(), 1000);
        uses_the_pool_at_exit = true;
        std::exit(7);
      },
      ::testing::ExitedWithCode(7), "sum at exit 499500");
  EXPECT_EXIT(ThreadPool::instance().parallel_tasks(4,
                                                    [](int64_t i) {
                                                      if (i == 0) std::exit(8);
                                                    });
              , ::testing::ExitedWithCode(8), "");
}

// --- number of CPUs ---

class CgroupTree : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("te_fl_cgroup_" + std::to_string(getpid()));
    std::filesystem::create_directories(root_ / "a" / "b");
    std::filesystem::create_directories(root_ / "cpu,cpuacct" / "a");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::ofstream(root_ / path) << text;
  }
  int limit() { return cgroup_cpu_limit(root_.string(), (root_ / "self").string()); }
  std::filesystem::path root_;
};

TEST_F(CgroupTree, NoFilesMeansNoLimit) { EXPECT_EQ(limit(), 0); }

TEST_F(CgroupTree, Version2TakesTheTightestAncestorRoundedUp) {
  write("self", "0::/a/b\n");
  write("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(limit(), 0);
  write("a/cpu.max", "250000 100000\n");
  EXPECT_EQ(limit(), 3);
  write("a/b/cpu.max", "20000 100000\n");
  EXPECT_EQ(limit(), 1);
}

TEST_F(CgroupTree, Version2PathOfTheOuterSystemFallsBackToTheRoot) {
  write("self", "0::/not/here\n");
  write("cpu.max", "200000 100000\n");
  EXPECT_EQ(limit(), 2);
}

TEST_F(CgroupTree, Version1) {
  write("self", "3:cpuset:/\n2:cpu,cpuacct:/a\n");
  write("cpu,cpuacct/a/cpu.cfs_quota_us", "-1");
  write("cpu,cpuacct/a/cpu.cfs_period_us", "100000");
  EXPECT_EQ(limit(), 0);
  write("cpu,cpuacct/a/cpu.cfs_quota_us", "400000");
  EXPECT_EQ(limit(), 4);
}

TEST(CpuCount, FollowsTheAffinityMask) {
  EXPECT_TRUE(child_succeeds([] {
    cpu_set_t all, one;
    CPU_ZERO(&all);
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof all, &all) != 0) return false;
    if (affinity_cpu_count() != CPU_COUNT(&all)) return false;
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
      if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
    }
    return sched_setaffinity(0, sizeof one, &one) == 0 && affinity_cpu_count() == 1 &&
           available_cpu_count() == 1;
  }));
}

}  // namespace
}  // namespace te_fl::cpu::thread_pool_test
