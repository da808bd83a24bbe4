// With sequence parallelism, ranks all-gather FP8 codes under delayed scaling if one amax reduction
// covers all of them; otherwise they gather high-precision values. The ranks are threads.
#include "counting_ranks.hpp"
#include "parallel_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::gathered_codes_test {
namespace {

constexpr int64_t kRows = 32, kIn = 64, kOut = 96;
constexpr int64_t kSteps = 3;

// Makes this rank's rows of the matrix [kRows, columns] (`rows`), or its columns.
Tensor make_part(const TensorParallel& parallel, bool rows, int64_t columns, uint64_t seed) {
  const Values whole = random_values(kRows * columns, seed, 2, true);
  const int64_t height = kRows / (rows ? parallel.size() : 1);
  const int64_t width = columns / (rows ? 1 : parallel.size());
  const int64_t first = parallel.rank() * (rows ? height * columns : width);
  Values part;
  for (int64_t i = 0; i < height; ++i) {
    const auto row = whole.begin() + first + i * columns;
    part.insert(part.end(), row, row + width);
  }
  return tensor({height, width}, part, DType::kBF16);
}

// The results of some training steps: last output and input gradient, weight gradients and scales.
struct Trained {
  Tensor y, dx;
  std::map<std::string, Tensor> state;
};

Trained train(Linear& layer, const TensorParallel& parallel, ParallelMode mode,
              const std::shared_ptr<AmaxReduction>& amaxes) {
  Trained trained;
  for (uint64_t step = 0; step < kSteps; ++step) {
    check(layer.zero_grad());
    Ctx ctx;
    {
      autocast scope({.enabled = true, .amax_reduction = amaxes}, DelayedScaling{});
      const Tensor x = make_part(parallel, mode == ParallelMode::kColumn, kIn, 10 * step);
      trained.y = take(layer.forward(x, &ctx));
    }
    const Tensor dy = make_part(parallel, mode == ParallelMode::kRow, kOut, 10 * step + 1);
    trained.dx = take(layer.backward(dy, ctx));
    check(backward_end());
  }
  for (const NamedParameter& p : layer.parameters()) trained.state[p.name] = p.grad();
  for (const NamedTensor& t : layer.state()) {
    if (t.name.find("fp8") != std::string::npos) trained.state[t.name] = t.tensor;
  }
  return trained;
}

void expect_same(const Trained& got, const Trained& wanted) {
  EXPECT_TRUE(same_bits(got.y, wanted.y));
  EXPECT_TRUE(same_bits(got.dx, wanted.dx));
  EXPECT_EQ(got.state.size(), wanted.state.size());
  for (const auto& [name, value] : wanted.state) {
    EXPECT_TRUE(same_bits(got.state.at(name), value)) << name;
  }
}

LinearOptions map_options(bool bias) {
  return {.in_features = kIn,
          .out_features = kOut,
          .bias = bias,
          .activation_dtype = DType::kBF16,
          .seed = 4,
          .init_std = 0.3f};
}

// An amax reduction over the ranks, passed as a function, so that te-fl cannot see which ranks it
// covers.
std::shared_ptr<AmaxReduction> unknown(const std::shared_ptr<const Comm>& ranks) {
  return std::make_shared<AmaxReduction>([ranks](std::span<const Tensor> amaxes) -> Status {
    for (const Tensor& t : amaxes) {
      te_fl_all_reduce_args args{};
      args.input = t;
      args.output = t;
      args.comm = ranks->c();
      args.reduction = TE_FL_REDUCTION_MAX;
      TE_FL_RETURN_IF_ERROR(ops::all_reduce(args));
    }
    return {};
  });
}

// The ranks that an amax reduction covers.
enum class Amaxes { kOfRanks, kOfWorld, kOfFunction, kOfOthers, kOfRank };

std::shared_ptr<AmaxReduction> make_reduction(Amaxes amaxes,
                                              const std::shared_ptr<const Comm>& world,
                                              const TensorParallel& parallel) {
  switch (amaxes) {
    case Amaxes::kOfRanks:
      return std::make_shared<AmaxReduction>(parallel.ranks);
    case Amaxes::kOfWorld:
      return std::make_shared<AmaxReduction>(world);
    case Amaxes::kOfFunction:
      return unknown(parallel.ranks);
    case Amaxes::kOfOthers:
      return std::make_shared<AmaxReduction>(
          shared(world->split(world->rank() % parallel.size(), 0, "others")));
    case Amaxes::kOfRank:
      return nullptr;
  }
  return nullptr;
}

class GatheredCodes : public ::testing::Test {
 protected:
  struct Run {
    std::vector<Trained> ranks;  // results of all ranks of the world; each half of the world holds
                                 // the whole sharded layer
    CountingRanks::Count gathered;
  };
  Run run(int size, ParallelMode mode, Amaxes amaxes, bool bias = false) {
    Run result;
    result.ranks.resize(static_cast<size_t>(2 * size));
    (void)counting_.take_counts();
    const auto rank_of = [&](const std::shared_ptr<const Comm>& world) {
      const int rank = world->rank();
      const TensorParallel parallel{shared(world->split(rank / size, rank, "tensor")), true, {}};
      const auto layer = take(Linear::create(take(shard_of(map_options(bias), mode, parallel))));
      result.ranks[static_cast<size_t>(rank)] =
          train(*layer, parallel, mode, make_reduction(amaxes, world, parallel));
    };
    on_ranks(2 * size, rank_of, "counted");
    result.gathered = counting_.take_counts()["all_gather"];
    return result;
  }
  CountingRanks counting_;
};

void expect_same(const std::vector<Trained>& got, const std::vector<Trained>& wanted) {
  for (size_t rank = 0; rank < wanted.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    expect_same(got[rank], wanted[rank]);
  }
}

// Rows that the ranks of both layers gather over all steps.
constexpr int64_t kAllRows = int64_t{2} * kSteps * kRows;

TEST_F(GatheredCodes, TravelWhereOneReductionHasAllRanks) {
  for (const int size : {2, 4}) {
    SCOPED_TRACE(std::to_string(size) + " ranks");
    const int64_t steps_of_ranks = int64_t{2} * size * kSteps;
    // An input gathered in high precision is gathered in the forward only; gathered as FP8 codes it
    // is gathered again in the backward.
    const Run values = run(size, ParallelMode::kColumn, Amaxes::kOfFunction);
    EXPECT_EQ(values.gathered.calls, steps_of_ranks);
    EXPECT_EQ(values.gathered.bytes, kAllRows * kIn * 2);
    const Run row_values = run(size, ParallelMode::kRow, Amaxes::kOfFunction);
    EXPECT_EQ(row_values.gathered.calls, steps_of_ranks);
    EXPECT_EQ(row_values.gathered.bytes, kAllRows * kOut * 2);
    for (const Amaxes amaxes : {Amaxes::kOfRanks, Amaxes::kOfWorld}) {
      const Run codes = run(size, ParallelMode::kColumn, amaxes);
      EXPECT_EQ(codes.gathered.calls, 2 * steps_of_ranks);
      EXPECT_EQ(codes.gathered.bytes, 2 * kAllRows * kIn);
      expect_same(codes.ranks, values.ranks);
      const Run row_codes = run(size, ParallelMode::kRow, amaxes);
      EXPECT_EQ(row_codes.gathered.calls, steps_of_ranks);
      EXPECT_EQ(row_codes.gathered.bytes, kAllRows * kOut);
      expect_same(row_codes.ranks, row_values.ranks);
    }
  }
}

TEST_F(GatheredCodes, DoNotTravelWhereRanksMayHaveOtherScales) {
  EXPECT_EQ(run(2, ParallelMode::kRow, Amaxes::kOfOthers).gathered.bytes, kAllRows * kOut * 2);
  EXPECT_EQ(run(2, ParallelMode::kRow, Amaxes::kOfRank).gathered.bytes, kAllRows * kOut * 2);
}

// Returns the columns [begin, begin + columns) of a matrix.
Values take_columns(const Tensor& whole, int64_t begin, int64_t columns) {
  const Values values = values_of(whole);
  Values part;
  for (int64_t i = 0; i < whole.size(0); ++i) {
    const auto first = values.begin() + i * whole.size(1) + begin;
    part.insert(part.end(), first, first + columns);
  }
  return part;
}

TEST_F(GatheredCodes, ComputeAsOneRank) {
  const auto one = take(Linear::create(map_options(true)));
  const Trained whole = train(*one, {}, ParallelMode::kNone, nullptr);
  const Run column = run(2, ParallelMode::kColumn, Amaxes::kOfRanks, true);
  const int64_t rows = kRows / 2, out = kOut / 2;
  for (int64_t rank = 0; rank < 2; ++rank) {
    const Trained& got = column.ranks[static_cast<size_t>(rank)];
    for (const char* name : {"fp8.fwd.scale", "fp8.bwd.scale"}) {
      EXPECT_TRUE(same_bits(got.state.at(name), whole.state.at(name))) << name;
    }
    EXPECT_EQ(values_of(got.y), take_columns(whole.y, rank * out, out));
    const Tensor dx = take(whole.dx.slice(0, rank * rows, (rank + 1) * rows));
    EXPECT_LT(relative_l2(values_of(got.dx), values_of(dx)), 0.01);
    const Tensor dw = take(whole.state.at("weight").slice(0, rank * out, (rank + 1) * out));
    EXPECT_LT(relative_l2(values_of(got.state.at("weight")), values_of(dw)), 1e-6);
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::gathered_codes_test
