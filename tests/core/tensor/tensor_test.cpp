#include "te_fl/tensor.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

namespace te_fl {
namespace {

std::vector<int64_t> vec(std::span<const int64_t> s) { return {s.begin(), s.end()}; }

Tensor iota(std::initializer_list<int64_t> shape) {
  int64_t n = 1;
  for (const int64_t e : shape) n *= e;
  std::vector<float> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 0.0f);
  return Tensor::from_values(shape, values).value();
}

std::vector<float> values(const Tensor& t) {
  const float* p = t.data<float>();
  return {p, p + t.numel()};
}

TEST(Tensor, UndefinedIsNull) {
  const Tensor t;
  EXPECT_FALSE(t.defined());
  EXPECT_EQ(t.c(), nullptr);
  EXPECT_EQ(t.numel(), 0);
  EXPECT_EQ(t.describe(), "null");
  EXPECT_FALSE(t.clone().ok());
  EXPECT_FALSE(t.view({1}).ok());
  EXPECT_FALSE(t.to_dlpack().ok());
}

TEST(Tensor, EmptyIsAlignedAndDescribed) {
  const Tensor t = Tensor::empty({2, 3, 5}, DType::kBF16).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(t.raw_data()) % 256, 0u);
  EXPECT_EQ(t.describe(), "bf16[2,3,5] cpu");
  EXPECT_EQ(t.numel(), 30);
  EXPECT_EQ(t.size(-1), 5);
  EXPECT_EQ(t.size(0), 2);
  EXPECT_EQ(vec(t.strides()), (std::vector<int64_t>{15, 5, 1}));
  EXPECT_TRUE(t.contiguous());
  EXPECT_EQ(t.c()->dl.strides, nullptr) << "a compact tensor has NULL strides in the ABI";
  EXPECT_EQ(t.c()->struct_size, sizeof(te_fl_tensor));
}

TEST(Tensor, ScalarsAndEmptyTensors) {
  const Tensor scalar = Tensor::zeros({}, DType::kF32).value();
  EXPECT_EQ(scalar.rank(), 0);
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_EQ(*scalar.data<float>(), 0.0f);
  const Tensor none = Tensor::zeros({3, 0, 2}, DType::kF32).value();
  EXPECT_EQ(none.numel(), 0);
  EXPECT_OK(none.clone());
  const int64_t shape[] = {0, 8}, strides[] = {0, 0};  // as PyTorch's expand() leaves them
  const auto expanded = Tensor::wrap(nullptr, shape, strides, DType::kF32, {}, nullptr);
  ASSERT_OK(expanded);
  EXPECT_TRUE(expanded->contiguous());
}

TEST(Tensor, ConstructorsRefuse) {
  EXPECT_FAILS(Tensor::empty({2, -3}, DType::kF32), kInvalidArgument, "extent -3 is negative");
  EXPECT_FAILS(Tensor::empty({1, 1, 1, 1, 1, 1, 1, 1, 1}, DType::kF32), kInvalidArgument,
               "rank 9 is more than 8");
  const int64_t big = int64_t{1} << 40;
  EXPECT_FAILS(Tensor::empty({big, big}, DType::kF32), kInvalidArgument, "does not fit 63 bits");
  EXPECT_FAILS(Tensor::empty({int64_t{1} << 62}, DType::kF32), kInvalidArgument,
               "does not fit 63 bits");
  EXPECT_FAILS(Tensor::empty({0, big, big}, DType::kU8), kInvalidArgument, "does not fit 63 bits");
  EXPECT_EQ(Tensor::empty({int64_t{1} << 60}, DType::kU8).status().code(),
            StatusCode::kOutOfMemory);
  EXPECT_EQ(Tensor::empty({2}, DType::kF32, {TE_FL_DEVICE_CUDA, 0, 0}).status().code(),
            StatusCode::kNotFound);
}

TEST(TensorDeathTest, SizeOutOfRangeAborts) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const Tensor t = Tensor::zeros({2}, DType::kF32).value();
  EXPECT_DEATH((void)t.size(1), "no such dimension");
}

