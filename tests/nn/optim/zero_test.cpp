// An optimizer whose state is sharded over ranks (ZeRO-1), against one with the whole state on each
// rank: the same bits, less memory, checkpoints, and refused calls.
#include <cmath>
#include <filesystem>

#include "parallel_fixture.hpp"
#include "support/expect.hpp"
#include "support/temp_folder.hpp"

namespace te_fl::nn::testing::zero_test {
namespace {

constexpr int64_t kIn = 37, kMiddle = 50;  // sizes that no number of ranks here divides

struct Config {
  bool zero = false;
  DType dtype = DType::kF32;
  float max_norm = 0;
  bool capturable = false;
  bool codes = false;  // the weights exist only as FP8 codes
  int ranks = 2;
};

class Maps : public Module {
 public:
  explicit Maps(const Config& config) {
    const quantized_model_init fp8({.enabled = config.codes, .recipe = Float8CurrentScaling{}});
    const int64_t in = config.codes ? 32 : kIn, middle = config.codes ? 48 : kMiddle;
    LinearOptions options{.in_features = in,
                          .out_features = middle,
                          .param_dtype = config.dtype,
                          .activation_dtype = config.dtype,
                          .seed = 5,
                          .init_std = 0.3f};
    first_ = take(Linear::create(options));
    std::swap(options.in_features, options.out_features);
    options.seed = 6;
    second_ = take(Linear::create(options));
    register_module("first", *first_);
    register_module("second", *second_);
  }

  // Runs forward and backward; the loss is the sum of squares of the output.
  void train(const Config& config, uint64_t seed) {
    const int64_t in = config.codes ? 32 : kIn;
    Ctx first, second;
    Tensor y;
    {
      autocast scope({.enabled = config.codes}, Float8CurrentScaling{});
      const Tensor x = tensor({16, in}, random_values(16 * in, seed), config.dtype);
      y = take(second_->forward(take(first_->forward(x, &first)), &second));
      testing::check(scope.exit());
    }
    (void)take(first_->backward(take(second_->backward(y, second)), first));
    testing::check(backward_end());
  }

 private:
  std::unique_ptr<Linear> first_, second_;
};

struct Outcome {
  std::map<std::string, Values> values;
  std::vector<float> norms;
  int64_t state_bytes = 0;
};

struct Files {
  std::string load = {}, save = {};
};

struct Training {
  Training(const Config& config, const std::shared_ptr<const Comm>& ranks)
      : config(config), ranks(ranks), maps(config) {
    data = take(DataParallel::create(maps.parameters(), ranks,
                                     {.bucket_bytes = 9000, .zero = config.zero}));
    adam = take(Adam::create(
        maps.parameters(), {.lr = 1e-2f,
                            .weight_decay = 0.1f,
                            .max_grad_norm = config.max_norm,
                            .decay = [](std::string_view, const Tensor& v) { return v.rank() > 1; },
                            .capturable = config.capturable,
                            .zero = config.zero ? data.get() : nullptr}));
  }
  void backward(int64_t step) {
    check(maps.zero_grad());
    const auto seed = static_cast<uint64_t>(step * 100 + ranks->rank());
    maps.train(config, seed);
    maps.train(config, seed + 50);
    check(data->average_gradients());
  }

