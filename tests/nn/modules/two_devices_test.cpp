// A model whose layers are on two devices of one provider.
#include "nn/base/tensor_ops.hpp"
#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"

namespace te_fl::nn::testing::two_devices_test {
namespace {

using te_fl::testing::FarDevice;

struct Split : Module {
  std::unique_ptr<Linear> first, second;
  Split(const Device& a, const Device& b, uint64_t seed) {
    first = take(Linear::create({.in_features = 4, .out_features = 4, .device = a, .seed = seed}));
    second =
        take(Linear::create({.in_features = 4, .out_features = 4, .device = b, .seed = seed + 1}));
    register_module("first", *first);
    register_module("second", *second);
  }
  std::vector<Values> values() const {
    std::vector<Values> all;
    for (const NamedParameter& p : parameters()) {
      all.push_back(values_of(take(p.value().to(Device()))));
    }
    return all;
  }
};

TEST(TwoDevices, StateIsLoadedToWhereEachParameterIs) {
  FarDevice far0(0), far1(1);
  OpManager::instance();
  const Device a = take(devices::add(&far0.desc)), b = take(devices::add(&far1.desc));
  {
    const Split from(a, b, 1);
    Split to(a, b, 5), crossed(b, a, 9);
    const Split host(Device(), Device(), 13);
    for (const Split* source : {&from, &host}) {
      for (Split* target : {&to, &crossed}) {
        ASSERT_OK(target->load_state(source->state(), "test"));
        EXPECT_EQ(target->values(), source->values());
      }
    }
    // A module without parameters creates its FP8 state on the module's own device.
    const DotProductAttentionOptions heads{.num_attention_heads = 1, .head_dim = 16};
    const auto trained = take(DotProductAttention::create(heads));
    const Tensor q = tensor({4, 1, 1, 16}, random_values(64, 1));
    {
      Ctx ctx;
      const autocast fp8(true, DelayedScaling{.amax_history_len = 4, .fp8_dpa = true});
      ASSERT_OK(trained->forward(q, q, q, &ctx).status());
    }
    DotProductAttentionOptions there = heads;
    there.device = b;
    const auto loaded = take(DotProductAttention::create(there));
    ASSERT_OK(loaded->load_state(trained->state(), "test"));
    EXPECT_EQ(loaded->state().size(), trained->state().size());
    for (const NamedTensor& t : loaded->state()) EXPECT_EQ(t.tensor.device(), b) << t.name;
  }
  for (const Device& device : {a, b}) {
    ASSERT_OK(devices::remove(device));
  }
}

// The streams of the two devices have equal handles here; te-fl must not confuse them.
TEST(TwoDevices, EachUsesItsOwnStreamWhoeverHasTheInnermostScope) {
  FarDevice far0(0), far1(1);
  OpManager::instance();
  const Device a = take(devices::add(&far0.desc)), b = take(devices::add(&far1.desc));
  {
    const Stream other = take(Stream::create(a)), of_a = take(Stream::create(a));
    const Stream of_b = take(Stream::create(b));
    ASSERT_EQ(other.get(), of_b.get());
    const Tensor host = tensor({1}, {42});
    const StreamScope scope_a(of_a);
    const Tensor scalar = take(host.to(a));
    const StreamScope scope_b(of_b);
    EXPECT_EQ(take(item(scalar)), 42);
    EXPECT_EQ(far0.queues.pending(other.get()), 0u);

    const auto linear =
        take(Linear::create({.in_features = 4, .out_features = 4, .bias = false, .device = a}));
    const auto adam = take(Adam::create(linear->parameters(), {.capturable = true}));
    ASSERT_OK(linear->parameters()[0].parameter->ensure_grad());
    ASSERT_OK(detail::fill(linear->parameters()[0].grad(), 1));
    ASSERT_OK(adam->step());
    ASSERT_OK(adam->advance());
    ASSERT_OK(devices::synchronize(a, of_a.get()));
    EXPECT_EQ(far0.queues.pending(other.get()), 0u);
  }
  for (const Device& device : {a, b}) ASSERT_OK(devices::remove(device));
}

// Returns the gradients, the result and dx of one step, copied to the host.
std::vector<Values> run_step(const Device& device, const Activation activation) {
  const auto mlp = take(LayerNormMLP::create({.hidden_size = 16,
                                              .ffn_hidden_size = 32,
                                              .activation = activation,
                                              .device = device,
                                              .seed = 3}));
  Residual residual;
  const Tensor x = take(tensor({16, 16}, random_values(256, 5)).to(device));
  Ctx ctx, outer;
  Tensor y;
  {
    autocast fp8(true, Float8CurrentScaling{});
    y = take(mlp->forward(x, &ctx));
  }
  y = take(residual.forward(y, x, &outer));
  const Tensor dx = take(mlp->backward(y, ctx));
  EXPECT_OK(backward_end());
  std::vector<Values> all = {values_of(take(y.to(Device()))), values_of(take(dx.to(Device())))};
  for (const NamedParameter& p : mlp->parameters()) {
    all.push_back(values_of(take(p.grad().to(Device()))));
  }
  return all;
}

TEST(TwoDevices, AStepUsesItsOwnStreamWhoeverHasTheInnermostScope) {
  FarDevice far0(0), far1(1);
  OpManager::instance();
  const Device a = take(devices::add(&far0.desc)), b = take(devices::add(&far1.desc));
  for (const Activation activation : {Activation::kGelu, Activation::kSwiglu}) {
    const std::vector<Values> expected = run_step(Device(), activation);
    const Stream other = take(Stream::create(a)), of_a = take(Stream::create(a));
    const Stream of_b = take(Stream::create(b));
    ASSERT_EQ(other.get(), of_b.get());
    const StreamScope scope_a(of_a), scope_b(of_b);
    EXPECT_EQ(run_step(a, activation), expected);
    EXPECT_EQ(far0.queues.pending(other.get()), 0u);
  }
  for (const Device& device : {a, b}) ASSERT_OK(devices::remove(device));
}

}  // namespace
}  // namespace te_fl::nn::testing::two_devices_test
