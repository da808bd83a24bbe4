// Measures the GEMM libraries that Debian and Ubuntu package, as the CPU backend would use them:
// loading time, FP32 speed on one thread, on the library's own threads and single-threaded
// inside the backend's pool, repeatability, and a forked child's first GEMM. Prints the table of
// bench/results/gemm_library.md.
//
//   gemm_library [NAME=PATH ...]   NAME: openblas, blis, onednn; default: what ld.so finds
//
// Each library runs in a separate process, so that its threads do not disturb the others.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../backends/cpu/sgemm.hpp"
#include "../backends/cpu/thread_pool.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using te_fl::cpu::ThreadPool;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Shape {
  bool trans_a, trans_b;
  int64_t m, n, k;
};

// A row-major SGEMM. The leading dimensions are those of the whole contiguous matrices.
using Sgemm = std::function<void(const Shape&, const float* a, int64_t lda, const float* b,
                                 int64_t ldb, float* c, int64_t ldc)>;

struct Library {
  Sgemm sgemm;
  // Sets the library's thread count for calls from this thread.
  std::function<void(int)> set_threads;
};

using CblasSgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*,
                            int, float, float*, int);
using DnnlSgemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t,
                          const float*, int64_t, float, float*, int64_t);

template <typename F>
F symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) {
    std::fprintf(stderr, "symbol %s is missing: %s\n", name, dlerror());
    std::exit(1);
  }
  return reinterpret_cast<F>(found);
}

Library bind(const std::string& name, void* library) {
  if (name == "onednn") {
    const auto gemm = symbol<DnnlSgemm>(library, "dnnl_sgemm");
    const auto threads = symbol<void (*)(int)>(library, "omp_set_num_threads");
    return {[gemm](const Shape& s, const float* a, int64_t lda, const float* b, int64_t ldb,
                   float* c, int64_t ldc) {
              gemm(s.trans_a ? 'T' : 'N', s.trans_b ? 'T' : 'N', s.m, s.n, s.k, 1.0f, a, lda, b,
                   ldb, 0.0f, c, ldc);
            },
            threads};
  }
  const auto gemm = symbol<CblasSgemm>(library, "cblas_sgemm");
  Library bound{[gemm](const Shape& s, const float* a, int64_t lda, const float* b, int64_t ldb,
                       float* c, int64_t ldc) {
                  gemm(101, s.trans_a ? 112 : 111, s.trans_b ? 112 : 111, int(s.m), int(s.n),
                       int(s.k), 1.0f, a, int(lda), b, int(ldb), 0.0f, c, int(ldc));
                },
                {}};
  if (name == "blis") {
    bound.set_threads =
        [set = symbol<void (*)(int64_t)>(library, "bli_thread_set_num_threads")](int n) { set(n); };
  } else {
    bound.set_threads = symbol<void (*)(int)>(library, "openblas_set_num_threads");
  }
  return bound;
}

long resident_kib() {
  std::ifstream file("/proc/self/statm");
  long size = 0, resident = 0;
  file >> size >> resident;
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

int thread_count() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    if (word == "Threads:") {
      int n = 0;
      file >> n;
      return n;
    }
  }
  return 0;
}

// Returns the shortest of several runs of each call, because other programs can only slow a run
// down. The calls alternate so that all meet the same load. A pause follows each turn, because
// threads of an OpenMP library keep spinning for some milliseconds after a call.
std::vector<double> best_seconds(const std::vector<std::function<void()>>& calls) {
  std::vector<double> best(calls.size(), 1e30);
  for (int round = 0; round < 6; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const auto turn = Clock::now();
      for (int run = 0; run < 200 && (run < 3 || seconds_since(turn) < 0.05); ++run) {
        const auto start = Clock::now();
        calls[i]();
        best[i] = std::min(best[i], seconds_since(start));
      }
    }
  }
  return best;
}

struct Problem {
  explicit Problem(const Shape& shape) : s(shape) {
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(-1, 1);
    a.resize(s.m * s.k);
    b.resize(s.k * s.n);
    c.assign(s.m * s.n, 0.0f);
    for (float& x : a) x = uniform(random);
    for (float& x : b) x = uniform(random);
  }
  int64_t lda() const { return s.trans_a ? s.m : s.k; }
  int64_t ldb() const { return s.trans_b ? s.k : s.n; }
  void whole(const Library& lib) { lib.sgemm(s, a.data(), lda(), b.data(), ldb(), c.data(), s.n); }
  // Splits the rows over the pool: the simplest parallel use of a single-threaded library.
  void pooled(const Library& lib, ThreadPool& pool) {
    pool.parallel_for(s.m, 16, [&](int64_t begin, int64_t end) {
      lib.set_threads(1);
      Shape part = s;
      part.m = end - begin;
      lib.sgemm(part, a.data() + (s.trans_a ? begin : begin * s.k), lda(), b.data(), ldb(),
                c.data() + begin * s.n, s.n);
    });
  }
  Shape s;
  std::vector<float> a, b, c;
};

double gflops(const Shape& s, double seconds) { return 2e-9 * s.m * s.n * s.k / seconds; }

// Returns the milliseconds of a forked child's first pooled GEMM, or -1 if it takes over five
// seconds.
double forked_first_gemm(const Library& lib, Problem& problem, ThreadPool& pool) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) std::exit(1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);
    const auto start = Clock::now();
    problem.pooled(lib, pool);
    const double ms = seconds_since(start) * 1e3;
    (void)!write(pipe_ends[1], &ms, sizeof ms);
    _exit(0);
  }
  close(pipe_ends[1]);
  double ms = -1;
  if (read(pipe_ends[0], &ms, sizeof ms) != sizeof ms) ms = -1;
  close(pipe_ends[0]);
  waitpid(child, nullptr, 0);
  return ms;
}

