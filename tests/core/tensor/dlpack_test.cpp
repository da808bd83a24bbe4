#include "core/tensor/dlpack.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <type_traits>

#include "support/expect.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

using core::DlpackManaged;
using core::DlpackVersioned;

// A DLPack producer of strided [2, 3] views into its own buffer; counts the calls of its deleter.
template <class Managed>
struct Producer {
  float data[16];
  int64_t shape[2] = {2, 3};
  int64_t strides[2] = {8, 2};
  int deleted = 0;
  Managed managed{};

  Producer() {
    std::iota(std::begin(data), std::end(data), 0.0f);
    managed.manager_ctx = this;
    managed.deleter = [](Managed* m) { ++static_cast<Producer*>(m->manager_ctx)->deleted; };
    managed.dl_tensor = {data, {TE_FL_DEVICE_CPU, 0}, 2, {TE_FL_CODE_FLOAT, 32, 1}, shape, strides,
                         4};
    if constexpr (std::is_same_v<Managed, DlpackVersioned>) managed.version = {1, 0};
  }
  static constexpr bool versioned = std::is_same_v<Managed, DlpackVersioned>;
};

template <class Managed>
class Dlpack : public ::testing::Test {};
using Forms = ::testing::Types<DlpackManaged, DlpackVersioned>;
TYPED_TEST_SUITE(Dlpack, Forms);

TYPED_TEST(Dlpack, ImportSharesMemoryStridesAndOffset) {
  Producer<TypeParam> p;
  {
    const Tensor t = Tensor::from_dlpack(&p.managed, p.versioned).value();
    EXPECT_EQ(t.raw_data(), p.data + 1) << "byte_offset applies";
    EXPECT_EQ(t.strides()[0], 8);
    EXPECT_EQ(t.describe(), "f32[2,3] cpu");
    const Tensor copy = t.clone().value();
    EXPECT_EQ(copy.data<float>()[5], 13.0f);  // element [1][2] of the view has the value 1 + 8 + 2
                                              // * 2
    const Tensor more = t;
    EXPECT_EQ(p.deleted, 0);
  }
  EXPECT_EQ(p.deleted, 1);
}

TYPED_TEST(Dlpack, ErrorsLeaveTheTensorUntouched) {
  const auto refused = [](auto change, const char* text) {
    Producer<TypeParam> p;
    change(p);
    const auto result = Tensor::from_dlpack(&p.managed, p.versioned);
    EXPECT_FALSE(result.ok()) << text;
    EXPECT_HAS(result.status().to_string(), text);
    EXPECT_EQ(p.deleted, 0) << text;
  };
  using P = Producer<TypeParam>;
  refused([](P& p) { p.managed.dl_tensor.ndim = 9; }, "rank 9");
  refused([](P& p) { p.managed.dl_tensor.ndim = -1; }, "rank -1");
  refused([](P& p) { p.managed.dl_tensor.shape = nullptr; }, "shape is null");
  refused([](P& p) { p.managed.dl_tensor.dtype.lanes = 4; }, "lanes must be 1");
  refused(
      [](P& p) {
        p.managed.dl_tensor.dtype = {TE_FL_CODE_COMPLEX, 64, 1};
      },
      "not supported by te-fl");
  refused([](P& p) { p.managed.dl_tensor.byte_offset = 2; }, "not aligned");
  refused([](P& p) { p.shape[1] = -3; }, "negative");
  refused([](P& p) { p.managed.dl_tensor.data = nullptr; }, "data is null");
  refused([](P& p) { p.strides[0] = INT64_MAX; }, "63 bits");
  refused([](P& p) { p.managed.dl_tensor.dtype = {TE_FL_CODE_FLOAT4_E2M1FN, 4, 1}; }, "4-bit");
  refused([](P& p) { p.managed.dl_tensor.device = {TE_FL_DEVICE_EXT, 5}; }, "no plugin provides");
}

TYPED_TEST(Dlpack, NullDeleterAndNullStridesAreAllowed) {
  Producer<TypeParam> p;
  p.managed.deleter = nullptr;
  p.managed.dl_tensor.strides = nullptr;
  const Tensor t = Tensor::from_dlpack(&p.managed, p.versioned).value();
  EXPECT_TRUE(t.contiguous());
}

