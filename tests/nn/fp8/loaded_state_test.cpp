// Loading FP8 state while scale updates of the previous state are pending, and steps that fail: the
// scales must be the loaded ones, or those from before the failed step.
#include <optional>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::loaded_state_test {
namespace {

constexpr int64_t kRows = 16, kSize = 32;
const DelayedScaling kRecipe{.amax_history_len = 3};

Tensor values(uint64_t seed, double range = 1) {
  return tensor({kRows, kSize}, random_values(kRows * kSize, seed, range));
}
std::unique_ptr<LayerNormMLP> make_module() {
  return take(LayerNormMLP::create({.hidden_size = kSize,
                                    .ffn_hidden_size = 2 * kSize,
                                    .seed = 3,
                                    .init_std = 0.2f,
                                    .output_init_std = 0.2f}));
}
std::vector<NamedTensor> fp8_tensors(const Module& module) {
  std::vector<NamedTensor> result;
  for (const NamedTensor& t : module.state()) {
    if (t.name.find("fp8.") != std::string::npos) result.push_back(t);
  }
  return result;
}
std::map<std::string, Values> fp8_state(const Module& module) {
  std::map<std::string, Values> result;
  for (const NamedTensor& t : fp8_tensors(module)) result[t.name] = values_of(t.tensor);
  return result;
}

void forward(LayerNormMLP& module, double range, Ctx* ctx) {
  autocast fp8(true, kRecipe);
  check(module.forward(values(5, range), ctx).status());
  check(fp8.exit());
}
// Runs one step; returns the input gradient.
Values step(LayerNormMLP& module, double range = 1) {
  Ctx ctx;
  check(module.zero_grad());
  forward(module, range, &ctx);
  const Values dx = values_of(take(module.backward(values(6, range), ctx)));
  check(backward_end());
  return dx;
}

// Makes a module with amaxes in every row of its history, as after a save in the middle of a step.
std::unique_ptr<LayerNormMLP> saved() {
  auto module = make_module();
  for (double range : {2.0, 7.0, 3.0}) step(*module, range);
  for (const NamedTensor& t : fp8_tensors(*module)) {
    if (!t.name.ends_with("amax_history")) continue;
    for (int64_t slot = 0; slot < t.tensor.size(1); ++slot) t.tensor.data<float>()[slot] = 11;
  }
  return module;
}

enum class Left { kNothing, kGradients, kInference, kOpenScope, kCalibration };
enum class Load { kState, kFp8State, kNoFp8State };

void load(LayerNormMLP& module, Load how, const LayerNormMLP& from) {
  std::vector<NamedTensor> parameters;
  for (const NamedParameter& p : from.parameters()) parameters.push_back({p.name, p.value()});
  if (how == Load::kState) check(module.load_state(from.state(), "memory"));
  if (how == Load::kFp8State) check(module.load_fp8_state(fp8_tensors(from), "memory"));
  if (how == Load::kNoFp8State) check(module.load_state(parameters, "memory"));
}

struct Outcome {
  std::map<std::string, Values> loaded;  // expected FP8 state after all pending updates
  Values dx;
  std::map<std::string, Values> after;
};

Outcome run(Left left, Load how) {
  auto module = make_module(), other = make_module();
  const auto from = saved();
  step(*module, 40);
  Ctx ctx;
  if (left == Left::kGradients) {
    forward(*module, 90, &ctx);
    check(module->backward(values(6, 90), ctx).status());
  } else if (left == Left::kInference) {
    forward(*module, 90, nullptr);
  }
  std::optional<autocast> open;
  if (left == Left::kOpenScope || left == Left::kCalibration) {
    const bool calibrates = left == Left::kCalibration;
    open.emplace(AutocastOptions{.enabled = !calibrates, .calibrating = calibrates}, kRecipe);
    check(module->forward(values(5, 90), calibrates ? nullptr : &ctx).status());
  }
  load(*module, how, *from);
  if (open.has_value()) check(open->exit());
  ctx.reset();
  step(*other);
  check(module->zero_grad());
  Outcome result;
  result.loaded = fp8_state(*module);
  result.dx = step(*module);
  result.after = fp8_state(*module);
  return result;
}

TEST(LoadedState, IsChangedByNoUpdateThatWaitedBefore) {
  for (Load how : {Load::kState, Load::kFp8State, Load::kNoFp8State}) {
    const Outcome expected = run(Left::kNothing, how);
    if (how != Load::kNoFp8State) EXPECT_EQ(expected.loaded, fp8_state(*saved()));
    for (Left left : {Left::kGradients, Left::kInference, Left::kOpenScope, Left::kCalibration}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(how) << static_cast<int>(left));
      const Outcome got = run(left, how);
      EXPECT_EQ(got.loaded, expected.loaded);
      EXPECT_EQ(got.dx, expected.dx);
      EXPECT_EQ(got.after, expected.after);
    }
  }
}