TEST(Tensor, CopiesShareAndRebind) {
  Tensor a = iota({2, 3}).transpose(0, 1).value();
  Tensor b = a;
  EXPECT_EQ(b.raw_data(), a.raw_data());
  EXPECT_NE(b.c()->dl.shape, a.c()->dl.shape) << "each object points to its own arrays";
  EXPECT_EQ(b.c()->dl.strides, b.strides().data());
  Tensor c = std::move(a);
  EXPECT_FALSE(a.defined());  // NOLINT: a moved-from tensor is undefined
  EXPECT_EQ(c.c()->dl.shape, c.shape().data());
  a = c;
  c = std::move(b);
  EXPECT_EQ(vec(c.shape()), (std::vector<int64_t>{3, 2}));
  c = *&c;
  EXPECT_TRUE(c.defined());
  const QuantSpec spec;
  const int64_t shape[] = {4, 4};
  Tensor q = Tensor::empty_quantized(shape, spec).value();
  Tensor r = q;
  EXPECT_NE(r.c()->quant, q.c()->quant);
  EXPECT_EQ(r.c()->quant->scale_inv, q.c()->quant->scale_inv);
}

TEST(Tensor, FromValuesConvertsExactly) {
  const std::vector<float> v = {0.0f, 1.0f, -2.5f, 65504.0f};
  const Tensor h = Tensor::from_values({4}, v, DType::kF16).value();
  const uint16_t f16[] = {0x0000, 0x3c00, 0xc100, 0x7bff};
  EXPECT_EQ(std::memcmp(h.raw_data(), f16, sizeof f16), 0);
  const Tensor e = Tensor::from_values({4}, v, DType::kF8E4M3).value();
  const uint8_t f8[] = {0x00, 0x38, 0xc2, 0x7e};  // 448 saturates
  EXPECT_EQ(std::memcmp(e.raw_data(), f8, sizeof f8), 0);
  const Tensor d = Tensor::from_values({4}, v, DType::kF64).value();
  EXPECT_EQ(d.data<double>()[2], -2.5);
  const Tensor f4 =
      Tensor::from_values({3}, std::vector<float>{0.5f, -6.0f, 1.0f}, DType::kF4E2M1).value();
  EXPECT_EQ(f4.data<uint8_t>()[0], 0xf1);  // low nibble first
  EXPECT_EQ(f4.data<uint8_t>()[1], 0x02);
  const Tensor b = Tensor::from_values({2}, std::vector<float>{1, 0}, DType::kBool).value();
  EXPECT_EQ(b.data<uint8_t>()[0], 1);
}

// The device's streams run late, so values that were read after the call would be seen.
TEST(Tensor, FromValuesOnADevice) {
  testing::FarDevice far;
  const Device device = devices::add(&far.desc).value();
  {
    std::vector<float> v = {0.0f, 1.0f, -2.5f, 65504.0f};
    const Result<Tensor> t = Tensor::from_values({2, 2}, v, DType::kF16, device);
    v.assign(4, 9.0f);
    ASSERT_OK(t);
    EXPECT_EQ(t->device(), device);
    const Result<Tensor> back = t->to(Device{});
    ASSERT_OK(back);
    const uint16_t f16[] = {0x0000, 0x3c00, 0xc100, 0x7bff};
    EXPECT_EQ(std::memcmp(back->raw_data(), f16, sizeof f16), 0);
    EXPECT_FAILS(Tensor::from_values({3}, v, DType::kF32, device).status(), kInvalidArgument,
                 "4 values for shape [3]");
  }
  EXPECT_OK(devices::remove(device));
  EXPECT_FAILS(Tensor::from_values({1}, std::vector<float>{1}, DType::kF32, device).status(),
               kNotFound, "ext:far:0");
}

