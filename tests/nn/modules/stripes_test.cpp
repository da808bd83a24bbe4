// Products by rows whose output features are cut into stripes, by the file TE_FL_STRIPES_FILE. The
// ranks are threads.
#include "te_fl/nn/modules/stripes.hpp"
#include "counting_ranks.hpp"
#include "parallel_fixture.hpp"
#include "support/expect.hpp"
#include "support/temp_folder.hpp"

namespace te_fl::nn::testing::stripes_test {
namespace {

constexpr int64_t kRows = 16, kHidden = 256, kFfn = 64;
constexpr int kRanks = 2;

std::string file_of(const std::string& operands, const std::string& output, int64_t in,
                    int stripes) {
  const te_fl_device_props host = take(devices::properties(Device()));
  return R"({"te_fl_stripes": 1, "entries": [{"device": ")" + std::string(host.name) +
         R"(", "ranks": 2, "operands": ")" + operands + R"(", "output": ")" + output +
         R"(", "rows": 16, "in": )" + std::to_string(in) + R"(, "out": 256, "stripes": )" +
         std::to_string(stripes) + "}]}";
}

// The setting's file while it lives.
class StripesFile {
 public:
  explicit StripesFile(const std::string& text) {
    check(environment::set("TE_FL_STRIPES_FILE", folder_.write("stripes.json", text)));
  }
  ~StripesFile() { (void)environment::unset("TE_FL_STRIPES_FILE"); }
  StripesFile(const StripesFile&) = delete;
  StripesFile& operator=(const StripesFile&) = delete;

 private:
  test::TempFolder folder_;
};

struct Pass {
  Values y, dx;
  std::map<std::string, Values> gradients;
};

template <class Layer>
Pass pass(Layer& layer, const Tensor& x, const Recipe* recipe) {
  Ctx ctx;
  Tensor y;
  {
    std::optional<autocast> scope;
    if (recipe != nullptr) scope.emplace(AutocastOptions{.enabled = true}, *recipe);
    y = take(layer.forward(x, &ctx));
  }
  Pass result{values_of(y), values_of(take(layer.backward(y, ctx))), {}};
  check(backward_end());
  for (const NamedParameter& p : layer.parameters()) result.gradients[p.name] = values_of(p.grad());
  return result;
}

Tensor input_of(int rank, int64_t rows, int64_t columns) {
  return tensor({rows, columns}, random_values(rows * columns, static_cast<uint64_t>(7 + rank)));
}

class Stripes : public ::testing::Test {
 protected:
  struct Run {
    std::vector<Pass> ranks = std::vector<Pass>(kRanks);
    int64_t scatters = 0;  // of one rank
  };
  // A map by rows, or an MLP, whose second map is one.
  Run run(bool mlp, const Recipe* recipe) {
    Run result;
    (void)counting_.take_counts();
    const auto rank_of = [&](const std::shared_ptr<const Comm>& ranks) {
      const TensorParallel parallel{ranks, true, {}};
      Pass& made = result.ranks[static_cast<size_t>(ranks->rank())];
      if (mlp) {
        const auto layer = take(LayerNormMLP::create(take(shard_of(
            LayerNormMLPOptions{.hidden_size = kHidden, .ffn_hidden_size = kFfn, .seed = 3},
            parallel))));
        made = pass(*layer, input_of(ranks->rank(), kRows / kRanks, kHidden), recipe);
        return;
      }
      const auto layer = take(Linear::create(
          take(shard_of(LinearOptions{.in_features = kFfn, .out_features = kHidden, .seed = 3},
                        ParallelMode::kRow, parallel))));
      made = pass(*layer, input_of(ranks->rank(), kRows, kFfn / kRanks), recipe);
    };
    on_ranks(kRanks, rank_of, "counted");
    result.scatters = counting_.take_counts()["reduce_scatter"].calls / kRanks;
    return result;
  }
  CountingRanks counting_;
};

void expect_near(const Pass& got, const Pass& wanted) {
  EXPECT_LT(relative_l2(got.y, wanted.y), 1e-6);
  EXPECT_LT(relative_l2(got.dx, wanted.dx), 1e-6);
  ASSERT_EQ(got.gradients.size(), wanted.gradients.size());
  for (const auto& [name, values] : wanted.gradients) {
    EXPECT_LT(relative_l2(got.gradients.at(name), values), 1e-6) << name;
  }
}

TEST_F(Stripes, ComputeAsOnePiece) {
  const Recipe delayed = DelayedScaling{}, current = Float8CurrentScaling{},
               blocks = Float8BlockScaling{};
  const std::pair<const Recipe*, std::string> kinds[] = {
      {nullptr, "f32"}, {&delayed, "fp8"}, {&current, "fp8"}, {&blocks, "fp8_block"}};
  for (const auto& [recipe, operands] : kinds) {
    for (const bool mlp : {false, true}) {
      SCOPED_TRACE(operands + (mlp ? ", MLP" : ", map"));
      const Run whole = run(mlp, recipe);
      const StripesFile file(file_of(operands, "f32", kFfn / kRanks, 2));
      const Run cut = run(mlp, recipe);
      // The MLP's backward scatters its input's gradient.
      EXPECT_EQ(whole.scatters, mlp ? 2 : 1);
      EXPECT_EQ(cut.scatters, whole.scatters + 1);
      for (size_t rank = 0; rank < kRanks; ++rank) expect_near(cut.ranks[rank], whole.ranks[rank]);
    }
  }
}

TEST_F(Stripes, AreOfTheProductsThatTheFileNames) {
  const StripesFile file(file_of("f32", "f32", kFfn, 2));
  EXPECT_EQ(run(false, nullptr).scatters, 1);
}

TEST_F(Stripes, AWrongFileIsAnErrorBeforeACollective) {
  {
    const StripesFile file(file_of("f32", "f32", kFfn, 3));
    const Status status = stripes_in_words().status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_HAS(status.to_string(), "TE_FL_STRIPES_FILE");
    EXPECT_HAS(status.to_string(), "entries[0]: out is 256, which must be a multiple of 3");
    on_ranks(
        kRanks,
        [&](const std::shared_ptr<const Comm>& ranks) {
          const auto layer = take(Linear::create(
              take(shard_of(LinearOptions{.in_features = kFfn, .out_features = kHidden},
                            ParallelMode::kRow, TensorParallel{ranks, true, {}}))));
          const Tensor x = input_of(0, kRows, kFfn / kRanks);
          EXPECT_EQ(layer->forward(x, nullptr).status().code(), StatusCode::kInvalidArgument);
        },
        "counted");
    EXPECT_EQ(counting_.take_counts()["reduce_scatter"].calls, 0);
  }
  EXPECT_EQ(take(stripes_in_words()), "no file");
}

TEST_F(Stripes, RanksCompareContents) {
  const std::string before = fingerprint_table();
  const StripesFile file(file_of("f32", "f32", kFfn, 2));
  const std::string words = take(stripes_in_words());
  const std::string hash = words.substr(words.rfind(' ') + 1);
  const auto differences = fingerprint_difference(before, fingerprint_table());
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(differences[0], "only in the second: setting TE_FL_STRIPES_FILE = " + hash);
}

}  // namespace
}  // namespace te_fl::nn::testing::stripes_test
