// A caller passes result memory that overlaps an operand which a GEMM or the backward still reads:
// the call is refused, or its results are right.
#include <functional>
#include <optional>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::result_memory_test {
namespace {

constexpr int64_t kRows = 32, kSize = 32;

const std::vector<std::optional<Recipe>>& recipes() {
  static const std::vector<std::optional<Recipe>> all = {std::nullopt, Recipe(DelayedScaling{}),
                                                         Recipe(Float8CurrentScaling{}),
                                                         Recipe(Float8BlockScaling{})};
  return all;
}

// Position of a result in a buffer with three times the operand's rows, relative to the operand,
// which is in the middle third.
enum class Place { kApart, kSame, kBefore, kBehind };
int64_t row_of(Place place) {
  if (place == Place::kApart) return 0;
  return kRows + (place == Place::kBefore ? -8 : place == Place::kBehind ? 8 : 0);
}

struct Buffer {
  explicit Buffer(uint64_t seed)
      : whole(tensor({3 * kRows, kSize}, random_values(3 * kRows * kSize, seed))),
        operand(rows(kRows)) {}
  Tensor rows(int64_t begin) const { return take(whole.slice(0, begin, begin + kRows)); }
  Tensor result(Place place) const { return rows(row_of(place)); }
  Tensor whole, operand;
};

// Results of a call with one placement, or the error that refused it. A refused call writes no
// parameter gradient.
struct Outcome {
  std::optional<std::vector<Values>> results;
  Status refused;
};

template <class Module>
Outcome outcome(Module& module, const std::optional<Recipe>& recipe,
                const std::function<Result<std::vector<Tensor>>()>& call) {
  check(module.zero_grad());
  Outcome got;
  Result<std::vector<Tensor>> made = [&] {
    autocast fp8(recipe.has_value(), recipe.value_or(DelayedScaling{}));
    return call();
  }();
  check(module.backward_dw());
  check(backward_end());
  if (!made.ok()) {
    got.refused = made.status();
    return got;
  }
  got.results.emplace();
  for (const Tensor& t : *made) got.results->push_back(values_of(t));
  for (const NamedParameter& p : module.parameters()) {
    if (p.grad().defined()) got.results->push_back(values_of(p.grad()));
  }
  return got;
}

// `make` returns a new module; `call` runs it with its results at the given place.
template <class Make, class Call>
void expect_right_or_refused(Make make, Call call, int refused_without_fp8) {
  for (const auto& recipe : recipes()) {
    int refused = 0;
    const auto run = [&](Place place) {
      const auto module = make();
      return outcome(*module, recipe, [&] { return call(*module, place); });
    };
    const Outcome expected = run(Place::kApart);
    ASSERT_TRUE(expected.results.has_value()) << expected.refused.to_string();
    for (Place place : {Place::kSame, Place::kBefore, Place::kBehind}) {
      SCOPED_TRACE(::testing::Message()
                   << (recipe ? describe(*recipe) : "no FP8") << " " << static_cast<int>(place));
      const Outcome got = run(place);
      if (!got.results.has_value()) {
        EXPECT_FAILS(got.refused, kInvalidArgument, "give it memory of its own");
        ++refused;
        continue;
      }
      EXPECT_TRUE(*got.results == *expected.results);
    }
    EXPECT_EQ(refused, recipe.has_value() ? 0 : refused_without_fp8)
        << (recipe ? describe(*recipe) : "no FP8");
  }
}

std::unique_ptr<Linear> linear(bool trains, bool delays) {
  auto module = take(
      Linear::create({.in_features = kSize, .out_features = kSize, .seed = 3, .init_std = 0.2f}));
  module->parameters()[0].parameter->set_requires_grad(trains);
  module->set_delay_wgrad(delays);
  return module;
}

TEST(ResultMemory, OfLinearsBackwardIsNotItsInputs) {
  for (bool trains : {true, false}) {
    for (bool delays : {false, true}) {
      SCOPED_TRACE(::testing::Message() << trains << delays);
      expect_right_or_refused([&] { return linear(trains, delays); },
                              [&](Linear& m, Place place) -> Result<std::vector<Tensor>> {
                                const Buffer x(1), dy(2);
                                const Tensor into = x.result(place);
                                Ctx ctx;
                                TE_FL_RETURN_IF_ERROR(m.forward(x.operand, &ctx).status());
                                TE_FL_ASSIGN_OR_RETURN(const Tensor dx,
                                                       m.backward(dy.operand, ctx, &into));
                                return std::vector<Tensor>{dx};
                              },
                              trains ? 3 : 0);
    }
  }
}

TEST(ResultMemory, OfLinearsBackwardIsNotTheOutputsGradients) {
  expect_right_or_refused([] { return linear(true, false); },
                          [](Linear& m, Place place) -> Result<std::vector<Tensor>> {
                            const Buffer x(1), dy(2);
                            const Tensor into = dy.result(place);
                            Ctx ctx;
                            TE_FL_RETURN_IF_ERROR(m.forward(x.operand, &ctx).status());
                            TE_FL_ASSIGN_OR_RETURN(const Tensor dx,
                                                   m.backward(dy.operand, ctx, &into));
                            return std::vector<Tensor>{dx};
                          },
                          3);
}

TEST(ResultMemory, OfLinearsForwardIsNotItsInputs) {
  expect_right_or_refused([] { return linear(true, false); },
                          [](Linear& m, Place place) -> Result<std::vector<Tensor>> {
                            const Buffer x(1), dy(2);
                            const Tensor into = x.result(place);
                            Ctx ctx;
                            TE_FL_ASSIGN_OR_RETURN(const Tensor y,
                                                   m.forward(x.operand, &ctx, {}, nullptr, &into));
                            TE_FL_ASSIGN_OR_RETURN(const Tensor dx, m.backward(dy.operand, ctx));
                            return std::vector<Tensor>{y, dx};
                          },
                          3);
}

TEST(ResultMemory, OfLayerNormLinearIsNotItsInputs) {
  const auto make = [] {
    return take(LayerNormLinear::create(
        {.in_features = kSize, .out_features = kSize, .seed = 3, .init_std = 0.2f}));
  };
  for (const auto& recipe : recipes()) {
    const auto run = [&](Place place, bool training) {
      const auto module = make();
      return outcome(*module, recipe, [&]() -> Result<std::vector<Tensor>> {
        const Buffer x(1), dy(2);
        const Tensor into = x.result(place);
        Ctx ctx;
        TE_FL_ASSIGN_OR_RETURN(const Tensor y,
                               module->forward(x.operand, training ? &ctx : nullptr, {}, &into));
        if (!training) return std::vector<Tensor>{y};
        TE_FL_ASSIGN_OR_RETURN(const Tensor dx, module->backward(dy.operand, ctx));
        return std::vector<Tensor>{y, dx};
      });
    };
    for (Place place : {Place::kSame, Place::kBefore, Place::kBehind}) {
      EXPECT_FAILS(run(place, true).refused, kInvalidArgument, "LayerNormLinear: into");
      const Outcome got = run(place, false);  // the norm has read x before the result is written
      ASSERT_TRUE(got.results.has_value()) << got.refused.to_string();
      EXPECT_TRUE(*got.results == *run(Place::kApart, false).results);
    }
  }
}

TEST(ResultMemory, OfGroupedLinearIsNotItsInputs) {
  const auto make = [] {
    return take(GroupedLinear::create({.num_gemms = 2,
                                       .in_features = kSize,
                                       .out_features = kSize,
                                       .seed = 3,
                                       .init_std = 0.2f}));
  };
  const std::vector<int64_t> splits = {8, kRows - 8};
  enum Which { kOutput, kInputGrad, kInputGradInDy };
  for (Which which : {kOutput, kInputGrad, kInputGradInDy}) {
    SCOPED_TRACE(static_cast<int>(which));
    expect_right_or_refused(
        make,
        [&](GroupedLinear& m, Place place) -> Result<std::vector<Tensor>> {
          const Buffer x(1), dy(2);
          GroupedMemory memory;
          if (which == kOutput) memory.output = x.result(place);
          if (which == kInputGrad) memory.input_grad = x.result(place);
          if (which == kInputGradInDy) memory.input_grad = dy.result(place);
          Ctx ctx;
          TE_FL_ASSIGN_OR_RETURN(const Tensor y, m.forward(x.operand, splits, &ctx, {}, memory));
          TE_FL_ASSIGN_OR_RETURN(const Tensor dx, m.backward(dy.operand, ctx));
          return std::vector<Tensor>{y, dx};
        },
        3);
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::result_memory_test
