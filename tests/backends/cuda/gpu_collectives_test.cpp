// NCCL collectives on real GPUs: with one rank, and with two if there are two GPUs. Usage:
// TE_FL_PLUGIN_MODULES=.../libte_fl_cuda.so gpu_collectives_test. Skipped without a GPU or without
// NCCL. Each rank of a job runs this program with a scenario's name.
#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "backends/cuda/plugin/nccl.hpp"
#include "collective_cases.hpp"

extern char** environ;

namespace te_fl {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using testing::Cases;
using testing::OnGpu;
using testing::rank_values;

Device gpu(int index) { return Device{TE_FL_DEVICE_CUDA, index, 0}; }
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
bool is_gpu_here(int index) {
  OpManager::instance();
  return devices::find(gpu(index)).ok();
}

// ---- one rank

class GpuCollectives : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(current_policy()) << "nothing runs under a policy that is invalid";
    if (!is_gpu_here(0)) GTEST_SKIP() << "no GPU, or TE_FL_PLUGIN_MODULES is not set";
    if (cuda::nccl() == nullptr) GTEST_SKIP() << cuda::nccl_missing();
    stream = std::move(Stream::create(gpu(0))).value();
    options.stream = stream.get();
  }
  static Comm one(const std::string& name = "one") {
    CommOptions o;
    o.device = gpu(0);
    o.name = name;
    Result<Comm> made = Comm::create(o);
    EXPECT_OK(made);
    return made.ok() ? std::move(made).value() : Comm();
  }
  Stream stream;
  CallOptions options;
};

TEST_F(GpuCollectives, OfOneRankAreRight) {
  const Comm comm = one();
  ASSERT_TRUE(comm);
  EXPECT_EQ(comm.provider(), "nccl");
  EXPECT_EQ(comm.implementations().size(), 9u);
  for (const auto& [op, impl] : comm.implementations()) EXPECT_EQ(impl, "vendor.nccl") << op;
  Cases cases(comm, options);
  cases.all();
  for (const DType d : {DType::kF32, DType::kF16, DType::kBF16, DType::kF64})
    cases.maximum_of_nan(d);
}

TEST_F(GpuCollectives, OfACapturedGraphRunAtEachLaunch) {
  const Comm comm = one();
  ASSERT_TRUE(comm);
  OnGpu x(gpu(0), DType::kF32, rank_values(0, 777)), sum(gpu(0), DType::kF32, 777),
      most(gpu(0), DType::kF32, 777), all(gpu(0), DType::kF32, 777);
  const auto step = [&] {
    ASSERT_OK(
        ops::all_reduce({.input = x.tensor, .output = sum.tensor, .comm = comm.c()}, options));
    ASSERT_OK(ops::all_reduce({.input = x.tensor,
                               .output = most.tensor,
                               .comm = comm.c(),
                               .reduction = TE_FL_REDUCTION_MAX},
                              options));
    ASSERT_OK(
        ops::all_to_all({.input = sum.tensor, .output = all.tensor, .comm = comm.c()}, options));
    ASSERT_OK(ops::barrier({.comm = comm.c()}, options));
  };
  step();
  Capture capture = std::move(Capture::begin(gpu(0), stream.get())).value();
  step();
  const Graph graph = std::move(capture.end()).value();
  for (int launch = 1; launch <= 3; ++launch) {
    x.put(rank_values(launch, 777));
    ASSERT_OK(graph.launch());
    ASSERT_OK(stream.synchronize());
    for (const OnGpu* result : {&sum, &most, &all})
      expect_values(*result, rank_values(launch, 777), "launch " + std::to_string(launch));
  }
}