  Config config;
  std::shared_ptr<const Comm> ranks;
  Maps maps;
  std::unique_ptr<DataParallel> data;
  std::unique_ptr<Adam> adam;
};

std::vector<Outcome> train(const Config& config, int64_t begin = 0, int64_t end = 6,
                           const Files& files = {}) {
  std::vector<Outcome> outcomes(static_cast<size_t>(config.ranks));
  on_ranks(config.ranks, [&](const std::shared_ptr<const Comm>& ranks) {
    Training t(config, ranks);
    Outcome& outcome = outcomes[static_cast<size_t>(ranks->rank())];
    if (!files.load.empty()) take(load_checkpoint(files.load, t.maps, t.adam.get()));
    for (int64_t step = begin; step < end; ++step) {
      t.backward(step);
      check(t.adam->step());
      outcome.norms.push_back(config.capturable ? take(item(t.adam->grad_norm()))
                                                : t.adam->last_grad_norm());
    }
    for (const NamedParameter& p : t.maps.parameters()) {
      outcome.values[p.name] = values_of(take(p.parameter->read(DType::kF32)));
    }
    for (const NamedTensor& s : t.adam->state()) {
      outcome.state_bytes += bytes_for(s.tensor.dtype(), s.tensor.numel());
    }
    if (!files.save.empty() && (config.zero || ranks->rank() == 0)) {
      check(save_checkpoint(files.save, t.maps, t.adam.get()));
    }
  });
  return outcomes;
}

void expect_same(const std::vector<Outcome>& got, const std::vector<Outcome>& expected) {
  for (const Outcome& outcome : got) {
    ASSERT_EQ(outcome.values.size(), 4u);
    EXPECT_EQ(outcome.values, expected.front().values);
  }
}

TEST(Zero, UpdatesAreTheSameBitsAsWithout) {
  for (int ranks : {2, 3}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      Config config{.dtype = dtype, .ranks = ranks};
      const std::vector<Outcome> whole = train(config);
      EXPECT_NE(whole.front().values, train(config, 0, 0).front().values);
      config.zero = true;
      expect_same(train(config), whole);
    }
  }
}

// Each rank quantises the whole updated weight, so the scale is that of all shards together.
TEST(Zero, WeightsOfCodesAloneAreTheSameBits) {
  Config config{.codes = true};
  const std::vector<Outcome> whole = train(config);
  config.zero = true;
  expect_same(train(config), whole);
}

TEST(Zero, ClipsByTheNormOfAllParts) {
  for (const bool capturable : {false, true}) {
    Config config{.max_norm = 0.5f, .capturable = capturable, .ranks = 3};
    const std::vector<Outcome> whole = train(config);
    config.zero = true;
    for (const Outcome& outcome : train(config)) {
      ASSERT_EQ(outcome.norms.size(), 6u);
      for (size_t i = 0; i < outcome.norms.size(); ++i) {
        EXPECT_GT(outcome.norms[i], config.max_norm);
        EXPECT_NEAR(outcome.norms[i], whole.front().norms[i], 1e-5 * whole.front().norms[i]);
      }
      for (const auto& [name, values] : outcome.values) {
        const Values& expected = whole.front().values.at(name);
        for (size_t i = 0; i < values.size(); ++i)
          EXPECT_NEAR(values[i], expected[i], 1e-5) << name;
      }
    }
  }
}

TEST(Zero, EachRankKeepsItsPartOfTheState) {
  const int64_t elements = 2 * kIn * kMiddle + kIn + kMiddle;
  for (int ranks : {2, 3, 4}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      // Bytes of state per element: two FP32 moments, and for BF16 an FP32 master weight.
      const int64_t per_element = dtype == DType::kF32 ? 8 : 12;
      int64_t sum = 0;
      for (const Outcome& o : train({.zero = true, .dtype = dtype, .ranks = ranks}, 0, 1)) {
        sum += o.state_bytes;
        // In each of at most 3 buckets, a rank's shard is rounded up to 64 elements and parameters
        // start at multiples of 64.
        EXPECT_LE(o.state_bytes, (elements / ranks + 3 * 128) * per_element);
      }
      EXPECT_EQ(sum, elements * per_element);
    }
  }
}

