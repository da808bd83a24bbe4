// Tests checkpoints of the RNG states of tensor-parallel ranks.
#include <unistd.h>

#include <filesystem>

#include "parallel_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::shard_random_test {
namespace {

constexpr int64_t kLength = 4, kBatch = 2, kHidden = 16;

std::unique_ptr<TransformerLayer> make_layer(const TensorParallel& parallel) {
  TransformerLayerOptions whole{
      .hidden_size = kHidden, .ffn_hidden_size = 32, .num_attention_heads = 4, .seed = 3};
  whole.hidden_dropout = 0.0f;
  whole.attention.attention_dropout = 0.5f;
  return take(TransformerLayer::create(take(shard_of(whole, parallel))));
}

Values pass(TransformerLayer& layer) {
  Ctx ctx;
  const Values x = random_values(kLength * kBatch * kHidden, 5);
  return values_of(take(layer.forward(tensor({kLength, kBatch, kHidden}, x), &ctx)));
}

TEST(ShardRandom, ResumingIsGoingOn) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("te_fl_own." + std::to_string(getpid()))).string();
  on_ranks(2, [&](const std::shared_ptr<const Comm>& ranks) {
    const auto rank = static_cast<uint64_t>(ranks->rank());
    const TensorParallel trained{ranks, false, Context(100 + rank)};
    const auto layer = make_layer(trained);
    const Values first = pass(*layer);
    check(save_checkpoint(path, trained, *layer));
    const Values second = pass(*layer);
    EXPECT_NE(first, second);
    const TensorParallel resumed{ranks, false, Context(500 + rank)};
    const auto other = make_layer(resumed);
    te_fl_barrier_args args{};
    args.comm = ranks->c();
    check(ops::barrier(args));
    check(load_checkpoint(path, resumed, *other).status());
    EXPECT_EQ(pass(*other), second);
  });
  // Loading with another number of ranks starts a new random stream.
  const TensorParallel one{nullptr, false, Context(7)};
  const auto whole = make_layer(one);
  check(load_checkpoint(path, one, *whole).status());
  EXPECT_EQ(one.random->random(), (RandomPosition{7, 0}));
  for (int rank = 0; rank < 2; ++rank) {
    std::filesystem::remove(path + "." + std::to_string(rank) + "-of-2");
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::shard_random_test
