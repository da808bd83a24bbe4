// The CPU backend called through its entry point. Results are the same for every split into tasks,
// vectors and streaming stores and in every run. TE_FL_NUM_THREADS is validated. The conformance
// tests check the ops' numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "support/expect.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/quantize.h"
#include "te_fl/ops/tensor.h"

extern "C" const te_fl_plugin_header* te_fl_cpu_query(const te_fl_host_info*);

namespace te_fl::ops_test {
namespace {

constexpr te_fl_dtype kF32{TE_FL_CODE_FLOAT, 32, 1};
constexpr te_fl_dtype kE4m3{TE_FL_CODE_FLOAT8_E4M3FN, 8, 1};
constexpr te_fl_dtype kU8{TE_FL_CODE_UINT, 8, 1};

// A tensor view of memory that the test owns.
struct View {
  View(void* data, te_fl_dtype dtype, std::vector<int64_t> extents) : shape(std::move(extents)) {
    tensor.dl = {data,  {TE_FL_DEVICE_CPU, 0}, static_cast<int32_t>(shape.size()),
                 dtype, shape.data(),          nullptr,
                 0};
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  std::vector<int64_t> shape;
  te_fl_quant quant;
  te_fl_tensor tensor;
};

class CpuOps : public ::testing::Test {
 protected:
  ~CpuOps() override {
    if (instance_ != nullptr) api().destroy(instance_);
  }

  static const te_fl_plugin_api& api() { return *te_fl_cpu_query(nullptr)->api; }

  // Calls create() with TE_FL_NUM_THREADS set to `threads`.
  te_fl_status create(const char* threads) {
    te_fl_host_api host{sizeof(te_fl_host_api), 0, const_cast<char*>(threads), nullptr,
                        [](void* value, const char* name) -> const char* {
                          return std::string(name) == "TE_FL_NUM_THREADS"
                                     ? static_cast<const char*>(value)
                                     : nullptr;
                        }};
    const te_fl_error_sink sink{
        sizeof(te_fl_error_sink), 0, &error_,
        [](void* text, const char* t) { *static_cast<std::string*>(text) += t; }};
    return api().create(&host, &instance_, &sink);
  }

  void run(const char* name, const void* args) {
    uint32_t count = 0;
    const te_fl_op_desc* const* list = nullptr;
    ASSERT_EQ(api().ops(instance_, &count, &list, nullptr), TE_FL_OK);
    for (uint32_t i = 0; i < count; ++i) {
      if (std::string(list[i]->op_name) != name) continue;
      te_fl_context ctx{};
      ctx.struct_size = sizeof ctx;
      const te_fl_rng rng{.seed = 11, .offset = 5};
      ctx.rng = &rng;
      const te_fl_error_sink sink{
          sizeof(te_fl_error_sink), 0, &error_,
          [](void* text, const char* t) { *static_cast<std::string*>(text) += t; }};
      ctx.errors = &sink;
      if (list[i]->supports != nullptr) {
        ASSERT_EQ(list[i]->supports(list[i]->self, &ctx, args), TE_FL_OK) << error_;
      }
      ASSERT_EQ(list[i]->run(list[i]->self, &ctx, args), TE_FL_OK) << error_;
      return;
    }
    FAIL() << "no op " << name;
  }

  void* instance_ = nullptr;
  std::string error_;
};

std::vector<float> numbers(int64_t n, float scale = 3.0f) {
  std::vector<float> values(static_cast<size_t>(n));
  uint32_t state = 12345;
  for (float& v : values) {
    state = state * 1664525u + 1013904223u;
    v = scale * (static_cast<float>(state >> 8) / (1 << 23) - 1.0f);
  }
  return values;
}

template <class T>
void expect_same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  ASSERT_EQ(a.size(), b.size());
  ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(T)), 0);
}

// The outputs exceed 32 MiB, from which size most machines use streaming stores. Rows have an odd
// length.
constexpr int64_t kRows = 8300, kCols = 1031;

TEST_F(CpuOps, ActivationsOfAWholeTensorEqualThoseOfItsRows) {
  ASSERT_EQ(create("4"), TE_FL_OK);
  std::vector<float> x = numbers(kRows * kCols), whole(x.size()), rows(x.size());
  View in(x.data(), kF32, {kRows, kCols}), out(whole.data(), kF32, {kRows, kCols});
  te_fl_gelu_args args;
  args.input = &in.tensor;
  args.output = &out.tensor;
  run("gelu", &args);
  for (int64_t r = 0; r < kRows; ++r) {
    View in_row(x.data() + r * kCols, kF32, {kCols}),
        out_row(rows.data() + r * kCols, kF32, {kCols});
    args.input = &in_row.tensor;
    args.output = &out_row.tensor;
    run("gelu", &args);
  }
  expect_same_bytes(whole, rows);
}

