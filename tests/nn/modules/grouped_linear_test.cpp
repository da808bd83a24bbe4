// GroupedLinear gives the same values and gradients as a loop over Linear with the same parameters.
#include <algorithm>

#include "te_fl/nn/modules/grouped_linear.hpp"

#include "autocast_fixture.hpp"
#include "nn/base/tensor_ops.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing {
namespace {

constexpr int64_t kExperts = 3;

class GroupedLinearTest : public ::testing::Test {
 protected:
  GroupedLinearTest() {
    grouped = take(GroupedLinear::create(
        {.num_gemms = kExperts, .in_features = kIn, .out_features = kOut, .seed = 3}));
    const auto own = grouped->parameters();
    for (int64_t i = 0; i < kExperts; ++i) {
      loop.push_back(take(Linear::create({.in_features = kIn, .out_features = kOut})));
      const auto parameters = loop.back()->parameters();
      check(detail::copy(own[i].value(), parameters[0].value()));
      check(detail::copy(own[kExperts + i].value(), parameters[1].value()));
    }
  }
  // Runs one step; returns the output and the gradients of x, weights and biases.
  std::vector<Values> step_grouped(const Tensor& x, const Tensor& dy,
                                   const std::vector<int64_t>& splits) {
    Ctx ctx;
    std::vector<Values> seen = {values_of(take(grouped->forward(x, splits, &ctx)))};
    seen.push_back(values_of(take(grouped->backward(dy, ctx))));
    for (const NamedParameter& p : grouped->parameters()) seen.push_back(values_of(p.grad()));
    return seen;
  }
  std::vector<Values> step_loop(const Tensor& x, const Tensor& dy,
                                const std::vector<int64_t>& splits) {
    std::vector<Values> seen(2), biases;
    int64_t begin = 0;
    for (int64_t i = 0; i < kExperts; ++i) {
      const int64_t end = begin + splits[i];
      Ctx ctx;
      const auto append = [](Values& all, const Values& part) {
        all.insert(all.end(), part.begin(), part.end());
      };
      append(seen[0], values_of(take(loop[i]->forward(take(x.slice(0, begin, end)), &ctx))));
      append(seen[1], values_of(take(loop[i]->backward(take(dy.slice(0, begin, end)), ctx))));
      seen.push_back(values_of(loop[i]->parameters()[0].grad()));
      biases.push_back(values_of(loop[i]->parameters()[1].grad()));
      begin = end;
    }
    seen.insert(seen.end(), biases.begin(), biases.end());
    return seen;
  }
  std::unique_ptr<GroupedLinear> grouped;
  std::vector<std::unique_ptr<Linear>> loop;
};

TEST_F(GroupedLinearTest, IsALoopOverLinear) {
  const Tensor x = tensor({48, kIn}, random_values(48 * kIn, 1));
  const Tensor dy = tensor({48, kOut}, random_values(48 * kOut, 2));
  for (const std::optional<Recipe>& recipe :
       {std::optional<Recipe>(), std::optional<Recipe>(DelayedScaling{.amax_history_len = 2}),
        std::optional<Recipe>(Float8CurrentScaling{}),
        std::optional<Recipe>(Float8BlockScaling{})}) {
    for (const std::vector<int64_t>& splits :
         {std::vector<int64_t>{16, 0, 32}, std::vector<int64_t>{0, 48, 0}}) {
      std::optional<autocast> fp8;
      if (recipe.has_value()) fp8.emplace(true, *recipe);
      EXPECT_EQ(step_grouped(x, dy, splits), step_loop(x, dy, splits));
      fp8.reset();
      check(backward_end());
    }
  }
}

TEST_F(GroupedLinearTest, HasParametersAndSitesOfEachExpert) {
  const Tensor x = tensor({16, kIn}, random_values(16 * kIn, 1));
  {
    const autocast fp8(true, DelayedScaling{.amax_history_len = 2});
    Ctx ctx;
    const std::vector<int64_t> splits = {16, 0, 0};
    check(grouped->forward(x, splits, &ctx).status());
  }
  std::vector<std::string> names;
  for (const NamedTensor& t : grouped->state()) names.push_back(t.name);
  for (const char* name : {"weight0", "bias2", "gemm0.fwd.scale", "gemm2.bwd.amax_history"}) {
    EXPECT_EQ(std::ranges::count(names, name), 1) << name;
  }
}

TEST_F(GroupedLinearTest, WritesToMemoryThatIsGiven) {
  const Tensor x = tensor({16, kIn}, random_values(16 * kIn, 1));
  const Tensor dy = tensor({16, kOut}, random_values(16 * kOut, 2));
  const std::vector<int64_t> splits = {8, 0, 8};
  const auto want = step_grouped(x, dy, splits);
  const GroupedMemory memory = {.output = tensor({16, kOut}, Values(16 * kOut, 7)),
                                .input_grad = tensor({16, kIn}, Values(16 * kIn, 7))};
  Ctx ctx;
  ctx.input_grad = false;  // the input gradient is computed nevertheless, because the caller passes
                           // memory for it
  const Tensor y = take(grouped->forward(x, splits, &ctx, {}, memory));
  EXPECT_EQ(y.raw_data(), memory.output.raw_data());
  EXPECT_EQ(values_of(memory.output), want[0]);
  EXPECT_EQ(take(grouped->backward(dy, ctx)).raw_data(), memory.input_grad.raw_data());
  EXPECT_EQ(values_of(memory.input_grad), want[1]);
  EXPECT_FAILS(grouped->forward(x, splits, nullptr, {}, {.output = memory.input_grad}).status(),
               kInvalidArgument, "the memory for the output is");
}

TEST_F(GroupedLinearTest, RefusesSplitsThatAreNotTheRows) {
  const Tensor x = tensor({4, kIn}, random_values(4 * kIn, 1));
  const auto forward = [&](const std::vector<int64_t>& splits) {
    return grouped->forward(x, splits, nullptr).status();
  };
  EXPECT_FAILS(forward({2, 2}), kInvalidArgument,
               "splits is [2,2]; it has one number for each of the 3");
  EXPECT_FAILS(forward({5, -1, 0}), kInvalidArgument, "no number below 0");
  EXPECT_FAILS(forward({2, 2, 1}), kInvalidArgument, "sum to the rows of x, which is f32[4,");
  EXPECT_FAILS(
      GroupedLinear::create({.num_gemms = 0, .in_features = 1, .out_features = 1}).status(),
      kInvalidArgument, "num_gemms is 0");
}

}  // namespace
}  // namespace te_fl::nn::testing
