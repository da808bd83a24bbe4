// Tests of modules whose parameters and gradients lie in memory that the module does not own.
#include <algorithm>

#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "te_fl/nn/fp8/fp8_parameters.hpp"
#include "te_fl/wrap_quantized.hpp"

namespace te_fl::nn::testing::borrowed_test {
namespace {

constexpr int64_t kRows = 4, kHidden = 16;

std::unique_ptr<LayerNormMLP> mlp() {
  return take(LayerNormMLP::create({.hidden_size = kHidden, .ffn_hidden_size = 32, .seed = 5}));
}

// Owns a copy of a module's parameter values and lends this memory to another module.
class Owner {
 public:
  explicit Owner(const Module& from) {
    for (const NamedParameter& p : from.parameters()) memory_.push_back(floats(p.value()));
  }
  void lend(const Module& to, uint64_t version) {
    const auto parameters = to.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& like = parameters[i].value();
      check(parameters[i].parameter->borrow(
          take(Tensor::wrap(memory_[i].data(), like.shape(), {}, DType::kF32, Device(), nullptr)),
          version));
    }
  }
  // Moves the values to new memory and fills the old memory with NaN.
  void move() {
    std::vector<std::vector<float>> moved = memory_;
    std::swap(memory_, moved);
    for (std::vector<float>& m : moved) std::fill(m.begin(), m.end(), NAN);
    past_.push_back(std::move(moved));
  }
  std::vector<float>& operator[](size_t i) { return memory_[i]; }

 private:
  static std::vector<float> floats(const Tensor& t) {
    return {t.data<float>(), t.data<float>() + t.numel()};
  }
  std::vector<std::vector<float>> memory_;
  std::vector<std::vector<std::vector<float>>> past_;
};

Tensor x() { return tensor({kRows, kHidden}, random_values(kRows * kHidden, 1)); }

TEST(Borrowed, AModuleWithoutValuesComputesWithLentParameters) {
  const auto own = mlp();
  std::unique_ptr<LayerNormMLP> lent;
  {
    const init::WithoutValues scope;
    lent = mlp();
  }
  for (const NamedParameter& p : lent->parameters()) {
    EXPECT_EQ(p.value().raw_data(), nullptr);
    EXPECT_GT(p.value().numel(), 0);
  }
  EXPECT_EQ(lent->forward(x(), nullptr).status().code(), StatusCode::kInvalidArgument);
  Owner owner(*own);
  owner.lend(*lent, 1);
  for (bool fp8 : {false, true}) {
    autocast scope(fp8, Float8CurrentScaling{});
    Ctx a, b;
    EXPECT_TRUE(same_bits(take(own->forward(x(), &a)), take(lent->forward(x(), &b))));
    owner.move();  // moves between forward and backward, as the memory of a sharded owner does
    owner.lend(*lent, 1);
    EXPECT_TRUE(same_bits(take(own->backward(x(), a)), take(lent->backward(x(), b))));
  }
  const auto one = own->parameters(), other = lent->parameters();
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(same_bits(one[i].grad(), other[i].grad()));
}

TEST(Borrowed, TheOwnersVersionSaysWhetherCopiesHold) {
  const auto module = mlp();
  Owner owner(*module);
  owner.lend(*module, 7);
  const auto infer = [&] {
    autocast scope(true, Float8CurrentScaling{});
    return take(module->forward(x(), nullptr));
  };
  const auto quantised = [&] {
    const auto count = [] {
      uint64_t total = 0;
      for (const OpUsage& u : OpManager::instance().usage()) {
        if (u.op == "quantize") total += u.calls;
      }
      return total;
    };
    const uint64_t before = count();
    (void)infer();
    return count() - before;
  };
  const Tensor first = infer();
  // The module keeps a weight's quantised copy from the second use on.
  const uint64_t both = quantised();
  const uint64_t inputs = quantised();
  EXPECT_EQ(both, inputs + 2);
  owner.move();
  owner.lend(*module, 7);
  EXPECT_EQ(quantised(), inputs);
  EXPECT_TRUE(same_bits(infer(), first));
  for (float& v : owner[2]) v *= 2;  // doubles fc1_weight
  owner.lend(*module, 8);
  EXPECT_EQ(quantised(), inputs + 2);
  EXPECT_FALSE(same_bits(infer(), first));
  Ctx ctx;
  (void)take(module->forward(x(), &ctx));
  owner.lend(*module, 9);
  EXPECT_HAS(module->backward(x(), ctx).status().to_string(), "has changed since the forward");
}

// Owns copies of the arrays of a quantised weight (FP8 data, scales, amax) and lends them to a
// module.
struct CodesOwner {
  Tensor codes, columns, scale_inv, columnwise_scale_inv, amax;
  Scaling scaling;
  explicit CodesOwner(const Tensor& weight) : scaling(weight.scaling()) {
    codes = copy_as(weight.rowwise_codes(), weight.dtype(), weight.shape());
    const Tensor transposed = weight.columnwise_codes();
    columns = copy_as(transposed, weight.dtype(), transposed.shape());
    scale_inv = take(weight.scale_inv().clone());
    if (scaling == Scaling::kTensor) {
      amax = take(weight.amax().clone());
    } else {
      columnwise_scale_inv = take(weight.columnwise_scale_inv().clone());
    }
  }
  QuantizedParts parts(bool with_columns = true) const {
    return {.codes = codes,
            .columns = with_columns ? columns : Tensor(),
            .scale_inv = scale_inv,
            .columnwise_scale_inv = with_columns ? columnwise_scale_inv : Tensor(),
            .amax = amax};
  }
  Tensor lend() const { return take(wrap_quantized(scaling, parts())); }