TEST(Tensor, FromValuesRefusesWhatDoesNotFit) {
  const auto try_one = [](float v, DType t) {
    return Tensor::from_values({1}, std::vector<float>{v}, t).status();
  };
  EXPECT_OK(try_one(127, DType::kI8));
  EXPECT_OK(try_one(-128, DType::kI8));
  EXPECT_FAILS(try_one(128, DType::kI8), kInvalidArgument, "cannot be stored as i8");
  EXPECT_FALSE(try_one(-129, DType::kI8).ok());
  EXPECT_FALSE(try_one(1.5f, DType::kI32).ok());
  EXPECT_FALSE(try_one(0x1p31f, DType::kI32).ok());
  EXPECT_OK(try_one(-0x1p31f, DType::kI32));
  EXPECT_FALSE(try_one(0x1p63f, DType::kI64).ok());
  EXPECT_OK(try_one(0x1p63f, DType::kU64));
  EXPECT_FALSE(try_one(-1, DType::kU8).ok());
  EXPECT_FALSE(try_one(NAN, DType::kI32).ok());
  EXPECT_FALSE(try_one(2, DType::kBool).ok());
  EXPECT_FAILS(Tensor::from_values({2, 2}, std::vector<float>{1, 2, 3}), kInvalidArgument,
               "3 values for shape [2, 2], which has 4 elements");
}

TEST(Tensor, WrapChecksMemory) {
  alignas(16) float data[12] = {};
  const int64_t shape[] = {3, 4}, strides[] = {4, 1}, one[] = {1};
  EXPECT_OK(Tensor::wrap(data, shape, {}, DType::kF32, {}, nullptr));
  EXPECT_TRUE(Tensor::wrap(data, shape, strides, DType::kF32, {}, nullptr)->contiguous());
  EXPECT_FAILS(Tensor::wrap(reinterpret_cast<char*>(data) + 2, shape, {}, DType::kF32, {}, nullptr),
               kInvalidArgument, "not aligned to the element's 4 bytes");
  EXPECT_FAILS(Tensor::wrap(nullptr, shape, {}, DType::kF32, {}, nullptr), kInvalidArgument,
               "its data is null");
  EXPECT_FAILS(Tensor::wrap(data, shape, one, DType::kF32, {}, nullptr), kInvalidArgument,
               "1 strides for rank 2");
  const int64_t far[] = {INT64_MAX / 2, 1};
  EXPECT_FAILS(Tensor::wrap(data, shape, far, DType::kF32, {}, nullptr), kInvalidArgument,
               "reach beyond 63 bits");
  const int64_t least[] = {INT64_MIN, 1};
  EXPECT_FALSE(Tensor::wrap(data, shape, least, DType::kF32, {}, nullptr).ok());
  const int64_t none[] = {0};
  EXPECT_OK(Tensor::wrap(nullptr, none, {}, DType::kF32, {}, nullptr));
  const int64_t column[] = {1, 3};
  EXPECT_FAILS(Tensor::wrap(data, shape, column, DType::kF4E2M1, {}, nullptr), kInvalidArgument,
               "packed");
}

TEST(Tensor, WrapKeepsTheOwner) {
  const auto owner = std::make_shared<std::vector<float>>(4);
  const int64_t shape[] = {4};
  {
    const Tensor t = Tensor::wrap(owner->data(), shape, {}, DType::kF32, {}, owner).value();
    const Tensor part = t.slice(0, 1, 2).value();
    EXPECT_EQ(owner.use_count(), 3);
  }
  EXPECT_EQ(owner.use_count(), 1);
}

TEST(Tensor, Views) {
  const Tensor t = iota({2, 3, 4});
  EXPECT_EQ(vec(t.view({6, -1})->shape()), (std::vector<int64_t>{6, 4}));
  EXPECT_EQ(vec(t.view({24})->shape()), (std::vector<int64_t>{24}));
  EXPECT_EQ(t.view({4, 6})->raw_data(), t.raw_data());
  EXPECT_FAILS(t.view({5, 5}), kInvalidArgument,
               "cannot view f32[2,3,4] cpu as [5, 5]: it has 24 elements, not 25");
  EXPECT_FAILS(t.view({-1, -1}), kInvalidArgument, "only one extent may be -1");
  EXPECT_FALSE(t.view({-1, 5}).ok());
  EXPECT_FALSE(t.view({-1, 0}).ok());
  EXPECT_FALSE(t.view({-2, 12}).ok());
  EXPECT_FAILS(t.transpose(0, 1)->view({24}), kInvalidArgument, "not contiguous");
  EXPECT_EQ(vec(Tensor::zeros({0, 4}, DType::kF32)->view({0})->shape()), (std::vector<int64_t>{0}));
}

