// Times calls off the fast path against a similar call on the fast path, alternately on one thread:
//   bench_neighbours
// A row's time is that of one block of both calls. Its counters: median ns of a call of the case,
// median ns of the fast-path call, and the median of their ratios. The target is a ratio of at
// most 1.6.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "bench/dispatch_ops.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/ops/attention.h"

namespace {

using namespace te_fl::bench_dispatch;
using te_fl::PreparedOp;
using te_fl::Tensor;

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Times `call(i)` for i = 0, 1, ... over a multiple of `period` calls; returns nanoseconds a call.
template <class F>
double measure_time(benchmark::State& state, size_t period, F& call) {
  const size_t calls = (2048 + period - 1) / period * period;
  bool good = true;
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < calls; ++i) good = call(i % period).ok() && good;
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  if (!good) state.SkipWithError("call failed");
  return took.count() / static_cast<double>(calls);
}

template <class Neighbour, class Case>
void beside(benchmark::State& state, size_t neighbour_period, Neighbour neighbour, size_t period,
            Case tested) {
  std::vector<double> ratios, ours, theirs;
  measure_time(state, neighbour_period, neighbour);
  measure_time(state, period, tested);
  const int64_t made = g_plans_made;
  double calls = 0;
  for (auto _ : state) {
    theirs.push_back(measure_time(state, neighbour_period, neighbour));
    ours.push_back(measure_time(state, period, tested));
    ratios.push_back(ours.back() / theirs.back());
    calls += 2048;
  }
  state.counters["case_ns"] = median(ours);
  state.counters["neighbour_ns"] = median(theirs);
  state.counters["ratio"] = median(ratios);
  state.counters["prepares_per_call"] = static_cast<double>(g_plans_made - made) / calls;
}

// Alternates between two lists whose tensors lie at different addresses. The fast-path case
// alternates between two lists of different shapes whose addresses do not change.
void lists_move(benchmark::State& state) {
  One& one = scale_impl();
  const Lists first(64), moved(64), second(64, 16);
  const auto call = [&](const Lists& lists) { return one.manager.call(one.op, &lists.args); };
  beside(
      state, 2, [&](size_t i) { return call(i == 0 ? first : second); }, 2,
      [&](size_t i) { return call(i == 0 ? first : moved); });
}

struct Attention {
  Attention() {
    for (const te_fl_tensor** slot : {&args.q, &args.k, &args.v, &args.o})
      *slot = add({2, 8, 2, 16}, te_fl::DType::kBF16);
    args.softmax_lse = add({2, 2, 8}, te_fl::DType::kF32);
    args.layout = 1;
    backward.q = args.q;
    backward.k = args.k;
    backward.v = args.v;
    backward.o = args.o;
    backward.softmax_lse = args.softmax_lse;
    backward.layout = 1;
    for (const te_fl_tensor** slot : {&backward.d_o, &backward.dq, &backward.dk, &backward.dv}) {
      *slot = add({2, 8, 2, 16}, te_fl::DType::kBF16);
    }
    record.storage = add({64}, te_fl::DType::kU8);
  }
  const te_fl_tensor* add(std::vector<int64_t> shape, te_fl::DType dtype) {
    return *tensors.emplace_back(std::make_unique<Tensor>(Tensor::zeros(shape, dtype).value()));
  }
  std::vector<std::unique_ptr<Tensor>> tensors;
  te_fl_saved record;
  te_fl_fused_attn_fwd_args args;
  te_fl_fused_attn_bwd_args backward;
};

// Compares an op that saves a record for its backward with the same op without a saved record.
template <class Args>
void saved(benchmark::State& state, const char* name, Args Attention::*which) {
  One one(name, false);
  Attention attention;
  Args plain = attention.*which, recorded = plain;
  recorded.saved = &attention.record;
  beside(
      state, 1, [&](size_t) { return one.manager.call(one.op, &plain); }, 1,
      [&](size_t) { return one.manager.call(one.op, &recorded); });
}
void saved_forward(benchmark::State& state) { saved(state, "fused_attn_fwd", &Attention::args); }
void saved_backward(benchmark::State& state) {
  saved(state, "fused_attn_bwd", &Attention::backward);
}

using Products = std::vector<std::unique_ptr<Product>>;

Products make_products(size_t count, int64_t step) {
  Products products;
  for (size_t i = 1; i <= count; ++i) {
    products.push_back(std::make_unique<Product>(kPlain, step * static_cast<int64_t>(i)));
  }
  return products;
}

// Compares calls through several handles in turn with the same calls by call().
void handles(benchmark::State& state) {
  const auto count = static_cast<size_t>(state.range(0));
  One& one = gemm_impl(false);
  const Products products = make_products(count, 8);
  std::vector<PreparedOp> prepared;
  for (const auto& p : products) prepared.push_back(one.manager.prepare(one.op, &p->args).value());
  beside(
      state, count, [&](size_t i) { return one.manager.call(one.op, &products[i]->args); }, count,
      [&](size_t i) { return prepared[i].call(&products[i]->args); });
}

// Compares calls that alternate among many shapes, each with a plan of its own, with calls among 64
// shapes.
void planned_shapes(benchmark::State& state) {
  One one("generic_gemm", true);
  const Products products = make_products(static_cast<size_t>(state.range(0)), 8);
  const auto call = [&](size_t i) { return one.manager.call(one.op, &products[i]->args); };
  beside(state, 64, call, products.size(), call);
}

BENCHMARK(lists_move);
BENCHMARK(saved_forward);
BENCHMARK(saved_backward);
BENCHMARK(handles)->Arg(16)->Arg(64)->Arg(200);
BENCHMARK(planned_shapes)->Arg(200)->Arg(300)->Arg(512)->Arg(1000)->Arg(2000);

}  // namespace

BENCHMARK_MAIN();