 private:
  static Tensor copy_as(const Tensor& bytes, DType dtype, std::span<const int64_t> shape) {
    auto own = std::make_shared<Tensor>(take(bytes.clone()));
    return take(Tensor::wrap(own->raw_data(), shape, {}, dtype, Device(), own));
  }
};

// Quantises a weight as `recipe` does in a forward.
CodesOwner make_codes(const Tensor& weight, const Recipe& recipe) {
  const bool blocks = std::holds_alternative<Float8BlockScaling>(recipe);
  QuantSpec spec;
  spec.scaling = blocks ? Scaling::kBlock128x128 : Scaling::kTensor;
  spec.columnwise = true;
  spec.compute_scale = !blocks;
  spec.pow2_scale = blocks;
  const Tensor codes = take(Tensor::empty_quantized(weight.shape(), spec));
  te_fl_quantize_args args{};
  args.input = weight;
  args.output = codes;
  check(ops::quantize(args));
  return CodesOwner(codes);
}

TEST(Borrowed, CodesAreReadAsTheyAre) {
  for (const Recipe& recipe : {Recipe(Float8CurrentScaling{}), Recipe(Float8BlockScaling{})}) {
    SCOPED_TRACE(describe(recipe));
    const auto own = mlp(), lent = mlp();
    const auto parameters = lent->parameters();
    std::vector<CodesOwner> codes;
    for (const NamedParameter& p : parameters) {
      if (p.value().rank() == 2) codes.push_back(make_codes(p.value(), recipe));
    }
    ASSERT_EQ(codes.size(), 2u);
    const auto lend = [&](uint64_t version) {
      size_t next = 0;
      for (const NamedParameter& p : parameters) {
        if (p.value().rank() == 2) check(p.parameter->borrow(codes[next++].lend(), version));
      }
    };
    lend(1);
    autocast scope(true, recipe);
    Ctx a, b;
    EXPECT_TRUE(same_bits(take(own->forward(x(), &a)), take(lent->forward(x(), &b))));
    for (CodesOwner& c : codes) c = CodesOwner(c.lend());  // moves the FP8 data to other memory
    lend(1);
    EXPECT_TRUE(same_bits(take(own->backward(x(), a)), take(lent->backward(x(), b))));
    const auto one = own->parameters();
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_TRUE(same_bits(one[i].grad(), parameters[i].grad())) << one[i].name;
    }
    Ctx c;
    (void)take(lent->forward(x(), &c));
    lend(2);
    EXPECT_HAS(lent->backward(x(), c).status().to_string(), "has changed since the forward");
  }
}

