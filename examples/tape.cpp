// Trains a Transformer layer, composed of single modules, on a tape. Values carry their errors, one
// call computes all gradients, and the backward recomputes the layer's second half so that its
// activations need not be kept. A few steps in FP8 teach it to classify sequences by the token that
// they repeat.
#include <cstdio>
#include <random>
#include <vector>

#include "te_fl/nn.hpp"
#include "te_fl/te_fl.hpp"

namespace nn = te_fl::nn;
using nn::Value;
using te_fl::Tensor;

namespace {

constexpr int64_t kSequence = 12, kBatch = 8, kHeads = 4, kHidden = 64, kClasses = 4;

struct Block : nn::Model {
  nn::Layer<nn::LayerNorm> ln1{{.hidden_size = kHidden}}, ln2{{.hidden_size = kHidden}};
  nn::Layer<nn::Linear> qkv{{.in_features = kHidden, .out_features = 3 * kHidden, .seed = 1}};
  nn::Layer<nn::DotProductAttention> attention{
      {.num_attention_heads = kHeads, .head_dim = kHidden / kHeads}};
  nn::Layer<nn::Linear> proj{{.in_features = kHidden, .out_features = kHidden, .seed = 2}};
  nn::Dropout dropout{0.1f};
  nn::Sequential mlp;

  Block() {
    mlp.add(nn::Layer<nn::Linear>({.in_features = kHidden, .out_features = 4 * kHidden, .seed = 3}))
        .add(nn::Layer<nn::ActivationLayer>({.activation = nn::Activation::kGelu}))
        .add(nn::Layer<nn::Linear>({.in_features = 4 * kHidden, .out_features = kHidden}));
    add("ln1", ln1), add("qkv", qkv), add("attention", attention), add("proj", proj);
    add("ln2", ln2), register_module("mlp", mlp);
  }
  Value operator()(const Value& x) {
    const Value packed = qkv(ln1(x)).view({kSequence, kBatch, kHeads, 3 * kHidden / kHeads});
    const auto [q, k, v] = packed.split<3>();
    const Value o = attention(q, k, v).view({kSequence, kBatch, kHidden});
    const Value h = x + nn::call(dropout, proj(o));
    return h + h.tape()->checkpoint([this](const Value& in) { return mlp(ln2(in)); }, h);
  }
};

struct Classifier : nn::Model {
  Block block;
  nn::Layer<nn::Linear> head{
      {.in_features = kHidden, .out_features = kClasses, .high_precision = true}};
  Classifier() { register_module("block", block), add("head", head); }
  Value operator()(const Value& x) { return head(block(x)); }
};

te_fl::Result<float> train() {
  std::mt19937 random(7);
  std::normal_distribution<float> noise;
  std::vector<float> values(kSequence * kBatch * kHidden);
  TE_FL_ASSIGN_OR_RETURN(Tensor targets, Tensor::empty({kSequence, kBatch}, te_fl::DType::kI32));
  for (int64_t i = 0; i < kSequence * kBatch; ++i) {
    const int64_t target = i % kBatch % kClasses;  // class of the sequence
    targets.data<int32_t>()[i] = static_cast<int32_t>(target);
    for (int64_t c = 0; c < kHidden; ++c) {
      values[i * kHidden + c] = noise(random) + (c % kClasses == target ? 0.5f : 0.0f);
    }
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor x, Tensor::from_values({kSequence, kBatch, kHidden}, values));
  Classifier model;
  TE_FL_ASSIGN_OR_RETURN(const auto adam, nn::Adam::create(model.parameters(), {.lr = 3e-3f}));
  float last = 0;
  for (int step = 0; step < 40; ++step) {
    TE_FL_RETURN_IF_ERROR(model.zero_grad());
    nn::Tape tape;
    nn::autocast fp8(true, nn::Float8CurrentScaling{});
    const Value loss = nn::cross_entropy(model(tape.input(x)), targets);
    // Returns the error of the loss's computation if that failed.
    TE_FL_RETURN_IF_ERROR(tape.backward(loss));
    TE_FL_RETURN_IF_ERROR(adam->step());
    TE_FL_ASSIGN_OR_RETURN(last, nn::item(loss.tensor()));
    if (step % 10 == 0) std::printf("step %2d  loss %.3f\n", step, last);
  }
  return last;
}

}  // namespace

int main() {
  const te_fl::Result<float> loss = train();
  if (!loss.ok()) {
    std::fprintf(stderr, "%s\n", loss.status().to_string().c_str());
    return 1;
  }
  std::printf("loss %.3f after 40 steps\n", *loss);
  return *loss < 0.1f ? 0 : 1;
}
