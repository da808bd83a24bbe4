// Which GPUs the CUDA plugin serves, and what it refuses to multiply there; needs no GPU.
#include "backends/cuda/gemm_limits.hpp"

#include "backends/cuda/architectures.hpp"
#include "backends/cuda/per_device.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace te_fl::cuda {
namespace {

std::string limit(int architecture, size_t version, bool fp8, bool blocks) {
  const char* why = gemm_limit(architecture, version, fp8, blocks);
  return why == nullptr ? "" : why;
}

TEST(CudaGemmLimits, PlainProductsRunEverywhere) {
  EXPECT_EQ(limit(75, 110000, false, false), "");
  EXPECT_EQ(limit(80, 0, false, false), "");
}

TEST(CudaGemmLimits, Fp8NeedsAda) {
  for (const int architecture : {70, 75, 80, 86, 87}) {
    const std::string why = limit(architecture, 130000, true, false);
    EXPECT_NE(why.find("a or b is FP8"), std::string::npos) << architecture;
    EXPECT_NE(why.find("8.9"), std::string::npos);
    EXPECT_NE(why.find("use BF16"), std::string::npos);
    EXPECT_EQ(limit(architecture, 130000, true, true), why);
  }
  for (const int architecture : {89, 90, 100, 120})
    EXPECT_EQ(limit(architecture, 120800, true, false), "") << architecture;
}

TEST(CudaGemmLimits, BlocksNeedHopperAndCuda129) {
  EXPECT_EQ(limit(90, 120900, true, true), "");
  EXPECT_EQ(limit(90, 130001, true, true), "");
  EXPECT_NE(limit(90, 120804, true, true).find("install libcublas of CUDA 12.9"),
            std::string::npos);
  for (const int architecture : {89, 100, 120}) {
    const std::string why = limit(architecture, 130000, true, true);
    EXPECT_NE(why.find("compute capability 9.0 only"), std::string::npos) << architecture;
    EXPECT_NE(why.find("delayed or current scaling"), std::string::npos);
  }
}

TEST(CudaArchitectures, AreThoseThatHaveCode) {
  EXPECT_TRUE(built_for("90a", 90));
  EXPECT_FALSE(built_for("90a", 80));
  EXPECT_FALSE(built_for("90a", 100));
  EXPECT_TRUE(built_for("80,90a", 86));
  EXPECT_TRUE(built_for("80,90a", 89));
  EXPECT_FALSE(built_for("89,90a", 86));
  EXPECT_FALSE(built_for("100a", 103));
  EXPECT_TRUE(built_for("100a,120", 121));
  EXPECT_FALSE(built_for("", 90));
}

TEST(CudaPerDevice, EachDeviceIsAskedOnce) {
  static PerDevice known;
  int asked = 0;
  const auto find = [&](int value) { return [&asked, value] { return ++asked, value; }; };
  EXPECT_EQ(known.get(0, find(232448)), 232448);
  EXPECT_EQ(known.get(1, find(101376)), 101376) << "one device's answer is not another's";
  EXPECT_EQ(known.get(0, find(1)), 232448);
  EXPECT_EQ(known.get(1, find(1)), 101376);
  EXPECT_EQ(known.get(2, find(0)), 0);
  EXPECT_EQ(known.get(2, find(5)), 0) << "0 is an answer, too";
  EXPECT_EQ(asked, 3);
}

TEST(CudaPerDevice, WhatFailedIsAskedAgain) {
  PerDevice known;
  const auto fails = []() -> int { throw std::runtime_error("no device"); };
  EXPECT_THROW(known.get(0, fails), std::runtime_error);
  EXPECT_EQ(known.get(0, [] { return 7; }), 7);
}

TEST(CudaPerDevice, DevicesPastTheTableAreAskedEachTime) {
  PerDevice known;
  EXPECT_EQ(known.get(PerDevice::kKept, [] { return 1; }), 1);
  EXPECT_EQ(known.get(PerDevice::kKept, [] { return 2; }), 2);
  EXPECT_EQ(known.get(-1, [] { return 3; }), 3);
}

}  // namespace
}  // namespace te_fl::cuda
