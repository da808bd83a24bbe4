// Checkpoints of sharded weights that exist only as FP8 codes: saved by one number of ranks and
// loaded by another, into FP8 codes or into high precision.
#include <algorithm>
#include <mutex>

#include "parallel_fixture.hpp"
#include "support/expect.hpp"
#include "support/temp_folder.hpp"

namespace te_fl::nn::testing::divided_codes_test {
namespace {

constexpr int64_t kIn = 32, kMiddle = 64;

// A column-parallel Linear followed by a row-parallel one.
class Maps : public Module {
 public:
  Maps(const TensorParallel& parallel, const Recipe& recipe, uint64_t seed) : recipe_(recipe) {
    const quantized_model_init codes({.recipe = recipe});
    LinearOptions options{
        .in_features = kIn, .out_features = kMiddle, .bias = false, .seed = seed, .init_std = 0.2f};
    first_ = take(Linear::create(take(shard_of(options, ParallelMode::kColumn, parallel))));
    options = {
        .in_features = kMiddle, .out_features = kIn, .bias = false, .seed = seed, .init_std = 0.2f};
    second_ = take(Linear::create(take(shard_of(options, ParallelMode::kRow, parallel))));
    register_module("first", *first_);
    register_module("second", *second_);
  }

  // Runs forward and backward for the loss sum(y^2) / 2 and accumulates the gradients; returns the
  // loss.
  double train(uint64_t seed, const std::shared_ptr<AmaxReduction>& amaxes) {
    Ctx first, second;
    Tensor y;
    {
      autocast scope({.enabled = true, .amax_reduction = amaxes}, recipe_);
      const Tensor x = tensor({16, kIn}, random_values(16 * kIn, seed));
      y = take(second_->forward(take(first_->forward(x, &first)), &second));
    }
    (void)take(first_->backward(take(second_->backward(y, second)), first));
    testing::check(backward_end());
    double loss = 0;
    for (const double v : values_of(y)) loss += v * v / 2;
    return loss;
  }

 private:
  Recipe recipe_;
  std::unique_ptr<Linear> first_, second_;
};

// Random values whose magnitude grows along the sharded dimension, so that the shards have
// different quantisation scales.
Values whole_values(const NamedParameter& p) {
  const int64_t rows =
      p.parameter->shard.whole.empty() ? p.value().size(0) : p.parameter->shard.whole[0];
  const int64_t columns = kIn * kMiddle / rows;
  Values values = random_values(rows * columns, 11);
  for (int64_t i = 0; i < rows * columns; ++i) {
    const int64_t along = rows == kMiddle ? i / columns : i % columns;
    values[static_cast<size_t>(i)] *= 0.3 + 0.07 * static_cast<double>(along);
  }
  return values;
}

Tensor as_tensor(const NamedParameter& p, const Values& values) {
  const std::vector<float> floats(values.begin(), values.end());
  const Tensor flat = take(Tensor::from_values({p.value().numel()}, floats));
  return take(flat.view(p.value().shape()));
}

Values read(const NamedParameter& p) { return values_of(take(p.parameter->read(DType::kF32))); }

// Copies this rank's shard into the whole matrix.
void put(Values& whole, const NamedParameter& p, const Values& part) {
  const Shard& shard = p.parameter->shard;
  const int64_t columns = p.value().size(1), width = shard.whole.empty() ? columns : shard.whole[1];
  whole.resize(kIn * kMiddle);
  for (int64_t i = 0; i < p.value().numel(); ++i) {
    const int64_t row = i / columns + (shard.begin.empty() ? 0 : shard.begin[0]);
    const int64_t column = i % columns + (shard.begin.empty() ? 0 : shard.begin[1]);
    whole[static_cast<size_t>(row * width + column)] = part[static_cast<size_t>(i)];
  }
}

// Saves a checkpoint on `size` ranks; returns the unsharded parameters, joined from the ranks'
// shards.
std::map<std::string, Values> save(const std::string& path, int size) {
  std::map<std::string, Values> wholes;
  std::mutex mutex;
  on_ranks(size, [&](const std::shared_ptr<const Comm>& ranks) {
    const TensorParallel parallel{ranks, false, {}};
    Maps maps(parallel, Float8CurrentScaling{}, 5);
    for (const NamedParameter& p : maps.parameters()) {
      EXPECT_TRUE(p.value().quantized()) << p.name;
      check(p.parameter->write(as_tensor(p, take_part(whole_values(p), p))));
      const std::lock_guard lock(mutex);
      put(wholes[p.name], p, read(p));
    }
    check(save_checkpoint(path, parallel, maps));
  });
  return wholes;
}

double largest(const Values& values) {
  double top = 0;
  for (const double v : values) top = std::max(top, std::abs(v));
  return top;
}

// Expects each value to equal `wanted` after rounding to E4M3 under the scale of the largest value:
// the error is at most half a step of E4M3.
void expect_quantised(const Values& got, const Values& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  const double smallest = largest(wanted) / 448 * 0x1p-10;
  EXPECT_NEAR(largest(got), largest(wanted), 1e-6 * largest(wanted)) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], wanted[i], std::max(std::abs(wanted[i]) * 0x1p-4, smallest) * 1.00001)
        << what << ", " << i;
  }
}

