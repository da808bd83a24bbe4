// Gradient buckets whose collectives start during the last backward of a step.
#include "nn/optim/bucket_schedule.hpp"
#include "parallel_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::data_parallel_test {
namespace {

TEST(DataParallel, SaysWhichGradientIsNotInItsBucket) {
  on_ranks(2, [](const std::shared_ptr<const Comm>& ranks) {
    const auto linear = take(Linear::create({.in_features = 4, .out_features = 4}));
    const auto data = take(DataParallel::create(linear->parameters(), ranks));
    check(linear->parameters()[0].parameter->clear_grad());
    EXPECT_FAILS(data->average_gradients(), kFailedPrecondition, "weight");
    (void)linear->parameters()[0].parameter->take_grad();
    EXPECT_FAILS(data->average_gradients(), kFailedPrecondition, "another DataParallel");
  });
}

TEST(DataParallel, AveragesNoGradientThatIsLeftForLater) {
  on_ranks(2, [](const std::shared_ptr<const Comm>& ranks) {
    const auto linear = take(Linear::create(
        {.in_features = 4, .out_features = 4, .parameters_split = {{"a", 2}, {"b", 2}}}));
    const auto data = take(DataParallel::create(linear->parameters(), ranks));
    linear->set_delay_wgrad(true);
    Ctx ctx;
    const Tensor y = take(linear->forward(tensor({1, 4}, {1, 2, 3, 4}), &ctx));
    check(linear->backward(y, ctx).status());
    EXPECT_FAILS(data->average_gradients(), kFailedPrecondition, "a_weight to backward_dw()");
    check(linear->backward_dw());
    EXPECT_OK(data->average_gradients());
  });
}

// Four Linear modules: the middle two share one weight, whose gradient a backward writes twice; the
// outer two have weights of their own.
struct Tied {
  Tied() {
    const LinearOptions options{
        .in_features = 16, .out_features = 16, .bias = false, .seed = 3, .init_std = 0.3f};
    for (int i = 0; i < 4; ++i) {
      LinearOptions own = options;
      own.seed += static_cast<uint64_t>(i);
      if (i == 2) own.tied_weight = maps[1]->parameters()[0].parameter;
      maps.push_back(take(Linear::create(own)));
    }
    for (size_t i : {0, 1, 3}) parameters.push_back(maps[i]->parameters()[0]);
  }
  // Writes the gradients of the weights, from the last module to module number `first`.
  void train(int rank, int64_t step, size_t first = 0) {
    std::vector<Ctx> kept(maps.size());
    const auto seed = static_cast<uint64_t>(step * 10 + rank);
    Tensor x = tensor({8, 16}, random_values(8 * 16, seed));
    for (size_t i = 0; i < maps.size(); ++i) x = take(maps[i]->forward(x, &kept[i]));
    for (size_t i = maps.size(); i-- > first;) x = take(maps[i]->backward(x, kept[i]));
  }
  void zero_grad() {
    for (const auto& map : maps) check(map->zero_grad());
  }
  std::vector<Values> gradients() const {
    std::vector<Values> values;
    for (const NamedParameter& p : parameters) values.push_back(values_of(p.grad()));
    return values;
  }

