// The CUDA plugin's choice among timed GEMM algorithms, the choices that it keeps, and its test of
// whether two results are equal. Needs no GPU and no CUDA.
#include <gtest/gtest.h>

#include <cmath>
#include <exception>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "backends/cuda/gemm/gemm_algorithm_file.hpp"
#include "backends/cuda/gemm/gemm_compare.hpp"
#include "backends/cuda/gemm/gemm_selection.hpp"

namespace te_fl::cuda::gemm_tuning_test {
namespace {

// A simulated chip. Candidate i takes cold[i] us, and hot[i] us in sequences of 20 ms or more.
struct Chip {
  std::vector<double> cold, hot;
  std::set<size_t> refused, wrong;
  // Candidates whose results were compared with candidate 0's. The results of candidates in `wrong`
  // differ.
  std::vector<size_t> asked;
  double total = 0;  // simulated time spent, us

  Winner run() {
    const auto time = [this](size_t i, int runs) {
      if (refused.count(i) != 0) return -1.0;
      const double us = cold[i] * runs < 20000 ? cold[i] : hot[i];
      total += us * runs;
      return us;
    };
    const auto agrees = [this](size_t i) {
      asked.push_back(i);
      return wrong.count(i) == 0;
    };
    return select_fastest(cold.size(), {time, agrees});
  }
};
Chip chip(size_t candidates) {
  Chip c;
  for (size_t i = 0; i < candidates; ++i) {
    c.cold.push_back(700 + 10 * static_cast<double>(i));
    c.hot.push_back(900 + 10 * static_cast<double>(i));
  }
  return c;
}

TEST(CudaGemmSelection, TakesTheFastestUnderLoad) {
  Chip c = chip(200);
  c.cold[150] = 760;  // the seventh fastest candidate in the first timing
  c.hot[150] = 820;
  const Winner w = c.run();
  EXPECT_EQ(w.index, 150u);
  EXPECT_EQ(w.us, 820);
  EXPECT_EQ(w.first_us, 900);
  EXPECT_EQ(w.timed, 200);
  EXPECT_EQ(w.different, 0);
  EXPECT_LT(c.total, 4e6) << "some 4 s, whatever the number of candidates";
}

TEST(CudaGemmSelection, DropsThoseWithOtherResults) {
  Chip c = chip(30);
  c.hot[3] = 500;
  c.hot[5] = 600;
  c.wrong = {3, 29};
  const Winner w = c.run();
  EXPECT_EQ(w.index, 5u);
  EXPECT_EQ(w.different, 1) << "29 never came near";
  EXPECT_LE(c.asked.size(), 6u) << "only those that come near are asked";
  EXPECT_EQ(std::set<size_t>(c.asked.begin(), c.asked.end()).count(0), 0u);
}

TEST(CudaGemmSelection, TheFirstIsInTheLastRoundsHoweverSlow) {
  Chip c = chip(60);
  c.cold[0] = 5000;
  c.hot[0] = 6000;
  const Winner w = c.run();
  EXPECT_EQ(w.index, 1u);
  EXPECT_EQ(w.first_us, 6000);
  c.wrong = std::set<size_t>();
  for (size_t i = 1; i < 60; ++i) c.wrong.insert(i);
  EXPECT_EQ(c.run().index, 0u);
}

TEST(CudaGemmSelection, LeavesOutWhatDoesNotRun) {
  Chip c = chip(10);
  c.refused = {0, 1, 7};
  Winner w = c.run();
  EXPECT_EQ(w.index, 2u);
  EXPECT_EQ(w.timed, 7);
  EXPECT_LT(w.first_us, 0);
  for (size_t i = 0; i < 10; ++i) c.refused.insert(i);
  w = c.run();
  EXPECT_EQ(w.index, 0u);
  EXPECT_EQ(w.timed, 0);
  EXPECT_EQ(chip(1).run().index, 0u);
}

TEST(CudaGemmSelection, LeavesOutWhatStopsRunning) {
  for (int after = 1; after < 20; ++after) {
    int runs_of_1 = 0;
    const auto time = [&](size_t i, int) {
      if (i == 1) return runs_of_1++ < after ? 10.0 : -1.0;
      return 20.0 + static_cast<double>(i);
    };
    // The selection times candidate 1 in four sequences before the rounds, and in 11 within them.
    const Winner w = select_fastest(4, {time, [](size_t) { return true; }});
    EXPECT_EQ(w.index, after < 15 ? 0u : 1u) << after;
  }
}

TEST(CudaGemmSelection, ShortProductsAreNotTimedByTheirStart) {
  // The start of a sequence adds 12 us.
  constexpr size_t kCount = 60;
  for (size_t fastest = 1; fastest < kCount; ++fastest) {
    const auto time = [&](size_t i, int runs) { return (i == fastest ? 4.0 : 4.5) + 12.0 / runs; };
    const Winner w = select_fastest(kCount, {time, [](size_t) { return true; }});
    EXPECT_EQ(w.index, fastest);
  }
}

TEST(CudaGemmSelection, TheMedianDecides) {
  // Candidate 1 is much slower in some sequences through disturbances; candidate 2 is once the
  // fastest.
  int sequences[3] = {};
  const auto time = [&](size_t i, int) {
    const int n = sequences[i]++;
    if (i == 1) return n % 3 == 2 ? 90.0 : 50.0;
    if (i == 2) return n % 5 == 4 ? 10.0 : 60.0;
    return 55.0;
  };
  const Winner w = select_fastest(3, {time, [](size_t) { return true; }});
  EXPECT_EQ(w.index, 1u);
  EXPECT_EQ(w.us, 50);
}

TEST(CudaGemmChoiceFile, WhatIsWrittenIsRead) {
  GemmChoice c;
  c.device = "NVIDIA H100 80GB HBM3";
  c.problem = "generic_gemm m=8192 n=16384 k=4096 a=f8e4m3 b=f8e4m3 d=bf16 fast bias";
  c.library = 130100;
  c.algorithm = {66, ~uint64_t{0}, 2, 3, 4, 5, 6, 7};
  c.config = "id 66 tile 29 stages 36";
  c.us = 820.25;
  c.first_us = 888.75;
  c.candidates = 170;
  c.different = 2;
  GemmChoice other;
  other.device = "another \"GPU\"";
  const std::vector<GemmChoice> both{c, other};
  std::istringstream in(gemm_choices_text(both));
  EXPECT_EQ(parse_gemm_choices(in), both);
}

TEST(CudaGemmChoiceFile, ReadsWhatEarlierVersionsWrote) {
  std::istringstream in(R"({"format": 1, "choices": [{"device": "d", "problem": "p",
    "cublaslt": 130100, "us": 2.5, "heuristic_us": 3.5, "candidates": 8,
    "algorithm": [1, 2, 3, 4, 5, 6, 7, 8]}]})");
  const std::vector<GemmChoice> all = parse_gemm_choices(in);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].algorithm, (std::array<uint64_t, 8>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(all[0].candidates, 8);
  EXPECT_EQ(all[0].different, 0);
  EXPECT_EQ(all[0].config, "");
}

