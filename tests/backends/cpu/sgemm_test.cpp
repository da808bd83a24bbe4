#include "backends/cpu/sgemm.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "backends/cpu/gemm_partition.hpp"
#include "backends/cpu/thread_pool.hpp"
#include "support/sanitizers.hpp"

namespace te_fl::cpu::sgemm_test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

uint16_t to_bf16(float x) {  // rounds to nearest even; finite inputs only
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

struct Case {
  int64_t m, n, k;
  bool trans_a = false, trans_b = false;
  float alpha = 1, beta = 0;
  int64_t pad = 0;  // added to every leading dimension
  int64_t lda() const { return std::max<int64_t>(1, trans_a ? m : k) + pad; }
  int64_t ldb() const { return std::max<int64_t>(1, trans_b ? k : n) + pad; }
  int64_t ldc() const { return n + pad; }
  std::string name() const {
    return std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) +
           (trans_a ? " T" : " N") + (trans_b ? "T" : "N") + " alpha " + std::to_string(alpha) +
           " beta " + std::to_string(beta) + " pad " + std::to_string(pad);
  }
};

std::vector<float> random_values(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = to_float(to_bf16(uniform(random)));  // also exact in BF16
  return x;
}

// GEMM operands whose row padding is NaN; no NaN may reach a result.
struct Operands {
  explicit Operands(const Case& t)
      : a(random_values((t.trans_a ? t.k : t.m) * t.lda() + 1, 1)),
        b(random_values((t.trans_b ? t.n : t.k) * t.ldb() + 1, 2)),
        c(random_values(t.m * t.ldc() + 1, 3)) {
    spoil_padding(a, t.lda(), t.pad);
    spoil_padding(b, t.ldb(), t.pad);
    for (const float x : a) a16.push_back(std::isnan(x) ? 0x7fc0 : to_bf16(x));
    for (const float x : b) b16.push_back(std::isnan(x) ? 0x7fc0 : to_bf16(x));
    if (t.beta == 0) std::fill(c.begin(), c.end(), kNaN);  // C must be overwritten and not read
  }
  static void spoil_padding(std::vector<float>& x, int64_t ld, int64_t pad) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (int64_t(i) % ld >= ld - pad) x[i] = kNaN;
    }
  }
  std::vector<float> a, b, c;
  std::vector<uint16_t> a16, b16;
};

// For each element of C: the dot product in double, and the sum of the products' magnitudes. These
// loops take most of this file's time and do not contain the code under test, so they are not
// sanitized.
struct Sums {
  std::vector<double> value, magnitude;
};
__attribute__((no_sanitize("address", "undefined"))) Sums compute_sums(const Case& t,
                                                                       const Operands& x) {
  Sums sums;
  sums.value.resize(static_cast<size_t>(t.m * t.n));
  sums.magnitude.resize(sums.value.size());
  const int64_t a_row = t.trans_a ? 1 : t.lda(), a_step = t.trans_a ? t.lda() : 1;
  const int64_t b_col = t.trans_b ? t.ldb() : 1, b_step = t.trans_b ? 1 : t.ldb();
  double *value = sums.value.data(), *magnitude = sums.magnitude.data();
  for (int64_t i = 0; i < t.m; ++i) {
    for (int64_t j = 0; j < t.n; ++j) {
      const float *a = x.a.data() + i * a_row, *b = x.b.data() + j * b_col;
      double sum = 0, size = 0;
      for (int64_t l = 0; l < t.k; ++l) {
        const double product = double(a[l * a_step]) * double(b[l * b_step]);
        sum += product;
        size += std::fabs(product);
      }
      *value++ = sum, *magnitude++ = size;
    }
  }
  return sums;
}

// Checks every element of C against its dot product in double; the error bound is proportional to
// the sum of magnitudes.
void expect_product(const Case& t, const Operands& before, const Sums& sums,
                    const std::vector<float>& c) {
  for (int64_t i = 0; i < t.m; ++i) {
    for (int64_t j = 0; j < t.n; ++j) {
      const double sum = sums.value[i * t.n + j], magnitude = sums.magnitude[i * t.n + j];
      const double old = t.beta == 0 ? 0 : double(t.beta) * double(before.c[i * t.ldc() + j]);
      const double bound =
          1e-6 * (std::fabs(t.alpha) * magnitude * std::sqrt(double(t.k) + 1) + std::fabs(old)) +
          1e-30;
      ASSERT_NEAR(c[i * t.ldc() + j], t.alpha * sum + old, bound)
          << t.name() << " at " << i << "," << j;
    }
  }
  // Nothing was written beyond the rows of C.
  for (size_t i = 0; i < c.size(); ++i) {
    if (int64_t(i) % t.ldc() < t.n && int64_t(i) < t.m * t.ldc()) continue;
    ASSERT_EQ(std::memcmp(&c[i], &before.c[i], 4), 0) << t.name() << " padding at " << i;
  }
}

