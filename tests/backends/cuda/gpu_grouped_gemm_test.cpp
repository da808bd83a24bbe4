// Grouped GEMMs in one kernel, or spread over several streams of a GPU: ordered with the caller's
// stream, captured, and called from threads. Part of gpu_errors_test. Skipped without a GPU.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "support/expect.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

const Device kGpu{TE_FL_DEVICE_CUDA, 0, 0};
constexpr int64_t kN = 320, kK = 256;

// Experts with 1 to 200 tokens; every fifth expert has no token.
struct Group {
  std::vector<Tensor> a, b, d, alone;
  float reach;  // bound of an element's sum of magnitudes
  std::vector<const te_fl_tensor*> as, bs, ds;

  explicit Group(int64_t count, float scale = 1) : reach(scale * scale * kK) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t m = i % 5 == 4 ? 0 : 1 + i * 37 % 200;
      a.push_back(drawn(m, kK, i, scale)), b.push_back(drawn(kN, kK, 100 + i, scale));
      d.push_back(Tensor::zeros({m, kN}, DType::kBF16, kGpu).value());
      alone.push_back(Tensor::zeros({m, kN}, DType::kBF16, kGpu).value());
    }
    for (size_t i = 0; i < a.size(); ++i)
      as.push_back(a[i]), bs.push_back(b[i]), ds.push_back(d[i]);
    // te-fl's streams do not synchronise with the default stream, so the test waits explicitly.
    EXPECT_OK(devices::synchronize(kGpu));
  }
  static Tensor drawn(int64_t rows, int64_t cols, int64_t seed, float scale) {
    std::vector<float> values(static_cast<size_t>(rows * cols));
    auto state = static_cast<uint32_t>(seed * 2654435761u + 1);
    for (float& v : values) {
      state = state * 1664525u + 1013904223u;
      v = scale * (static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
    }
    const Tensor host = Tensor::from_values({rows, cols}, values, DType::kBF16).value();
    return host.to(kGpu).value();
  }
  static std::vector<float> values(const Tensor& bf16) {
    std::vector<float> out(static_cast<size_t>(bf16.numel()));
    const auto* bits = bf16.data<uint16_t>();
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
    }
    return out;
  }
  Status multiply(const Stream& stream) const {
    te_fl_grouped_gemm_args args;
    args.a = as.data(), args.b = bs.data(), args.d = ds.data();
    args.a_count = args.b_count = args.d_count = static_cast<int64_t>(as.size());
    args.trans_b = 1;
    CallOptions options;
    options.stream = stream.get();
    return OpManager::instance().call(op::grouped_gemm, &args, options);
  }
  // Compares with separate GEMMs. Those of the kernel for groups may add in another order, and then
  // differ by a step of BF16.
  void check(const Stream& stream) const {
    for (size_t i = 0; i < a.size(); ++i) {
      const te_fl_generic_gemm_args args{.a = a[i], .b = b[i], .d = alone[i], .trans_b = 1};
      CallOptions options;
      options.stream = stream.get();
      ASSERT_OK(OpManager::instance().call(op::generic_gemm, &args, options));
    }
    ASSERT_OK(stream.synchronize());
    for (size_t i = 0; i < a.size(); ++i) {
      const Tensor got = d[i].to(Device{}).value(), want = alone[i].to(Device{}).value();
      const std::vector<float> x = values(got), y = values(want);
      for (size_t j = 0; j < x.size(); ++j) {
        const float step = 0x1p-7f * std::fabs(y[j]) + 1e-4f * reach;
        ASSERT_NEAR(x[j], y[j], step) << "product " << i << ", element " << j;
      }
    }
  }
};

class GpuGroupedGemm : public ::testing::Test {
 protected:
  void SetUp() override {
    OpManager::instance();
    if (!devices::find(kGpu).ok()) GTEST_SKIP() << "no GPU, or TE_FL_PLUGIN_MODULES is not set";
  }
};

TEST_F(GpuGroupedGemm, IsItsProductsOneByOne) {
  const Stream stream = std::move(Stream::create(kGpu)).value();
  for (const int64_t count : {1, 2, 7, 64}) {
    const Group group(count);
    ASSERT_OK(group.multiply(stream));
    group.check(stream);
  }
}

// The group's GEMMs start after earlier work on the caller's stream, and later work on that stream
// sees their results.
TEST_F(GpuGroupedGemm, KeepsTheOrderOfTheStream) {
  const Stream stream = std::move(Stream::create(kGpu)).value();
  const Group group(64);
  CallOptions options;
  options.stream = stream.get();
  for (int round = 0; round < 20; ++round) {
    for (const Tensor& x : group.a) {
      const te_fl_fill_args fill{.output = x, .value = static_cast<float>(round % 3)};
      ASSERT_OK(OpManager::instance().call(op::fill, &fill, options));
    }
    ASSERT_OK(group.multiply(stream));
  }
  group.check(stream);
}

// During a capture, all GEMMs of the group run on the caller's stream.
TEST_F(GpuGroupedGemm, IsCaptured) {
  const Stream stream = std::move(Stream::create(kGpu)).value();
  const Group group(24);
  // The workspace must exist before the capture, which cannot allocate it.
  ASSERT_OK(group.multiply(stream));
  for (const bool warm : {true, false}) {
    const Stream other = std::move(Stream::create(kGpu)).value();
    if (warm) ASSERT_OK(group.multiply(other));
    Capture capture = std::move(Capture::begin(kGpu, other.get())).value();
    ASSERT_OK(group.multiply(other));
    ASSERT_OK(group.multiply(stream));  // GEMMs on another stream would be missing from the graph
    ASSERT_OK(group.multiply(other));
    const Graph graph = std::move(capture.end()).value();
    ASSERT_OK(stream.synchronize());
    for (const float value : {0.5f, -2.0f}) {
      CallOptions options;
      options.stream = other.get();
      for (const Tensor& x : group.a) {
        const te_fl_fill_args fill{.output = x, .value = value};
        ASSERT_OK(OpManager::instance().call(op::fill, &fill, options));
      }
      ASSERT_OK(graph.launch());
      group.check(other);
    }
    ASSERT_OK(group.multiply(other));  // works again outside a capture
    group.check(other);
  }
}

TEST_F(GpuGroupedGemm, ThreadsWithStreamsOfTheirOwnAndOneTogether) {
  const Stream shared = std::move(Stream::create(kGpu)).value();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&shared, t] {
      const Group group(16, static_cast<float>(t + 1));
      const Stream own = std::move(Stream::create(kGpu)).value();
      for (int round = 0; round < 10; ++round) {
        EXPECT_OK(group.multiply(round % 2 == 0 ? own : shared));
        EXPECT_OK(shared.synchronize());
        EXPECT_OK(own.synchronize());
      }
      group.check(own);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace te_fl
