// Times the host's work for a TransformerLayer's forward and backward: for the whole layer, and for
// one rank of two under sequence parallelism. All ops, collectives included, run
// implementations that return at once, so the time is that of the layer and of dispatch. One
// row times the rank's collectives alone; the targets limit (part - collectives) / whole.
//
// usage: bench_ranks [--hidden=N] [--iterations=N] [options of Google Benchmark]
//   --hidden      hidden size of the layer (default 1024); the host's work does not depend on it
//   --iterations  fixed number of iterations of each row: run valgrind with two numbers; the
//                 difference of its counts is the instructions of the extra iterations
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "registry/comm_providers.hpp"
#include "te_fl/nn.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::nn {
namespace {

constexpr int64_t kTokens = 512;
int64_t g_hidden = 1024;
constexpr char kOwner[] = "nothing";

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  std::exit(1);
}

template <class T>
T take(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

te_fl_status nothing(void*, const te_fl_context*, const void* args) {
  benchmark::DoNotOptimize(args);
  return TE_FL_OK;
}

// A backend whose implementations do nothing. It has an implementation of every op of the reference
// backend and makes communicators.
class Nothing {
 public:
  Nothing() {
    (void)OpManager::instance();  // registers the built-in backends first
    api_.create = [](void* self, const te_fl_comm_config*, void** out, const te_fl_error_sink*) {
      *out = self;
      return te_fl_status{TE_FL_OK};
    };
    api_.destroy = [](void*) {};
    api_.abort = [](void*) {};
    provider_.name = kOwner;
    provider_.kind = TE_FL_KIND_DEFAULT;
    provider_.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
    provider_.self = this;
    provider_.api = &api_;
    const te_fl_comm_desc* const providers[] = {&provider_};
    check(registry::add_comm_providers(providers, kOwner, kOwner, "1", nullptr));
    infos_ = OpRegistry::instance().snapshot();
    std::erase_if(infos_, [](const OpImplInfo& i) { return i.impl_id != "reference.host"; });
    for (const OpImplInfo& info : infos_) {
      te_fl_op_desc& op = *ops_.emplace_back(std::make_unique<te_fl_op_desc>(info.desc));
      op.op_name = info.op.c_str();
      op.impl_id = "default.nothing";
      op.kind = TE_FL_KIND_DEFAULT;
      op.run = &nothing;
      check(OpRegistry::instance().register_op(op, kOwner, kOwner));
      check(OpRegistry::instance().set_priority(info.op, op.impl_id, 1000000));
    }
  }

  std::shared_ptr<const Comm> two_ranks() {
    const std::shared_ptr<Store> store = Store::in_process();
    const auto make = [&](int rank) {
      CommOptions options;
      options.rank = rank;
      options.size = 2;
      options.store = store;
      options.provider = kOwner;
      return std::make_shared<const Comm>(take(Comm::create(options)));
    };
    std::thread second([&] { second_ = make(1); });
    const std::shared_ptr<const Comm> first = make(0);
    second.join();
    return first;
  }

 private:
  te_fl_comm_api api_;
  te_fl_comm_desc provider_;
  std::vector<OpImplInfo> infos_;
  std::vector<std::unique_ptr<te_fl_op_desc>> ops_;
  std::shared_ptr<const Comm> second_;
};

Nothing& serving() {
  static Nothing* const serving = new Nothing;
  return *serving;
}

struct Case {
  const char* name;
  bool divided;
  const Recipe* recipe;  // null: without FP8
};

// The layer under test; if it is sharded, also its two ranks.
struct Subject {
  explicit Subject(bool divided) {
    if (divided) parallel = {.ranks = serving().two_ranks(), .sequence_parallel = true};
    layer = take(TransformerLayer::create(
        take(shard_of(TransformerLayerOptions{.hidden_size = g_hidden,
                                              .ffn_hidden_size = 4 * g_hidden,
                                              .num_attention_heads = 16,
                                              .param_dtype = DType::kBF16,
                                              .activation_dtype = DType::kBF16},
                      parallel))));
    x = take(Tensor::zeros({kTokens / (divided ? 2 : 1), 1, g_hidden}, DType::kBF16));
    if (divided) amaxes = std::make_shared<AmaxReduction>(parallel.ranks);
  }
  TensorParallel parallel;
  std::unique_ptr<TransformerLayer> layer;
  Tensor x;
  std::shared_ptr<AmaxReduction> amaxes;
};

void run(benchmark::State& state, const Case& which) {
  static Subject* const whole = new Subject(false);
  static Subject* const part = new Subject(true);
  auto& [parallel, layer, x, amaxes] = which.divided ? *part : *whole;
  for (auto _ : state) {
    Ctx ctx;
    {
      autocast scope({.enabled = which.recipe != nullptr, .amax_reduction = amaxes},
                     which.recipe != nullptr ? *which.recipe : Recipe(DelayedScaling{}));
      benchmark::DoNotOptimize(take(layer->forward(x, &ctx)));
      check(scope.exit());
    }
    benchmark::DoNotOptimize(take(layer->backward(x, ctx)));
    check(backward_end());
  }
}

// Runs the collectives of one rank's forward and backward: each linear layer gathers or scatters
// once in either direction, and a column-parallel layer gathers its input again in the backward.
void run_collectives(benchmark::State& state) {
  const std::shared_ptr<const Comm> ranks = serving().two_ranks();
  const Tensor part = take(Tensor::zeros({kTokens / 2, g_hidden}, DType::kBF16));
  const Tensor whole = take(Tensor::zeros({kTokens, g_hidden}, DType::kBF16));
  te_fl_all_gather_args gather{};
  gather.input = part;
  gather.output = whole;
  te_fl_reduce_scatter_args scatter{};
  scatter.input = whole;
  scatter.output = part;
  gather.comm = scatter.comm = ranks->c();
  for (auto _ : state) {
    for (int i = 0; i < 6; ++i) check(ops::all_gather(gather));
    for (int i = 0; i < 4; ++i) check(ops::reduce_scatter(scatter));
  }
}

const Recipe kDelayed = DelayedScaling{}, kCurrent = Float8CurrentScaling{};
const Case kCases[] = {{"whole/bf16", false, nullptr},      {"part/bf16", true, nullptr},
                       {"whole/delayed", false, &kDelayed}, {"part/delayed", true, &kDelayed},
                       {"whole/current", false, &kCurrent}, {"part/current", true, &kCurrent}};

}  // namespace
}  // namespace te_fl::nn