TEST(LoadedState, AForwardAfterTheLoadCountsInTheScopeThatWasOpen) {
  auto module = make_module(), expected = make_module();
  const auto from = saved();
  for (auto* m : {module.get(), expected.get()}) {
    Ctx first, second;
    autocast fp8(true, kRecipe);
    if (m == module.get()) check(m->forward(values(5, 90), &first).status());
    load(*m, Load::kState, *from);
    check(m->forward(values(5), &second).status());
    check(fp8.exit());
  }
  EXPECT_EQ(fp8_state(*module), fp8_state(*expected));
  EXPECT_NE(fp8_state(*module), fp8_state(*saved()));
}

// ---- steps that fail

struct Model {
  std::unique_ptr<LayerNormMLP> first = make_module(), second = make_module();
  Result<Tensor> forward(const Tensor& x, Ctx* ctxs, bool fails) const {
    TE_FL_ASSIGN_OR_RETURN(Tensor y, first->forward(x, &ctxs[0]));
    if (fails) {
      TE_FL_ASSIGN_OR_RETURN(y, y.slice(1, 0, 8));
    }
    return second->forward(y, &ctxs[1]);
  }
  std::map<std::string, Values> state() const {
    auto result = fp8_state(*first);
    for (const auto& [name, v] : fp8_state(*second)) result["second." + name] = v;
    return result;
  }
};

TEST(FailedStep, ChangesNoScaleAndNoAmax) {
  Model model, other;
  for (const Model* m : {&model, &other}) {
    Ctx ctxs[2];
    autocast fp8(true, kRecipe);
    ASSERT_OK(m->forward(values(1), ctxs, false).status());
  }
  const auto before = model.state();
  {
    Ctx ctxs[2];
    autocast fp8(true, kRecipe);
    EXPECT_FAILS(model.forward(values(2, 50), ctxs, true).status(), kInvalidArgument,
                 "LayerNormMLP");
  }
  EXPECT_EQ(model.state(), before);
  // The next step behaves as if the failed step had never run.
  for (const Model* m : {&model, &other}) {
    Ctx ctxs[2];
    autocast fp8(true, kRecipe);
    ASSERT_OK(m->forward(values(3), ctxs, false).status());
  }
  EXPECT_EQ(model.state(), other.state());
  EXPECT_NE(model.state(), before);
}

TEST(FailedStep, LeavesTheAmaxesOfAnInferenceBeforeIt) {
  const auto state_of = [](const Linear& linear) {
    return std::pair(values_of(find_state(linear, "fp8.fwd.amax_history")),
                     values_of(find_state(linear, "fp8.fwd.scale")));
  };
  const auto forward = [](Linear& linear, double range, Ctx* ctx) {
    autocast fp8(true, kRecipe);
    check(linear.forward(values(1, range), ctx).status());
    check(fp8.exit());
  };
  const auto after = [&](bool fails) {
    const auto linear =
        take(Linear::create({.in_features = kSize, .out_features = kSize, .seed = 3}));
    Ctx first, last;
    forward(*linear, 1, &first);
    forward(*linear, 9, nullptr);
    const auto before = state_of(*linear);
    if (fails) {
      Ctx good, bad;
      autocast fp8(true, kRecipe);
      check(linear->forward(values(1, 90), &good).status());
      EXPECT_FALSE(linear->forward(take(values(1).slice(1, 0, 8)), &bad).ok());
    }
    EXPECT_EQ(state_of(*linear), before);
    forward(*linear, 1, &last);
    EXPECT_LT(state_of(*linear).second[0], before.second[0]);  // the inference counts
    return state_of(*linear);
  };
  EXPECT_EQ(after(true), after(false));
}