TYPED_TEST(Dlpack, ExportSharesUntilDeleted) {
  const int64_t before = devices::live_objects(Device{});
  void* raw = nullptr;
  {
    const Tensor t = Tensor::zeros({4, 3}, DType::kBF16).value();
    const Tensor view = t.transpose(0, 1)->slice(1, 1, 3).value();
    raw = view.to_dlpack(Producer<TypeParam>::versioned).value();
    const auto& dl = static_cast<TypeParam*>(raw)->dl_tensor;
    EXPECT_EQ(static_cast<char*>(dl.data) + dl.byte_offset, view.raw_data());
    EXPECT_EQ(dl.ndim, 2);
    EXPECT_EQ(dl.shape[0], 3);
    EXPECT_EQ(dl.shape[1], 2);
    EXPECT_EQ(dl.strides[0], 1);
    EXPECT_EQ(dl.strides[1], 3);
    EXPECT_EQ(dl.dtype.code, TE_FL_CODE_BFLOAT);
  }
  EXPECT_EQ(devices::live_objects(Device{}), before + 1) << "the export keeps the storage";
  auto* managed = static_cast<TypeParam*>(raw);
  managed->deleter(managed);
  EXPECT_EQ(devices::live_objects(Device{}), before);
}

TYPED_TEST(Dlpack, RoundTripOfOurOwn) {
  const Tensor t = Tensor::from_values({2, 2}, std::vector<float>{1, 2, 3, 4}).value();
  constexpr bool versioned = Producer<TypeParam>::versioned;
  const Tensor back = Tensor::from_dlpack(t.to_dlpack(versioned).value(), versioned).value();
  EXPECT_EQ(back.raw_data(), t.raw_data());
  EXPECT_TRUE(back.contiguous());
}

TEST(DlpackVersion, StridesAreGivenEvenIfCompact) {
  const Tensor t = Tensor::zeros({2, 3}, DType::kF32).value();
  auto* m = static_cast<DlpackVersioned*>(t.to_dlpack().value());
  ASSERT_NE(m->dl_tensor.strides, nullptr);
  EXPECT_EQ(m->dl_tensor.strides[0], 3);
  EXPECT_EQ(m->version.major, 1u);
  EXPECT_EQ(m->flags, 0u);
  m->deleter(m);
}

TEST(DlpackVersion, UnknownMajorIsRefusedClearly) {
  Producer<DlpackVersioned> p;
  p.managed.version = {2, 3};
  const Status s = Tensor::from_dlpack(&p.managed, true).status();
  EXPECT_EQ(s.code(), StatusCode::kIncompatible);
  EXPECT_FAILS(s, kIncompatible, "DLPack version 2.3, this build reads version 1.x");
  p.managed.version = {1, 99};
  EXPECT_OK(Tensor::from_dlpack(&p.managed, true)) << "a newer minor is compatible";
}

TEST(DlpackVersion, FlagsThatCannotBeHonouredAreRefused) {
  Producer<DlpackVersioned> p;
  p.managed.flags = core::kDlpackReadOnly;
  EXPECT_FAILS(Tensor::from_dlpack(&p.managed, true), kInvalidArgument, "read-only");
  p.managed.flags = core::kDlpackSubbytePadded;
  EXPECT_FAILS(Tensor::from_dlpack(&p.managed, true), kInvalidArgument, "padded");
  EXPECT_EQ(p.deleted, 0);
  p.managed.flags = core::kDlpackIsCopied;
  EXPECT_OK(Tensor::from_dlpack(&p.managed, true));
  EXPECT_FALSE(Tensor::from_dlpack(nullptr, true).ok());
}

TEST(DlpackVersion, QuantisedTensorsAreExportedByParts) {
  const int64_t shape[] = {4, 4};
  const Tensor t = Tensor::empty_quantized(shape, {}).value();
  EXPECT_FAILS(t.to_dlpack(), kInvalidArgument, "export its parts");
  auto* m = static_cast<DlpackManaged*>(t.rowwise_codes().to_dlpack(false).value());
  EXPECT_EQ(m->dl_tensor.dtype.code, TE_FL_CODE_UINT);
  m->deleter(m);
}

}  // namespace
}  // namespace te_fl