TEST_F(CpuOps, LayernormOfAWholeTensorEqualsThatOfItsRows) {
  ASSERT_EQ(create("3"), TE_FL_OK);
  std::vector<float> x = numbers(kRows * kCols), g = numbers(kCols), whole(x.size()),
                     rows(x.size());
  std::vector<float> mu(kRows), rs(kRows), mu_rows(kRows), rs_rows(kRows);
  View gamma(g.data(), kF32, {kCols});
  te_fl_layernorm_fwd_args args;
  args.gamma = args.beta = &gamma.tensor;
  const auto normalise = [&](int64_t row, int64_t count, std::vector<float>& z,
                             std::vector<float>& m, std::vector<float>& r) {
    View in(x.data() + row * kCols, kF32, {count, kCols});
    View out(z.data() + row * kCols, kF32, {count, kCols});
    View mean(m.data() + row, kF32, {count}), rsigma(r.data() + row, kF32, {count});
    args.x = &in.tensor;
    args.z = &out.tensor;
    args.mu = &mean.tensor;
    args.rsigma = &rsigma.tensor;
    run("layernorm_fwd", &args);
  };
  normalise(0, kRows, whole, mu, rs);
  for (int64_t r = 0; r < kRows; ++r) normalise(r, 1, rows, mu_rows, rs_rows);
  expect_same_bytes(whole, rows);
  expect_same_bytes(mu, mu_rows);
  expect_same_bytes(rs, rs_rows);
}

TEST_F(CpuOps, TransposedCodesEqualTheRowwiseOnes) {
  ASSERT_EQ(create("4"), TE_FL_OK);
  // 34 MB of codes use streaming stores; columns start at multiples of 64 bytes.
  constexpr int64_t kM = 16448, kK = 2111;
  std::vector<float> x = numbers(kM * kK, 500.0f);
  std::vector<uint8_t> codes(x.size());
  const auto columnwise = std::make_unique<uint8_t[]>(x.size() + 64);
  auto* aligned =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(columnwise.get()) + 63) / 64 * 64);
  float scale = 0.5f, scale_inv = 0.0f, amax = 0.0f;
  View in(x.data(), kF32, {kM, kK}), out(codes.data(), kE4m3, {kM, kK});
  out.quant.scaling = TE_FL_SCALING_TENSOR;
  out.quant.columnwise_data = aligned;
  out.quant.scale = &scale;
  out.quant.scale_inv = &scale_inv;
  out.quant.amax = &amax;
  out.tensor.quant = &out.quant;
  te_fl_quantize_args args;
  args.input = &in.tensor;
  args.output = &out.tensor;
  run("quantize", &args);
  EXPECT_EQ(scale_inv, 2.0f);
  for (int64_t r = 0; r < kM; ++r) {
    for (int64_t c = 0; c < kK; ++c) {
      ASSERT_EQ(codes[static_cast<size_t>(r * kK + c)], aligned[c * kM + r]) << r << ", " << c;
    }
  }
}

TEST_F(CpuOps, ReductionsRepeatBitForBit) {
  ASSERT_EQ(create("4"), TE_FL_OK);
  constexpr int64_t kM = 1000, kH = 515;
  std::vector<float> dz = numbers(kM * kH), x = numbers(kM * kH, 7.0f), g = numbers(kH);
  std::vector<float> mu(kM, 0.1f), rs(kM, 0.3f), dx(dz.size());
  View dz_view(dz.data(), kF32, {kM, kH}), x_view(x.data(), kF32, {kM, kH});
  View mu_view(mu.data(), kF32, {kM}), rs_view(rs.data(), kF32, {kM}), gamma(g.data(), kF32, {kH});
  View dx_view(dx.data(), kF32, {kM, kH});
  std::vector<float> first;
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::vector<float> sums(static_cast<size_t>(2 * kH));
    View dgamma(sums.data(), kF32, {kH}), dbeta(sums.data() + kH, kF32, {kH});
    te_fl_layernorm_bwd_args args;
    args.dz = &dz_view.tensor;
    args.x = &x_view.tensor;
    args.mu = &mu_view.tensor;
    args.rsigma = &rs_view.tensor;
    args.gamma = &gamma.tensor;
    args.dx = &dx_view.tensor;
    args.dgamma = &dgamma.tensor;
    args.dbeta = &dbeta.tensor;
    run("layernorm_bwd", &args);
    if (repeat == 0) first = sums;
    expect_same_bytes(first, sums);
  }
}