TEST(Tensor, SliceAndTranspose) {
  const Tensor t = iota({4, 3});
  const Tensor rows = t.slice(0, 1, 3).value();
  EXPECT_TRUE(rows.contiguous());
  EXPECT_EQ(rows.data<float>()[0], 3.0f);
  const Tensor column = t.slice(-1, 2, 3).value();
  EXPECT_FALSE(column.contiguous());
  EXPECT_EQ(values(column.clone().value()), (std::vector<float>{2, 5, 8, 11}));
  EXPECT_EQ(values(t.transpose(0, 1)->clone().value()),
            (std::vector<float>{0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11}));
  EXPECT_EQ(values(t.transpose(0, 1)->slice(0, 1, 2)->clone().value()),
            (std::vector<float>{1, 4, 7, 10}));
  EXPECT_EQ(t.slice(0, 4, 4)->numel(), 0);
  EXPECT_FAILS(t.slice(0, 2, 5), kInvalidArgument, "the range must lie in [0, 4]");
  EXPECT_FALSE(t.slice(0, 3, 2).ok());
  EXPECT_FALSE(t.slice(2, 0, 1).ok());
  EXPECT_FALSE(t.transpose(0, 2).ok());
}

TEST(Tensor, StorageLivesAsLongAsAView) {
  const int64_t before = devices::live_objects(Device{});
  Tensor view;
  {
    const Tensor t = iota({4});
    view = t.slice(0, 2, 4).value();
  }
  EXPECT_EQ(devices::live_objects(Device{}), before + 1);
  EXPECT_EQ(view.data<float>()[1], 3.0f);
  view = Tensor();
  EXPECT_EQ(devices::live_objects(Device{}), before);
}

TEST(Tensor, NegativeStridesAreGathered) {
  float data[4] = {0, 1, 2, 3};
  const int64_t shape[] = {4}, strides[] = {-1};
  const Tensor t = Tensor::wrap(data + 3, shape, strides, DType::kF32, {}, nullptr).value();
  EXPECT_EQ(values(t.clone().value()), (std::vector<float>{3, 2, 1, 0}));
}

// ---- quantised tensors

// Extents of the scales of a logical [130, 200] matrix, derived by hand from the table in
// te_fl_quant's header comment.
struct ScaleCase {
  Scaling scaling;
  DType dtype;
  std::array<int64_t, 2> row, column;
  DType scale_dtype;
};
const ScaleCase kScaleCases[] = {
    {Scaling::kBlock1x128, DType::kF8E4M3, {2, 132}, {2, 200}, DType::kF32},
    {Scaling::kBlock128x128, DType::kF8E4M3, {2, 4}, {2, 4}, DType::kF32},
    {Scaling::kMXFP8, DType::kF8E5M2, {256, 8}, {8, 256}, DType::kF8E8M0},
    {Scaling::kNVFP4, DType::kF4E2M1, {256, 16}, {256, 12}, DType::kF8E4M3},
};

TEST(ScaleInvShape, FollowsTheTable) {
  for (const ScaleCase& c : kScaleCases) {
    EXPECT_EQ(scale_inv_shape(c.scaling, false, 130, 200), c.row) << name(c.scaling);
    EXPECT_EQ(scale_inv_shape(c.scaling, true, 130, 200), c.column) << name(c.scaling);
  }
  EXPECT_EQ(scale_inv_shape(Scaling::kTensor, false, 130, 200), (std::array<int64_t, 2>{1, 1}));
  EXPECT_EQ(scale_inv_shape(Scaling::kBlock1x128, false, 0, 128), (std::array<int64_t, 2>{1, 0}));
}

