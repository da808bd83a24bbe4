// A vocabulary sharded over ranks, against the unsharded one on one rank. The ranks are threads.
#include <algorithm>
#include <limits>

#include "nn/modules/id_table.hpp"
#include "parallel_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"

namespace te_fl::nn::testing::vocabulary_parallel_test {
namespace {

constexpr int64_t kVocabulary = 24, kHidden = 8, kRows = 8;

double worst(const Values& got, const Values& wanted) {
  EXPECT_EQ(got.size(), wanted.size());
  double top = 1e-6, worst = 0;
  for (double v : wanted) top = std::max(top, std::abs(v));
  for (size_t i = 0; i < std::min(got.size(), wanted.size()); ++i) {
    const double difference = std::abs(got[i] - wanted[i]) / top;
    worst = std::isnan(difference) ? std::numeric_limits<double>::infinity()
                                   : std::max(worst, difference);
  }
  return worst;
}

Tensor wide(const Tensor& ids) {
  Tensor result = take(Tensor::empty(ids.shape(), DType::kI64));
  for (int64_t i = 0; i < ids.numel(); ++i) result.data<int64_t>()[i] = ids.data<int32_t>()[i];
  return result;
}

// Every rank owns some of these ids; id 0 occurs twice.
Tensor some_ids() { return int_tensor({0, 5, 23, 11, 12, 6, 0, 17}); }

void compare_embedding(int size, bool sequence, bool i64) {
  const EmbeddingOptions options{.num_embeddings = kVocabulary, .hidden_size = kHidden, .seed = 5};
  const Tensor ids = i64 ? wide(some_ids()) : some_ids();
  const Values dy = random_values(kRows * kHidden, 3);
  const auto one = take(Embedding::create(options));
  Ctx ctx;
  const Values y = values_of(take(one->forward(ids, &ctx)));
  check(one->backward(tensor({kRows, kHidden}, dy), ctx));
  const NamedParameter whole = one->parameters()[0];
  on_ranks(size, [&](const std::shared_ptr<const Comm>& ranks) {
    const TensorParallel parallel{ranks, sequence, {}};
    const auto divided = take(Embedding::create(take(shard_of(options, parallel))));
    const NamedParameter own = divided->parameters()[0];
    EXPECT_EQ(own.value().size(0), kVocabulary / size);
    EXPECT_EQ(values_of(own.value()), take_part(values_of(whole.value()), own));
    Ctx kept;
    const Tensor found = take(divided->forward(ids, &kept));
    const Tensor all = sequence ? take(gather_rows(parallel, found)) : found;
    EXPECT_EQ(values_of(all), y);
    Tensor gradient = tensor({kRows, kHidden}, dy);
    if (sequence) gradient = take(scatter_rows(parallel, gradient));
    check(divided->backward(gradient, kept));
    EXPECT_LT(worst(values_of(own.grad()), take_part(values_of(whole.grad()), own)), 1e-6);
  });
}

TEST(VocabularyParallel, AnEmbeddingIsTheWholeOne) {
  for (int size : {1, 2, 4}) {
    for (bool sequence : {false, true}) {
      SCOPED_TRACE(std::to_string(size) + (sequence ? " ranks, sequence" : " ranks"));
      compare_embedding(size, sequence, sequence);
    }
  }
}

// Returns this rank's columns of a matrix [rows, kVocabulary].
Values take_columns(const TensorParallel& parallel, const Values& whole) {
  const int64_t width = kVocabulary / parallel.size(), begin = parallel.rank() * width;
  Values part;
  for (int64_t row = 0; row < static_cast<int64_t>(whole.size()) / kVocabulary; ++row) {
    for (int64_t c = 0; c < width; ++c) {
      part.push_back(whole[static_cast<size_t>(row * kVocabulary + begin + c)]);
    }
  }
  return part;
}

struct LossCase {
  CrossEntropyOptions options;
  double range;
  std::vector<int32_t> targets;
};

void compare_loss(const LossCase& c, int size) {
  const Values x = random_values(kRows * kVocabulary, 7, c.range);
  CrossEntropyLoss one(c.options);
  const Tensor targets = int_tensor(c.targets);
  Ctx ctx;
  const double loss =
      element(take(one.forward(tensor({kRows, kVocabulary}, x), targets, &ctx, 6)), 0);
  const Values dx = values_of(take(one.backward(ctx, 3)));
  on_ranks(size, [&](const std::shared_ptr<const Comm>& ranks) {
    CrossEntropyOptions options = c.options;
    options.parallel.ranks = ranks;
    CrossEntropyLoss divided(options);
    const Tensor own = tensor({kRows, kVocabulary / size}, take_columns(options.parallel, x));
    for (bool by_tensor : {false, true}) {
      Ctx kept;
      const double got = element(take(divided.forward(own, targets, &kept, 6)), 0);
      EXPECT_NEAR(got, loss, 1e-6 * std::max(1.0, std::abs(loss)));
      const Tensor gradient =
          take(by_tensor ? divided.backward(kept, tensor({1}, {3})) : divided.backward(kept, 3));
      EXPECT_LT(worst(values_of(gradient), take_columns(options.parallel, dx)), 1e-5);
    }
  });
}

TEST(VocabularyParallel, ALossIsTheWholeOne) {
  const std::vector<int32_t> all = {0, 5, 23, 11, 12, 6, 0, 17};
  const std::vector<int32_t> without = {0, -100, 23, 11, -100, 6, 0, 17};
  const LossCase cases[] = {{{}, 1, all},
                            {{}, 60, all},
                            {{.label_smoothing = 0.2f}, 3, all},
                            {{.label_smoothing = 1.0f}, 3, all},
                            {{}, 3, without},
                            {{.label_smoothing = 0.1f}, 3, without},
                            {{.label_smoothing = 0.1f, .ignore_index = 6}, 3, all}};
  for (size_t i = 0; i < std::size(cases); ++i) {
    for (int size : {1, 2, 4}) {
      SCOPED_TRACE("case " + std::to_string(i) + ", " + std::to_string(size) + " ranks");
      compare_loss(cases[i], size);
    }
  }
}

TEST(VocabularyParallel, WhatDoesNotFitIsRefused) {
  on_ranks(2, [&](const std::shared_ptr<const Comm>& ranks) {
    const TensorParallel parallel{ranks, false, {}};
    const EmbeddingOptions odd{.num_embeddings = 25, .hidden_size = 4};
    const auto refused = shard_of(odd, parallel);
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.status().message().find("num_embeddings is 25"), std::string::npos);
    const EmbeddingOptions even{.num_embeddings = 24, .hidden_size = 4};
    EXPECT_EQ(shard_of(take(shard_of(even, parallel)), parallel).status().code(),
              StatusCode::kInvalidArgument);
    const auto table = take(Embedding::create(take(shard_of(even, parallel))));
    for (int32_t wrong : {24, -1}) {
      const auto found = table->forward(int_tensor({3, wrong}), nullptr);
      EXPECT_EQ(found.status().code(), StatusCode::kInvalidArgument);
      EXPECT_NE(found.status().message().find("is " + std::to_string(wrong)), std::string::npos);
    }
    CrossEntropyLoss loss({.parallel = parallel});
    const auto lost = loss.forward(tensor({2, 12}, Values(24)), int_tensor({0, 24}), nullptr);
    EXPECT_EQ(lost.status().code(), StatusCode::kInvalidArgument);
  });
}

// On a device, ids are translated by embedding_fwd, which moves integers as the bits of F32.
TEST(VocabularyParallel, IdsAreLookedUpOnADevice) {
  using detail::IdTable;
  using te_fl::testing::FarDevice;
  FarDevice far;
  OpManager::instance();
  const Device device = take(devices::add(&far.desc));
  {
    constexpr int64_t kCount = 70000;
    IdTable table({DType::kI32, DType::kF32}, kCount, 9, [](int64_t id, IdTable::Word* words) {
      words[0].integer = static_cast<int32_t>(id < 0 ? kCount : kCount - 1 - id);
      words[1].real = static_cast<float>(id) / 2;
    });
    const Tensor ids = int_tensor({0, 9, 69999, 4, 1});
    const auto here = take(table.look_up(ids));
    const auto there = take(table.look_up(take(ids.to(device))));
    const std::vector<int32_t> wanted = {69999, 70000, 0, 69995, 69998};
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(here[0].data<int32_t>()[i], wanted[i]);
    for (size_t c = 0; c < 2; ++c) {
      EXPECT_TRUE(same_bits(take(there[c].to(Device())), here[c])) << "column " << c;
    }
    EXPECT_EQ(table.look_up(tensor({1}, {1})).status().code(), StatusCode::kInvalidArgument);
  }
  ASSERT_OK(devices::remove(device));
}

}  // namespace
}  // namespace te_fl::nn::testing::vocabulary_parallel_test
