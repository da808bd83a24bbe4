// Plugins are loaded and deactivated while other threads call their ops: every call gives a right
// result or an error with a reason, and nothing leaks. DEACTIVATION_CALLS=N sets the number of
// calls per test; the long form uses ten million.
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "core/tensor/dlpack.hpp"
#include "fault_fixture.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"

namespace te_fl::test {
namespace {

constexpr int kThreads = 4;
constexpr int64_t kMostElements = 8;  // each extent has its own plan
constexpr int kBatch = 256;
constexpr uint64_t kLeastLives = 8;  // minimum number of plugin lives, even with few calls

std::atomic<uint64_t> g_served{0}, g_plans_destroyed{0};

void count_event(const char* text) {
  if (std::string_view(text) == "run") g_served.fetch_add(1, std::memory_order_relaxed);
  if (std::string_view(text) == "destroy_plan")
    g_plans_destroyed.fetch_add(1, std::memory_order_relaxed);
}

uint64_t calls_wanted() {
  const char* text = std::getenv("DEACTIVATION_CALLS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 200'000;
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Tensors, calls and checks of one thread.
class Caller {
 public:
  explicit Caller(bool prepared) : prepared_(prepared) {
    // The arguments point at their elements.
    in_.reserve(kMostElements), out_.reserve(kMostElements);
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

  // Calls the op; returns "" if the results are right, otherwise an error text.
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

class DeactivationSoak : public FaultTest {
 protected:
  static void hear_with(void (*listener)(const char*)) {
    char address[32];
    std::snprintf(address, sizeof address, "%llx",
                  static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(listener)));
    setenv("FAULT_EVENTS", address, 1);
  }
};

TEST_F(DeactivationSoak, OfAPluginOnTheHost) {
  hear_with(&count_event);
  const uint64_t wanted = calls_wanted();
  ASSERT_GT(wanted, 0u) << "DEACTIVATION_CALLS";
  std::atomic<uint64_t> calls{0}, wrong{0};
  std::atomic<bool> done{false};
  std::mutex mutex;
  std::string first_wrong;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, prepared = t % 2 == 1] {
      PolicySettings settings;
      settings.prefer = Kind::kVendor;
      const PolicyScope scope(settings);
      Caller caller(prepared);
      for (uint64_t number = 0; !done.load(); number += kBatch) {
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
  // The plugin "good" has no plans; "throw_destroy_plan" has plans.
  const std::string plugins[] = {"good", "throw_destroy_plan"};
  uint64_t rounds = 0;
  int64_t settled = 0;
  while (calls.load() < wanted || rounds < kLeastLives) {
    const std::string& name = plugins[rounds % 2];
    load(name);
    const uint64_t now = calls.load();
    while (calls.load() < now + 16 * kBatch) std::this_thread::yield();
    const Status status = te_fl::plugins::deactivate(name, true);
    EXPECT_OK(status);
    EXPECT_FALSE(in_maps(fault_path(name)));
    if (++rounds == 20) settled = resident_bytes();
  }
  done = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0u) << first_wrong;
  EXPECT_GT(g_served, 0u);
  EXPECT_LT(g_served, calls) << "the host runs the calls while the plugin is gone";
  EXPECT_GT(g_plans_destroyed, 0u);
  const int64_t grown = settled == 0 ? 0 : resident_bytes() - settled;
  if (!TE_FL_ASAN && !TE_FL_TSAN) {  // sanitizers keep freed memory
    EXPECT_LT(grown, int64_t{4} << 20) << "a life leaves memory behind";
  }
  std::printf(
      "%llu calls, %llu of them by the plugin, in %llu lives of it; memory grew by %lld KiB\n",
      static_cast<unsigned long long>(calls), static_cast<unsigned long long>(g_served),
      static_cast<unsigned long long>(rounds), static_cast<long long>(grown >> 10));
}

// ---- op tables that are replaced continuously

TEST_F(DeactivationSoak, WhilePrioritiesChange) {
  constexpr int kCallers = 2, kSetters = 4;
  constexpr uint64_t kLeastTables = 40'000;
  const uint64_t wanted = calls_wanted();
  std::atomic<uint64_t> calls{0}, tables{0}, wrong{0};
  const auto goes_on = [&] { return calls.load() < wanted || tables.load() < kLeastTables; };
  std::mutex mutex;
  std::string first_wrong;
  const auto note = [&](const std::string& what) {
    if (what.empty() || wrong.fetch_add(1) != 0) return;
    const std::lock_guard lock(mutex);
    first_wrong = what;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kCallers; ++t) {
    threads.emplace_back([&, t] {
      Caller caller(t % 2 == 1);
      for (uint64_t number = 0; goes_on(); number += kBatch) {
        for (int i = 0; i < kBatch; ++i) note(caller.call(number + i));
        calls.fetch_add(kBatch);
      }
    });
  }
  // These threads also query the registry, which reads the op tables without making calls.
  for (int t = 0; t < kSetters; ++t) {
    threads.emplace_back([&, t] {
      OpRegistry& registry = OpRegistry::instance();
      for (int priority = 0; goes_on(); ++priority) {
        const Status set = registry.set_priority(
            "relu", t % 2 == 0 ? "default.cpu" : "reference.host", 100 + priority % 40);
        note(set.ok() ? "" : set.to_string());
        if (priority % 16 == 0 && registry.snapshot().empty()) note("nothing is registered");
        tables.fetch_add(1);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  ASSERT_OK(OpRegistry::instance().set_priority("relu", "default.cpu", TE_FL_PRIORITY_DEFAULT));
  ASSERT_OK(
      OpRegistry::instance().set_priority("relu", "reference.host", TE_FL_PRIORITY_REFERENCE));
  EXPECT_EQ(wrong, 0u) << first_wrong;
  std::printf("%llu calls, %llu tables\n", static_cast<unsigned long long>(calls),
              static_cast<unsigned long long>(tables));
}

// ---- a plugin with a device, and another plugin that adds ops to it

std::atomic<int64_t> g_inside{0}, g_guest_served{0};
std::atomic<uint64_t> g_violations{0};

void watch_guest(const char* raw) {
  const std::string_view text = raw;
  if (text == "guest runs") {
    g_inside.fetch_add(1, std::memory_order_relaxed);
  } else if (text == "guest ran") {
    g_inside.fetch_sub(1, std::memory_order_relaxed);
    g_guest_served.fetch_add(1, std::memory_order_relaxed);
  } else if (text == "quiesce" || text == "guest quiesces") {
    if (g_inside.load() != 0) ++g_violations;  // no thread may be inside an op on the device
  } else if (text == "destroy with objects") {
    ++g_violations;
  }
}

// Memory that belongs to a framework; te-fl wraps it and never frees it.
class ForeignMemory {
 public:
  ForeignMemory() : data_(static_cast<float*>(std::aligned_alloc(256, 256))) {}
  ~ForeignMemory() { std::free(data_); }
  ForeignMemory(const ForeignMemory&) = delete;
  ForeignMemory& operator=(const ForeignMemory&) = delete;
  float* data() const { return data_; }

 private:
  float* data_;
};

// A DLPack tensor [n] on ext:owner:0 that owns its memory.
core::DlpackVersioned* make_dlpack(int64_t n) {
  struct Holder {
    ForeignMemory memory;
    int64_t shape[1];
    core::DlpackVersioned managed{};
  };
  auto* holder = new Holder;
  holder->shape[0] = n;
  holder->managed.version = core::kDlpackVersion;
  holder->managed.manager_ctx = holder;
  holder->managed.deleter = [](core::DlpackVersioned* self) {
    delete static_cast<Holder*>(self->manager_ctx);
  };
  holder->managed.dl_tensor.data = holder->memory.data();
  holder->managed.dl_tensor.device = {TE_FL_DEVICE_EXT, 0};
  holder->managed.dl_tensor.ndim = 1;
  holder->managed.dl_tensor.dtype = {TE_FL_CODE_FLOAT, 32, 1};
  holder->managed.dl_tensor.shape = holder->shape;
  return &holder->managed;
}

// One thread of a framework: the memory, streams, handles and calls of one batch.
class ForeignCaller {
 public:
  struct Counts {
    uint64_t served = 0, refused = 0;
  };
  ForeignCaller(const Device& device, int number) : device_(device), number_(number) {}

  // Runs a batch; returns "" if each call gave a right result or was refused because the device was
  // away.
  std::string batch(uint64_t first, Counts& counts) {
    const int64_t n = static_cast<int64_t>(first / kBatch) % kMostElements + 1;
    const Tensor in = foreign(n), out = foreign(n);
    if (!in.defined() || !out.defined()) return "";  // from_dlpack() fails while the device is away
    // Uses the default stream, a framework's stream or te-fl's stream.
    Result<Stream> own = Stream::create(device_);
    uint64_t framework_stream = 0;
    void* const streams[] = {nullptr, &framework_stream, own.ok() ? own->get() : nullptr};
    te_fl_relu_args args;
    args.input = in;
    args.output = out;
    for (uint64_t i = first; i < first + kBatch; ++i) {
      if (std::string what = call(args, i, n, streams[i % 3], counts); !what.empty()) return what;
    }
    return touch(out);
  }

 private:
  Tensor foreign(int64_t n) {
    if (number_ % 2 == 0) {
      auto memory = std::make_shared<ForeignMemory>();
      const int64_t shape[] = {n};
      float* const data = memory->data();
      return Tensor::wrap(data, shape, {}, DType::kF32, device_, std::move(memory)).value();
    }
    core::DlpackVersioned* const managed = make_dlpack(n);
    Result<Tensor> taken = Tensor::from_dlpack(managed, true);
    if (taken.ok()) return *taken;
    managed->deleter(managed);
    return Tensor();
  }

  std::string call(const te_fl_relu_args& args, uint64_t number, int64_t n, void* stream,
                   Counts& counts) {
    auto* const x = static_cast<float*>(args.input->dl.data);
    auto* const y = static_cast<float*>(args.output->dl.data);
    for (int64_t i = 0; i < n; ++i) {
      const auto value = static_cast<float>(number % 4093 + static_cast<uint64_t>(i) + 1);
      x[i] = (number + static_cast<uint64_t>(i)) % 3 == 0 ? -value : value;
      y[i] = -1;
    }
    CallOptions options;
    options.stream = stream;
    const Status status = run(args, options);
    if (!status.ok()) {
      ++counts.refused;
      return is_away(status) ? "" : status.to_string();
    }
    ++counts.served;
    for (int64_t i = 0; i < n; ++i) {
      if (y[i] != (x[i] > 0 ? x[i] : 0)) {
        return "call " + std::to_string(number) + ": relu(" + std::to_string(x[i]) + ") is " +
               std::to_string(y[i]);
      }
    }
    return "";
  }

  // Threads 2 and 3 call through a PreparedOp that stays in use while the device is withdrawn and
  // reloaded many times.
  Status run(const te_fl_relu_args& args, const CallOptions& options) {
    if (number_ < 2) return OpManager::instance().call(op::relu, &args, options);
    if (!handle_) {
      Result<PreparedOp> made = OpManager::instance().prepare(op::relu, &args, options);
      if (!made.ok()) return made.status();
      handle_ = *made;
    }
    return handle_->call(&args, options);
  }

  // Calls the device's own functions.
  std::string touch(const Tensor& out) {
    char byte = 0;
    for (const Status& s :
         {devices::copy(Device{}, &byte, device_, out.raw_data(), 1), devices::synchronize(device_),
          Event::create(device_).status(), Tensor::zeros({4}, DType::kF32, device_).status()}) {
      if (!s.ok() && !is_away(s)) return s.to_string();
    }
    return "";
  }

  static bool is_away(const Status& status) {
    const bool code =
        status.code() == StatusCode::kUnsupported || status.code() == StatusCode::kNotFound;
    return code && testing::contains(status.to_string(), "ext:owner:0");
  }

  const Device device_;
  const int number_;
  std::optional<PreparedOp> handle_;
};

// Withdraws and reloads the two plugins in turn while `live` returns true; returns the number of
// lives.
uint64_t withdraw_in_turn(const std::function<bool(uint64_t lives)>& live) {
  const auto load = [](const char* name) {
    for (;;) {
      const auto loaded = plugins::load(fault_path(name));
      if (loaded.ok()) return;
      // Loading the owner fails with "still referenced" while streams of an unfinished batch exist;
      // it is then repeated.
      ASSERT_TRUE(testing::contains(loaded.status().to_string(), "still referenced"))
          << loaded.status().to_string();
      std::this_thread::yield();
    }
  };
  uint64_t lives = 0;
  for (; live(lives); ++lives) {
    const bool owner_goes = lives % 4 != 1, guest_goes = lives % 4 != 0;
    const bool guest_first = lives % 4 == 2;
    const auto go = [](const char* name) {
      const Status status = plugins::deactivate(name, true);
      EXPECT_OK(status);
    };
    if (guest_goes && guest_first) go("guest");
    if (owner_goes) go("owner");
    if (guest_goes && !guest_first) go("guest");
    if (owner_goes) load("owner");
    if (guest_goes) load("guest");
  }
  return lives;
}

TEST_F(DeactivationSoak, OfADeviceAndOfAPluginThatOnlyAddsOpsToIt) {
  hear_with(&watch_guest);
  load("owner");
  load("guest");
  const Device device = parse_device("ext:owner:0").value();
  const uint64_t wanted = calls_wanted();
  std::atomic<uint64_t> calls{0}, served{0}, refused{0}, wrong{0};
  std::atomic<bool> done{false};
  std::mutex mutex;
  std::string first_wrong;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      // Half of the threads use the implementation with plans, half the one without (fast path).
      const PolicyScope scope(only("relu", t % 2 == 0 ? "vendor.guest" : "vendor.guest_plain"));
      PolicySettings any;
      ForeignCaller caller(device, t);
      ForeignCaller::Counts counts;
      for (uint64_t number = 0; !done.load(); number += kBatch) {
        std::optional<PolicyScope> whoever;  // allows host implementations while the guest is not
                                             // loaded
        if (number / kBatch % 2 == 0) whoever.emplace(any);
        const uint64_t before = counts.served + counts.refused;
        const std::string what = caller.batch(number, counts);
        if (!what.empty() && wrong.fetch_add(1) == 0) {
          const std::lock_guard lock(mutex);
          first_wrong = what;
        }
        calls.fetch_add(counts.served + counts.refused - before);
      }
      served += counts.served;
      refused += counts.refused;
    });
  }
  int64_t settled = 0;
  const uint64_t lives = withdraw_in_turn([&](uint64_t so_far) {
    const uint64_t now = calls.load();
    while (calls.load() < now + 16 * kBatch) std::this_thread::yield();
    if (so_far == 40) settled = resident_bytes();
    return now < wanted || so_far < kLeastLives;
  });
  done = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0u) << first_wrong;
  EXPECT_EQ(g_violations, 0u) << "a plugin was quiesced or destroyed under a call";
  EXPECT_GT(g_guest_served, 0);
  EXPECT_GT(served, static_cast<uint64_t>(g_guest_served)) << "the host runs the calls in between";
  EXPECT_GT(refused, 0u);
  const int64_t grown = settled == 0 ? 0 : resident_bytes() - settled;
  if (!TE_FL_ASAN && !TE_FL_TSAN) {
    EXPECT_LT(grown, int64_t{4} << 20) << "a life leaves memory behind";
  }
  std::printf(
      "%llu calls (%llu served, %llu of them by the guest) in %llu lives; memory grew by "
      "%lld KiB\n",
      static_cast<unsigned long long>(calls), static_cast<unsigned long long>(served),
      static_cast<unsigned long long>(g_guest_served), static_cast<unsigned long long>(lives),
      static_cast<long long>(grown >> 10));
}

}  // namespace
}  // namespace te_fl::test