TEST(QuantisedTensor, PartsOfEveryScalingMode) {
  const int64_t shape[] = {10, 13, 200};
  for (const ScaleCase& c : kScaleCases) {
    QuantSpec spec;
    spec.dtype = c.dtype;
    spec.scaling = c.scaling;
    spec.columnwise = true;
    const Tensor t = Tensor::empty_quantized(shape, spec).value();
    EXPECT_TRUE(t.quantized() && t.has_rowwise() && t.has_columnwise());
    EXPECT_EQ(vec(t.scale_inv().shape()), std::vector<int64_t>(c.row.begin(), c.row.end()));
    EXPECT_EQ(vec(t.columnwise_scale_inv().shape()),
              std::vector<int64_t>(c.column.begin(), c.column.end()));
    EXPECT_EQ(t.scale_inv().dtype(), c.scale_dtype);
    const bool four_bit = c.dtype == DType::kF4E2M1;
    EXPECT_EQ(t.rowwise_codes().numel(), four_bit ? 13000 : 26000);
    EXPECT_EQ(t.columnwise_codes().numel(), four_bit ? 13000 : 26000);
    if (!four_bit) {
      const bool transposed = c.scaling != Scaling::kMXFP8;
      EXPECT_EQ(vec(t.columnwise_codes().shape()),
                (transposed ? std::vector<int64_t>{200, 130} : std::vector<int64_t>{130, 200}));
    }
    EXPECT_EQ(t.amax().defined(), c.scaling == Scaling::kNVFP4);
    EXPECT_FALSE(t.scale().defined());
    for (const Tensor& part : {t.scale_inv(), t.columnwise_scale_inv()}) {
      const auto* bytes = part.data<uint8_t>();
      for (int64_t i = 0; i < bytes_for(part.dtype(), part.numel()); ++i) ASSERT_EQ(bytes[i], 0);
    }
  }
}

TEST(QuantisedTensor, ACopyOfBothAmaxes) {
  QuantSpec spec;
  spec.dtype = DType::kF4E2M1;
  spec.scaling = Scaling::kNVFP4;
  spec.columnwise = spec.own_columnwise_amax = true;
  const int64_t shape[] = {4, 6};
  const Tensor t = Tensor::empty_quantized(shape, spec).value();
  EXPECT_EQ(t.columnwise_amax().data<float>()[0], 0.0f);
  t.amax().data<float>()[0] = 2;
  t.columnwise_amax().data<float>()[0] = 3;
  const Tensor copy = t.clone().value();
  EXPECT_EQ(copy.amax().data<float>()[0], 2.0f);
  EXPECT_EQ(copy.columnwise_amax().data<float>()[0], 3.0f);
  EXPECT_NE(copy.columnwise_amax().raw_data(), t.columnwise_amax().raw_data());
  EXPECT_FALSE(t.rowwise_only().columnwise_amax().defined());
  spec.columnwise = false;
  EXPECT_FAILS(Tensor::empty_quantized(shape, spec).status(), kInvalidArgument,
               "only the column-wise copy of a scaling with a second level has its own amax");
  spec = QuantSpec();
  spec.columnwise = spec.own_columnwise_amax = true;
  EXPECT_FAILS(Tensor::empty_quantized(shape, spec).status(), kInvalidArgument, "second level");
}

TEST(QuantisedTensor, WithoutAnAmax) {
  const int64_t shape[] = {4, 6};
  QuantSpec spec;
  spec.amax = false;
  const Tensor scale = Tensor::from_values({1}, std::vector<float>{2}, DType::kF32).value();
  const Tensor t = Tensor::empty_quantized(shape, spec, Device{}, &scale).value();
  EXPECT_FALSE(t.amax().defined());
  EXPECT_EQ(t.scale_inv().data<float>()[0], 0.0f);
  EXPECT_TRUE(t.clone().value().amax().defined()) << "a copy is as by default";
  constexpr const char* kRule = "one of scaling tensor under a given scale";
  EXPECT_FAILS(Tensor::empty_quantized(shape, spec).status(), kInvalidArgument, kRule);
  EXPECT_FAILS(Tensor::empty_quantized(shape, spec, Device{}, &scale, &scale).status(),
               kInvalidArgument, kRule);
  spec.scaling = Scaling::kBlock1x128;
  EXPECT_FAILS(Tensor::empty_quantized(shape, spec).status(), kInvalidArgument, kRule);
}

