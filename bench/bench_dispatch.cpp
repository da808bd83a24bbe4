// Times the dispatch of a call with five tensors to an implementation that returns at
// once.
//   bench_dispatch --benchmark_format=json
// "control" runs only arithmetic, in the same way: machines may slow down when all cores are
// busy, so divide a cost on all threads by "control" before comparing it.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "bench/dispatch_ops.hpp"
#include "core/op/op_table.hpp"
#include "support/dispatch_fixture.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/op_registry.hpp"

namespace {

using namespace te_fl::bench_dispatch;
using te_fl::OpId;
using te_fl::OpManager;
using te_fl::OpRegistry;
using te_fl::Status;
using te_fl::testing::five_schema;
using te_fl::testing::FiveArgs;
using te_fl::testing::FiveCall;

// Returns the schema of an op with five tensors and no other argument.
const te_fl_op_schema& schema() {
  static const te_fl_op_schema first = [] {
    te_fl_op_schema s = five_schema();
    s.arg_count = 5;
    s.args_size = s.least_args_size;
    return s;
  }();
  return first;
}

te_fl_op_desc five(const char* id, uint32_t kind) {
  te_fl_op_desc d = descriptor("test::five", id, kind);
  d.schema = &schema();
  return d;
}

// A registry with three implementations of the op, as on a machine with one vendor's plugin.
struct World {
  World() : manager(registry) {
    for (const te_fl_op_desc& d :
         {five("default.x", TE_FL_KIND_DEFAULT), five("vendor.x", TE_FL_KIND_VENDOR),
          five("reference.x", TE_FL_KIND_REFERENCE)}) {
      if (Status s = registry.register_op(d, "bench", "acme"); !s.ok()) te_fl::die(s);
    }
    op = registry.find("test::five").value();
  }
  OpRegistry registry;
  OpManager manager;
  OpId op;
};

te_fl_status willing(void*, const te_fl_context*, const void* args) {
  benchmark::DoNotOptimize(args);
  return TE_FL_OK;
}

World& world() {
  static World* const w = new World;
  return *w;
}

te_fl::PolicySettings prefer(te_fl::Kind kind) {
  te_fl::PolicySettings s;
  s.prefer = kind;
  return s;
}

void control(benchmark::State& state) {
  uint64_t x = 88172645463325252u;
  for (auto _ : state) {
    for (int i = 0; i < 16; ++i) {
      x ^= x << 13;
      x ^= x >> 7;
      x ^= x << 17;
    }
    benchmark::DoNotOptimize(x);
  }
}

void call(benchmark::State& state) {
  World& w = world();
  FiveCall five;
  for (auto _ : state) {
    if (!w.manager.call(w.op, &five.args).ok()) state.SkipWithError("call failed");
  }
}

// Times calls of an implementation with an is_supported() function, which dispatch calls before
// each call.
void call_supported(benchmark::State& state) {
  static World* const asked = [] {
    auto* w = new World;
    te_fl_op_desc d = five("default.asked", TE_FL_KIND_DEFAULT);
    d.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
    d.supports = &willing;
    d.priority = 1000;
    if (Status s = w->registry.register_op(d, "bench", "acme"); !s.ok()) te_fl::die(s);
    return w;
  }();
  FiveCall five;
  for (auto _ : state) {
    if (!asked->manager.call(asked->op, &five.args).ok()) state.SkipWithError("call failed");
  }
}

void call_in_scope(benchmark::State& state) {
  World& w = world();
  FiveCall five;
  const te_fl::PolicyScope scope(prefer(te_fl::Kind::kVendor));
  for (auto _ : state) {
    if (!w.manager.call(w.op, &five.args).ok()) state.SkipWithError("call failed");
  }
}

void handle(benchmark::State& state) {
  World& w = world();
  FiveCall five;
  const auto prepared = w.manager.prepare(w.op, &five.args).value();
  for (auto _ : state) {
    if (!prepared.call(&five.args).ok()) state.SkipWithError("call failed");
  }
}

void handle_in_scope(benchmark::State& state) {
  World& w = world();
  FiveCall five;
  const auto prepared = w.manager.prepare(w.op, &five.args).value();
  const te_fl::PolicyScope scope(prefer(te_fl::Kind::kVendor));
  for (auto _ : state) {
    if (!prepared.call(&five.args).ok()) state.SkipWithError("call failed");
  }
}

// Calls under TE_FL_VERIFY, which verifies either another op's calls or 1 % of these. A verified
// call copies its tensors, runs the reference and compares; the tensors have 6 elements, so the row
// shows the fixed cost.
void verify(const char* setting) {
  const Status set = setting == nullptr ? te_fl::environment::unset("TE_FL_VERIFY")
                                        : te_fl::environment::set("TE_FL_VERIFY", setting);
  if (!set.ok()) te_fl::die(set);
}
void verify_another(const benchmark::State&) { verify("0.01:gelu"); }
void verify_1_percent(const benchmark::State&) { verify("0.01"); }
void verify_none(const benchmark::State&) { verify(nullptr); }

// A second thread switches the global policy between two settings every millisecond.
void call_while_policy_changes(benchmark::State& state) {
  World& w = world();
  FiveCall five;
  std::atomic<bool> stop{false};
  std::thread changer;
  if (state.thread_index() == 0) {
    changer = std::thread([&stop] {
      const auto a = te_fl::SelectionPolicy::intern(prefer(te_fl::Kind::kVendor));
      const auto b = te_fl::SelectionPolicy::intern(prefer(te_fl::Kind::kReference));
      for (int i = 0; !stop; ++i) {
        te_fl::set_global_policy(i % 2 == 0 ? a : b);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      te_fl::clear_global_policy();
    });
  }
  for (auto _ : state) {
    if (!w.manager.call(w.op, &five.args).ok()) state.SkipWithError("call failed");
  }
  if (state.thread_index() == 0) {
    stop = true;
    changer.join();
  }
}

// Times the first call after a change of the registry, when dispatch has no cached decision. The
// change itself is not timed.
void cold_resolve(benchmark::State& state) {
  OpRegistry registry;
  OpManager manager(registry);
  for (const te_fl_op_desc& d :
       {five("default.x", TE_FL_KIND_DEFAULT), five("vendor.x", TE_FL_KIND_VENDOR),
        five("reference.x", TE_FL_KIND_REFERENCE)}) {
    if (Status s = registry.register_op(d, "bench", "acme"); !s.ok()) te_fl::die(s);
  }
  const OpId op = registry.find("test::five").value();
  FiveCall five;
  int32_t priority = 0;
  for (auto _ : state) {
    if (Status s = registry.set_priority("test::five", "reference.x", ++priority % 40); !s.ok())
      te_fl::die(s);
    const auto start = std::chrono::steady_clock::now();
    const bool ok = manager.call(op, &five.args).ok();
    const auto end = std::chrono::steady_clock::now();
    if (!ok) state.SkipWithError("call failed");
    state.SetIterationTime(std::chrono::duration<double>(end - start).count());
  }
}

// Times only the argument validation that every call performs.
void check(benchmark::State& state) {
  const auto compiled = te_fl::core::CompiledOp::compile(schema()).value();
  FiveCall five;
  te_fl::core::Signature signature;
  for (auto _ : state) {
    if (!compiled->check(&five.args, signature)) state.SkipWithError("check failed");
    benchmark::DoNotOptimize(signature);
  }
}

// ---- realistic calls: FP8 GEMMs, GEMMs of changing shapes, and tensor lists. Implementations
// return at once. Compare each row with `gemm`, which calls the same op with BF16 tensors.

void gemm(benchmark::State& state, Operands operands, Needs needs) {
  One& one = gemm_impl(needs == kPlans);
  Product product(operands);
  for (auto _ : state) {
    if (!one.manager.call(one.op, &product.args).ok()) state.SkipWithError("call failed");
  }
}

// Calls GEMM with tensors at different addresses in every call, as a framework's caching allocator
// returns them.
void gemm_moves(benchmark::State& state, Operands operands, Needs needs) {
  One& one = gemm_impl(needs == kPlans);
  Product first(operands), second(operands);
  bool turn = false;
  for (auto _ : state) {
    turn = !turn;
    if (!one.manager.call(one.op, turn ? &first.args : &second.args).ok()) {
      state.SkipWithError("call failed");
    }
  }
}

void gemm_handle(benchmark::State& state, Operands operands, Needs needs) {
  One& one = gemm_impl(needs == kPlans);
  Product product(operands);
  const auto prepared = one.manager.prepare(one.op, &product.args).value();
  for (auto _ : state) {
    if (!prepared.call(&product.args).ok()) state.SkipWithError("call failed");
  }
}

void gemm_shapes(benchmark::State& state, Operands operands, Needs needs) {
  One& one = gemm_impl(needs == kPlans);
  std::vector<std::unique_ptr<Product>> products;
  for (int64_t i = 1; i <= 64; ++i) products.push_back(std::make_unique<Product>(operands, 8 * i));
  size_t i = 0;
  for (auto _ : state) {
    if (!one.manager.call(one.op, &products[i++ % 64]->args).ok()) {
      state.SkipWithError("call failed");
    }
  }
}

// Scales 64 tensors into 64 others.
void lists(benchmark::State& state) {
  One& one = scale_impl();
  Lists lists(64);
  for (auto _ : state) {
    if (!one.manager.call(one.op, &lists.args).ok()) state.SkipWithError("call failed");
  }
}

// A naive registry as the lower bound: a name map behind a shared mutex, a std::function, no
// validation.
class PlainRegistry {
 public:
  using Function = std::function<Status(const void*)>;
  void add(std::string op, std::string impl, Function f) {
    std::unique_lock lock(mutex_);
    ops_[std::move(op)][std::move(impl)] = std::move(f);
  }
  Status call(const std::string& op, const void* args) {
    Function f;
    {
      std::shared_lock lock(mutex_);
      const auto at = ops_.find(op);
      if (at == ops_.end()) return te_fl::not_found("no op " + op);
      const auto impl = at->second.find(preferred_);
      if (impl == at->second.end()) return te_fl::not_found("no implementation " + preferred_);
      f = impl->second;
    }
    return f(args);
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<std::string, std::unordered_map<std::string, Function>> ops_;
  std::string preferred_ = "default.x";
};

void peer_shared_mutex(benchmark::State& state) {
  static PlainRegistry* const plain = [] {
    auto* p = new PlainRegistry;
    for (const char* id : {"default.x", "vendor.x", "reference.x"}) {
      p->add("test::five", id,
             [](const void* args) { return Status::from_c(nothing(nullptr, nullptr, args), ""); });
    }
    return p;
  }();
  FiveCall five;
  for (auto _ : state) {
    if (!plain->call("test::five", &five.args).ok()) state.SkipWithError("call failed");
  }
}

const int kAll = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));

void threads(benchmark::internal::Benchmark* b) {
  b->Threads(1);
  if (kAll > 1) b->Threads(kAll);
  b->UseRealTime();
}

BENCHMARK(control)->Apply(threads);
BENCHMARK(call)->Apply(threads);
BENCHMARK(call_supported)->Apply(threads);
BENCHMARK(call_in_scope)->Apply(threads);
BENCHMARK(call_while_policy_changes)->Apply(threads);
BENCHMARK(call)
    ->Name("call_verify_another_op")
    ->Setup(verify_another)
    ->Teardown(verify_none)
    ->Apply(threads);
BENCHMARK(call)
    ->Name("call_verify_1_percent")
    ->Setup(verify_1_percent)
    ->Teardown(verify_none)
    ->Apply(threads);
BENCHMARK(handle)->Apply(threads);
BENCHMARK(handle_in_scope)->Apply(threads);
BENCHMARK(cold_resolve)->UseManualTime();
BENCHMARK(check)->Apply(threads);
BENCHMARK_CAPTURE(gemm, plain, kPlain, kNothing);
BENCHMARK_CAPTURE(gemm, fp8, kScaled, kNothing);
BENCHMARK_CAPTURE(gemm, plain_plan, kPlain, kPlans);
BENCHMARK_CAPTURE(gemm, fp8_plan, kScaled, kPlans);
BENCHMARK_CAPTURE(gemm_moves, plain, kPlain, kNothing);
BENCHMARK_CAPTURE(gemm_moves, fp8_plan, kScaled, kPlans);
BENCHMARK_CAPTURE(gemm_handle, plain, kPlain, kNothing);
BENCHMARK_CAPTURE(gemm_handle, fp8, kScaled, kNothing);
BENCHMARK_CAPTURE(gemm_handle, fp8_plan, kScaled, kPlans);
BENCHMARK_CAPTURE(gemm_shapes, plain, kPlain, kNothing);
BENCHMARK_CAPTURE(gemm_shapes, fp8_plan, kScaled, kPlans);
BENCHMARK(lists);
BENCHMARK(peer_shared_mutex)->Apply(threads);

}  // namespace

BENCHMARK_MAIN();
