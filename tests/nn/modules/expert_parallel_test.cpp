// Rows of experts over ranks (ExpertRoute): their order, a mixture against the same on one rank,
// and wrong arguments. The ranks are threads, or processes of the same machine's Gloo in threads.
#include <algorithm>
#include <numeric>
#include <optional>

#include "parallel_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/nn/modules/expert_parallel.hpp"
#include "te_fl/nn/modules/grouped_linear.hpp"
#include "te_fl/nn/modules/moe_layer.hpp"

namespace te_fl::nn::testing::expert_parallel_test {
namespace {

constexpr int64_t kHidden = 24, kOut = 16, kExperts = 8;
constexpr std::array<int64_t, 4> kTokens = {7, 0, 12, 1};  // of four ranks; one has none

// The expert of token t. `skewed`: all tokens go to one expert, the last.
int64_t expert_of(int64_t t, bool skewed) {
  return skewed ? kExperts - 1 : (t * 5 + t / 3) % kExperts;
}

// The tokens of a rank of `size`, ordered by expert, and the number of tokens of each expert.
struct Sorted {
  std::vector<int64_t> tokens;
  std::vector<int64_t> counts;
};
Sorted tokens_of(int rank, int size, bool skewed) {
  const int per = 4 / size;
  const auto sum = [](int n) {
    return std::accumulate(kTokens.begin(), kTokens.begin() + n, int64_t{0});
  };
  Sorted sorted;
  for (int64_t e = 0; e < kExperts; ++e) {
    const size_t before = sorted.tokens.size();
    for (int64_t t = sum(rank * per); t < sum((rank + 1) * per); ++t) {
      if (expert_of(t, skewed) == e) sorted.tokens.push_back(t);
    }
    sorted.counts.push_back(static_cast<int64_t>(sorted.tokens.size() - before));
  }
  return sorted;
}

Values rows_of(const Values& whole, const std::vector<int64_t>& tokens, int64_t columns) {
  Values rows;
  for (const int64_t t : tokens) {
    rows.insert(rows.end(), whole.begin() + t * columns, whole.begin() + (t + 1) * columns);
  }
  return rows;
}

std::unique_ptr<GroupedLinear> experts(int64_t first, int64_t count) {
  auto layer = take(GroupedLinear::create(
      {.num_gemms = count, .in_features = kHidden, .out_features = kOut, .bias = false}));
  for (int64_t i = 0; i < count; ++i) {
    set_values(layer->parameters()[static_cast<size_t>(i)].value(),
               random_values(kHidden * kOut, static_cast<uint64_t>(100 + first + i)));
  }
  return layer;
}

struct Results {
  Values y, dx;                 // by token
  std::vector<Values> weights;  // gradients
};

// Puts rows back to their tokens.
void put_rows(Values& whole, const Values& rows, const std::vector<int64_t>& tokens,
              int64_t columns) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::copy_n(rows.begin() + static_cast<int64_t>(i) * columns, columns,
                whole.begin() + tokens[i] * columns);
  }
}

constexpr int64_t kAll = 20;

Results on_one_rank(const Values& x, const Values& dy, bool skewed) {
  const Sorted sorted = tokens_of(0, 1, skewed);
  const auto layer = experts(0, kExperts);
  Ctx ctx;
  Results results{.y = Values(kAll * kOut), .dx = Values(kAll * kHidden), .weights = {}};
  const Tensor y = take(layer->forward(tensor({kAll, kHidden}, rows_of(x, sorted.tokens, kHidden)),
                                       sorted.counts, &ctx));
  const Tensor dx =
      take(layer->backward(tensor({kAll, kOut}, rows_of(dy, sorted.tokens, kOut)), ctx));
  put_rows(results.y, values_of(y), sorted.tokens, kOut);
  put_rows(results.dx, values_of(dx), sorted.tokens, kHidden);
  for (const NamedParameter& p : layer->parameters())
    results.weights.push_back(values_of(p.grad()));
  return results;
}