TEST(Borrowed, CodesThatDoNotFitAreNamed) {
  const auto module = mlp();
  const auto weight = module->parameters()[2].parameter;
  const CodesOwner blocks = make_codes(weight->value, Float8BlockScaling{});
  const CodesOwner whole = make_codes(weight->value, Float8CurrentScaling{});
  QuantizedParts parts = whole.parts();
  parts.scale_inv = take(Tensor::zeros({2}, DType::kF32));
  EXPECT_FAILS(wrap_quantized(Scaling::kTensor, parts), kInvalidArgument, "scale_inv is f32[2]");
  parts = whole.parts();
  parts.columns = whole.codes;
  EXPECT_FAILS(wrap_quantized(Scaling::kTensor, parts), kInvalidArgument, "columns is f8e4m3");
  EXPECT_FAILS(wrap_quantized(Scaling::kMXFP8, parts), kInvalidArgument, "it must be f8e8m0");
  EXPECT_FAILS(wrap_quantized(Scaling::kNone, parts), kInvalidArgument, "the scaling is none");
  parts.codes = weight->value;
  EXPECT_FAILS(wrap_quantized(Scaling::kTensor, parts), kInvalidArgument, "codes is f32");
  const auto bias = module->parameters()[3].parameter;
  EXPECT_FAILS(bias->borrow(whole.lend(), 1), kInvalidArgument, "codes must be E4M3");
  check(weight->borrow(take(wrap_quantized(blocks.scaling, blocks.parts(false))), 1));
  {
    autocast scope(true, Float8BlockScaling{});
    Ctx ctx;
    EXPECT_FAILS(module->forward(x(), &ctx), kFailedPrecondition, "lend both copies");
    EXPECT_TRUE(module->forward(x(), nullptr).ok());
  }
  autocast scope(true, Float8CurrentScaling{});
  EXPECT_FAILS(module->forward(x(), nullptr), kFailedPrecondition, "scaled by blocks");
}

TEST(Borrowed, TheOwnerWritesCodes) {
  for (const Recipe& recipe : {Recipe(Float8CurrentScaling{}), Recipe(Float8BlockScaling{})}) {
    const auto module = mlp();
    const auto before = module->state();
    auto adam = take(Adam::create(module->parameters(), {}));
    const auto weight = module->parameters()[2].parameter;
    const Tensor values = take(weight->value.clone());
    check(weight->borrow(make_codes(values, recipe).lend(), 1));
    EXPECT_FAILS(weight->write(values), kFailedPrecondition, "their owner writes them");
    EXPECT_FAILS(module->load_state(before, "state"), kFailedPrecondition, "holds codes");
    EXPECT_FAILS(adam->step(), kFailedPrecondition, "fc1_weight");
    EXPECT_FAILS(Adam::create(module->parameters(), {}), kFailedPrecondition, "fc1_weight");
    std::vector<std::string> names;
    for (const NamedTensor& t : module->state()) {
      EXPECT_FALSE(t.tensor.quantized()) << t.name;
      if (t.name.starts_with("fc1_weight")) names.push_back(t.name);
    }
    const bool blocks = std::holds_alternative<Float8BlockScaling>(recipe);
    EXPECT_EQ(names.size(), blocks ? 2u : 3u);  // the parts: codes, scale_inv, amax
  }
}

TEST(Borrowed, CodesAreNoPartOfAParameter) {
  const auto module = take(Linear::create(
      {.in_features = kHidden, .out_features = 32, .parameters_split = {{"a", 16}, {"b", 16}}}));
  const auto part = module->parameters()[0].parameter;
  check(part->borrow(make_codes(part->value, Float8CurrentScaling{}).lend(), 1));
  EXPECT_FAILS(module->forward(x(), nullptr), kInvalidArgument, "a part of a parameter is f8e4m3");
}