// Needs 16 GiB, including the scratch memory of the maximum reduction, which te-fl's own kernels
// compute.
TEST_F(GpuCollectives, OfMoreElementsThan32BitsCountAreRight) {
  using numeric::bfloat16;
  constexpr int64_t kHalf = int64_t{1} << 31, kCount = kHalf + 77;
  const Comm comm = one();
  ASSERT_TRUE(comm);
  const Result<Tensor> x = Tensor::empty({kCount}, DType::kBF16, gpu(0)),
                       y = Tensor::empty({kCount}, DType::kBF16, gpu(0));
  if (!x.ok() || !y.ok()) GTEST_SKIP() << "less than 8 GiB of memory are free";
  const auto at = [](const Tensor& t, int64_t i) {
    return static_cast<bfloat16*>(t.raw_data()) + i;
  };
  const std::vector<int64_t> marked = {0, 78, kHalf - 1, kHalf, kHalf + 1, kCount - 1};
  ASSERT_OK(ops::fill({.output = *x, .value = 2}, options));
  for (size_t m = 0; m < marked.size(); ++m) {
    const auto value = numeric::from_double<bfloat16>(3.0 + static_cast<double>(m));
    ASSERT_OK(
        devices::copy(gpu(0), at(*x, marked[m]), Device(), &value, sizeof value, options.stream));
  }
  const auto expect_copy = [&](const char* what) {
    ASSERT_OK(stream.synchronize());
    for (const int64_t first : {int64_t{0}, int64_t{60}, kHalf - 16, kCount - 32}) {
      bfloat16 values[32];
      ASSERT_OK(devices::copy(Device(), values, gpu(0), at(*y, first), sizeof values));
      ASSERT_OK(devices::synchronize(gpu(0)));
      for (int64_t i = first; i < first + 32; ++i) {
        double expected = 2;
        for (size_t m = 0; m < marked.size(); ++m)
          if (marked[m] == i) expected = 3.0 + static_cast<double>(m);
        EXPECT_EQ(numeric::to_double(values[i - first]), expected) << what << ", element " << i;
      }
    }
    ASSERT_OK(ops::fill({.output = *y, .value = -1}, options));
  };
  for (const te_fl_reduction r : {TE_FL_REDUCTION_SUM, TE_FL_REDUCTION_MAX}) {
    ASSERT_OK(
        ops::all_reduce({.input = *x, .output = *y, .comm = comm.c(), .reduction = r}, options));
    expect_copy(r == TE_FL_REDUCTION_SUM ? "sum" : "max");
  }
  ASSERT_OK(ops::all_gather({.input = *x, .output = *y, .comm = comm.c()}, options));
  expect_copy("all_gather");
  ASSERT_OK(ops::all_to_all({.input = *x, .output = *y, .comm = comm.c()}, options));
  expect_copy("all_to_all");
}

TEST_F(GpuCollectives, WhatNeedsScratchIsRefusedInAGroup) {
  const Comm comm = one();
  ASSERT_TRUE(comm);
  OnGpu x(gpu(0), DType::kF32, rank_values(0, 5)), y(gpu(0), DType::kF32, 5);
  CommGroup group = std::move(CommGroup::begin(comm)).value();
  ASSERT_OK(ops::all_reduce({.input = x.tensor, .output = y.tensor, .comm = comm.c()}, options));
  // With one rank, a reduction is a copy and needs no NCCL call; a barrier is an all-reduce of one
  // number.
  ASSERT_OK(ops::all_reduce(
      {.input = x.tensor, .output = y.tensor, .comm = comm.c(), .reduction = TE_FL_REDUCTION_MAX},
      options));
  EXPECT_FAILS(ops::barrier({.comm = comm.c()}, options), kFailedPrecondition, "group");
  ASSERT_OK(group.end());
  ASSERT_OK(stream.synchronize());
  expect_values(y, rank_values(0, 5), "the group's");
}

TEST_F(GpuCollectives, SplitAndAbortedCommunicators) {
  Comm comm = one();
  ASSERT_TRUE(comm);
  const Comm part = std::move(comm.split(3, 0, "part")).value();
  ASSERT_TRUE(part);
  OnGpu x(gpu(0), DType::kF32, rank_values(0, 5)), y(gpu(0), DType::kF32, 5);
  const auto reduce = [&](const Comm& c) {
    return ops::all_reduce({.input = x.tensor, .output = y.tensor, .comm = c.c()}, options);
  };
  ASSERT_OK(reduce(part));
  ASSERT_OK(stream.synchronize());
  expect_values(y, rank_values(0, 5), "a part");
  comm.abort("the test says so");
  EXPECT_FAILS(reduce(comm), kCommFailed, "the test says so");
  EXPECT_FAILS(reduce(part), kCommFailed, "aborted");
  const Comm another = one("another");
  ASSERT_OK(reduce(another));
  ASSERT_OK(stream.synchronize());
}

