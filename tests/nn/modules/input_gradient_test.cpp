// A backward without an input gradient skips the input gradient's GEMM and collectives.
#include "counting_ranks.hpp"
#include "parallel_fixture.hpp"

namespace te_fl::nn::testing::input_gradient_test {
namespace {

constexpr int64_t kRows = 8, kIn = 12, kOut = 16;

int64_t count_calls(const std::string& op) {
  uint64_t calls = 0;
  for (const OpUsage& u : OpManager::instance().usage()) calls += u.op == op ? u.calls : 0;
  return static_cast<int64_t>(calls);
}

// Number of GEMMs of one pass, and its gradients; dx may be undefined.
struct Pass {
  int64_t products = 0;
  Tensor dx;
  std::map<std::string, Values> gradients;
};

template <class Layer>
Pass pass(Layer& layer, int64_t rows, bool input_grad) {
  check(layer.zero_grad());
  Ctx ctx;
  ctx.input_grad = input_grad;
  const int64_t in = layer.parameters()[0].value().shape().back();
  const Tensor y = take(layer.forward(tensor({rows, in}, random_values(rows * in, 1)), &ctx));
  Pass result;
  const int64_t before = count_calls("generic_gemm");
  result.dx = take(layer.backward(y, ctx));
  result.products = count_calls("generic_gemm") - before;
  for (const NamedParameter& p : layer.parameters()) {
    if (p.grad().defined()) result.gradients[p.name] = values_of(p.grad());
  }
  return result;
}

TEST(InputGradient, IsLeftOut) {
  const auto linear = take(Linear::create({.in_features = kIn, .out_features = kOut, .seed = 1}));
  const Pass with = pass(*linear, kRows, true), without = pass(*linear, kRows, false);
  EXPECT_EQ(with.products, 2);
  EXPECT_EQ(without.products, 1);
  EXPECT_TRUE(with.dx.defined());
  EXPECT_FALSE(without.dx.defined());
  EXPECT_EQ(without.gradients, with.gradients);
}

TEST(InputGradient, OfATrainedNormIsNeeded) {
  const auto layer =
      take(LayerNormLinear::create({.in_features = kIn, .out_features = kOut, .seed = 1}));
  const Pass with = pass(*layer, kRows, true), trained = pass(*layer, kRows, false);
  EXPECT_EQ(trained.products, 2);
  EXPECT_EQ(trained.gradients, with.gradients);
  for (const NamedParameter& p : layer->parameters()) {
    if (p.name.starts_with("layer_norm")) p.parameter->set_requires_grad(false);
  }
  const Pass frozen = pass(*layer, kRows, false);
  EXPECT_EQ(frozen.products, 1);
  EXPECT_FALSE(frozen.dx.defined());
  EXPECT_EQ(frozen.gradients.at("weight"), with.gradients.at("weight"));
}

TEST(InputGradient, OfAnMlpIsLeftOutWithoutATrainedNorm) {
  for (const bool normalizes : {false, true}) {
    const auto mlp = take(LayerNormMLP::create(
        {.hidden_size = kIn, .ffn_hidden_size = kOut, .seed = 1, .normalizes = normalizes}));
    const Pass with = pass(*mlp, kRows, true), trained = pass(*mlp, kRows, false);
    EXPECT_EQ(with.products, 4);
    EXPECT_EQ(trained.products, normalizes ? 4 : 3);
    EXPECT_EQ(trained.gradients, with.gradients);
    for (const NamedParameter& p : mlp->parameters()) {
      if (p.name.starts_with("layer_norm")) p.parameter->set_requires_grad(false);
    }
    const Pass frozen = pass(*mlp, kRows, false);
    EXPECT_EQ(frozen.products, 3);
    EXPECT_FALSE(frozen.dx.defined());
    EXPECT_EQ(frozen.gradients.at("fc1_weight"), with.gradients.at("fc1_weight"));
  }
}

TEST(InputGradient, OfValuesThatWantNoneIsLeftOut) {
  const auto linear = take(Linear::create({.in_features = kIn, .out_features = kOut, .seed = 1}));
  const auto products = [&](bool wanted) {
    Tape tape;
    const Value x = tape.input(tensor({kRows, kIn}, random_values(kRows * kIn, 1)), wanted);
    const Value y = call(*linear, x);
    const int64_t before = count_calls("generic_gemm");
    check(tape.backward(y, y.tensor()));
    EXPECT_EQ(x.grad().defined(), wanted);
    return count_calls("generic_gemm") - before;
  };
  EXPECT_EQ(products(true), 2);
  EXPECT_EQ(products(false), 1);
}

TEST(InputGradient, TakesItsCollectiveWithIt) {
  CountingRanks counting;
  for (const bool sequence : {false, true}) {
    std::map<std::string, CountingRanks::Count> counts[2];
    std::map<std::string, Values> gradients[2];
    for (const bool wanted : {false, true}) {
      on_ranks(
          2,
          [&](const std::shared_ptr<const Comm>& ranks) {
            const TensorParallel parallel{ranks, sequence, {}};
            const LinearOptions whole{.in_features = kIn, .out_features = kOut, .seed = 1};
            const auto column =
                take(Linear::create(take(shard_of(whole, ParallelMode::kColumn, parallel))));
            const Pass made = pass(*column, kRows / (sequence ? 2 : 1), wanted);
            EXPECT_EQ(made.dx.defined(), wanted);
            if (ranks->rank() == 0) gradients[wanted] = made.gradients;
          },
          "counted");
      counts[wanted] = counting.take_counts();
    }
    const char* const sum = sequence ? "reduce_scatter" : "all_reduce";
    EXPECT_EQ(counts[true][sum].calls, 2) << sum;
    EXPECT_EQ(counts[false][sum].calls, 0) << sum;
    EXPECT_EQ(counts[false]["all_gather"].calls, counts[true]["all_gather"].calls);
    EXPECT_EQ(gradients[false], gradients[true]);
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::input_gradient_test