TEST(Borrowed, WhatDoesNotFitIsNamedAndNothingChanges) {
  const auto module = mlp();
  const auto weight = module->parameters()[2].parameter;
  const void* before = weight->value.raw_data();
  const Tensor wide = take(Tensor::zeros({kHidden, kHidden}, DType::kF32));
  const Tensor codes = take(Tensor::zeros(weight->value.shape(), DType::kI32));
  for (const Tensor& wrong : {wide, codes, Tensor()}) {
    EXPECT_FAILS(weight->borrow(wrong, 1), kInvalidArgument, "Parameter::borrow: the tensor is");
    EXPECT_FAILS(weight->give_grad(wrong, true), kInvalidArgument, "Parameter::give_grad");
  }
  EXPECT_EQ(weight->value.raw_data(), before);
  EXPECT_EQ(weight->version, 0u);
  EXPECT_FALSE(weight->grad.defined());
  weight->set_requires_grad(false);
  EXPECT_FAILS(weight->give_grad(take(weight->value.clone()), true), kFailedPrecondition, "frozen");
}

TEST(Borrowed, GradientsGoInAndOut) {
  const auto module = take(Linear::create({.in_features = 3, .out_features = 2, .bias = false}));
  const auto weight = module->parameters()[0].parameter;
  const auto backward = [&] {
    Ctx ctx;
    (void)take(module->forward(tensor({1, 3}, {1, 2, 3}), &ctx));
    (void)take(module->backward(tensor({1, 2}, {1, -1}), ctx));
  };
  EXPECT_FALSE(weight->take_grad().defined());
  backward();
  const Tensor taken = weight->take_grad();
  const Values once = {1, 2, 3, -1, -2, -3};
  EXPECT_EQ(values_of(taken), once);
  EXPECT_FALSE(weight->grad.defined());
  backward();
  EXPECT_EQ(values_of(taken), once) << "the taken one is no longer written";
  EXPECT_EQ(values_of(weight->take_grad()), once);

  float memory[6] = {10, 10, 10, 10, 10, 10};
  const Tensor lent_grad =
      take(Tensor::wrap(memory, weight->value.shape(), {}, DType::kF32, Device(), nullptr));
  ASSERT_OK(weight->give_grad(lent_grad, true));
  backward();
  EXPECT_EQ(Values(memory, memory + 6), (Values{11, 12, 13, 9, 8, 7}));
  ASSERT_OK(weight->give_grad(lent_grad, false));
  EXPECT_FALSE(weight->take_grad().defined()) << "it holds nothing yet";
  ASSERT_OK(weight->give_grad(lent_grad, false));
  backward();
  EXPECT_EQ(Values(memory, memory + 6), once);
}

// ---- initial values of shards

TEST(InitialValues, OfAShardAreThoseOfTheWhole) {
  // More rows than one worker thread gets, and an odd number of columns.
  constexpr int64_t kM = 300, kN = 257;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const Values whole =
        values_of(take(init::normal(Shape{kM, kN}, 0.5f, 9, dtype, Device()))->value);
    for (const auto& [begin, shape] :
         {std::pair(Shape{100, 0}, Shape{150, kN}), std::pair(Shape{0, 33}, Shape{kM, 95}),
          std::pair(Shape{299, 256}, Shape{1, 1})}) {
      const Values part =
          values_of(take(init::normal(shape, 0.5f, 9, dtype, Device(), {{kM, kN}, begin}))->value);
      for (int64_t r = 0; r < shape[0]; ++r) {
        for (int64_t c = 0; c < shape[1]; ++c) {
          ASSERT_EQ(part[static_cast<size_t>(r * shape[1] + c)],
                    whole[static_cast<size_t>((begin[0] + r) * kN + begin[1] + c)]);
        }
      }
    }
    double mean = 0, square = 0;
    for (double v : whole) mean += v, square += v * v;
    const auto n = static_cast<double>(whole.size());
    EXPECT_NEAR(mean / n, 0, 0.01);
    EXPECT_NEAR(square / n, 0.25, 0.005);
  }
  const init::Shard outside{{4, 4}, {3, 0}};
  EXPECT_HAS(init::normal(Shape{2, 4}, 1, 1, DType::kF32, Device(), outside).status().to_string(),
             "shard does not lie within the whole");
}

}  // namespace
}  // namespace te_fl::nn::testing::borrowed_test