void compare(int size, bool skewed) {
  const Values x = random_values(kAll * kHidden, 5), dy = random_values(kAll * kOut, 6);
  const Results whole = on_one_rank(x, dy, skewed);
  on_ranks(size, [&](const std::shared_ptr<const Comm>& ranks) {
    const Sorted sorted = tokens_of(ranks->rank(), size, skewed);
    const auto count = static_cast<int64_t>(sorted.tokens.size());
    const int64_t each = kExperts / size, first = ranks->rank() * each;
    const auto layer = experts(first, each);
    const Tensor rows = tensor({count, kHidden}, rows_of(x, sorted.tokens, kHidden));
    const ExpertRoute route = take(ExpertRoute::create(ranks, sorted.counts, rows));
    Ctx ctx;
    RowTransfer transfer = take(route.start_dispatch(rows));
    const RowsWithProbs there = take(transfer.wait());
    EXPECT_EQ(transfer.wait().status().code(), StatusCode::kFailedPrecondition);
    const Tensor out = take(layer->forward(there.rows, route.splits(), &ctx));
    const Tensor y = take(route.combine(out)).rows;
    const Tensor d_out =
        take(route.dispatch(tensor({count, kOut}, rows_of(dy, sorted.tokens, kOut)))).rows;
    const Tensor dx = take(route.combine(take(layer->backward(d_out, ctx)))).rows;
    EXPECT_EQ(values_of(y), rows_of(whole.y, sorted.tokens, kOut));
    EXPECT_EQ(values_of(dx), rows_of(whole.dx, sorted.tokens, kHidden));
    for (int64_t i = 0; i < each; ++i) {
      EXPECT_EQ(values_of(layer->parameters()[static_cast<size_t>(i)].grad()),
                whole.weights[static_cast<size_t>(first + i)])
          << "expert " << first + i;
    }
  });
}

TEST(ExpertParallel, MixturesEqualThatOfOneRank) {
  for (const int size : {1, 2, 4}) {
    for (const bool skewed : {false, true}) {
      SCOPED_TRACE(std::to_string(size) + " ranks" + (skewed ? ", skewed" : ""));
      compare(size, skewed);
    }
  }
}

// Each row says its sender and its expert; 60 experts on each rank take more than one message.
TEST(ExpertParallel, RowsAreOrderedByExpertAndRank) {
  for (const int64_t each : {1, 3, 60}) {
    on_ranks(3, [&](const std::shared_ptr<const Comm>& ranks) {
      const auto count = [](int64_t rank, int64_t e) { return rank == 1 ? 0 : (rank * 3 + e) % 4; };
      std::vector<int64_t> counts;
      Values sent, wanted;
      for (int64_t e = 0; e < 3 * each; ++e) {
        counts.push_back(count(ranks->rank(), e));
        for (int64_t i = 0; i < counts.back(); ++i) {
          sent.insert(sent.end(), {static_cast<double>(ranks->rank()), static_cast<double>(e)});
        }
      }
      for (int64_t e = ranks->rank() * each; e < (ranks->rank() + 1) * each; ++e) {
        for (int64_t r = 0; r < 3; ++r) {
          for (int64_t i = 0; i < count(r, e); ++i) {
            wanted.insert(wanted.end(), {static_cast<double>(r), static_cast<double>(e)});
          }
        }
      }
      const auto n = static_cast<int64_t>(sent.size()) / 2;
      const Tensor rows = tensor({n, 2}, sent);
      const ExpertRoute route = take(ExpertRoute::create(ranks, counts, rows));
      Values first;
      for (size_t i = 1; i < sent.size(); i += 2) first.push_back(sent[i]);
      const RowsWithProbs there = take(route.dispatch(rows, tensor({n}, first)));
      EXPECT_EQ(values_of(there.rows), wanted);
      for (size_t i = 0; i < wanted.size() / 2; ++i) {
        EXPECT_EQ(values_of(there.probs)[i], wanted[2 * i + 1]);
      }
      EXPECT_EQ(std::accumulate(route.splits().begin(), route.splits().end(), int64_t{0}),
                static_cast<int64_t>(wanted.size()) / 2);
      const RowsWithProbs back = take(route.combine(there.rows, there.probs));
      EXPECT_EQ(values_of(back.rows), sent);
      EXPECT_EQ(values_of(back.probs), first);
    });
  }
}

