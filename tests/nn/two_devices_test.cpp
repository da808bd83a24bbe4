// A model whose layers lie on two devices of one provider.
#include "nn_test_util.hpp"
#include "plugins/hooks.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"

namespace te_fl::nn::testing {
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
    // FP8 state that is not there yet is made on its module's device, which may have no parameter.
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
    plugins::g_hooks.release_device.load()(device);
    ASSERT_OK(devices::remove(device));
  }
}

}  // namespace
}  // namespace te_fl::nn::testing