TEST(FailedStep, OneThatIsTriedAgainInItsScopeCounts) {
  Model model;
  Ctx failed[2], ctxs[2];
  autocast fp8(true, kRecipe);
  EXPECT_FALSE(model.forward(values(2), failed, true).ok());
  ASSERT_OK(model.forward(values(2), ctxs, false).status());
  ASSERT_OK(fp8.exit());
  for (const auto& [name, v] : model.state()) {
    if (name.ends_with("fwd.scale")) EXPECT_NE(v[0], 1) << name;
  }
}

// A failed step also keeps the FP8 type of the gradients and the scales that belong to it, even if
// the failed step's recipe had another type.
TEST(FailedStep, LeavesTheTypeOfGradients) {
  auto module = make_module();
  for (double range : {2.0, 3.0}) step(*module, range);
  const auto gradients = [&] {
    auto state = fp8_state(*module);
    std::erase_if(state, [](const auto& t) { return t.first.find(".bwd.") == std::string::npos; });
    return state;
  };
  const auto before = gradients();
  DelayedScaling other = kRecipe;
  other.format = Fp8Format::kE4M3;
  Ctx ctx;
  {
    autocast fp8(true, other);
    ASSERT_OK(module->forward(values(5), &ctx).status());
  }
  te_fl_op_desc fails{};
  fails.struct_size = sizeof fails;
  fails.op_name = "multi_tensor_scale";
  fails.impl_id = "vendor.fails";
  fails.kind = TE_FL_KIND_VENDOR;
  fails.priority = 500;
  fails.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_IN_PLACE_OK;
  fails.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  fails.run = [](void*, const te_fl_context*, const void*) -> te_fl_status {
    return TE_FL_INTERNAL;
  };
  OpRegistry& registry = OpRegistry::instance();
  ASSERT_OK(registry.register_op(fails, "fails", "acme"));
  EXPECT_FALSE(module->backward(values(6), ctx).ok());
  EXPECT_EQ(gradients(), before);
  ASSERT_OK(registry.unregister_owner("fails"));
  Ctx again;
  {
    autocast fp8(true, other);
    ASSERT_OK(module->forward(values(5), &again).status());
  }
  ASSERT_OK(module->backward(values(6), again).status());
  EXPECT_NE(gradients(), before);
}

// A failure in any kind of module counts as a failed step.
TEST(FailedStep, IsSeenWhicheverModuleFails) {
  const Tensor wrong = tensor({kRows, 8}, random_values(kRows * 8, 1));
  const std::vector<int64_t> splits = {kRows};
  auto linear = take(Linear::create({.in_features = kSize, .out_features = kSize}));
  auto norm_linear = take(LayerNormLinear::create({.in_features = kSize, .out_features = kSize}));
  auto norm = take(RMSNorm::create({.hidden_size = kSize}));
  auto mlp = make_module();
  auto mha = take(MultiheadAttention::create({.hidden_size = kSize, .num_attention_heads = 2}));
  auto layer = take(TransformerLayer::create(
      {.hidden_size = kSize, .ffn_hidden_size = kSize, .num_attention_heads = 2}));
  auto grouped = take(GroupedLinear::create({.in_features = kSize, .out_features = kSize}));
  const std::vector<std::pair<const char*, std::function<Status(Ctx*)>>> failing = {
      {"Linear", [&](Ctx* c) { return linear->forward(wrong, c).status(); }},
      {"LayerNormLinear", [&](Ctx* c) { return norm_linear->forward(wrong, c).status(); }},
      {"RMSNorm", [&](Ctx* c) { return norm->forward(wrong, c).status(); }},
      {"LayerNormMLP", [&](Ctx* c) { return mlp->forward(wrong, c).status(); }},
      {"MultiheadAttention", [&](Ctx* c) { return mha->forward(wrong, c).status(); }},
      {"TransformerLayer", [&](Ctx* c) { return layer->forward(wrong, c).status(); }},
      {"GroupedLinear", [&](Ctx* c) { return grouped->forward(wrong, splits, c).status(); }},
  };
  for (const auto& [name, fails] : failing) {
    SCOPED_TRACE(name);
    auto module = make_module();
    step(*module);
    const auto before = fp8_state(*module);
    {
      Ctx good, bad;
      autocast fp8(true, kRecipe);
      ASSERT_OK(module->forward(values(2, 50), &good).status());
      EXPECT_FALSE(fails(&bad).ok());
    }
    EXPECT_EQ(fp8_state(*module), before);
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::loaded_state_test