// Trains a MoELayer by plain gradient descent and returns the losses. ranks: null for one rank that
// has all experts and tokens.
std::vector<double> train(const std::shared_ptr<const Comm>& ranks, MoELayerOptions options,
                          bool fp8) {
  constexpr int64_t kWidth = 32, kCount = 20;
  options.hidden_size = kWidth;
  options.ffn_hidden_size = 48;
  options.num_experts = kExperts;
  options.seed = 11;
  options.init_std = options.output_init_std = 0.2f;
  options.expert_ranks = ranks;
  const auto layer = take(MoELayer::create(options));
  const int size = ranks == nullptr ? 1 : ranks->size(),
            rank = ranks == nullptr ? 0 : ranks->rank();
  int64_t begin = 0, end = 0;  // of the tokens of this rank
  for (int r = 0; r <= rank; ++r) {
    begin = end;
    for (int i = r * 4 / size; i < (r + 1) * 4 / size; ++i) end += kTokens[static_cast<size_t>(i)];
  }
  const Values all = random_values(kCount * kWidth, 3), target = random_values(kCount * kWidth, 4);
  const Values x(all.begin() + begin * kWidth, all.begin() + end * kWidth);
  const auto over_ranks = [&](const Tensor& t) {
    if (ranks == nullptr) return;
    te_fl_all_reduce_args args{};
    args.input = t;
    args.output = t;
    args.comm = ranks->c();
    check(ops::all_reduce(args));
  };
  std::vector<double> losses;
  for (int step = 0; step < 8; ++step) {
    Ctx ctx;
    std::optional<autocast> scope;
    if (fp8) scope.emplace(true, Float8CurrentScaling{});
    const Tensor y = take(layer->forward(tensor({end - begin, kWidth}, x), &ctx));
    scope.reset();
    Values dy = values_of(y);
    double loss = 0;
    for (size_t i = 0; i < dy.size(); ++i) {
      dy[i] -= target[static_cast<size_t>(begin * kWidth) + i];
      loss += dy[i] * dy[i];
      dy[i] *= 2.0 / (kCount * kWidth);
    }
    check(layer->backward(tensor({end - begin, kWidth}, dy), ctx).status());
    const Tensor sum = tensor({1}, {loss});
    over_ranks(sum);
    losses.push_back(values_of(sum)[0]);
    for (const NamedParameter& p : layer->parameters()) {
      if (!p.parameter->requires_grad) continue;
      const bool of_experts = p.name.starts_with("fc");  // the others are on all ranks
      if (!of_experts) over_ranks(p.grad());
      Values values = values_of(p.value());
      const Values grad = values_of(p.grad());
      for (size_t i = 0; i < values.size(); ++i) values[i] -= 0.5 * grad[i];
      set_values(p.value(), values);
    }
    layer->zero_grad();
  }
  return losses;
}

void compare_losses(const MoELayerOptions& options, bool fp8, double tolerance) {
  const std::vector<double> whole = train(nullptr, options, fp8);
  EXPECT_LT(whole.back(), 0.95 * whole.front());
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [&](const std::shared_ptr<const Comm>& ranks) {
      const std::vector<double> losses = train(ranks, options, fp8);
      ASSERT_EQ(losses.size(), whole.size());
      for (size_t i = 0; i < losses.size(); ++i) {
        EXPECT_LT(std::abs(losses[i] - whole[i]), tolerance * whole[i])
            << size << " ranks, step " << i;
      }
    });
  }
}

