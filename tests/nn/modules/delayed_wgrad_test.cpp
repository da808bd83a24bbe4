// Delayed weight gradients: backward_dw() computes them after the backward.
#include "autocast_fixture.hpp"
#include "nn/autograd/parameter.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::delayed_wgrad_test {
namespace {

// Returns the gradients after two microbatches. Weight gradients are computed with each backward,
// or with `delays` after both.
std::vector<Values> gradients(Module& module, const std::function<Result<Tensor>(Ctx&)>& forward,
                              const std::function<Result<Tensor>(const Tensor&, Ctx&)>& backward,
                              const std::optional<Recipe>& recipe, bool delays) {
  std::vector<Values> seen;
  module.set_delay_wgrad(delays);
  for (int step = 0; step < 2; ++step) {
    check(module.zero_grad());
    for (int m = 0; m < 2; ++m) {
      Ctx ctx;
      std::optional<autocast> fp8;
      if (recipe.has_value()) fp8.emplace(true, *recipe);
      const Tensor y = take(forward(ctx));
      fp8.reset();
      seen.push_back(values_of(take(backward(y, ctx))));
    }
    check(backward_end());
    if (delays) {
      for (const NamedParameter& p : module.parameters()) {
        if (p.value().rank() == 2) {
          EXPECT_FALSE(p.parameter->internals().grad_written) << p.name;
        }
      }
    }
    check(module.backward_dw());
    for (const NamedParameter& p : module.parameters()) seen.push_back(values_of(p.grad()));
  }
  return seen;
}

TEST(DelayedWgrad, IsTheSameGradient) {
  for (const std::optional<Recipe>& recipe :
       {std::optional<Recipe>(), std::optional<Recipe>(DelayedScaling{.amax_history_len = 2}),
        std::optional<Recipe>(Float8BlockScaling{})}) {
    std::vector<Values> seen[2], parts[2];
    for (bool delays : {false, true}) {
      auto layer = take(TransformerLayer::create({.hidden_size = 32,
                                                  .ffn_hidden_size = 64,
                                                  .num_attention_heads = 2,
                                                  .attention = {.layout = Layout::kBSHD},
                                                  .seed = 5,
                                                  .init_std = 0.2f}));
      const Tensor x = tensor({2, 6, 32}, random_values(2 * 6 * 32, 7));
      seen[delays] = gradients(
          *layer, [&](Ctx& ctx) { return layer->forward(x, &ctx); },
          [&](const Tensor& dy, Ctx& ctx) { return layer->backward(dy, ctx); }, recipe, delays);
      auto split = take(Linear::create({.in_features = kIn,
                                        .out_features = kOut,
                                        .seed = 3,
                                        .init_std = 0.2f,
                                        .parameters_split = {{"a", 16}, {"b", 32}}}));
      parts[delays] = gradients(
          *split, [&](Ctx& ctx) { return split->forward(input(), &ctx); },
          [&](const Tensor& dy, Ctx& ctx) { return split->backward(dy, ctx); }, recipe, delays);
    }
    EXPECT_TRUE(seen[0] == seen[1]);
    EXPECT_TRUE(parts[0] == parts[1]);
  }
}

TEST(DelayedWgrad, AStepBeforeItIsRefused) {
  auto linear = make_linear();
  linear->set_delay_wgrad(true);
  auto adam = take(Adam::create(linear->parameters(), {}));
  Ctx ctx;
  const Tensor y = take(linear->forward(input(), &ctx));
  (void)take(linear->backward(y, ctx));
  EXPECT_FAILS(adam->step(), kFailedPrecondition, "weight to backward_dw()");
  check(linear->backward_dw());
  check(adam->step());
  check(linear->backward_dw());  // no weight gradient is pending
}

// A module and its step: the forward and the backward.
struct Delayed {
  std::shared_ptr<Module> module;
  std::function<Status()> step;
};

template <class M>
Delayed delayed(std::unique_ptr<M> made) {
  std::shared_ptr<M> module = std::move(made);
  module->set_delay_wgrad(true);
  return {module, [module]() -> Status {
            Ctx ctx;
            TE_FL_ASSIGN_OR_RETURN(const Tensor y, module->forward(input(), &ctx));
            return module->backward(y, ctx).status();
          }};
}

LinearOptions options(bool parts) {
  LinearOptions made{.in_features = kIn, .out_features = kOut, .seed = 3, .init_std = 0.2f};
  if (parts) made.parameters_split = {{"a", 16}, {"b", 32}};
  return made;
}

// Returns modules that cover every kind of parameter whose gradient backward_dw() computes:
// weights, split weights, biases of a frozen weight.
std::vector<Delayed> every_kind() {
  std::vector<Delayed> kinds;
  kinds.push_back(delayed(take(Linear::create(options(false)))));
  kinds.push_back(delayed(take(Linear::create(options(true)))));
  for (bool parts : {false, true}) {
    kinds.push_back(delayed(take(Linear::create(options(parts)))));
    for (const NamedParameter& p : kinds.back().module->parameters()) {
      if (p.value().rank() == 2) p.parameter->set_requires_grad(false);
    }
  }
  kinds.push_back(delayed(take(TransformerLayer::create({.hidden_size = kIn,
                                                         .ffn_hidden_size = kIn,
                                                         .num_attention_heads = 2,
                                                         .attention = {.layout = Layout::kSBHD},
                                                         .fuse_qkv_params = false}))));
  kinds.back().step = [layer = std::static_pointer_cast<TransformerLayer>(kinds.back().module)] {
    Ctx ctx;
    const Tensor x = take(input().view({4, 8, kIn}));
    return layer->backward(take(layer->forward(x, &ctx)), ctx).status();
  };
  auto grouped =
      take(GroupedLinear::create({.num_gemms = 2, .in_features = kIn, .out_features = kOut}));
  grouped->set_delay_wgrad(true);
  const std::shared_ptr<GroupedLinear> group = std::move(grouped);
  kinds.push_back(
      {group, [group] {
         Ctx ctx;
         const std::vector<int64_t> splits = {kRows - 8, 8};
         return group->backward(take(group->forward(input(), splits, &ctx)), ctx).status();
       }});
  return kinds;
}

TEST(DelayedWgrad, AStepBeforeItIsRefusedWhateverIsLeft) {
  for (const Delayed& kind : every_kind()) {
    auto sgd = take(SGD::create(kind.module->parameters(), {.lr = 1}));
    for (int step = 0; step < 2; ++step) {
      SCOPED_TRACE(kind.module->parameters()[0].name + " " + std::to_string(step));
      check(kind.module->zero_grad());
      check(kind.step());
      EXPECT_FAILS(sgd->step(), kFailedPrecondition, "to backward_dw()");
      check(kind.module->backward_dw());
      EXPECT_OK(sgd->step());
    }
  }
}

TEST(DelayedWgrad, OneThatFailsOrIsDroppedLeavesNothing) {
  for (const Delayed& kind : every_kind()) {
    SCOPED_TRACE(kind.module->parameters()[0].name);
    auto sgd = take(SGD::create(kind.module->parameters(), {.lr = 1}));
    for (int m = 0; m < 2; ++m) check(kind.step());
    {
      PolicySettings settings;  // no implementation of the GEMMs is allowed
      for (const char* op : {"generic_gemm", "grouped_gemm"}) {
        settings.per_op[op] = {{PolicyToken::Type::kImpl, Kind::kVendor, "vendor.absent"}};
      }
      const PolicyScope policy(settings);
      EXPECT_FALSE(kind.module->backward_dw().ok());
    }
    check(kind.step());
    (void)kind.module->take_delayed_wgrad();
    check(kind.module->zero_grad());
    check(kind.step());
    check(kind.module->backward_dw());
    EXPECT_OK(sgd->step());
  }
}

TEST(DelayedWgrad, TakenOutItIsTheBackwardsOwn) {
  const auto computed = [](bool delays, int64_t backwards) {
    auto linear = make_linear();
    linear->set_delay_wgrad(delays);
    std::vector<std::function<Status()>> left;
    for (int64_t m = 0; m < 2; ++m) {
      if (!delays && m == backwards) break;
      Ctx ctx;
      const Tensor y = take(linear->forward(input(), &ctx));
      (void)take(linear->backward(m == 0 ? y : gradient(), ctx));
      left.push_back(linear->take_delayed_wgrad());
    }
    check(linear->backward_dw());  // no weight gradient is pending in the module
    for (int64_t m = 0; delays && m < backwards; ++m) check(left[static_cast<size_t>(m)]());
    return values_of(linear->parameters()[0].grad());
  };
  EXPECT_EQ(computed(true, 1), computed(false, 1));
  EXPECT_EQ(computed(true, 2), computed(false, 2));
  EXPECT_NE(computed(true, 1), computed(true, 2));
}

TEST(DelayedWgrad, HooksWaitForNothingThatIsDelayed) {
  const Layer<Linear> linear({.in_features = kIn, .out_features = kOut});
  const auto seen = [&](bool delays) {
    linear->set_delay_wgrad(delays);
    Tape tape;
    int64_t count = 0;
    tape.on_gradient([&](Parameter&) {
      ++count;
      return Status();
    });
    check(tape.backward(linear(tape.input(input())), gradient()));
    check(linear->backward_dw());
    return count;
  };
  EXPECT_EQ(seen(false), 2);
  EXPECT_EQ(seen(true), 0);  // without FP8, backward_dw() computes the bias's gradient as well
  const Layer<Linear> parts(options(true));
  parts->set_delay_wgrad(true);
  for (int m = 0; m < 2; ++m) {
    Tape tape;
    tape.on_gradient([](Parameter&) { return internal_error("it is not complete"); });
    check(tape.backward(parts(tape.input(input())), gradient()));
    check(parts->backward_dw());
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::delayed_wgrad_test