  std::vector<std::unique_ptr<Linear>> maps;
  std::vector<NamedParameter> parameters;
};

constexpr DataParallelOptions kEach{.bucket_bytes = 1, .overlap = true};  // one bucket per gradient

// Runs two ranks; returns each rank's gradients.
std::vector<std::vector<Values>> means(const DataParallelOptions& options, bool last,
                                       int64_t step) {
  std::vector<std::vector<Values>> result(2);
  on_ranks(2, [&](const std::shared_ptr<const Comm>& ranks) {
    Tied model;
    const auto data = take(DataParallel::create(model.parameters, ranks, options));
    for (int64_t i = 0; i <= step; ++i) {
      model.zero_grad();
      model.train(ranks->rank(), 2 * i);
      if (last) {
        const auto scope = data->last_backward();
        model.train(ranks->rank(), 2 * i + 1);
      } else {
        model.train(ranks->rank(), 2 * i + 1);
      }
      check(data->average_gradients());
    }
    result[static_cast<size_t>(ranks->rank())] = model.gradients();
  });
  return result;
}

TEST(DataParallel, OverlapGivesTheSameBits) {
  for (int64_t step : {0, 1, 3}) {
    const auto expected = means({.bucket_bytes = 1}, false, step);
    EXPECT_EQ(expected[0], expected[1]);
    EXPECT_EQ(means(kEach, true, step), expected) << "step " << step;
    EXPECT_EQ(means({}, true, step), expected) << "on the host, without overlap";
  }
}

TEST(DataParallel, CollectivesBeginWithTheLastWriteOfTheirLastGradient) {
  const auto expected = means({.bucket_bytes = 1}, false, 1);
  on_ranks(2, [&](const std::shared_ptr<const Comm>& ranks) {
    Tied model;
    const auto data = take(DataParallel::create(model.parameters, ranks, kEach));
    ASSERT_EQ(data->buckets(), 3u);
    const int rank = ranks->rank();
    for (int64_t step = 0; step < 2; ++step) {
      model.zero_grad();
      model.train(rank, 2 * step);
      // The first step's backward runs through all modules; the second's stops before it writes the
      // shared weight's gradient a second time.
      const size_t first = step == 0 ? 0 : 2;
      {
        const auto last = data->last_backward();
        model.train(rank, 2 * step + 1, first);
      }
      const std::vector<Values> now = model.gradients();
      EXPECT_EQ(now[2] == expected[0][2], step == 1) << "the last map's is the mean already";
      const Values tied = now[1];
      check(data->average_gradients());
      EXPECT_NE(model.gradients()[1], tied) << "the tied one's was not";
    }
  });
}

TEST(DataParallel, RefusesWritesThatComeTooLate) {
  on_ranks(2, [](const std::shared_ptr<const Comm>& ranks) {
    Tied model;
    const auto data = take(DataParallel::create(model.parameters, ranks, kEach));
    const int rank = ranks->rank();
    const auto step = [&](int before, int after) {
      model.zero_grad();
      for (int i = 0; i < before; ++i) model.train(rank, i);
      {
        const auto last = data->last_backward();
        model.train(rank, 8);
        EXPECT_FAILS(data->average_gradients(), kFailedPrecondition, "LastBackward is alive");
      }
      for (int i = 0; i < after; ++i) model.train(rank, i);
      return data->average_gradients();
    };
    check(step(1, 0));
    check(step(0, 0));
    EXPECT_FAILS(step(0, 1), kFailedPrecondition, "after its collective had begun");
    check(step(1, 0));  // the next step works as usual
    model.zero_grad();
    model.train(rank, 1);
    check(data->average_gradients());  // without a last_backward() scope
  });
}

// A rank whose backward does not reach some parameters still issues its collectives in the same
// order.
TEST(DataParallel, RanksThatWriteFewerGradientsStayTogether) {
  on_ranks(2, [](const std::shared_ptr<const Comm>& ranks) {
    Tied model;
    const auto data = take(DataParallel::create(model.parameters, ranks, kEach));
    for (int64_t step = 0; step < 3; ++step) {
      model.zero_grad();
      {
        const auto last = data->last_backward();
        model.train(ranks->rank(), step, step > 0 && ranks->rank() == 1 ? 3 : 0);
      }
      check(data->average_gradients());
    }
    for (const Values& gradient : model.gradients()) {
      EXPECT_NE(gradient, Values(gradient.size())) << "half of the first rank's";
    }
  });
}

TEST(BucketSchedule, GoesFromTheLastBucketToTheFirst) {
  detail::BucketSchedule schedule({0, 0, 1, 2}, 3, 0);
  EXPECT_EQ(schedule.take_complete(), std::nullopt);
  schedule.begin();
  for (size_t gradient : {3, 2, 2, 1, 0}) {
    schedule.wrote(gradient);
    EXPECT_EQ(schedule.take_complete(), std::nullopt) << "the first backward only counts";
  }
  for (size_t bucket : {2, 1, 0}) EXPECT_EQ(schedule.take(), bucket);
  EXPECT_EQ(schedule.take(), std::nullopt);
  schedule.end();
  schedule.begin();
  schedule.wrote(2);
  schedule.wrote(2);
  EXPECT_EQ(schedule.take_complete(), std::nullopt) << "bucket 1 is complete, and 2 comes first";
  schedule.wrote(3);
  EXPECT_EQ(schedule.take_complete(), 2u);
  EXPECT_TRUE(schedule.taken(3));
  EXPECT_EQ(schedule.take_complete(), 1u);
  schedule.wrote(0);
  EXPECT_EQ(schedule.take_complete(), std::nullopt) << "gradient 1 is to come";
  EXPECT_FALSE(schedule.taken(0));
  schedule.reset();
  schedule.wrote(1);
  EXPECT_EQ(schedule.take_complete(), std::nullopt) << "no last backward has begun";
  EXPECT_EQ(schedule.take(), 2u);
}

TEST(BucketSchedule, NeverCallsHeldBucketsComplete) {
  detail::BucketSchedule schedule({0, 1, 2}, 3, 2);
  for (int step = 0; step < 2; ++step) {
    schedule.begin();
    for (size_t gradient : {2, 1, 0}) schedule.wrote(gradient);
    EXPECT_EQ(schedule.take_complete(), step == 0 ? std::nullopt : std::optional<size_t>(2));
    EXPECT_EQ(schedule.take_complete(), std::nullopt);
    while (schedule.take().has_value()) {
    }
    schedule.end();
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::data_parallel_test