std::vector<float> run_sgemm(const Case& t, const Operands& x) {
  std::vector<float> c = x.c;
  sgemm(t.trans_a, t.trans_b, t.m, t.n, t.k, t.alpha, x.a.data(), t.lda(), x.b.data(), t.ldb(),
        t.beta, c.data(), t.ldc());
  return c;
}

std::vector<float> run_bf16(const Case& t, const Operands& x) {
  std::vector<float> c = x.c;
  bf16gemm(t.trans_a, t.trans_b, t.m, t.n, t.k, t.alpha, x.a16.data(), t.lda(), x.b16.data(),
           t.ldb(), t.beta, c.data(), t.ldc());
  return c;
}

class Gemm : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    ASSERT_TRUE(gemm_available(&reason)) << reason;
    ThreadPool::instance().configure(4);
  }
};

TEST_F(Gemm, MatchesSumsInDouble) {
  const int64_t shapes[][3] = {{1, 1, 1},     {1, 17, 5},    {19, 1, 7},    {5, 3, 1},
                               {33, 47, 65},  {64, 64, 64},  {97, 130, 61}, {257, 101, 33},
                               {3, 700, 300}, {700, 3, 300}, {9, 11, 5000}, {130, 190, 211}};
  for (const auto& shape : shapes) {
    for (int flags = 0; flags < 4; ++flags) {
      for (const auto& [alpha, beta, pad] :
           {std::tuple{1.0f, 0.0f, 0}, {1.0f, 1.0f, 3}, {-0.5f, 0.0f, 1}, {2.0f, 0.75f, 7}}) {
        const Case t{shape[0],         shape[1], shape[2], (flags & 1) != 0,
                     (flags & 2) != 0, alpha,    beta,     pad};
        const Operands x(t);
        const Sums sums = compute_sums(t, x);  // the oracle of the F32 and the BF16 GEMM, as the
                                               // values are exact in BF16
        expect_product(t, x, sums, run_sgemm(t, x));
        expect_product(t, x, sums, run_bf16(t, x));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Gemm, EmptySumsScaleC) {
  for (const float beta : {0.0f, 1.0f, -2.0f}) {
    const Case none{37, 29, 0, false, true, 1.0f, beta, 2};
    const Operands x(none);
    expect_product(none, x, compute_sums(none, x), run_sgemm(none, x));
    expect_product(none, x, compute_sums(none, x), run_bf16(none, x));
    Case no_alpha{37, 29, 8, false, true, 0.0f, beta, 2};
    Operands y(no_alpha);
    std::vector<float> c = y.c;
    sgemm(false, true, 37, 29, 8, 0.0f, nullptr, 10, nullptr, 10, beta, c.data(), 31);
    expect_product(no_alpha, y, compute_sums(no_alpha, y), c);
  }
}

TEST_F(Gemm, EmptyResultsTouchNothing) {
  sgemm(false, false, 0, 5, 7, 1, nullptr, 7, nullptr, 5, 0, nullptr, 5);
  sgemm(false, false, 5, 0, 7, 1, nullptr, 7, nullptr, 1, 0, nullptr, 1);
  bf16gemm(true, true, 0, 0, 0, 1, nullptr, 1, nullptr, 1, 0, nullptr, 1);
  sgemm_batched(0, false, false, 2, 2, 2, 1, 2, 2, 0, 2, [](int64_t) -> SgemmOperands {
    ADD_FAILURE();
    return {};
  });
}

TEST_F(Gemm, RefusesBadSizesByName) {
  const auto message = [](auto call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "no error";
  };
  float x[64] = {};
  EXPECT_EQ(message([&] { sgemm(false, false, -1, 2, 2, 1, x, 2, x, 2, 0, x, 2); }),
            "gemm: m is -1, must be at least 0");
  EXPECT_EQ(message([&] { sgemm(false, false, 2, 3, 4, 1, x, 3, x, 3, 0, x, 3); }),
            "gemm: lda is 3, must be at least 4, the length of a stored row of A");
  EXPECT_EQ(message([&] { sgemm(false, true, 2, 3, 4, 1, x, 4, x, 3, 0, x, 3); }),
            "gemm: ldb is 3, must be at least 4, the length of a stored row of B");
  EXPECT_EQ(message([&] { sgemm(true, false, 2, 3, 4, 1, x, 2, x, 3, 0, x, 2); }),
            "gemm: ldc is 2, must be at least 3, the length of a row of C");
}

TEST_F(Gemm, EqualCallsGiveEqualBits) {
  for (const Case& t :
       {Case{300, 200, 500}, Case{64, 64, 8192, true}, Case{16, 1024, 512, false, true}}) {
    const Operands x(t);
    const std::vector<float> first = run_sgemm(t, x), first16 = run_bf16(t, x);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {  // most of these threads find the thread pool busy
      callers.emplace_back([&] {
        for (int j = 0; j < 5; ++j) {
          EXPECT_EQ(std::memcmp(run_sgemm(t, x).data(), first.data(), 4 * t.m * t.n), 0);
          EXPECT_EQ(std::memcmp(run_bf16(t, x).data(), first16.data(), 4 * t.m * t.n), 0);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
}

TEST_F(Gemm, WorksOnEveryThreadCountAndInsideTasks) {
  const Case t{150, 140, 700, false, true, 1.5f, 1.0f, 1};
  const Operands x(t);
  const Sums sums = compute_sums(t, x);
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool::instance().configure(threads);
    expect_product(t, x, sums, run_sgemm(t, x));
  }
  ThreadPool::instance().parallel_tasks(
      4, [&](int64_t) { expect_product(t, x, sums, run_sgemm(t, x)); });
}

TEST_F(Gemm, BatchedMatchesOneByOne) {
  for (const int64_t batch : {1, 3, 24, 200}) {
    for (const Case& t :
         {Case{31, 33, 16, false, true, 0.125f}, Case{5, 7, 0, false, false, 1, 0.5f},
          Case{128, 64, 96, true, false, 1, 1, 2}}) {
      std::vector<Operands> xs;
      std::vector<std::vector<float>> cs;
      for (int64_t i = 0; i < batch; ++i) {
        xs.emplace_back(t);
        if (t.k > 0) xs.back().a[0] += float(i);
        cs.push_back(xs.back().c);
      }
      sgemm_batched(batch, t.trans_a, t.trans_b, t.m, t.n, t.k, t.alpha, t.lda(), t.ldb(), t.beta,
                    t.ldc(), [&](int64_t i) {
                      return SgemmOperands{xs[i].a.data(), xs[i].b.data(), cs[i].data()};
                    });
      for (const int64_t i : {int64_t{0}, batch / 2, batch - 1})
        expect_product(t, xs[i], compute_sums(t, xs[i]), cs[i]);
    }
  }
}

#if !TE_FL_TSAN  // It has a thread of its own.
int thread_count() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    if (word == "Threads:") {
      int n = 0;
      file >> n;
      return n;
    }
  }
  return -1;
}

TEST_F(Gemm, TheLibraryStartsNoThreads) {
  const Case t{512, 512, 512};
  const Operands x(t);
  std::thread([&] { run_sgemm(t, x), run_bf16(t, x); }).join();
  EXPECT_EQ(thread_count(), ThreadPool::instance().num_threads());
}
#endif

template <typename F>
bool child_succeeds(F body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Runs the first GEMMs in a forked child; true if they are right and finish within a second.
struct ForkedGemm {
  Case t{256, 256, 256};
  Operands x{t};
  std::vector<float> expected = run_sgemm(t, x);
  std::vector<float> expected16 = run_bf16(t, x);

  bool child_is_right() const {
    return child_succeeds([&] {
      const auto start = std::chrono::steady_clock::now();
      const bool right = std::memcmp(run_sgemm(t, x).data(), expected.data(), 4 * t.m * t.n) == 0 &&
                         std::memcmp(run_bf16(t, x).data(), expected16.data(), 4 * t.m * t.n) == 0;
      return right && std::chrono::steady_clock::now() - start < std::chrono::seconds(1);
    });
  }
};

TEST_F(Gemm, ChildForkedAfterAGemmMultipliesWithinASecond) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  EXPECT_TRUE(ForkedGemm().child_is_right());
}

TEST_F(Gemm, ChildForkedDuringAGemmMultipliesWithinASecond) {
  TE_FL_SKIP_FORK_WHILE_ALLOCATING();
  const ForkedGemm gemm;
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 2; ++i) {
    busy.emplace_back([&] {
      while (!stop) run_sgemm(gemm.t, gemm.x), run_bf16(gemm.t, gemm.x);
    });
  }
  for (int i = 0; i < 30; ++i) EXPECT_TRUE(gemm.child_is_right());
  stop = true;
  for (std::thread& thread : busy) thread.join();
}

// exit() destroys the library's static objects and waits for GEMMs that are running. The child's
// exit skips the leak check, which would report memory that its running threads still use.
TEST_F(Gemm, AProgramThatEndsDuringAGemmEndsWell) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  TE_FL_SKIP_FORK_WHILE_ALLOCATING();
  const ForkedGemm gemm;
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(child_succeeds([&]() -> bool {
      std::atomic<int> busy{0};
      for (int t = 0; t < 3; ++t) {
        std::thread([&] {
          try {
            for (;; ++busy) run_sgemm(gemm.t, gemm.x), run_bf16(gemm.t, gemm.x);
          } catch (const std::exception&) {  // the GEMM is refused once exit() has begun
          }
          for (;;) pause();
        }).detach();
      }
      while (busy < 3) std::this_thread::yield();
      std::exit(0);
    }));
  }
}

constexpr const char* kDelay = "TEST_EXIT_AFTER_US";

// AProgramThatEndsDuringItsFirstGemmEndsWell starts this test in a process of its own. The main
// thread exits while another thread initialises the static objects of each kind of GEMM.
TEST(GemmExit, DISABLED_DuringTheFirst) {
  const char* delay = std::getenv(kDelay);
  ASSERT_NE(delay, nullptr);
  std::atomic<bool> begun{false};
  std::thread([&] {
    begun = true;
    for (int flags = 0; flags < 8; ++flags) {
      try {
        const Case t{64, 64, 64, (flags & 1) != 0, (flags & 2) != 0, 1, flags < 4 ? 0.0f : 1.0f};
        const Operands x(t);
        run_sgemm(t, x), run_bf16(t, x);
      } catch (const std::exception&) {  // refused once the exit began
      }
    }
    for (;;) pause();
  }).detach();
  while (!begun) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::microseconds(std::atoi(delay)));
  std::exit(0);
}

TEST(GemmExit, AProgramThatEndsDuringItsFirstGemmEndsWell) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  for (int us = 0; us < 48'000; us += 2'000) {
    const pid_t child = fork();
    if (child == 0) {
      setenv(kDelay, std::to_string(us).c_str(), 1);
      execl("/proc/self/exe", "unit_cpu", "--gtest_filter=GemmExit.DISABLED_DuringTheFirst",
            "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr);
      _exit(127);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << "after " << us << " us: status " << status;
  }
}

TEST(GemmPartition, BlocksCoverTheProductOnce) {
  for (const int threads : {1, 2, 3, 4, 7, 16, 64}) {
    for (const int64_t m : {1, 8, 9, 100, 4096}) {
      for (const int64_t n : {1, 16, 50, 1000}) {
        for (const int64_t k : {1, 255, 5000}) {
          const GemmPartition p = partition_gemm(m, n, k, threads);
          ASSERT_GE(p.blocks(), 1);
          ASSERT_LE(p.blocks(), threads);
          for (const auto& [size, blocks, align] :
               {std::tuple{m, p.row_blocks, 8}, {n, p.column_blocks, 16}, {k, p.k_blocks, 64}}) {
            int64_t next = 0;
            for (int64_t i = 0; i < blocks; ++i) {
              const Range r = divide(size, blocks, align, i);
              ASSERT_EQ(r.begin, next);
              ASSERT_GT(r.size, 0);
              next = r.begin + r.size;
            }
            ASSERT_EQ(next, size);
          }
        }
      }
    }
  }
}

TEST(GemmPartition, LargeProductsUseEveryThreadAndSmallOnesOne) {
  EXPECT_EQ(partition_gemm(2048, 1024, 1024, 4).blocks(), 4);
  EXPECT_EQ(partition_gemm(16, 4096, 1024, 4).column_blocks, 4);
  EXPECT_EQ(partition_gemm(4096, 64, 64, 4).row_blocks, 4);
  EXPECT_GT(partition_gemm(16, 16, 1 << 20, 4).k_blocks, 1);
  EXPECT_EQ(partition_gemm(32, 32, 32, 4).blocks(), 1);
}

}  // namespace
}  // namespace te_fl::cpu::sgemm_test