TEST_F(CpuOps, DropoutMaskOfAddDoesNotDependOnTheNumberOfThreads) {
  std::vector<float> a = numbers(100'001), b = numbers(100'001);
  std::vector<std::vector<uint8_t>> masks;
  for (const char* threads : {"1", "4"}) {
    ASSERT_EQ(create(threads), TE_FL_OK);
    std::vector<float> y(a.size());
    std::vector<uint8_t> bits((a.size() + 7) / 8);
    const auto n = static_cast<int64_t>(a.size());
    View a_view(a.data(), kF32, {n}), b_view(b.data(), kF32, {n}), y_view(y.data(), kF32, {n});
    View mask(bits.data(), kU8, {static_cast<int64_t>(bits.size())});
    te_fl_add_args args;
    args.a = &a_view.tensor;
    args.b = &b_view.tensor;
    args.output = &y_view.tensor;
    args.mask = &mask.tensor;
    args.p = 0.25f;
    run("add", &args);
    masks.push_back(bits);
    api().destroy(instance_);
    instance_ = nullptr;
  }
  expect_same_bytes(masks[0], masks[1]);
}

// Rows of several chunks. The largest logit rises from chunk to chunk, or follows a chunk of masked
// classes, or one logit is NaN.
TEST_F(CpuOps, CrossEntropyOverRowsOfSeveralChunks) {
  ASSERT_EQ(create("2"), TE_FL_OK);
  constexpr int64_t kTestRows = 6, kClasses = 5000;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> x = numbers(kTestRows * kClasses), loss(kTestRows), lse(kTestRows);
  for (int64_t c = 0; c < kClasses; ++c) {
    const auto i = static_cast<size_t>(c);
    x[i] += 0.05f * static_cast<float>(c);
    x[kClasses + i] -= 0.05f * static_cast<float>(c);
    if (c < 2100) x[2 * kClasses + i] = -kInf;
  }
  x[3 * kClasses + 4999] = std::nanf("");
  x[4 * kClasses] = std::nanf("");
  x[5 * kClasses + 2500] = std::nanf("");
  std::vector<int64_t> targets(kTestRows, 4000);
  View logits(x.data(), kF32, {kTestRows, kClasses}), loss_view(loss.data(), kF32, {kTestRows});
  View target_view(targets.data(), {TE_FL_CODE_INT, 64, 1}, {kTestRows});
  View lse_view(lse.data(), kF32, {kTestRows});
  te_fl_cross_entropy_fwd_args args;
  args.logits = &logits.tensor;
  args.targets = &target_view.tensor;
  args.loss = &loss_view.tensor;
  args.lse = &lse_view.tensor;
  run("cross_entropy_fwd", &args);
  for (size_t row = 0; row < kTestRows; ++row) {
    if (row >= 3) {
      EXPECT_TRUE(std::isnan(lse[row]) && std::isnan(loss[row])) << row;
      continue;
    }
    const float* values = x.data() + row * kClasses;
    const double max = *std::max_element(values, values + kClasses);
    double sum = 0.0;
    for (int64_t c = 0; c < kClasses; ++c) sum += std::exp(values[c] - max);
    const double expected = max + std::log(sum);
    EXPECT_NEAR(lse[row], expected, 1e-6 * std::abs(expected) + 1e-6) << row;
    EXPECT_NEAR(loss[row], expected - values[4000], 2e-6 * std::abs(expected) + 2e-6) << row;
  }
}

TEST_F(CpuOps, ThreadCountMustBeANumberInRange) {
  for (const char* wrong : {"four", "4x", "-1", "1025", "99999999999999"}) {
    error_.clear();
    EXPECT_EQ(create(wrong), TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN) << wrong;
    EXPECT_HAS(error_, std::string("TE_FL_NUM_THREADS is \"") + wrong);
    EXPECT_EQ(instance_, nullptr);
  }
}

}  // namespace
}  // namespace te_fl::ops_test