TEST(QuantisedTensor, PerTensorScaling) {
  const int64_t shape[] = {4, 6};
  QuantSpec spec;
  spec.columnwise = true;
  spec.compute_scale = true;
  spec.pow2_scale = true;
  spec.amax_epsilon = 0.25f;
  const Tensor t = Tensor::empty_quantized(shape, spec).value();
  EXPECT_EQ(t.describe(), "f8e4m3[4,6] tensor row+col cpu");
  EXPECT_EQ(t.scale_inv().data<float>()[0], 0.0f);
  EXPECT_EQ(t.columnwise_scale_inv().raw_data(), t.scale_inv().raw_data())
      << "one value serves both";
  EXPECT_EQ(t.amax().data<float>()[0], 0.0f);
  EXPECT_EQ(t.scale().data<float>()[0], 1.0f);
  EXPECT_EQ(vec(t.scale_inv().shape()), (std::vector<int64_t>{1}));
  EXPECT_EQ(t.c()->quant->flags, uint32_t{TE_FL_QUANT_COMPUTE_SCALE | TE_FL_QUANT_POW2_SCALE});
  EXPECT_EQ(t.c()->quant->amax_epsilon, 0.25f);
}

TEST(QuantisedTensor, ColumnwiseOnly) {
  const int64_t shape[] = {4, 6};
  QuantSpec spec;
  spec.rowwise = false;
  spec.columnwise = true;
  const Tensor t = Tensor::empty_quantized(shape, spec).value();
  EXPECT_EQ(t.raw_data(), nullptr);
  EXPECT_FALSE(t.has_rowwise());
  EXPECT_FALSE(t.rowwise_codes().defined());
  EXPECT_TRUE(t.scale_inv().defined());
  EXPECT_EQ(t.describe(), "f8e4m3[4,6] tensor col cpu");
  EXPECT_TRUE(t.clone()->has_columnwise());
  EXPECT_FALSE(t.clone()->has_rowwise());
}

// columnwise_only() keeps the column-wise data and scales in place and releases the row-wise ones.
TEST(QuantisedTensor, ColumnwiseOnlyOfBothCopies) {
  const int64_t shape[] = {128, 256};
  for (Scaling scaling : {Scaling::kTensor, Scaling::kBlock1x128}) {
    QuantSpec spec;
    spec.scaling = scaling;
    EXPECT_FALSE(Tensor::empty_quantized(shape, spec)->columnwise_only().defined());
    spec.columnwise = true;
    const Tensor both = Tensor::empty_quantized(shape, spec).value();
    const Tensor t = both.columnwise_only();
    EXPECT_FALSE(t.has_rowwise());
    EXPECT_EQ(t.raw_data(), nullptr);
    EXPECT_EQ(vec(t.shape()), (std::vector<int64_t>{128, 256}));
    EXPECT_EQ(t.columnwise_codes().raw_data(), both.columnwise_codes().raw_data());
    EXPECT_EQ(t.columnwise_scale_inv().raw_data(), both.columnwise_scale_inv().raw_data());
    EXPECT_EQ(t.scale_inv().defined(), scaling == Scaling::kTensor);
  }
  EXPECT_FALSE(Tensor::empty(shape, DType::kF32)->columnwise_only().defined());
}

TEST(QuantisedTensor, StateOfOthersIsUsedInPlace) {
  const int64_t shape[] = {4, 4};
  const Tensor scales = iota({3}), amaxes = iota({3});
  const Tensor scale = scales.slice(0, 2, 3).value(), amax = amaxes.slice(0, 1, 2).value();
  const Tensor t = Tensor::empty_quantized(shape, {}, {}, &scale, &amax).value();
  EXPECT_EQ(t.scale().raw_data(), scales.data<float>() + 2);
  EXPECT_EQ(t.scale().data<float>()[0], 2.0f) << "given state is not reset";
  EXPECT_EQ(t.amax().raw_data(), amaxes.data<float>() + 1);
  const Tensor two = iota({2});
  EXPECT_FAILS(Tensor::empty_quantized(shape, {}, {}, &two), kInvalidArgument,
               "must be one f32 on cpu, not f32[2] cpu");
  QuantSpec block;
  block.scaling = Scaling::kBlock1x128;
  EXPECT_FAILS(Tensor::empty_quantized(shape, block, {}, &scale), kInvalidArgument,
               "derives its scales");
}

