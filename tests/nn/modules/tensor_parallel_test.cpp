// Tensor-parallel layers against the unsharded layer on one rank: outputs, gradients, losses and
// scales. The ranks are threads.
#include <algorithm>

#include "nn/modules/comm_ranks.hpp"
#include "parallel_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::tensor_parallel_test {
namespace {

constexpr int64_t kHidden = 32, kLength = 8, kBatch = 2;

TransformerLayerOptions gpt_layer() {
  return {.hidden_size = kHidden, .ffn_hidden_size = 64, .num_attention_heads = 4, .seed = 3};
}

TransformerLayerOptions llama_layer() {
  TransformerLayerOptions o = gpt_layer();
  o.num_attention_heads = 8;
  o.num_gqa_groups = 4;
  o.activation = Activation::kSwiglu;
  o.normalization = Normalization::kRMSNorm;
  o.bias = false;
  return o;
}

TransformerLayerOptions odd_layer() {
  TransformerLayerOptions o = gpt_layer();
  o.output_layernorm = true;
  o.qk_norm = QkNorm::kRMSNorm;
  o.qkv_weight_interleaved = false;
  return o;
}

TransformerLayerOptions post_norm_layer() {
  TransformerLayerOptions o = gpt_layer();
  o.apply_residual_connection_post_layernorm = true;
  return o;
}

TransformerLayerOptions layer_of_parts() {
  TransformerLayerOptions o = llama_layer();
  o.fuse_qkv_params = false;
  o.bias = true;
  return o;
}

struct Pass {
  Values y, dx;
  std::map<std::string, Values> values, gradients;
};

// Runs the unsharded layer; returns its results and its parameter values.
Pass whole_pass(const TransformerLayerOptions& options, const Values& x, const Values& dy) {
  const auto layer = take(TransformerLayer::create(options));
  randomize(*layer, 70);
  Ctx ctx;
  Pass pass;
  pass.y = values_of(take(layer->forward(tensor({kLength, kBatch, kHidden}, x), &ctx)));
  pass.dx = values_of(take(layer->backward(tensor({kLength, kBatch, kHidden}, dy), ctx)));
  for (const NamedParameter& p : layer->parameters()) {
    pass.values[p.name] = values_of(p.value());
    pass.gradients[p.name] = values_of(p.grad());
  }
  return pass;
}

double worst(const Values& got, const Values& wanted) {
  EXPECT_EQ(got.size(), wanted.size());
  double top = 1, worst = 0;
  for (double v : wanted) top = std::max(top, std::abs(v));
  for (size_t i = 0; i < std::min(got.size(), wanted.size()); ++i) {
    worst = std::max(worst, std::abs(got[i] - wanted[i]) / top);
  }
  return worst;
}

// Returns this rank's part of the first dimension, or all of it without sequence parallelism.
Values take_rows(const TensorParallel& parallel, const Values& whole) {
  if (!parallel.divides_sequence()) return whole;
  const auto n = static_cast<int64_t>(whole.size()) / parallel.size();
  return {whole.begin() + parallel.rank() * n, whole.begin() + (parallel.rank() + 1) * n};
}

void compare_with_whole(const TransformerLayerOptions& options, int size, bool sequence) {
  const Values x = random_values(kLength * kBatch * kHidden, 5);
  const Values dy = random_values(kLength * kBatch * kHidden, 6);
  const Pass whole = whole_pass(options, x, dy);
  on_ranks(size, [&](const std::shared_ptr<const Comm>& ranks) {
    const TensorParallel parallel{ranks, sequence, {}};
    const auto layer = take(TransformerLayer::create(take(shard_of(options, parallel))));
    for (const NamedParameter& p : layer->parameters()) {
      set_values(p.value(), take_part(whole.values.at(p.name), p));
    }
    const int64_t rows = parallel.divides_sequence() ? kLength / size : kLength;
    Ctx ctx;
    const Tensor y =
        take(layer->forward(tensor({rows, kBatch, kHidden}, take_rows(parallel, x)), &ctx));
    const Tensor dx =
        take(layer->backward(tensor({rows, kBatch, kHidden}, take_rows(parallel, dy)), ctx));
    check(sum_partial_gradients(parallel, layer->parameters()));
    EXPECT_LT(worst(values_of(y), take_rows(parallel, whole.y)), 1e-5);
    EXPECT_LT(worst(values_of(dx), take_rows(parallel, whole.dx)), 1e-5);
    for (const NamedParameter& p : layer->parameters()) {
      EXPECT_LT(worst(values_of(p.grad()), take_part(whole.gradients.at(p.name), p)), 1e-5)
          << p.name << " of rank " << parallel.rank();
    }
  });
}

TEST(TensorParallel, LayersAreTheWholeOnes) {
  const TransformerLayerOptions layers[] = {gpt_layer(), llama_layer(), odd_layer(),
                                            post_norm_layer(), layer_of_parts()};
  for (size_t i = 0; i < std::size(layers); ++i) {
    for (int size : {1, 2, 4}) {
      for (bool sequence : {false, true}) {
        SCOPED_TRACE("layer " + std::to_string(i) + ", " + std::to_string(size) +
                     (sequence ? " ranks, sequence" : " ranks"));
        compare_with_whole(layers[i], size, sequence);
      }
    }
  }
}

TEST(TensorParallel, AColumnAndARowAreTheWholeMaps) {
  const LinearOptions whole{.in_features = 12, .out_features = 8, .seed = 9};
  const Values x = random_values(4 * 12, 1), dy = random_values(4 * 8, 2);
  const auto one = take(Linear::create(whole));
  Ctx ctx;
  const Values y = values_of(take(one->forward(tensor({4, 12}, x), &ctx)));
  const Values dx = values_of(take(one->backward(tensor({4, 8}, dy), ctx)));
  on_ranks(2, [&](const std::shared_ptr<const Comm>& ranks) {
    const TensorParallel parallel{ranks, true, {}};
    const int64_t r = parallel.rank();
    const auto column =
        take(Linear::create(take(shard_of(whole, ParallelMode::kColumn, parallel))));
    Ctx kept;
    const Values columns =
        values_of(take(column->forward(tensor({2, 12}, take_rows(parallel, x)), &kept)));
    Values own, own_dy;
    for (int64_t row = 0; row < 4; ++row) {
      for (int64_t c = 4 * r; c < 4 * r + 4; ++c) {
        own.push_back(y[static_cast<size_t>(8 * row + c)]);
        own_dy.push_back(dy[static_cast<size_t>(8 * row + c)]);
      }
    }
    EXPECT_LT(worst(columns, own), 1e-6);
    EXPECT_LT(worst(values_of(take(column->backward(tensor({4, 4}, own_dy), kept))),
                    take_rows(parallel, dx)),
              1e-6);
    const auto row = take(Linear::create(take(shard_of(whole, ParallelMode::kRow, parallel))));
    Values own_x;
    for (int64_t i = 0; i < 4; ++i) {
      own_x.insert(own_x.end(), x.begin() + 12 * i + 6 * r, x.begin() + 12 * i + 6 * r + 6);
    }
    EXPECT_LT(worst(values_of(take(row->forward(tensor({4, 6}, own_x), nullptr))),
                    take_rows(parallel, y)),
              1e-6);
  });
}

TEST(TensorParallel, RefusesByNameWhatDoesNotDivide) {
  on_ranks(4, [&](const std::shared_ptr<const Comm>& ranks) {
    const TensorParallel parallel{ranks, false, {}};
    TransformerLayerOptions o = gpt_layer();
    o.num_attention_heads = 8;
    o.num_gqa_groups = 2;
    EXPECT_FAILS(shard_of(o, parallel), kInvalidArgument, "num_gqa_groups 2");
    o = gpt_layer();
    o.ffn_hidden_size = 66;
    EXPECT_FAILS(shard_of(o, parallel), kInvalidArgument, "ffn_hidden_size is 66");
    EXPECT_FAILS(
        shard_of(LinearOptions{.in_features = 6, .out_features = 8}, ParallelMode::kRow, parallel),
        kInvalidArgument, "in_features is 6");
    EXPECT_FAILS(scatter_rows(parallel, take(Tensor::zeros({6, 2}, DType::kF32))), kInvalidArgument,
                 "f32[6,2]");
  });
}

TEST(TensorParallel, GathersAndScattersOnATape) {
  on_ranks(2, [&](const std::shared_ptr<const Comm>& ranks) {
    const TensorParallel parallel{ranks, true, {}};
    Tape tape;
    const Value x = tape.input(tensor({4, 1}, {1, 2, 3, 4}), true);
    const Value part = scatter_rows(parallel, x);
    EXPECT_EQ(values_of(part.tensor()), take_rows(parallel, {1, 2, 3, 4}));
    const Value y = gather_rows(parallel, part + part);
    EXPECT_EQ(values_of(y.tensor()), (Values{2, 4, 6, 8}));
    check(tape.backward(y, tensor({4, 1}, {1, 10, 100, 1000})));
    EXPECT_EQ(values_of(x.grad()), (Values{2, 20, 200, 2000}));
  });
}

// A framework's process group (framework_ranks) may replace the communicator.
TEST(TensorParallel, RowsAndPartialGradientsGoOverAFrameworksRanks) {
  on_ranks(2, [&](const std::shared_ptr<const Comm>& comm) {
    const TensorParallel parallel{.sequence_parallel = true,
                                  .framework_ranks = std::make_shared<detail::CommRanks>(comm)};
    const Values whole = {1, 2, 3, 4}, own = take_rows(parallel, whole);
    EXPECT_EQ(values_of(take(scatter_rows(parallel, tensor({4, 1}, whole)))), own);
    EXPECT_EQ(values_of(take(gather_rows(parallel, tensor({2, 1}, own)))), whole);
    const auto norm = take(LayerNorm::create({.hidden_size = 1}));
    const NamedParameter gamma = norm->parameters()[0];
    gamma.parameter->partial_grad = true;
    check(gamma.parameter->give_grad(tensor({1}, {own[0]}), true));
    check(sum_partial_gradients(parallel, {gamma}));
    EXPECT_EQ(values_of(gamma.grad()), (Values{4}));
  });
}

}  // namespace
}  // namespace te_fl::nn::testing::tensor_parallel_test