// ---- two ranks, each in its own process

struct Rank {
  int number = 0;
  std::string store;
  Comm comm;
  Stream stream;
  CallOptions options;

  bool begin() {
    CommOptions o;
    o.device = gpu(number);
    o.rank = number;
    o.size = 2;
    Result<std::shared_ptr<Store>> opened = Store::open(store, number, 2, milliseconds(20000));
    EXPECT_OK(opened);
    if (!opened.ok()) return false;
    o.store = *opened;
    Result<Comm> made = Comm::create(o);
    EXPECT_OK(made);
    if (!made.ok()) return false;
    comm = std::move(made).value();
    stream = std::move(Stream::create(gpu(number))).value();
    options.stream = stream.get();
    return true;
  }
  Status reduce(const OnGpu& from, const OnGpu& to) const {
    return ops::all_reduce({.input = from.tensor, .output = to.tensor, .comm = comm.c()}, options);
  }
};

void run_ops(Rank& rank) {
  Cases cases(rank.comm, rank.options);
  cases.all();
  for (const DType d : {DType::kF32, DType::kF16, DType::kBF16, DType::kF64})
    cases.maximum_of_nan(d);
  const Comm part = std::move(rank.comm.split(0, -rank.number, "turned")).value();
  ASSERT_TRUE(part);
  EXPECT_EQ(part.rank(), 1 - rank.number);
  Cases(part, rank.options).reductions(DType::kF32, 777, TE_FL_REDUCTION_SUM);
}

// Calls collectives until one fails; expects the failure within `limit` s of `start`.
void expect_failure(Rank& rank, Clock::time_point start, double limit) {
  OnGpu x(gpu(rank.number), DType::kF32, rank_values(0, 65536)),
      y(gpu(rank.number), DType::kF32, 65536);
  Status status;
  while (status.ok() && seconds_since(start) < 30) {
    status = rank.reduce(x, y);
    if (status.ok()) status = devices::synchronize(gpu(rank.number), rank.stream.get());
    if (status.ok()) status = rank.comm.status();
  }
  const double took = seconds_since(start);
  std::fprintf(stderr, "failed after %.2f s: %s\n", took, status.to_string().c_str());
  EXPECT_EQ(status.code(), StatusCode::kCommFailed) << status.to_string();
  EXPECT_LT(took, limit);
  EXPECT_FAILS(rank.reduce(x, y), kCommFailed, "");
}

void run_killed(Rank& rank) {
  OnGpu x(gpu(rank.number), DType::kF32, rank_values(0, 65536)),
      y(gpu(rank.number), DType::kF32, 65536);
  ASSERT_OK(rank.reduce(x, y));
  ASSERT_OK(rank.stream.synchronize());
  if (rank.number == 1) {
    std::this_thread::sleep_for(milliseconds(300));
    raise(SIGKILL);
  }
  std::this_thread::sleep_for(milliseconds(600));
  expect_failure(rank, Clock::now(), 4.1);
}

// Rank 1 stays alive and calls no collectives, either from the beginning or after the first one.
void run_silent(Rank& rank) {
  if (rank.number == 1) return std::this_thread::sleep_for(milliseconds(9000));
  expect_failure(rank, Clock::now(), 4.1);
}
void run_late(Rank& rank) {
  OnGpu x(gpu(rank.number), DType::kF32, rank_values(0, 65536)),
      y(gpu(rank.number), DType::kF32, 65536);
  ASSERT_OK(rank.reduce(x, y));
  ASSERT_OK(rank.stream.synchronize());
  run_silent(rank);
}