TEST(QuantisedTensor, SpecsThatCannotBe) {
  const int64_t shape[] = {4, 4};
  const auto refused = [&](DType dtype, Scaling scaling) {
    QuantSpec spec;
    spec.dtype = dtype;
    spec.scaling = scaling;
    return Tensor::empty_quantized(shape, spec).status();
  };
  EXPECT_FAILS(refused(DType::kF32, Scaling::kTensor), kInvalidArgument,
               "needs dtype f8e4m3 or f8e5m2");
  EXPECT_FAILS(refused(DType::kF8E4M3, Scaling::kNVFP4), kInvalidArgument,
               "nvfp4 needs dtype f4e2m1");
  EXPECT_FAILS(refused(DType::kF4E2M1, Scaling::kMXFP8), kInvalidArgument, "needs dtype");
  EXPECT_FAILS(refused(DType::kF8E4M3, Scaling::kNone), kInvalidArgument, "use empty()");
  QuantSpec neither;
  neither.rowwise = false;
  EXPECT_FAILS(Tensor::empty_quantized(shape, neither), kInvalidArgument, "a row-wise copy");
  QuantSpec negative;
  negative.amax_epsilon = -1;
  EXPECT_FALSE(Tensor::empty_quantized(shape, negative).ok());
  negative.amax_epsilon = NAN;
  EXPECT_FALSE(Tensor::empty_quantized(shape, negative).ok());
  const int64_t bad[] = {4, -4};
  EXPECT_FALSE(Tensor::empty_quantized(bad, {}).ok());
}

TEST(QuantisedTensor, ViewsKeepTheLastDimension) {
  const int64_t shape[] = {2, 3, 8};
  const Tensor t = Tensor::empty_quantized(shape, {}).value();
  const Tensor v = t.view({6, 8}).value();
  EXPECT_EQ(v.scale_inv().raw_data(), t.scale_inv().raw_data());
  EXPECT_FALSE(t.transpose(0, 1).ok());
  QuantSpec both;
  both.columnwise = true;
  const Tensor two = Tensor::empty_quantized(shape, both).value();
  EXPECT_FAILS(two.view({3, 16}), kInvalidArgument, "last dimension must stay");
  EXPECT_FAILS(two.slice(0, 0, 1), kInvalidArgument, "without a column-wise copy");
  QuantSpec mx;
  mx.scaling = Scaling::kMXFP8;
  EXPECT_FAILS(Tensor::empty_quantized(shape, mx)->view({6, 8}), kInvalidArgument,
               "does not allow views");
}

TEST(QuantisedTensor, OneScaleAndOneCopyGoInAnyShapeAndInSlices) {
  const int64_t shape[] = {2, 3, 8};
  QuantSpec spec;
  spec.columnwise = true;
  const Tensor both = Tensor::empty_quantized(shape, spec).value();
  const Tensor t = both.rowwise_only();
  EXPECT_TRUE(both.has_columnwise());
  EXPECT_FALSE(t.has_columnwise());
  EXPECT_EQ(t.raw_data(), both.raw_data());
  EXPECT_EQ(t.scale_inv().raw_data(), both.scale_inv().raw_data());
  EXPECT_EQ(t.view({3, 16})->scale().raw_data(), both.scale().raw_data());
  auto* codes = t.data<uint8_t>();
  for (int i = 0; i < 48; ++i) codes[i] = static_cast<uint8_t>(i);
  const Tensor part = t.slice(2, 2, 6).value();
  EXPECT_TRUE(part.quantized());
  EXPECT_EQ(part.amax().raw_data(), t.amax().raw_data());
  EXPECT_EQ(part.strides()[1], 8);
  EXPECT_EQ(part.rowwise_codes().strides()[1], 8);
  const Tensor copied = part.clone().value();
  EXPECT_TRUE(copied.contiguous());
  for (int i = 0; i < 24; ++i) EXPECT_EQ(copied.data<uint8_t>()[i], i / 4 * 8 + 2 + i % 4);
  spec.rowwise = false;
  EXPECT_FALSE(Tensor::empty_quantized(shape, spec)->rowwise_only().defined());
}

