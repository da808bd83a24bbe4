// Host memory runs out at one allocation, each in turn, in every te-fl function that a program or a
// plugin can call. The function must fail with a status, or with std::bad_alloc where
// te_fl/te_fl.hpp allows it, and afterwards the same call must succeed. Functions that read or
// write JSON are excluded: destructors of the JSON library allocate, and a failure there ends the
// process.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fault_fixture.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/temp_folder.hpp"
#include "te_fl/nn.hpp"

namespace {

// The number of allocations that still succeed, on any thread, since te-fl has its own threads;
// negative: all succeed.
std::atomic<int64_t> g_left{-1};
std::atomic<bool> g_failed{false};

void* allocate(size_t bytes, size_t alignment) {
  if (g_left.load(std::memory_order_relaxed) >= 0 && g_left.fetch_sub(1) == 0) {
    g_failed = true;
    throw std::bad_alloc();
  }
  void* const data =
      alignment == 0
          ? std::malloc(bytes == 0 ? 1 : bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) { return allocate(bytes, 0); }
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace te_fl::test {
namespace {

// The current attempt, for the message of a process that ends during it.
const char* g_entry = "";
int g_allocation = 0;

// One function of te-fl to test. `prepare` runs before each attempt and `undo` after a successful
// one, both without allocation failures.
struct Entry {
  const char* name;
  std::function<Status()> attempt;
  std::function<void()> prepare = [] {};
  std::function<void()> undo = [] {};
  bool anew = false;  // a failure destroys the state, so `prepare` must run again
};

struct Attempt {
  Status status;
  int allocations = 0;
  bool failed = false;  // an allocation failed
  bool threw = false;   // threw std::bad_alloc
};

constexpr int kAll = 1 << 30;  // no allocation fails

Attempt attempt(const Entry& entry, int allocation) {
  Attempt made;
  g_allocation = allocation;
  g_failed = false;
  g_left = allocation;
  try {
    made.status = entry.attempt();
  } catch (const std::bad_alloc&) {
    made.threw = true;
  }
  made.allocations = allocation - static_cast<int>(g_left.exchange(-1));
  made.failed = g_failed;
  return made;
}

// Returns true if allocation `allocation` of `count` should fail: all if there are few; otherwise
// the first 60, the last 150, which may follow a change of state, and every 11th between.
bool is_tried(int allocation, int count) {
  return allocation < 60 || allocation >= count - 150 || allocation % 11 == 0;
}

// Returns true if the attempt failed properly and then succeeded.
bool fails_well(const Entry& entry, int allocation) {
  const std::string where = std::string(entry.name) + ", allocation " + std::to_string(allocation);
  entry.prepare();
  const Attempt made = attempt(entry, allocation);
  if (made.failed && (made.threw || !made.status.ok())) {
    const std::string text = made.threw ? "bad_alloc" : made.status.to_string();
    EXPECT_TRUE(made.threw || made.status.code() == StatusCode::kOutOfMemory ||
                testing::contains(text, "memory") || testing::contains(text, "bad_alloc"))
        << where << ": " << text;
    if (entry.anew) entry.prepare();
    EXPECT_OK(attempt(entry, kAll).status) << where << ", tried again after: " << text;
  } else {
    EXPECT_OK(made.status) << where;
  }
  if (::testing::Test::HasFailure()) return false;
  entry.undo();
  return true;
}

void run_out_of_memory(const Entry& entry) {
  g_entry = entry.name;
  // Counts the allocations of the second run, as the first run also allocates objects that live as
  // long as the process.
  int count = 0;
  for (int round = 0; round < 2; ++round) {
    entry.prepare();
    const Attempt whole = attempt(entry, kAll);
    ASSERT_OK(whole.status) << entry.name;
    count = whole.allocations;
    entry.undo();
  }
  for (int n = 0; n < count; ++n)
    if (is_tried(n, count) && !fails_well(entry, n)) return;
}

class OutOfMemory : public FaultTest {
 protected:
  void SetUp() override {
    FaultTest::SetUp();
    unsetenv("FAULT_EVENTS");  // events allocate memory
    expect_host_works();
    std::set_terminate([] {
      g_left = -1;
      std::fprintf(stderr, "%s ended the process at allocation %d\n", g_entry, g_allocation);
      std::abort();
    });
  }
  void TearDown() override {
    FaultTest::TearDown();
    expect_host_works();
  }
  static void all(const std::vector<Entry>& entries) {
    for (const Entry& entry : entries) run_out_of_memory(entry);
  }
  static Status same(bool right) { return right ? Status() : internal_error("another result"); }
};

TEST_F(OutOfMemory, Policies) {
  int round = 0;
  all({
      {"parse_per_op of a misspelt op",
       [] {
         const Status status = parse_per_op("reluu=default", {"relu"}).status();
         return status.code() == StatusCode::kInvalidArgument ? Status() : status;
       }},
      {"parse_per_op", [] { return parse_per_op("relu=vendor:x|default", {"relu"}).status(); }},
      {"parse_vendor_list", [] { return parse_vendor_list("acme, other").status(); }},
      {"intern",
       [&] {
         PolicySettings settings;
         settings.deny_vendors = {"a_vendor_of_a_long_name_" + std::to_string(round)};
         const SelectionPolicy policy = SelectionPolicy::intern(settings);
         return same(policy.settings() == settings && policy == SelectionPolicy::intern(settings) &&
                     !policy.describe().empty());
       },
       [&] { ++round; }},
      {"from_environment",
       [] {
         return SelectionPolicy::from_environment(OpRegistry::instance().op_names()).status();
       }},
      {"a global policy and a scope",
       [] {
         PolicySettings settings;
         settings.prefer = Kind::kReference;
         set_global_policy(SelectionPolicy::intern(settings));
         const PolicyScope scope(only("relu", "reference.host"));
         const auto captured = CapturedPolicy::capture().enter();
         return current_policy().status();
       },
       [] {}, [] { clear_global_policy(); }},
      {"environment",
       [] {
         TE_FL_RETURN_IF_ERROR(environment::set("TE_FL_PREFER", "reference"));
         TE_FL_RETURN_IF_ERROR(environment::get("TE_FL_PREFER").status());
         TE_FL_RETURN_IF_ERROR(OpManager::instance().reload());
         TE_FL_RETURN_IF_ERROR(environment::unset("TE_FL_PREFER"));
         (void)environment::table(), (void)environment::remarks();
         return environment::reload();
       },
       [] {}, [] { EXPECT_OK(environment::unset("TE_FL_PREFER")); }},
  });
  EXPECT_OK(OpManager::instance().reload());
}

TEST_F(OutOfMemory, RegistryAndCalls) {
  std::optional<OpRegistry> registry;
  std::optional<OpManager> manager;
  std::optional<testing::Fake> first, second;
  const auto fresh = [&] {
    manager.reset(), registry.reset(), first.reset(), second.reset();
    registry.emplace();
    manager.emplace(*registry);
    first.emplace("default.first");
    second.emplace("reference.second");
  };
  const auto with_both = [&] {
    fresh();
    const te_fl_op_desc* const list[] = {&first->desc, &second->desc};
    EXPECT_OK(registry->register_ops(list, "tests", "acme"));
  };
  const auto known = [&] {
    with_both();
    testing::FiveCall call;
    EXPECT_OK(manager->call("test::five", &call.args));
  };
  testing::FiveCall call;
  all({
      {"register_op", [&] { return registry->register_op(first->desc, "tests", "acme"); }, fresh},
      {"register_ops",
       [&] {
         const te_fl_op_desc* const list[] = {&first->desc, &second->desc};
         return registry->register_ops(list, "tests", "acme");
       },
       fresh},
      {"declare_op", [&] { return registry->declare_op(testing::five_schema()).status(); }, fresh},
      {"set_priority", [&] { return registry->set_priority("test::five", "default.first", 7); },
       with_both},
      {"unregister_op", [&] { return registry->unregister_op("test::five", "default.first"); },
       known},
      {"unregister_owner", [&] { return registry->unregister_owner("tests"); }, known},
      {"snapshot and names",
       [&] { return same(registry->snapshot().size() == 2 && !registry->op_names().empty()); },
       with_both},
      {"find of a misspelt op",
       [&] {
         const Status status = registry->find("test::fiv").status();
         return status.code() == StatusCode::kNotFound ? Status() : status;
       },
       with_both},
      {"a first call", [&] { return manager->call("test::five", &call.args); }, with_both},
      {"a call after another", [&] { return manager->call("test::five", &call.args); }, known},
      {"a refused call",
       [&] {
         testing::FiveCall wrong;
         wrong.args.b = nullptr;
         const Status status = manager->call("test::five", &wrong.args);
         return status.code() == StatusCode::kInvalidArgument ? Status() : status;
       },
       with_both},
      {"prepare and call",
       [&] {
         TE_FL_ASSIGN_OR_RETURN(const PreparedOp op,
                                manager->prepare(*registry->find("test::five"), &call.args));
         return op.call(&call.args);
       },
       with_both},
      {"resolve",
       [&] { return manager->resolve(*registry->find("test::five"), &call.args).status(); },
       with_both},
      {"explain",
       [&] { return manager->explain(*registry->find("test::five"), CallProfile{}).status(); },
       with_both},
      {"first_choice",
       [&] { return manager->first_choice(*registry->find("test::five"), &call.args).status(); },
       with_both},
      {"usage",
       [&] {
         const auto usage = manager->usage();
         manager->reset_usage();
         return same(usage.size() <= 1);
       },
       known},
  });
  manager.reset(), registry.reset();
}

TEST_F(OutOfMemory, Plugins) {
  const std::string good = fault_path("good"), with_device = fault_path("device"),
                    bad = fault_path("bad_magic");
  all({
      {"plugins::load", [&] { return plugins::load(good).status(); }, [] {},
       [] { EXPECT_OK(plugins::deactivate("good", true)); }},
      {"plugins::load of one with a device", [&] { return plugins::load(with_device).status(); },
       [] {}, [] { EXPECT_OK(plugins::deactivate("device", true)); }},
      {"plugins::load of a broken one",
       [&] {
         const Status status = plugins::load(bad).status();
         return status.code() == StatusCode::kIncompatible ? Status() : status;
       }},
      {"plugins::deactivate", [] { return plugins::deactivate("good", true); },
       [&] { EXPECT_OK(plugins::load(good)); }},
      {"plugins::list and search_path",
       [] {
         (void)plugins::search_path();
         return same(!plugins::list().empty());
       }},
  });
}

TEST_F(OutOfMemory, TensorsAndDevices) {
  // Registers the host's device functions, which keep no memory, under another name.
  te_fl_device_desc spare = *devices::find(Device{}).value();
  spare.device = {TE_FL_DEVICE_EXT, 0};
  spare.provider = "spare";
  Device device;
  const auto add = [&] { device = devices::add(&spare).value(); };
  const auto remove = [&] { EXPECT_OK(devices::remove(device)); };
  const std::vector<float> values{1, 2, 3, 4};
  all({
      {"Tensor::from_values",
       [&] {
         TE_FL_ASSIGN_OR_RETURN(const Tensor t, Tensor::from_values({2, 2}, values));
         return same(!describe(t.c()).empty());
       }},
      {"Tensor::empty_quantized",
       [] {
         const int64_t shape[] = {128, 128};
         QuantSpec spec;
         return Tensor::empty_quantized(shape, spec).status();
       }},
      {"devices::add",
       [&] {
         auto added = devices::add(&spare);
         if (added.ok()) device = *added;
         return added.status();
       },
       [] {}, remove},
      {"devices::remove", [&] { return devices::remove(device); }, add},
      {"a tensor on a device and back",
       [&] {
         TE_FL_ASSIGN_OR_RETURN(const Tensor t, Tensor::from_values({2, 2}, values));
         TE_FL_ASSIGN_OR_RETURN(const Tensor there, t.to(device));
         TE_FL_ASSIGN_OR_RETURN(const Tensor back, there.to(Device{}));
         return same(values_of(back) == values);
       },
       add, remove},
      {"a staged call",
       [&] {
         TE_FL_ASSIGN_OR_RETURN(const Tensor t, Tensor::from_values({2, 2}, values));
         TE_FL_ASSIGN_OR_RETURN(const Tensor in, t.to(device));
         TE_FL_ASSIGN_OR_RETURN(const Tensor out, Tensor::empty({2, 2}, DType::kF32, device));
         TE_FL_RETURN_IF_ERROR(call_relu(in, out));
         TE_FL_ASSIGN_OR_RETURN(const Tensor back, out.to(Device{}));
         return same(values_of(back) == values);
       },
       add, remove},
  });
}

TEST_F(OutOfMemory, Ranks) {
  std::optional<Comm> comm;
  std::optional<TempFolder> folder;
  const auto options = [] {
    CommOptions o;
    o.store = Store::in_process();
    o.provider = "threads";
    return o;
  };
  const auto made = [&] { comm.emplace(Comm::create(options()).value()); };
  const auto gone = [&] { comm.reset(); };
  all({
      {"Comm::create",
       [&] {
         auto created = Comm::create(options());
         if (created.ok()) comm.emplace(std::move(*created));
         return created.status();
       },
       [] {}, gone},
      {"Comm::split", [&] { return comm->split(0, 0, "part").status(); }, made, gone},
      {"a collective",
       [&] {
         TE_FL_ASSIGN_OR_RETURN(const Tensor t, Tensor::zeros({3}, DType::kF32));
         te_fl_all_reduce_args args;
         args.input = args.output = t.c();
         args.comm = comm->c();
         return ops::all_reduce(args);
       },
       made, gone, true},
      {"a folder as a store",
       [&] {
         TE_FL_ASSIGN_OR_RETURN(const auto store, Store::open("file:" + folder->path(), 0, 1,
                                                              std::chrono::milliseconds(1000)));
         TE_FL_RETURN_IF_ERROR(store->set("key", "value"));
         return store->get("key", std::chrono::milliseconds(1000)).status();
       },
       [&] { folder.emplace(); }, [] {}, true},
  });
}

TEST_F(OutOfMemory, Layers) {
  std::unique_ptr<nn::Linear> linear;
  const auto make = [&] {
    linear = nn::Linear::create({.in_features = 32, .out_features = 32}).value();
  };
  const Tensor x = Tensor::zeros({32, 32}, DType::kF32).value();
  const auto step = [&] {
    nn::Ctx ctx;
    Tensor y;
    {
      const nn::autocast fp8(true, nn::DelayedScaling{});
      TE_FL_ASSIGN_OR_RETURN(y, linear->forward(x, &ctx));
    }
    TE_FL_RETURN_IF_ERROR(linear->backward(y, ctx).status());
    return nn::backward_end();
  };
  all({
      {"Linear::create",
       [] { return nn::Linear::create({.in_features = 8, .out_features = 8}).status(); }},
      {"a step in FP8", step, make},
  });
}

TEST_F(OutOfMemory, Watching) {
  all({
      {"fingerprint_table", [] { return same(!fingerprint_table().empty()); }},
      {"quarantines", [] { return quarantines().status(); }},
      {"step_boundary", [] { return step_boundary(); }},
      {"write_trace", [] { return write_trace(); }},
      {"watch_status", [] { return watch_status(); }},
  });
}

}  // namespace
}  // namespace te_fl::test