TEST(CudaGemmChoiceFile, SaysWhatIsWrong) {
  const auto why = [](const std::string& text) -> std::string {
    std::istringstream in(text);
    try {
      parse_gemm_choices(in);
    } catch (const std::exception& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_NE(why("not JSON"), "");
  EXPECT_NE(why(""), "");
  EXPECT_NE(why(R"({"format": 1})"), "");
  EXPECT_EQ(why(R"({"format": 2, "choices": []})"), "\"format\" is not 1");
  EXPECT_EQ(why(R"({"format": 1, "choices": [{"device": "d", "problem": "p", "cublaslt": 1,
                 "algorithm": [1, 2]}]})"),
            "\"algorithm\" of p has 2 numbers; it must have 8");
  EXPECT_EQ(why(R"({"format": 1, "choices": []})"), "");
}

TEST(CudaGemmCompare, WhatTheOrderOfSumsExplains) {
  constexpr float kStep = 1.0f / 128;  // BF16
  EXPECT_TRUE(explained(1.0f, 1.0f + kStep, kStep, 0));
  EXPECT_FALSE(explained(1.0f, 1.0f + 2 * kStep, kStep, 0));
  EXPECT_TRUE(explained(1.0f, 1.0f + 2 * kStep, kStep, kStep));
  EXPECT_TRUE(explained(0.0f, 0.25f, kStep, 0.25f));
  EXPECT_FALSE(explained(0.0f, -0.26f, kStep, 0.25f));
  EXPECT_FALSE(explained(1.0f, -1.0f, kStep, 0.25f));
}

TEST(CudaGemmCompare, NoNumberAndInfinityAgreeWithTheSameOnly) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(explained(kNan, kNan, 1, 1));
  EXPECT_TRUE(explained(kInf, kInf, 1, 1));
  EXPECT_FALSE(explained(kNan, 1, 1, 1));
  EXPECT_FALSE(explained(1, kNan, 1, 1)) << "what an algorithm left unwritten";
  EXPECT_FALSE(explained(kInf, 1, 1, 1));
  EXPECT_FALSE(explained(1, kInf, 1, 1));
  EXPECT_FALSE(explained(kInf, -kInf, 1, 1));
  EXPECT_FALSE(explained(kInf, kNan, 1, 1));
}

}  // namespace
}  // namespace te_fl::cuda::gemm_tuning_test
