#include "policy/vendors.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace te_fl::policy {
namespace {

TEST(Vendors, ThoseOfShippedManifestsAreKnown) {
  EXPECT_TRUE(same_vendor("CUDA", "Nvidia"));
  EXPECT_FALSE(same_vendor("cuda", "amd"));
  EXPECT_FALSE(same_vendor("cuda", ""));
  EXPECT_FALSE(add_vendor_alias("Cuda", "NVIDIA")) << "it is known";
}

TEST(Vendors, AnswerToTheAliasesThatAreAdded) {
  EXPECT_FALSE(same_vendor("Chips", "chipmaker"));
  EXPECT_TRUE(add_vendor_alias("chips", "ChipMaker"));
  EXPECT_TRUE(same_vendor("Chips", "chipmaker"));
  EXPECT_TRUE(same_vendor("chipmaker", "CHIPS"));
  EXPECT_FALSE(add_vendor_alias("CHIPS", "chipmaker")) << "it is known";
  EXPECT_FALSE(add_vendor_alias("chipmaker", "ChipMaker")) << "it is the vendor's own name";
}

TEST(Vendors, AnAliasMayStandForSeveral) {
  EXPECT_TRUE(add_vendor_alias("fab", "first"));
  EXPECT_TRUE(add_vendor_alias("foundry", "first"));
  EXPECT_TRUE(same_vendor("fab", "foundry"));
  EXPECT_TRUE(add_vendor_alias("fab", "second"));
  EXPECT_TRUE(same_vendor("fab", "first")) << "the alias is taken from nobody";
  EXPECT_TRUE(same_vendor("second", "fab"));
  EXPECT_FALSE(same_vendor("first", "second"));
  EXPECT_FALSE(same_vendor("second", "foundry"));
}

// Several threads add the same aliases: each alias is reported as new to exactly one thread.
TEST(Vendors, ThreadsAddTheSameAliases) {
  constexpr int kAliases = 100;
  std::atomic<int> added{0}, missing{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kAliases; ++i) {
        const std::string alias = "branch" + std::to_string(i);
        if (add_vendor_alias(alias, "trunk")) added.fetch_add(1);
        if (!same_vendor(alias, "trunk")) missing.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(added.load(), kAliases);
  EXPECT_EQ(missing.load(), 0);
}

}  // namespace
}  // namespace te_fl::policy