// Prints the host time of a call that only enqueues, alternating between te-fl's call and NCCL's.
void print_times(const Comm& comm, const CallOptions& options, void* communicator) {
  const Device device = comm.device();
  const auto* nccl = cuda::nccl();
  constexpr int kCalls = 200;
  for (const int64_t n : {int64_t{768}, int64_t{1} << 20, int64_t{1} << 24}) {
    OnGpu x(device, DType::kF32, n), y(device, DType::kF32, n);
    const te_fl_all_reduce_args args{.input = x.tensor, .output = y.tensor, .comm = comm.c()};
    auto* stream = static_cast<cudaStream_t>(options.stream);
    const auto ours = [&] {
      for (int i = 0; i < kCalls; ++i) ASSERT_OK(ops::all_reduce(args, options));
    };
    const auto theirs = [&] {
      for (int i = 0; i < kCalls; ++i) {
        ASSERT_EQ(nccl->all_reduce(x.tensor.raw_data(), y.tensor.raw_data(), static_cast<size_t>(n),
                                   cuda::kNcclF32, cuda::kNcclSum, communicator, stream),
                  0);
      }
    };
    double host[2] = {1e9, 1e9}, whole[2] = {1e9, 1e9};
    for (int turn = 0; turn < 6; ++turn) {
      ASSERT_OK(devices::synchronize(device, stream));
      const Clock::time_point start = Clock::now();
      turn % 2 == 0 ? ours() : theirs();
      host[turn % 2] = std::min(host[turn % 2], seconds_since(start) / kCalls * 1e6);
      ASSERT_OK(devices::synchronize(device, stream));
      whole[turn % 2] = std::min(whole[turn % 2], seconds_since(start) / kCalls * 1e6);
    }
    std::fprintf(stderr,
                 "all_reduce of %lld f32, %d ranks: host te-fl %.2f us, NCCL %.2f us; "
                 "with the GPU te-fl %.2f us, NCCL %.2f us\n",
                 static_cast<long long>(n), comm.size(), host[0], host[1], whole[0], whole[1]);
  }
}

TEST_F(GpuCollectives, TimesOfOneRank) {
  const Comm comm = one();
  ASSERT_TRUE(comm);
  cuda::NcclUniqueId id;
  void* communicator = nullptr;
  ASSERT_EQ(cuda::nccl()->unique_id(&id), 0);
  ASSERT_EQ(cuda::nccl()->create(&communicator, 1, id, 0), 0);
  print_times(comm, options, communicator);
  EXPECT_EQ(cuda::nccl()->destroy(communicator), 0);
}

void run_times(Rank& rank) {
  cuda::NcclUniqueId id;
  void* communicator = nullptr;
  OnGpu bytes(gpu(rank.number), DType::kU8, int64_t{sizeof id});
  if (rank.number == 0) {
    ASSERT_EQ(cuda::nccl()->unique_id(&id), 0);
  }
  ASSERT_OK(devices::copy(gpu(rank.number), bytes.tensor.raw_data(), Device(), &id, sizeof id,
                          rank.options.stream));
  ASSERT_OK(ops::broadcast({.data = bytes.tensor, .comm = rank.comm.c()}, rank.options));
  ASSERT_OK(devices::copy(Device(), &id, gpu(rank.number), bytes.tensor.raw_data(), sizeof id,
                          rank.options.stream));
  ASSERT_OK(rank.stream.synchronize());
  // NCCL uses the current device, which te-fl does not change.
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  ASSERT_NE(driver, nullptr);
  void* context = nullptr;
  const auto retain =
      reinterpret_cast<int (*)(void**, int)>(dlsym(driver, "cuDevicePrimaryCtxRetain"));
  const auto set_current = reinterpret_cast<int (*)(void*)>(dlsym(driver, "cuCtxSetCurrent"));
  ASSERT_EQ(retain(&context, rank.number), 0);
  ASSERT_EQ(set_current(context), 0);
  ASSERT_EQ(cuda::nccl()->create(&communicator, 2, id, rank.number), 0);
  print_times(rank.comm, rank.options, communicator);
  cuda::nccl()->destroy(communicator);
}

