// A plugin comes and goes while other threads call its op, ten million times: no call fails, gives
// a wrong result or leaks. DEACTIVATION_CALLS=N makes it another number of calls.
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "fault_fixture.hpp"
#include "tests/unit/sanitizers.hpp"

namespace te_fl::test {
namespace {

constexpr int kThreads = 4;
constexpr int64_t kMostElements = 8;  // each extent has a plan of its own
constexpr int kBatch = 256;

std::atomic<uint64_t> g_served{0}, g_plans_destroyed{0};

void count_event(const char* text) {
  if (std::string_view(text) == "run") g_served.fetch_add(1, std::memory_order_relaxed);
  if (std::string_view(text) == "destroy_plan")
    g_plans_destroyed.fetch_add(1, std::memory_order_relaxed);
}

uint64_t calls_wanted() {
  const char* text = std::getenv("DEACTIVATION_CALLS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 10'000'000;
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// One thread's tensors, calls and checks.
class Caller {
 public:
  explicit Caller(bool prepared) : prepared_(prepared) {
    in_.reserve(kMostElements), out_.reserve(kMostElements);  // the arguments point at them
    for (int64_t n = 1; n <= kMostElements; ++n) {
      in_.push_back(Tensor::zeros({n}, DType::kF32).value());
      out_.push_back(Tensor::zeros({n}, DType::kF32).value());
      te_fl_relu_args args;
      args.input = in_.back();
      args.output = out_.back();
      args_.push_back(args);
      if (prepared) handles_.push_back(OpManager::instance().prepare(op::relu, &args).value());
    }
  }

  // Empty if the results are right.
  std::string call(uint64_t number) {
    const size_t which = number % kMostElements;
    auto* const x = in_[which].data<float>();
    auto* const y = out_[which].data<float>();
    for (size_t i = 0; i <= which; ++i) {
      const auto value = static_cast<float>(number % 4093 + i + 1);
      x[i] = (number + i) % 3 == 0 ? -value : value;
      y[i] = std::nanf("");
    }
    const Status status = prepared_ ? handles_[which].call(&args_[which])
                                    : OpManager::instance().call(op::relu, &args_[which]);
    if (!status.ok()) return status.to_string();
    for (size_t i = 0; i <= which; ++i) {
      if (y[i] != (x[i] > 0 ? x[i] : 0))
        return "call " + std::to_string(number) + ": relu(" + std::to_string(x[i]) + ") is " +
               std::to_string(y[i]);
    }
    return "";
  }

 private:
  const bool prepared_;
  std::vector<Tensor> in_, out_;
  std::vector<te_fl_relu_args> args_;
  std::vector<PreparedOp> handles_;
};

TEST_F(FaultTest, DeactivationDuringTenMillionCalls) {
  char address[32];
  std::snprintf(address, sizeof address, "%llx",
                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(&count_event)));
  setenv("FAULT_EVENTS", address, 1);
  const uint64_t wanted = calls_wanted();
  ASSERT_GT(wanted, 0u) << "DEACTIVATION_CALLS";
  std::atomic<uint64_t> calls{0}, wrong{0};
  std::mutex mutex;
  std::string first_wrong;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, prepared = t % 2 == 1] {
      PolicySettings settings;
      settings.prefer = Kind::kVendor;
      const PolicyScope scope(settings);
      Caller caller(prepared);
      for (uint64_t number = 0; calls.load() < wanted; number += kBatch) {
        for (int i = 0; i < kBatch; ++i) {
          const std::string what = caller.call(number + i);
          if (what.empty()) continue;
          if (wrong.fetch_add(1) == 0) {
            const std::lock_guard lock(mutex);
            first_wrong = what;
          }
        }
        calls.fetch_add(kBatch);
      }
    });
  }
  // One without plans and one with.
  const std::string plugins[] = {"good", "throw_destroy_plan"};
  uint64_t rounds = 0;
  int64_t settled = 0;
  while (calls.load() < wanted) {
    const std::string& name = plugins[rounds % 2];
    load(name);
    const uint64_t now = calls.load();
    while (calls.load() < std::min(wanted, now + 16 * kBatch)) std::this_thread::yield();
    const Status status = te_fl::plugins::deactivate(name, true);
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_FALSE(in_maps(fault_path(name)));
    if (++rounds == 20) settled = resident_bytes();
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0u) << first_wrong;
  EXPECT_GT(g_served, 0u);
  EXPECT_LT(g_served, calls) << "the host serves while the plugin is gone";
  EXPECT_GT(g_plans_destroyed, 0u);
  EXPECT_GE(rounds, 2u);
  const int64_t grown = settled == 0 ? 0 : resident_bytes() - settled;
  if (!TE_FL_ASAN && !TE_FL_TSAN) {  // which keep what is freed, and books of it
    EXPECT_LT(grown, int64_t{4} << 20) << "a life leaves memory behind";
  }
  std::printf(
      "%llu calls, %llu of them by the plugin, in %llu lives of it; memory grew by %lld KiB\n",
      static_cast<unsigned long long>(calls), static_cast<unsigned long long>(g_served),
      static_cast<unsigned long long>(rounds), static_cast<long long>(grown >> 10));
}

}  // namespace
}  // namespace te_fl::test