TEST(DividedCodes, AreLoadedByAnotherNumberOfRanks) {
  const test::TempFolder folder;
  for (const int saving : {1, 2, 4}) {
    const std::string path = folder / ("from" + std::to_string(saving));
    const auto saved = save(path, saving);
    for (const int loading : {1, 2, 4}) {
      on_ranks(loading, [&](const std::shared_ptr<const Comm>& ranks) {
        const TensorParallel parallel{ranks, false, {}};
        Maps maps(parallel, Float8CurrentScaling{}, 77);
        check(load_checkpoint(path, parallel, maps).status());
        for (const NamedParameter& p : maps.parameters()) {
          const std::string what =
              p.name + " from " + std::to_string(saving) + " to " + std::to_string(loading);
          const Values wanted = take_part(saved.at(p.name), p);
          // A rank whose shard lies within one saved shard keeps the FP8 codes and their scale.
          if (saving <= loading) {
            EXPECT_EQ(read(p), wanted) << what;
          } else {
            EXPECT_NE(read(p), wanted) << what << ": the parts' scales should differ";
            expect_quantised(read(p), wanted, what);
          }
        }
      });
    }
  }
}

struct Codes {
  Tensor codes, scale_inv, amax;
};

std::map<std::string, Codes> codes_in(const std::string& path) {
  std::map<std::string, Codes> result;
  for (const NamedTensor& t : take(load_safetensors(path)).tensors) {
    for (const char* name : {"first.weight", "second.weight"}) {
      if (t.name == name) result[name].codes = t.tensor;
      if (t.name == std::string(name) + ".scale_inv") result[name].scale_inv = t.tensor;
      if (t.name == std::string(name) + ".amax") result[name].amax = t.tensor;
    }
  }
  return result;
}

// With delayed scaling and shared amaxes, all ranks' shards have the same scale, so loading keeps
// the FP8 codes.
TEST(DividedCodes, OfOneScaleStayCodes) {
  const test::TempFolder folder;
  constexpr int kSaving = 4;
  const std::string path = folder / "shared";
  Values losses;
  const auto step = [&](Maps& maps, Adam& adam, const std::shared_ptr<AmaxReduction>& amaxes,
                        uint64_t seed) {
    check(maps.zero_grad());
    const double loss = maps.train(seed, amaxes);
    check(adam.step());
    return loss;
  };
  on_ranks(kSaving, [&](const std::shared_ptr<const Comm>& ranks) {
    const TensorParallel parallel{ranks, false, {}};
    Maps maps(parallel, DelayedScaling{}, 5);
    const auto adam = take(Adam::create(maps.parameters(), {.lr = 1e-3f}));
    const auto amaxes = std::make_shared<AmaxReduction>(ranks);
    for (uint64_t seed = 1; seed < 4; ++seed) (void)step(maps, *adam, amaxes, seed);
    check(save_checkpoint(path, parallel, maps, adam.get()));
    for (uint64_t seed = 4; seed < 8; ++seed) {
      const double loss = step(maps, *adam, amaxes, seed);
      if (ranks->rank() == 0) losses.push_back(loss);
    }
  });
  std::vector<std::map<std::string, Codes>> parts;
  for (int rank = 0; rank < kSaving; ++rank) {
    parts.push_back(codes_in(path + "." + std::to_string(rank) + "-of-4"));
  }
  for (const int loading : {1, 2}) {
    on_ranks(loading, [&](const std::shared_ptr<const Comm>& ranks) {
      const TensorParallel parallel{ranks, false, {}};
      Maps maps(parallel, DelayedScaling{}, 77);
      const auto adam = take(Adam::create(maps.parameters(), {.lr = 1e-3f}));
      check(load_checkpoint(path, parallel, maps, adam.get()).status());
      for (const NamedParameter& p : maps.parameters()) {
        const auto first = static_cast<size_t>(ranks->rank() * kSaving / loading);
        float amax = 0;
        for (size_t i = first; i < first + kSaving / static_cast<size_t>(loading); ++i) {
          const Codes& part = parts[i].at(p.name);
          EXPECT_TRUE(same_bits(part.scale_inv, p.value().scale_inv())) << p.name;
          amax = std::max(amax, *part.amax.data<float>());
          const Tensor& own = p.value();
          const auto offset = static_cast<int64_t>(i - first);
          const bool rows = p.name == "first.weight";
          for (int64_t r = 0; r < part.codes.size(0); ++r) {
            const int64_t at = rows ? (offset * part.codes.size(0) + r) * own.size(1)
                                    : r * own.size(1) + offset * part.codes.size(1);
            ASSERT_EQ(
                std::memcmp(own.data<char>() + at, part.codes.data<char>() + r * part.codes.size(1),
                            static_cast<size_t>(part.codes.size(1))),
                0)
                << p.name << ", part " << i << ", row " << r;
          }
        }
        EXPECT_EQ(*p.value().amax().data<float>(), amax) << p.name;
      }
      const auto amaxes = std::make_shared<AmaxReduction>(ranks);
      for (uint64_t seed = 4; seed < 8; ++seed) {
        const double loss = step(maps, *adam, amaxes, seed), wanted = losses[seed - 4];
        EXPECT_NEAR(loss, wanted, 1e-3 * wanted) << "step " << seed << " of " << loading;
      }
    });
  }
}

TEST(DividedCodes, AFileWithoutAScaleIsRefused) {
  const test::TempFolder folder;
  const std::string path = folder / "cut";
  (void)save(path, 2);
  const std::string second = path + ".1-of-2";
  SafetensorsFile file = take(load_safetensors(second));
  std::erase_if(file.tensors, [](const auto& t) { return t.name == "first.weight.scale_inv"; });
  check(save_safetensors(second, file.tensors, file.metadata));
  Maps maps({}, Float8CurrentScaling{}, 5);
  EXPECT_FAILS(load_checkpoint(path, TensorParallel{}, maps), kDataLoss,
               "1-of-2: tensor first.weight.scale_inv");
}

}  // namespace
}  // namespace te_fl::nn::testing::divided_codes_test
