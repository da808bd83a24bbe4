// Benchmarks the validation of one call's arguments: CompiledOp::check().
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <string_view>

#include "core/op/op_finder.hpp"
#include "core/op/op_table.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/optimizer.h"
#include "te_fl/tensor.hpp"

namespace {

using namespace te_fl;

std::unique_ptr<const core::CompiledOp> op(std::string_view name) {
  for (const te_fl_op_schema* schema : core::catalogue()) {
    if (schema->name == name) return std::move(core::CompiledOp::compile(*schema)).value();
  }
  std::abort();
}

Tensor f32(std::initializer_list<int64_t> shape) {
  return Tensor::zeros(shape, DType::kF32).value();
}

void run(benchmark::State& state, const core::CompiledOp& compiled, const void* args) {
  core::Signature signature;
  if (!compiled.check(args, signature)) {
    state.SkipWithError(compiled.check_status(args).to_string().c_str());
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(args);
    benchmark::DoNotOptimize(compiled.check(args, signature));
    benchmark::DoNotOptimize(signature);
  }
}

struct Norm {
  Tensor x = f32({64, 256}), gamma = f32({256}), beta = f32({256}), z = f32({64, 256}),
         mu = f32({64}), rsigma = f32({64});
  te_fl_layernorm_fwd_args args;
  Norm() {
    args.x = x, args.gamma = gamma, args.beta = beta, args.z = z, args.mu = mu,
    args.rsigma = rsigma;
  }
};

// Validates a layer norm with six tensors and two scalars.
void LayerNorm(benchmark::State& state) {
  const Norm n;
  run(state, *op("layernorm_fwd"), &n.args);
}
BENCHMARK(LayerNorm);

// Validates a layer norm with five tensors: the optional beta is null.
void LayerNormFiveTensors(benchmark::State& state) {
  Norm n;
  n.args.beta = nullptr;
  run(state, *op("layernorm_fwd"), &n.args);
}
BENCHMARK(LayerNormFiveTensors);

// Validates contiguous tensors whose strides are given explicitly (not NULL), as frameworks pass
// them.
void LayerNormWithStrides(benchmark::State& state) {
  Norm n;
  int64_t two[2] = {256, 1}, one[1] = {1};
  te_fl_tensor t[6] = {*n.x.c(), *n.gamma.c(), *n.beta.c(), *n.z.c(), *n.mu.c(), *n.rsigma.c()};
  for (te_fl_tensor& tensor : t) tensor.dl.strides = tensor.dl.ndim == 2 ? two : one;
  n.args.x = &t[0], n.args.gamma = &t[1], n.args.beta = &t[2];
  n.args.z = &t[3], n.args.mu = &t[4], n.args.rsigma = &t[5];
  run(state, *op("layernorm_fwd"), &n.args);
}
BENCHMARK(LayerNormWithStrides);

void Gelu(benchmark::State& state) {
  const Tensor x = f32({64, 256}), y = f32({64, 256});
  te_fl_activation_act_fwd_args args;
  args.input = x, args.output = y;
  run(state, *op("gelu"), &args);
}
BENCHMARK(Gelu);

void Fp8Gemm(benchmark::State& state) {
  const int64_t shape[] = {256, 256};
  const Tensor a = Tensor::empty_quantized(shape, {}).value(),
               b = Tensor::empty_quantized(shape, {}).value();
  const Tensor d = f32({256, 256});
  te_fl_generic_gemm_args args;
  args.a = a, args.b = b, args.d = d, args.trans_b = 1;
  run(state, *op("generic_gemm"), &args);
}
BENCHMARK(Fp8Gemm);

// Benchmarks the exact check, which check() runs for the calls that its fast check cannot decide.
void LayerNormExact(benchmark::State& state) {
  const Norm n;
  const auto compiled = op("layernorm_fwd");
  Norm empty;
  const Tensor x = f32({0, 256}), mu = f32({0});
  const Tensor z = f32({0, 256}), rsigma = f32({0});
  empty.args.x = x, empty.args.z = z, empty.args.mu = mu, empty.args.rsigma = rsigma;
  te_fl_tensor hollow = *x.c();
  hollow.dl.data = nullptr;
  empty.args.x = &hollow;
  run(state, *compiled, &empty.args);
}
BENCHMARK(LayerNormExact);

void Adam100Tensors(benchmark::State& state) {
  std::vector<Tensor> tensors;
  std::vector<const te_fl_tensor*> lists[4];
  for (int i = 0; i < 400; ++i) tensors.push_back(f32({8, 8}));
  for (size_t i = 0; i < 400; ++i) lists[i % 4].push_back(tensors[i]);
  te_fl_multi_tensor_adam_args args;
  args.grads = lists[0].data(), args.params = lists[1].data();
  args.exp_avgs = lists[2].data(), args.exp_avg_sqs = lists[3].data();
  args.grads_count = args.params_count = args.exp_avgs_count = args.exp_avg_sqs_count = 100;
  run(state, *op("multi_tensor_adam"), &args);
}
BENCHMARK(Adam100Tensors);

}  // namespace

BENCHMARK_MAIN();