constexpr struct {
  const char* name;
  void (*run)(Rank&);
} kScenarios[] = {{"ops", run_ops},
                  {"killed", run_killed},
                  {"silent", run_silent},
                  {"late", run_late},
                  {"times", run_times}};

// Runs a scenario; returns the ranks' exit statuses, 128 + signal for a rank that was killed.
std::vector<int> run_ranks(const std::string& scenario) {
  const std::string store = "/tmp/te_fl_collectives." + std::to_string(getpid()) + "." + scenario;
  std::vector<pid_t> ranks;
  for (int r = 0; r < 2; ++r) {
    // Every rank process sees all GPUs, because the scenarios use the machine's GPU numbers. If
    // only one GPU were visible, it would be cuda:0.
    std::string number = std::to_string(r), address = "file:" + store, name = scenario;
    std::string self = "/proc/self/exe", word = "--rank";
    char* argv[] = {self.data(), word.data(), name.data(), number.data(), address.data(), nullptr};
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, self.c_str(), nullptr, nullptr, argv, environ), 0);
    ranks.push_back(pid);
  }
  std::vector<int> statuses;
  for (const pid_t pid : ranks) {
    int status = 0;
    waitpid(pid, &status, 0);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return statuses;
}

class GpuRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(current_policy());  // the ranks, which are child processes, use the same policy
    if (!is_gpu_here(0)) GTEST_SKIP() << "no GPU, or TE_FL_PLUGIN_MODULES is not set";
    if (!is_gpu_here(1)) GTEST_SKIP() << "one GPU only";
    if (cuda::nccl() == nullptr) GTEST_SKIP() << cuda::nccl_missing();
  }
};

TEST_F(GpuRanks, EveryCollectiveIsRight) { EXPECT_EQ(run_ranks("ops"), (std::vector<int>{0, 0})); }
TEST_F(GpuRanks, AKilledRankIsDetected) {
  EXPECT_EQ(run_ranks("killed"), (std::vector<int>{0, 128 + SIGKILL}));
}
TEST_F(GpuRanks, ARankThatNeverCallsIsDetected) {
  EXPECT_EQ(run_ranks("silent"), (std::vector<int>{0, 0}));
}
TEST_F(GpuRanks, ARankThatStopsCallingIsDetected) {
  EXPECT_EQ(run_ranks("late"), (std::vector<int>{0, 0}));
}
TEST_F(GpuRanks, Times) { EXPECT_EQ(run_ranks("times"), (std::vector<int>{0, 0})); }

// One rank's part of a scenario, run in its own process.
std::string g_scenario, g_store;
int g_rank = 0;
void run_as_rank() {
  Rank rank{.number = g_rank, .store = g_store, .comm = {}, .stream = {}, .options = {}};
  ASSERT_TRUE(is_gpu_here(g_rank));
  ASSERT_TRUE(rank.begin());
  for (const auto& scenario : kScenarios) {
    if (g_scenario == scenario.name) return scenario.run(rank);
  }
  FAIL() << "no scenario " << g_scenario;
}

TEST(GpuRank, Runs) {
  if (g_scenario.empty()) GTEST_SKIP() << "the part of one rank, which the tests of two start";
  run_as_rank();
}

}  // namespace
}  // namespace te_fl

int main(int argc, char** argv) {
  setenv("NCCL_NVLS_ENABLE", "0", 0);  // multicast can disable the GPUs of a shared host
  setenv("TE_FL_COMM_TIMEOUT_MS", "3000", 0);
  ::testing::InitGoogleTest(&argc, argv);
  if (argc == 5 && std::string(argv[1]) == "--rank") {
    alarm(60);  // kills a rank that hangs
    te_fl::g_scenario = argv[2];
    te_fl::g_rank = std::atoi(argv[3]);
    te_fl::g_store = argv[4];
    ::testing::GTEST_FLAG(filter) = "GpuRank.*";
  }
  return RUN_ALL_TESTS();
}