// Removes the option from the arguments and returns its value, or `otherwise` if the option is
// absent.
static int64_t take_option(int& argc, char** argv, const std::string& name, int64_t otherwise) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (!argument.starts_with(name + "=")) continue;
    std::copy(argv + i + 1, argv + argc + 1, argv + i);  // includes the terminating null
    --argc;
    return std::stoll(argument.substr(name.size() + 1));
  }
  return otherwise;
}

int main(int argc, char** argv) {
  te_fl::nn::g_hidden = take_option(argc, argv, "--hidden", te_fl::nn::g_hidden);
  const int64_t iterations = take_option(argc, argv, "--iterations", 0);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  std::vector<benchmark::internal::Benchmark*> rows;
  for (const auto& which : te_fl::nn::kCases) {
    rows.push_back(benchmark::RegisterBenchmark(
        which.name, [&which](benchmark::State& state) { te_fl::nn::run(state, which); }));
  }
  rows.push_back(benchmark::RegisterBenchmark("collectives", te_fl::nn::run_collectives));
  for (auto* row : rows) {
    if (iterations > 0) row->Iterations(iterations);
  }
  benchmark::RunSpecifiedBenchmarks();
  std::fflush(stdout);
  std::_Exit(0);  // skips destructors: the implementations stay registered
}
