// Tests of the tape. Its values and gradients equal those of explicit calls of the modules; the
// gradient of each tape operation matches finite differences.
#include <algorithm>
#include <functional>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::tape_test {
namespace {

constexpr int64_t kRows = 6, kWidth = 8;

Tensor input(uint64_t seed = 1, int64_t width = kWidth) {
  return tensor({kRows, width}, random_values(kRows * width, seed));
}

using Linear8 = Layer<Linear>;
Linear8 make_linear(uint64_t seed, int64_t out = kWidth) {
  return Linear8({.in_features = kWidth, .out_features = out, .seed = seed, .init_std = 0.4f});
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Returns the gradient of dot(f(x), dy) with respect to x by central differences.
Values differences(const std::function<Value(const Value&)>& f, const Tensor& x, const Values& dy) {
  constexpr double kStep = 1e-2;
  const auto at = [&](const Values& values) {
    Tape tape(false);
    Tensor moved = take(x.clone());
    set_values(moved, values);
    return dot(values_of(take(f(tape.input(moved)).tensor().clone())), dy);
  };
  const Values start = values_of(x);
  Values gradient;
  for (size_t i = 0; i < start.size(); ++i) {
    Values up = start, down = start;
    up[i] += kStep;
    down[i] -= kStep;
    gradient.push_back((at(up) - at(down)) / (2 * kStep));
  }
  return gradient;
}

void expect_gradient(const std::function<Value(const Value&)>& f, const Tensor& x) {
  Tape tape;
  const Value in = tape.input(x, true);
  const Value y = f(in);
  ASSERT_OK(y.status());
  const Tensor dy = take(Tensor::empty(y.tensor().shape(), DType::kF32));
  set_values(dy, random_values(dy.numel(), 9));
  ASSERT_OK(tape.backward(y, dy));
  const Values want = differences(f, x, values_of(dy));
  const Values got = values_of(in.grad());
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 2e-2) << i;
}

TEST(Tape, GradientsAreThoseOfFiniteDifferences) {
  const auto linear = make_linear(1), other = make_linear(2);
  expect_gradient([&](const Value& x) { return linear(x); }, input());
  // The input is used several times, so its gradients add up.
  expect_gradient([&](const Value& x) { return x + linear(x) + other(x + x); }, input());
  expect_gradient([&](const Value& x) { return linear(x.view({2, 3, kWidth})); }, input());
  expect_gradient(
      [&](const Value& x) {
        const auto [a, b] = x.split<2>();  // the result does not depend on b
        return a;
      },
      input());
  expect_gradient(
      [&](const Value& x) {
        const auto [a, b] = linear(x).split<2>();
        return b + a;
      },
      input());
  auto attention = take(DotProductAttention::create(
      {.num_attention_heads = 2, .head_dim = 4, .attention = {.layout = Layout::kBSHD}}));
  expect_gradient(
      [&](const Value& x) {
        const auto [q, k, v] = x.view({2, 3, 2, 12}).split<3>();
        return call(*attention, q, k, v).view({2, 3, 8});
      },
      tensor({2, 3, 24}, random_values(2 * 3 * 24, 5)));
}

TEST(Tape, EveryActivationHasItsGradient) {
  for (int i = 0; i <= static_cast<int>(Activation::kClampedSwiglu); ++i) {
    const auto activation = static_cast<Activation>(i);
    SCOPED_TRACE(name(activation));
    const Layer<ActivationLayer> layer({.activation = activation});
    // Keeps the inputs away from the kinks of relu and of the clamps, where differences are wrong.
    Values values = random_values(kRows * kWidth, 3, 2);
    for (double& v : values) v += v < 0 ? -0.1 : 0.1;
    const Tensor x = tensor({kRows, kWidth}, values);
    expect_gradient([&](const Value& v) { return layer(v); }, x);
    EXPECT_EQ(take(layer->forward(x, nullptr)).size(-1),
              is_gated(activation) ? kWidth / 2 : kWidth);
  }
}

TEST(Tape, ActivationsRefuseWhatDoesNotFit) {
  const Layer<ActivationLayer> gated({.activation = Activation::kSwiglu});
  EXPECT_FAILS(gated->forward(input(1, 7), nullptr), kInvalidArgument, "even");
  Ctx ctx;
  (void)take(gated->forward(input(), &ctx));
  EXPECT_FAILS(gated->backward(input(), ctx), kInvalidArgument, "ActivationLayer");
  EXPECT_FAILS(ActivationLayer::create({.activation = static_cast<Activation>(99)}),
               kInvalidArgument, "activation is 99");
}

// Runs two layers and a loss on the tape, and again by explicit calls.
TEST(Tape, EqualsExplicitCalls) {
  const Tensor x = input(), targets = int_tensor({0, 1, 2, 3, 4, 5});
  for (const std::optional<Recipe>& recipe :
       {std::optional<Recipe>(), std::optional<Recipe>(DelayedScaling{.amax_history_len = 2}),
        std::optional<Recipe>(Float8CurrentScaling{})}) {
    std::vector<Values> seen[2];
    for (bool on_tape : {false, true}) {
      const ContextScope scope(Context(3));
      const auto first = make_linear(1), second = make_linear(2);
      Dropout dropout(0.3f);
      for (int step = 0; step < 3; ++step) {
        check(first->zero_grad());
        check(second->zero_grad());
        std::optional<autocast> fp8;
        if (recipe.has_value()) fp8.emplace(true, *recipe);
        std::vector<Values>& out = seen[on_tape];
        if (on_tape) {
          Tape tape;
          const Value in = tape.input(x, true);
          const Value loss = cross_entropy(second(call(dropout, first(in))), targets);
          fp8.reset();
          check(tape.backward(loss));
          out.push_back(values_of(loss.tensor()));
          out.push_back(values_of(in.grad()));
        } else {
          Ctx ctx[4];
          CrossEntropyLoss loss;
          const Tensor hidden = take(first->forward(x, &ctx[0]));
          const Tensor dropped = take(dropout.forward(hidden, &ctx[1]));
          const Tensor y = take(second->forward(dropped, &ctx[2]));
          out.push_back(values_of(take(loss.forward(y, targets, &ctx[3]))));
          fp8.reset();
          Tensor d = take(loss.backward(ctx[3]));
          d = take(dropout.backward(take(second->backward(d, ctx[2])), ctx[1]));
          out.push_back(values_of(take(first->backward(d, ctx[0]))));
          check(backward_end());
        }
        for (const Linear8* layer : {&first, &second}) {
          for (const NamedParameter& p : (*layer)->parameters()) out.push_back(values_of(p.grad()));
          for (const NamedTensor& t : (*layer)->state()) out.push_back(values_of(t.tensor));
        }
      }
    }
    EXPECT_TRUE(seen[0] == seen[1]);
  }
}

TEST(Tape, SequentialIsItsLayers) {
  Sequential stack;
  stack.add(make_linear(1)).add(Layer<ActivationLayer>({})).add(make_linear(2), "last");
  ASSERT_OK(stack.status());
  std::vector<std::string> names;
  for (const NamedParameter& p : stack.parameters()) names.push_back(p.name);
  EXPECT_EQ(names, (std::vector<std::string>{"0.weight", "0.bias", "last.weight", "last.bias"}));
  const Tensor x = input(), dy = input(2);
  Ctx ctx;
  const Tensor y = take(stack.forward(x, &ctx));
  const Tensor dx = take(stack.backward(dy, ctx));
  Tape tape;
  const Value in = tape.input(x, true);
  const Value on_tape = stack(in);
  EXPECT_EQ(values_of(on_tape.tensor()), values_of(y));
  check(tape.backward(on_tape, dy));
  EXPECT_EQ(values_of(in.grad()), values_of(dx));
  const Value whole = call(stack, tape.input(x));  // the stack as one call on the tape
  EXPECT_EQ(values_of(whole.tensor()), values_of(y));
  EXPECT_EQ(values_of(take(stack.forward(x, nullptr))), values_of(y));
}

TEST(Tape, ErrorsTravelToTheBackward) {
  const auto linear = make_linear(1);
  const Linear8 broken({.in_features = 0, .out_features = 3});
  Tape tape;
  const Value y = linear(broken(linear(tape.input(input()))) + tape.input(input()));
  EXPECT_FALSE(y.ok());
  EXPECT_FALSE(y.tensor().defined());
  EXPECT_FAILS(tape.backward(y), kInvalidArgument, "in_features is 0");
  const Value wrong = linear(tape.input(input(1, 5)));
  EXPECT_FAILS(wrong.status(), kInvalidArgument, "Linear: x");
  EXPECT_FAILS(wrong.split<2>()[1].status(), kInvalidArgument, "Linear: x");
  EXPECT_FAILS(cross_entropy(wrong.view({3}), int_tensor({1})).status(), kInvalidArgument,
               "Linear: x");
  EXPECT_FAILS(linear(Value()).status(), kFailedPrecondition, "nothing has made");
  EXPECT_FAILS(tape.input(Tensor()).status(), kInvalidArgument, "undefined");
  Sequential stack;
  stack.add(make_linear(1)).add(Linear8({.in_features = 0, .out_features = 3}));
  EXPECT_FAILS(stack(tape.input(input())).status(), kInvalidArgument, "layer 1");
  EXPECT_FAILS(stack.forward(input(), nullptr), kInvalidArgument, "layer 1");
  struct Part : Model {
    Linear8 inner{{.in_features = 0}};
    Part() { add("inner", inner); }
  } part;
  EXPECT_FAILS(part.status(), kInvalidArgument, "inner");
}

TEST(Tape, RefusesWhatHasNoGradient) {
  const auto linear = make_linear(1);
  Tape tape, other;
  EXPECT_FAILS(tape.backward(linear(tape.input(input()))), kInvalidArgument, "one element");
  EXPECT_FAILS(tape.backward(linear(tape.input(input())), input(1, 3)), kInvalidArgument,
               "must have the shape");
  EXPECT_FAILS(tape.backward(tape.input(input()), input()), kFailedPrecondition,
               "depends on no parameter");
  const Value y = linear(tape.input(input()));
  EXPECT_FAILS(other.backward(y, input()), kFailedPrecondition, "another tape");
  EXPECT_FAILS((y + other.input(input())).status(), kInvalidArgument, "two tapes");
  check(tape.backward(y, input()));
  EXPECT_FAILS(tape.backward(y, input()), kFailedPrecondition, "earlier backward()");
  EXPECT_FAILS(linear(y).status(), kFailedPrecondition, "before the last backward()");
  Tape inference(false);
  EXPECT_FAILS(inference.backward(linear(inference.input(input())), input()), kFailedPrecondition,
               "inference");
}

TEST(Tape, FrozenModulesGetNoGradient) {
  const auto first = make_linear(1), frozen = make_linear(2);
  frozen->set_requires_grad(false);
  Tape tape;
  check(tape.backward(frozen(first(tape.input(input()))), input(2)));
  EXPECT_TRUE(first->parameters()[0].grad().defined());
  EXPECT_FALSE(frozen->parameters()[0].grad().defined());
  // The tape runs no backward of the modules before the first trained one.
  first->set_requires_grad(false);
  const Value y = frozen(first(tape.input(input())));
  EXPECT_FAILS(tape.backward(y, input(2)), kFailedPrecondition, "depends on no parameter");
}

// Mixes recomputed (checkpointed) pieces of a model with others: the results have the same bits,
// and the hooks run as without recomputation.
TEST(Tape, CheckpointsEqualTheSegment) {
  for (const Recipe& recipe : {Recipe(DelayedScaling{.amax_history_len = 2}),
                               Recipe(Float8CurrentScaling{}), Recipe(Float8BlockScaling{})}) {
    std::vector<Values> seen[2];
    for (bool recompute : {false, true}) {
      const ContextScope scope(Context(3));
      const auto first = make_linear(1), second = make_linear(2), third = make_linear(3);
      Dropout dropout(0.3f);
      const auto segment = [&](const Value& x) { return x + call(dropout, second(x)); };
      for (int step = 0; step < 3; ++step) {
        for (const Linear8* layer : {&first, &second, &third}) check((*layer)->zero_grad());
        Tape tape;
        int64_t finished = 0;
        tape.on_gradient([&](Parameter&) {
          ++finished;
          return Status();
        });
        const Value in = tape.input(input(), true);
        Value y;
        {
          const autocast fp8(true, recipe);
          const Value h = first(in);
          const Value p = recompute ? tape.checkpoint(segment, h) : segment(h);
          y = third(p);
          // A checkpointed segment whose input needs no gradient still computes its parameters'
          // gradients.
          const Value constant = tape.input(input(4));
          y = y + (recompute ? tape.checkpoint(segment, constant) : segment(constant));
        }
        check(tape.backward(y, input(5)));
        EXPECT_EQ(finished, 6);
        seen[recompute].push_back(values_of(y.tensor()));
        seen[recompute].push_back(values_of(in.grad()));
        for (const Linear8* layer : {&first, &second, &third}) {
          for (const NamedParameter& p : (*layer)->parameters()) {
            seen[recompute].push_back(values_of(p.grad()));
          }
          for (const NamedTensor& t : (*layer)->state()) {
            seen[recompute].push_back(values_of(t.tensor));
          }
        }
      }
    }
    EXPECT_TRUE(seen[0] == seen[1]);
  }
}

TEST(Tape, CheckpointsRunInferenceAndPassErrorsOn) {
  const auto linear = make_linear(1);
  const auto segment = [&](const Value& x) { return linear(x); };
  Tape inference(false);
  EXPECT_EQ(values_of(inference.checkpoint(segment, inference.input(input())).tensor()),
            values_of(take(linear->forward(input(), nullptr))));
  Tape tape;
  EXPECT_FAILS(tape.checkpoint(segment, tape.input(input(1, 3))).status(), kInvalidArgument,
               "Linear: x");
}

// A hook runs once for each gradient, as soon as that gradient is complete.
TEST(Tape, HooksSeeCompleteGradients) {
  const auto first = make_linear(1), twice = make_linear(2), frozen = make_linear(3);
  frozen->set_requires_grad(false);
  Tape tape;
  std::vector<std::pair<const Parameter*, Values>> finished;
  tape.on_gradient([&](Parameter& p) {
    finished.emplace_back(&p, values_of(p.grad));
    return Status();
  });
  check(tape.backward(twice(frozen(twice(first(tape.input(input()))))), input(2)));
  std::vector<const Parameter*> order;
  for (const auto& [parameter, gradient] : finished) {
    order.push_back(parameter);
    EXPECT_EQ(gradient, values_of(parameter->grad));
  }
  const auto of = [](const Linear8& layer, size_t i) {
    return layer->parameters()[i].parameter.get();
  };
  EXPECT_EQ(order, (std::vector<const Parameter*>{of(twice, 0), of(twice, 1), of(first, 0),
                                                  of(first, 1)}));
  tape.on_gradient([&](Parameter&) { return internal_error("the network is gone"); });
  EXPECT_FAILS(tape.backward(first(tape.input(input())), input(2)), kInternal, "network is gone");
}

// A call on the tape releases what it kept for its backward once that backward has run.
TEST(Tape, BackwardDropsWhatItHasUsed) {
  const auto first = make_linear(1), second = make_linear(2);
  Tape tape;
  std::weak_ptr<int> kept;
  {
    auto owner = std::make_shared<int>(0);
    kept = owner;
    const Value x = tape.input(input(), true);
    const auto run = [&](bool) -> Result<Tape::Recorded> {
      return Tape::Recorded{{x.tensor()},
                            [owner](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
                              return Tape::Tensors(dys);
                            }};
    };
    const Value y = tape.record({&x, 1}, 1, run)[0];
    owner.reset();
    EXPECT_FALSE(kept.expired());
    check(tape.backward(second(y) + first(tape.input(input())), input(2)));
  }
  EXPECT_TRUE(kept.expired());
}

TEST(Tape, GivesForwardOptions) {
  const auto linear = make_linear(1);
  Tape tape;
  tape.options.is_first_microbatch = true;
  tape.options.reuse_weights = tensor({1}, {0});
  EXPECT_FAILS(linear(tape.input(input())).status(), kInvalidArgument, "is_first_microbatch");
  // Explicit options override the tape's.
  EXPECT_OK(linear(tape.input(input()), ForwardOptions{}).status());
}

// A layer that is called with attention inputs gets the tape's forward options, or the explicit
// ones of the call.
TEST(Tape, GivesForwardOptionsBesideAttentionInputs) {
  const Layer<MultiheadAttention> attention(
      {.hidden_size = kWidth, .num_attention_heads = 1, .attention = {.layout = Layout::kBSHD}});
  const Layer<TransformerLayer> layer({.hidden_size = kWidth,
                                       .ffn_hidden_size = kWidth,
                                       .num_attention_heads = 1,
                                       .attention = {.layout = Layout::kBSHD}});
  Tape tape;
  tape.options.is_first_microbatch = true;
  tape.options.reuse_weights = tensor({1}, {0});
  const Value x = tape.input(tensor({1, 4, kWidth}, random_values(4 * kWidth, 1)));
  const AttentionInputs inputs;
  for (const Value& y : {attention(x, inputs), layer(x, inputs)}) {
    EXPECT_FAILS(y.status(), kInvalidArgument, "is_first_microbatch");
  }
  EXPECT_OK(attention(x, inputs, ForwardOptions{}).status());
  EXPECT_OK(layer(x, inputs, ForwardOptions{}).status());
}

TEST(Tape, AnEmbeddingBegins) {
  const Layer<Embedding> embedding({.num_embeddings = 5, .hidden_size = kWidth, .init_std = 1});
  const auto linear = make_linear(1);
  Tape tape;
  const Tensor indices = int_tensor({0, 2, 2, 4, 1, 0});
  check(tape.backward(linear(embedding(tape, indices)), input(2)));
  Ctx ctx[2];
  const Values table = values_of(embedding->parameters()[0].grad());
  check(embedding->zero_grad());
  (void)take(linear->forward(take(embedding->forward(indices, &ctx[0])), &ctx[1]));
  check(embedding->backward(take(linear->backward(input(2), ctx[1])), ctx[0]));
  EXPECT_EQ(table, values_of(embedding->parameters()[0].grad()));
}

// A backward from several losses adds their gradients; each loss is weighted by the gradient that
// is passed for it.
TEST(Tape, LossesAddUp) {
  const auto linear = make_linear(1);
  const Tensor targets = int_tensor({0, 1, 2, 3, 4, 5});
  const auto gradient = [&](int64_t losses, float scale) {
    check(linear->zero_grad());
    Tape tape;
    Value loss = cross_entropy(linear(tape.input(input())), targets);
    for (int64_t i = 1; i < losses; ++i) {
      loss = loss + cross_entropy(linear(tape.input(input())), targets);
    }
    check(tape.backward(loss, tensor({1}, {scale})));
    return values_of(linear->parameters()[0].grad());
  };
  const Values one = gradient(1, 1), two = gradient(2, 1), scaled = gradient(1, 8);
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_FLOAT_EQ(two[i], 2 * one[i]);
    EXPECT_FLOAT_EQ(scaled[i], 8 * one[i]);
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::tape_test
