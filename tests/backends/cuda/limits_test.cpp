// GPU architectures that the CUDA plugin supports, and GEMMs that it refuses. Needs no GPU.
#include "backends/cuda/gemm/gemm_limits.hpp"

#include "backends/cuda/common/overlap.hpp"
#include "backends/cuda/device/architectures.hpp"
#include "backends/cuda/device/per_device.hpp"
#include "support/expect.hpp"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace te_fl::cuda::limits_test {
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
    EXPECT_HAS(why, "a or b is FP8") << architecture;
    EXPECT_HAS(why, "8.9");
    EXPECT_HAS(why, "use BF16");
    EXPECT_EQ(limit(architecture, 130000, true, true), why);
  }
  for (const int architecture : {89, 90, 100, 120})
    EXPECT_EQ(limit(architecture, 120800, true, false), "") << architecture;
}

TEST(CudaGemmLimits, BlocksNeedHopperAndCuda129) {
  EXPECT_EQ(limit(90, 120900, true, true), "");
  EXPECT_EQ(limit(90, 130001, true, true), "");
  EXPECT_HAS(limit(90, 120804, true, true), "install libcublas of CUDA 12.9");
  for (const int architecture : {89, 100, 120}) {
    const std::string why = limit(architecture, 130000, true, true);
    EXPECT_HAS(why, "compute capability 9.0 only") << architecture;
    EXPECT_HAS(why, "delayed or current scaling");
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

TEST(CudaArchitectures, APluginWithoutCodeForAnyGpuTakesNone) {
  const auto why = [](std::string_view built, std::vector<int> gpus) {
    return refuse_all(built, gpus);
  };
  EXPECT_EQ(why("90a", {}), "");
  EXPECT_EQ(why("90a", {90, 90}), "");
  EXPECT_EQ(why("90a", {86, 90}), "") << "a launch on the other GPU is an error";
  EXPECT_EQ(why("80,89,90a,100a,120", {121}), "");
  EXPECT_HAS(why("90a", {86, 86}),
             "for the architectures 90a, and this GPU has compute capability 8.6");
  EXPECT_HAS(why("90a", {86}), "TE_FL_CUDA_ARCHITECTURES=80 or all");
  EXPECT_HAS(why("80,90a", {100}), "TE_FL_CUDA_ARCHITECTURES=100a or all");
  EXPECT_HAS(why("90a", {103}), "kernels can be built for 80,89,90a,100a,120 only");
  EXPECT_HAS(why("90a", {75}), "by PyTorch (reference.torch)");
}

TEST(CudaArchitectures, TheOneToBuildForIsOneThatCMakeTakes) {
  EXPECT_EQ(architecture_for(80), "80");
  EXPECT_EQ(architecture_for(86), "80");
  EXPECT_EQ(architecture_for(89), "89");
  EXPECT_EQ(architecture_for(90), "90a");
  EXPECT_EQ(architecture_for(100), "100a");
  EXPECT_EQ(architecture_for(121), "120");
  EXPECT_EQ(architecture_for(103), "") << "100a is for 10.0 alone";
  EXPECT_EQ(architecture_for(75), "");
}

// A tensor of `size` bytes at fake address `at`, with column-wise data at `columns` if that is >=
// 0.
struct Bytes {
  int64_t size;
  te_fl_quant quant{};
  te_fl_tensor tensor{};
  Bytes(int64_t at, int64_t s, int64_t columns = -1) : size(s) {
    tensor.dl.data = place(at);
    tensor.dl.ndim = 1;
    tensor.dl.dtype = {TE_FL_CODE_UINT, 8, 1};
    tensor.dl.shape = &size;
    if (columns < 0) return;
    quant.columnwise_data = place(columns);
    tensor.quant = &quant;
  }
  Bytes(const Bytes&) = delete;
  static void* place(int64_t at) { return reinterpret_cast<void*>(uintptr_t{1} << 40 | at); }
};

TEST(CudaOverlap, OfListsIsThatOfTheirPairs) {
  std::mt19937 random(7);
  const auto below = [&random](int64_t n) { return static_cast<int64_t>(random() % n); };
  int meeting = 0;
  for (int round = 0; round < 400; ++round) {
    const int64_t count = round % 2 == 0 ? 8 : 40, room = 40000 << round % 4;
    std::deque<Bytes> made;
    std::vector<const te_fl_tensor*> in, out;
    std::vector<std::pair<int64_t, int64_t>> read, written;  // ranges [begin, end)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = below(room), to = below(room), columns = below(room);
      const int64_t read_size = 1 + below(i == 0 ? room : 30), size = 1 + below(30);
      in.push_back(&made.emplace_back(from, read_size).tensor);
      read.emplace_back(from, from + read_size);
      out.push_back(&made.emplace_back(to, size, i % 3 == 0 ? columns : -1).tensor);
      written.emplace_back(to, to + size);
      if (i % 3 == 0) written.emplace_back(columns, columns + size);
    }
    bool expected = false;
    for (const auto& [a, b] : written) {
      for (const auto& [c, d] : read) expected = expected || (a < d && c < b);
    }
    meeting += expected;
    EXPECT_EQ(any_overlap(out.data(), count, in.data(), count), expected) << "round " << round;
  }
  EXPECT_GT(meeting, 40);
  EXPECT_LT(meeting, 400);
}

TEST(CudaPerDevice, EachDeviceIsQueriedOnce) {
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

TEST(CudaPerDevice, AFailedQueryIsRepeated) {
  PerDevice known;
  const auto fails = []() -> int { throw std::runtime_error("no device"); };
  EXPECT_THROW(known.get(0, fails), std::runtime_error);
  EXPECT_EQ(known.get(0, [] { return 7; }), 7);
}

TEST(CudaPerDevice, DevicesBeyondTheTableAreQueriedEachTime) {
  PerDevice known;
  EXPECT_EQ(known.get(PerDevice::kKept, [] { return 1; }), 1);
  EXPECT_EQ(known.get(PerDevice::kKept, [] { return 2; }), 2);
  EXPECT_EQ(known.get(-1, [] { return 3; }), 3);
}

}  // namespace
}  // namespace te_fl::cuda::limits_test