void report_fork(const Library& lib, ThreadPool& pool) {
  Problem problem({false, false, 512, 512, 512});
  Problem other({false, false, 512, 512, 512});
  problem.pooled(lib, pool);
  std::printf("  fork, first GEMM of the child: parent idle %.1f ms",
              forked_first_gemm(lib, problem, pool));
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    lib.set_threads(1);
    while (!stop) other.whole(lib);
  });
  double worst = 0;
  int hung = 0;
  for (int i = 0; i < 40; ++i) {
    const double ms = forked_first_gemm(lib, problem, pool);
    if (ms < 0 && ++hung == 3) break;
    worst = std::max(worst, ms);
  }
  stop = true;
  busy.join();
  std::printf("; parent in a GEMM: worst of 40 %.1f ms, hung %d\n", worst, hung);
}

constexpr Shape kShapes[] = {{false, true, 1024, 256, 256},    {false, true, 1024, 1024, 256},
                             {false, true, 2048, 1024, 1024},  {false, false, 2048, 1024, 1024},
                             {true, false, 1024, 1024, 2048},  {false, true, 2048, 4096, 1024},
                             {false, false, 2048, 1024, 4096}, {true, false, 4096, 1024, 1024},
                             {false, true, 4096, 64, 64},      {false, true, 16, 4096, 1024},
                             {false, true, 1, 4096, 1024},     {true, false, 256, 256, 8192},
                             {true, false, 64, 64, 8192}};

// Prints one line of the table. `served`: te_fl::cpu::sgemm uses this library.
void measure_shape(const Library& lib, ThreadPool& pool, const Shape& s, bool served) {
  Problem problem(s);
  problem.pooled(lib, pool);
  const std::vector<float> reference = problem.c;
  problem.pooled(lib, pool);
  const bool same = std::memcmp(reference.data(), problem.c.data(), 4 * reference.size()) == 0;
  std::vector<uint16_t> a16(problem.a.size(), 0x3f80), b16(problem.b.size(), 0x3f80);
  std::vector<std::function<void()>> calls = {
      [&] { lib.set_threads(1), problem.whole(lib); },
      [&] { lib.set_threads(pool.num_threads()), problem.whole(lib); },
      [&] { problem.pooled(lib, pool); }};
  if (served) {
    calls.push_back([&] {
      te_fl::cpu::sgemm(s.trans_a, s.trans_b, s.m, s.n, s.k, 1.0f, problem.a.data(), problem.lda(),
                        problem.b.data(), problem.ldb(), 0.0f, problem.c.data(), s.n);
    });
    calls.push_back([&] {
      te_fl::cpu::bf16gemm(s.trans_a, s.trans_b, s.m, s.n, s.k, 1.0f, a16.data(), problem.lda(),
                           b16.data(), problem.ldb(), 0.0f, problem.c.data(), s.n);
    });
  }
  char label[64];
  std::snprintf(label, sizeof label, "%c%c %5ld %5ld %5ld", s.trans_a ? 'T' : 'N',
                s.trans_b ? 'T' : 'N', long(s.m), long(s.n), long(s.k));
  std::printf("  %-18s", label);
  for (const double t : best_seconds(calls)) std::printf(" %8.1f", gflops(s, t));
  std::printf("%s\n", same ? "" : "  NOT REPEATABLE");
}

void measure(const std::string& name, const std::string& path) {
  const long before_kib = resident_kib();
  const auto start = Clock::now();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const double load_ms = seconds_since(start) * 1e3;
  if (handle == nullptr) {
    std::printf("%s: not here (%s)\n", name.c_str(), dlerror());
    return;
  }
  std::printf("%s (%s): dlopen %.2f ms, +%ld KiB resident, %d threads after loading\n",
              name.c_str(), path.c_str(), load_ms, resident_kib() - before_kib, thread_count());
  const Library lib = bind(name, handle);
  ThreadPool& pool = ThreadPool::instance();
  lib.set_threads(1);
  Problem tiny({false, false, 32, 32, 32});
  const auto first = Clock::now();
  tiny.whole(lib);
  const double first_ms = seconds_since(first) * 1e3;
  std::printf("  first GEMM %.2f ms, later %.2f us\n", first_ms,
              best_seconds({[&] { tiny.whole(lib); }})[0] * 1e6);
  report_fork(lib, pool);
  std::printf("  %-18s %8s %8s %8s", "shape", "1 thread", "own", "pool");
  if (name == "onednn") std::printf(" %8s %8s", "sgemm", "bf16gemm");
  std::printf("   GFLOP/s (threads: %d)\n", pool.num_threads());
  for (const Shape& s : kShapes) measure_shape(lib, pool, s, name == "onednn");
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> libraries(argv + 1, argv + argc);
  if (libraries.empty()) {
    libraries = {"openblas=libopenblas.so.0", "blis=libblis.so.4", "onednn=libdnnl.so.2",
                 "onednn=libdnnl.so.3"};
  }
  for (const std::string& entry : libraries) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos) {
      std::fprintf(stderr, "%s: expected NAME=PATH\n", entry.c_str());
      return 2;
    }
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      measure(entry.substr(0, equals), entry.substr(equals + 1));
      std::fflush(stdout);
      _exit(0);
    }
    waitpid(child, nullptr, 0);
  }
}