TEST(Zero, CheckpointsLoadAtAnotherDegreeAndWithout) {
  const test::TempFolder folder;
  const std::string divided = folder / "divided", whole = folder / "whole";
  const Config zero{.zero = true, .dtype = DType::kBF16, .ranks = 2}, plain{.dtype = DType::kBF16};
  const std::vector<Outcome> expected = train(plain);
  (void)train(zero, 0, 3, {.save = divided});
  (void)train(plain, 0, 3, {.save = whole});
  EXPECT_TRUE(std::filesystem::exists(divided + ".optimizer.1-of-2"));
  expect_same(train(zero, 3, 6, {.load = divided}), expected);
  expect_same(train(plain, 3, 6, {.load = divided}), expected);
  expect_same(train(zero, 3, 6, {.load = whole}), expected);
  // Four ranks load the two ranks' checkpoint and save the same state again.
  Config four = zero;
  four.ranks = 4;
  (void)train(four, 3, 3, {.load = divided, .save = whole});
  EXPECT_TRUE(std::filesystem::exists(whole + ".optimizer.3-of-4"));
  expect_same(train(zero, 3, 6, {.load = whole}), expected);
  expect_same(train(plain, 3, 6, {.load = whole}), expected);

  Maps maps(plain);
  const auto adam = take(Adam::create(maps.parameters(), {}));
  (void)train(zero, 0, 2, {.save = folder / "other"});
  std::filesystem::rename(folder / "other.optimizer.1-of-2", divided + ".optimizer.1-of-2");
  EXPECT_FAILS(load_checkpoint(divided, maps, adam.get()), kDataLoss, "another step");
  std::filesystem::remove(divided + ".optimizer.1-of-2");
  EXPECT_FAILS(load_checkpoint(divided, maps, adam.get()), kNotFound, "divided.optimizer.1-of-2");
  take(load_checkpoint(divided, maps));  // loads only the module, without the optimizer
}

// One rank finds an overflow in its shard of the gradients; all ranks skip the step.
TEST(Zero, AStepThatOverflowsIsLeftOutByAllRanks) {
  on_ranks(2, [](const std::shared_ptr<const Comm>& ranks) {
    Training t({.zero = true}, ranks);
    const auto scaler = take(LossScaler::create({.init_scale = 8}));
    t.backward(0);
    const auto before = values_of(t.maps.parameters()[0].value());
    // This element belongs to the second rank.
    const Tensor& last = t.maps.parameters().back().grad();
    last.data<float>()[last.numel() - 1] = INFINITY;
    check(t.adam->step(*scaler));
    EXPECT_TRUE(take(scaler->update()));
    EXPECT_EQ(values_of(t.maps.parameters()[0].value()), before);
    t.backward(0);
    check(t.adam->step(*scaler));
    EXPECT_FALSE(take(scaler->update()));
    EXPECT_NE(values_of(t.maps.parameters()[0].value()), before);
  });
}

TEST(Zero, RefusesWhatWouldUpdateByAnotherMean) {
  on_ranks(2, [](const std::shared_ptr<const Comm>& ranks) {
    Training t({.zero = true}, ranks);
    EXPECT_FAILS(t.adam->step(), kFailedPrecondition, "average_gradients");
    t.backward(0);
    EXPECT_FAILS(t.data->average_gradients(), kFailedPrecondition, "other ranks' parts");
    EXPECT_FAILS(clip_grad_norm(t.maps.parameters(), 1), kFailedPrecondition, "AdamOptions::zero");
    const auto sgd = take(SGD::create(t.maps.parameters(), {}));
    EXPECT_FAILS(sgd->step(), kFailedPrecondition, "AdamOptions::zero");
    check(t.adam->step());
    t.maps.train({}, 1);
    EXPECT_FAILS(t.adam->step(), kFailedPrecondition, "average_gradients");

    Maps other({});
    EXPECT_FAILS(Adam::create(other.parameters(), {.zero = t.data.get()}), kInvalidArgument,
                 "first.weight is not among");
    EXPECT_FAILS(
        Adam::create(t.maps.parameters(), {.write_fp8_weights = true, .zero = t.data.get()}),
        kInvalidArgument, "write_fp8_weights");
    const auto plain = take(DataParallel::create(other.parameters(), ranks));
    EXPECT_FAILS(Adam::create(other.parameters(), {.zero = plain.get()}), kInvalidArgument,
                 "DataParallelOptions::zero");
    const NamedParameter bias = other.parameters()[1];
    check(bias.parameter->borrow(take(bias.value().clone()), 1));
    EXPECT_FAILS(DataParallel::create(other.parameters(), ranks, {.zero = true}),
                 kFailedPrecondition, "borrowed");
  });
}

TEST(Zero, OfOneRankIsAsWithout) {
  const Outcome whole = train({.ranks = 1}).front(),
                one = train({.zero = true, .ranks = 1}).front();
  EXPECT_EQ(one.values, whole.values);
  EXPECT_EQ(one.state_bytes, whole.state_bytes);
}

}  // namespace
}  // namespace te_fl::nn::testing::zero_test