TEST(ExpertParallel, AMoELayerLearnsTheSameAtEachDegree) {
  compare_losses({}, false, 1e-5);
  compare_losses({.activation = Activation::kGelu, .bias = true, .shared_ffn_hidden_size = 16},
                 false, 1e-5);
  compare_losses({.score_function = ScoreFunction::kSigmoid, .single_grouped_weight = false}, false,
                 1e-5);
  compare_losses({}, true, 1e-4);
}

TEST(ExpertParallel, AMoELayerRefusesExpertsThatDoNotDivide) {
  on_ranks(3, [](const std::shared_ptr<const Comm>& ranks) {
    const Status status =
        MoELayer::create(
            {.hidden_size = 8, .ffn_hidden_size = 8, .num_experts = 8, .expert_ranks = ranks})
            .status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_HAS(status.message(), "num_experts is 8; the number of expert_ranks, 3, must divide it");
  });
}

TEST(ExpertParallel, OnATape) {
  on_ranks(2, [](const std::shared_ptr<const Comm>& ranks) {
    const std::vector<int64_t> counts = {1, 2};
    const double mine = ranks->rank() + 1;
    Tape tape;
    const Value x = tape.input(tensor({3, 1}, {mine, mine + 10, mine + 20}), true);
    const ExpertRoute route = take(ExpertRoute::create(ranks, counts, x.tensor()));
    const Value there = route.dispatch(x);
    const Value y = route.combine(there + there);
    check(tape.backward(y, tensor({3, 1}, {1, 2, 3})));
    EXPECT_EQ(values_of(y.tensor()), (Values{2 * mine, 2 * mine + 20, 2 * mine + 40}));
    EXPECT_EQ(values_of(x.grad()), (Values{2, 4, 6}));
  });
}

TEST(ExpertParallel, WrongArgumentsAreRefusedOnAllRanks) {
  struct Wrong {
    std::vector<int64_t> counts;
    int64_t rows, columns;
    DType dtype;
    const char* text;
  };
  const Wrong cases[] = {
      {{1, 1, 1, 2}, 4, 8, DType::kF32, "rows_of_experts of rank 1 sums to 5; its rows are 4"},
      {{2, 2, 2, -2}, 4, 8, DType::kF32, "rows_of_experts of rank 1 has -2"},
      {{1, 1, 1, 1, 0, 0}, 4, 8, DType::kF32, "rank 1 has 6, and rank 0 4 experts"},
      {{1, 1, 1, 1}, 4, 16, DType::kF32, "rank 1 has 16, and rank 0 8 columns"},
      {{1, 1, 1, 1}, 4, 8, DType::kBF16, "as dtype of rows"},
      {{1, 1, 2}, 4, 8, DType::kF32, nullptr}};
  on_ranks(2, [&](const std::shared_ptr<const Comm>& ranks) {
    const std::vector<int64_t> counts = {1, 1, 1, 1};
    const Tensor right = take(Tensor::empty({4, 8}, DType::kF32));
    for (const Wrong& wrong : cases) {
      const bool odd = ranks->rank() == 1;
      const Tensor rows =
          odd ? take(Tensor::empty({wrong.rows, wrong.columns}, wrong.dtype)) : right;
      const Status status = ExpertRoute::create(ranks, odd ? wrong.counts : counts, rows).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_HAS(status.message(), wrong.text != nullptr ? wrong.text
                                   : odd                 ? "rows_of_experts has 3 numbers"
                                                         : "rank 1 refused its arguments");
    }
    const ExpertRoute route = take(ExpertRoute::create(ranks, counts, right));
    EXPECT_EQ(route.dispatch(take(Tensor::empty({5, 8}, DType::kF32))).status().code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(take(route.dispatch(right)).rows.size(0), 4);
  });
}

}  // namespace
}  // namespace te_fl::nn::testing::expert_parallel_test
