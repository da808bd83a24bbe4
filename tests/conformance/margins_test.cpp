// The ranks of a conformance case are threads, which record their error margins concurrently.
#include "conformance/margins.hpp"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace te_fl::conformance {
namespace {

TEST(Margins, RanksNoteTheirTensorsAtTheSameTime) {
  constexpr int kRanks = 8, kTensors = 20000;
  Margins margins;
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&margins, r] {
      for (int i = 0; i < kTensors; ++i)
        margins.add_placed("a tensor of rank " + std::to_string(r));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::vector<std::string> placed = margins.take_placed();
  EXPECT_EQ(placed.size(), size_t{kRanks} * kTensors);
  EXPECT_TRUE(margins.take_placed().empty());
}

}  // namespace
}  // namespace te_fl::conformance