TEST(QuantisedTensor, ToCopiesEveryPart) {
  for (const Scaling scaling :
       {Scaling::kTensor, Scaling::kBlock1x128, Scaling::kMXFP8, Scaling::kNVFP4}) {
    const int64_t shape[] = {5, 32};
    QuantSpec spec;
    spec.scaling = scaling;
    spec.dtype = scaling == Scaling::kNVFP4 ? DType::kF4E2M1 : DType::kF8E4M3;
    spec.columnwise = true;
    const Tensor t = Tensor::empty_quantized(shape, spec).value();
    const auto parts = [](const Tensor& x) {
      return std::vector<Tensor>{x.rowwise_codes(), x.columnwise_codes(),
                                 x.scale_inv(),     x.columnwise_scale_inv(),
                                 x.amax(),          x.scale()};
    };
    uint8_t mark = 1;
    for (const Tensor& p : parts(t)) {
      if (p.defined())
        std::memset(p.raw_data(), mark++, static_cast<size_t>(bytes_for(p.dtype(), p.numel())));
    }
    const Tensor copy = t.clone().value();
    const auto from = parts(t), to = parts(copy);
    for (size_t i = 0; i < from.size(); ++i) {
      ASSERT_EQ(from[i].defined(), to[i].defined()) << i;
      if (!from[i].defined()) continue;
      EXPECT_NE(from[i].raw_data(), to[i].raw_data());
      const auto bytes = static_cast<size_t>(bytes_for(from[i].dtype(), from[i].numel()));
      EXPECT_EQ(std::memcmp(from[i].raw_data(), to[i].raw_data(), bytes), 0)
          << name(scaling) << " part " << i;
    }
  }
}

TEST(QuantisedTensor, ACopyToTheHostThatFailsIsWaitedForBeforeItsMemoryGoes) {
  testing::FarDevice far;
  static const auto copy = far.api.copy;
  static int reads = 0;
  far.api.copy = [](void* self, void* dst, const void* src, size_t bytes, uint32_t host,
                    void* stream, const te_fl_error_sink* e) -> te_fl_status {
    if (host == 1 && ++reads == 2) return TE_FL_OUT_OF_MEMORY;
    return copy(self, dst, src, bytes, host, stream, e);
  };
  const Device device = devices::add(&far.desc).value();
  {
    const int64_t shape[] = {64, 64};
    const Tensor q = Tensor::empty_quantized(shape, {.columnwise = true}, device).value();
    ASSERT_OK(devices::synchronize(device));
    EXPECT_FAILS(q.to(Device{}), kOutOfMemory, "copy of 4096 bytes by ext:far:0 failed");
    EXPECT_EQ(far.queues.pending(nullptr), 0u) << "it would write into memory that has been freed";
  }
  EXPECT_OK(devices::remove(device));
}

TEST(Describe, SurvivesNonsense) {
  te_fl_tensor t;
  t.dl = {};
  EXPECT_EQ(describe(nullptr), "null");
  t.struct_size = 3;
  EXPECT_EQ(describe(&t), "a tensor with struct_size 3");
  t.struct_size = sizeof t;
  t.dl.ndim = 1000000;
  t.dl.dtype = {200, 7, 9};
  EXPECT_EQ(describe(&t), "dtype{code 200, bits 7, lanes 9}[rank 1000000] dlpack0:0");
  t.dl.ndim = 2;
  EXPECT_HAS(describe(&t), "[rank 2]") << "shape is null";
}

}  // namespace
}  // namespace te_fl
