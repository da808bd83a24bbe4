// Tests of what a forward keeps for its backward, in bytes for each token and unit of the hidden
// size, as te-fl's account of the device's memory has it. Prints the account:
//   nn_test --gtest_filter=ActivationMemory.*
#include <cstdio>

#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"
#include "support/sanitizers.hpp"

namespace te_fl::nn::testing::activation_memory_test {
namespace {

using te_fl::testing::RecordingDevice;

constexpr int64_t kTokens = 128, kHidden = 128;

struct Plan {
  const char* name;
  std::optional<Recipe> recipe;
  int64_t groups;  // of keys and values; heads: 2
  bool frozen;
  double bytes;  // at most, with what rows of statistics and the alignment of memory add
};

double kept(const Device& device, const Plan& plan) {
  auto layer = take(TransformerLayer::create({.hidden_size = kHidden,
                                              .ffn_hidden_size = 4 * kHidden,
                                              .num_attention_heads = 2,
                                              .num_gqa_groups = plan.groups,
                                              .param_dtype = DType::kBF16,
                                              .activation_dtype = DType::kBF16,
                                              .device = device}));
  layer->set_requires_grad(!plan.frozen);
  const Tensor x = take(Tensor::zeros({kTokens, 1, kHidden}, DType::kBF16, device));
  double bytes = 0;
  // The first makes what stays: weights in FP8, scales, gradients.
  for (const bool first : {true, false}) {
    const auto held = [&] {
      check(devices::synchronize(device));
      return static_cast<double>(take(devices::memory_account(device)).bytes);
    };
    const double before = held();
    Ctx ctx;
    {
      autocast fp8(plan.recipe.has_value(), plan.recipe.value_or(DelayedScaling{}));
      (void)take(layer->forward(x, &ctx, {}, {.is_first_microbatch = first}));
    }
    bytes = held() - before;
    (void)take(layer->backward(x, ctx));
    check(backward_end());
  }
  check(devices::synchronize(device));
  return bytes / static_cast<double>(kTokens * kHidden);
}

// BF16: the inputs of the norms (of which the first is the layer's, and not counted), 2, and of the
// products, 2 + 2 + 2 + 8, one of which is the attention's output, with q, k, v, 6, what GELU
// reads, 8, and what remains of the residual branch, 2. FP8 halves the products' inputs, of which
// the attention's output stays besides. FP8 attention reads q, k, v and o in codes.
TEST(ActivationMemory, IsWhatBackwardReads) {
  const Recipe attention = DelayedScaling{.fp8_dpa = true};
  const Plan plans[] = {
      {"bf16", std::nullopt, 2, false, 30.4},
      {"bf16, 1 group of 2 heads", std::nullopt, 1, false, 28.4},
      {"bf16, frozen", std::nullopt, 2, true, 18.4},
      {"delayed", DelayedScaling{}, 2, false, 25.4},
      {"delayed, frozen", DelayedScaling{}, 2, true, 18.4},
      {"delayed, FP8 attention", attention, 2, false, 21.4},
      {"current", Float8CurrentScaling{}, 2, false, 25.4},
      {"block", Float8BlockScaling{}, 2, false, 25.8},
  };
  RecordingDevice recorder;
  // Bytes are the same under the address sanitizer, where a step takes twenty times as long: there
  // the first and the one of FP8 attention will do.
  for (size_t i = 0; i < std::size(plans); i += TE_FL_ASAN ? 5 : 1) {
    const Plan& plan = plans[i];
    SCOPED_TRACE(plan.name);
    const double bytes = kept(recorder.device(), plan);
    std::printf("%-26s %5.2f bytes per token and hidden\n", plan.name, bytes);
    EXPECT_LE(bytes, plan.bytes);
    EXPECT_GE(bytes, plan.bytes - 1);  // a bound that has become loose
  }
  ASSERT_OK(devices::remove(recorder.device()));
}

}  // namespace
}  // namespace te_fl::nn::testing::activation_memory_test
