// A byte-level model whose embedding and output projection share one sharded weight, against the
// unsharded model on one rank: gradients, training steps, and checkpoints that another number of
// ranks loads.
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "parallel_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::divided_vocabulary_test {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kVocabulary = 24, kHidden = 8;

class Tied : public Module {
 public:
  Tied(const TensorParallel& parallel, uint64_t seed)
      : loss_({.label_smoothing = 0.1f, .parallel = parallel}) {
    EmbeddingOptions table{
        .num_embeddings = kVocabulary, .hidden_size = kHidden, .seed = seed, .init_std = 0.5f};
    LinearOptions head{.in_features = kHidden, .out_features = kVocabulary, .bias = false};
    table_ = take(Embedding::create(take(shard_of(table, parallel))));
    head = take(shard_of(head, ParallelMode::kColumn, parallel));
    head.tied_weight = table_->weight();
    head_ = take(Linear::create(head));
    register_module("table", *table_);
    register_module("head", *head_);
  }

  double train(int32_t step) {
    const Tensor ids = int_tensor({step, 5, 23, 11, 12, 6, step, 17});
    const Tensor targets = int_tensor({5, 23, 11, 12, 6, step, 17, 0});
    Ctx table, head, loss;
    const Tensor logits = take(head_->forward(take(table_->forward(ids, &table)), &head));
    const double mean = take(item(take(loss_.forward(logits, targets, &loss))));
    testing::check(
        table_->backward(take(head_->backward(take(loss_.backward(loss)), head)), table));
    return mean;
  }

 private:
  std::unique_ptr<Embedding> table_;
  std::unique_ptr<Linear> head_;
  CrossEntropyLoss loss_;
};

struct Trained {
  Trained(const TensorParallel& parallel, uint64_t seed) : model(parallel, seed) {
    adam = take(Adam::create(model.parameters(), {.lr = 0.05f, .max_grad_norm = 0.5f}));
    if (parallel.ranks != nullptr) adam->set_norm_ranks(parallel.ranks);
  }
  // Runs the steps [begin, end); returns their losses.
  Values run(int32_t begin, int32_t end) {
    Values losses;
    for (int32_t step = begin; step < end; ++step) {
      check(model.zero_grad());
      losses.push_back(model.train(step));
      check(adam->step());
    }
    return losses;
  }
  Tied model;
  std::unique_ptr<Adam> adam;
};

void expect_near(const Values& got, const Values& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], wanted[i], 2e-5 * std::max(1.0, std::abs(wanted[i]))) << what << ", " << i;
  }
}

TEST(DividedVocabulary, ASharedWeightHasTheWholeOnesGradient) {
  Tied whole({}, 5);
  ASSERT_EQ(whole.parameters().size(), 1u) << "the weight is shared";
  const double loss = whole.train(3);
  const Values gradient = values_of(whole.parameters()[0].grad());
  for (int size : {2, 4}) {
    on_ranks(size, [&](const std::shared_ptr<const Comm>& ranks) {
      Tied own(TensorParallel{ranks, false, {}}, 5);
      EXPECT_NEAR(own.train(3), loss, 1e-6);
      const NamedParameter weight = own.parameters()[0];
      EXPECT_EQ(weight.value().size(0), kVocabulary / size);
      expect_near(values_of(weight.grad()), take_part(gradient, weight), "gradient");
    });
  }
}

// Trains on one number of ranks, saves, then loads on another number of ranks, whose model had
// other initial values.
TEST(DividedVocabulary, ACheckpointIsLoadedByAnotherNumberOfRanks) {
  constexpr int32_t kSaved = 4, kEnd = 9;
  Trained whole({}, 5);
  const Values before = whole.run(0, kSaved), after = whole.run(kSaved, kEnd);
  const fs::path folder =
      fs::temp_directory_path() / ("te_fl_vocabulary." + std::to_string(::getpid()));
  fs::create_directories(folder);
  for (int saving : {4, 2, 1}) {
    const std::string path = folder / ("from" + std::to_string(saving));
    on_ranks(saving, [&](const std::shared_ptr<const Comm>& ranks) {
      const TensorParallel parallel{ranks, false, {}};
      Trained first(parallel, 5);
      expect_near(first.run(0, kSaved), before, "before, of " + std::to_string(saving));
      check(save_checkpoint(path, parallel, first.model, first.adam.get()));
    });
    for (int loading : {1, 2, 4}) {
      on_ranks(loading, [&](const std::shared_ptr<const Comm>& ranks) {
        const TensorParallel parallel{ranks, false, {}};
        Trained second(parallel, 77);
        check(load_checkpoint(path, parallel, second.model, second.adam.get()).status());
        expect_near(second.run(kSaved, kEnd), after,
                    "from " + std::to_string(saving) + " to " + std::to_string(loading));
      });
    }
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace te_fl::nn::testing::divided_vocabulary_test
