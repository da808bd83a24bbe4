// Tests the element types of backends: which dtypes reach a kernel, under which type.
#include "te_fl/backend/elements.hpp"

#include <gtest/gtest.h>

#include <string>

#include "te_fl/dtype.hpp"

namespace te_fl {
namespace {

namespace b = te_fl::backend;

te_fl_tensor tensor_of(DType dtype) {
  te_fl_tensor t{};
  t.struct_size = sizeof t;
  t.dl.dtype = to_c(dtype);
  return t;
}

// The name of the type that for_element_type finds for a dtype, or the text of the refusal.
template <class... Types>
std::string found(DType dtype) {
  std::string name;
  try {
    b::for_element_type<Types...>("input", tensor_of(dtype), [&](auto type) {
      using T = typename decltype(type)::type;
      name = std::string(b::ElementType<T>::kName) + " of " + std::to_string(sizeof(T));
    });
  } catch (const b::Error& e) {
    EXPECT_EQ(e.status(), TE_FL_UNSUPPORTED);
    return e.what();
  }
  return name;
}

TEST(BackendElements, EachDtypeHasOneType) {
  const auto any = [](DType dtype) {
    return found<double, float, b::half, b::bfloat16, b::fp8e4m3, b::fp8e5m2, b::e8m0, int8_t,
                 int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, bool>(dtype);
  };
  for (int i = 0; i < TE_FL_DTYPE_COUNT; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (dtype == DType::kF4E2M1) continue;  // packed: its elements have no addresses
    const std::string bytes = std::to_string(to_c(dtype).bits / 8);
    EXPECT_EQ(any(dtype), std::string(name(dtype)) + " of " + bytes);
  }
}

TEST(BackendElements, OthersAreRefusedByName) {
  EXPECT_EQ((found<float, b::bfloat16>(DType::kBF16)), "bf16 of 2");
  EXPECT_EQ((found<float, b::bfloat16>(DType::kF16)),
            "the dtype of input must be one of f32, bf16");
  EXPECT_EQ((found<b::half>(DType::kBF16)), "the dtype of input must be one of f16");
}

TEST(BackendElements, TheMaskIsThatOfTheDescriptor) {
  EXPECT_EQ((b::kElementMask<float, b::bfloat16>), TE_FL_BIT(TE_FL_F32) | TE_FL_BIT(TE_FL_BF16));
  EXPECT_EQ((b::kElementMask<b::fp8e4m3, b::fp8e5m2>), TE_FL_MASK_FP8);
}

TEST(BackendElements, ConversionsRoundToNearestEven) {
  EXPECT_EQ(b::to_float(b::from_float<b::bfloat16>(1.00390625f)), 1.0f);  // half of a step above
  EXPECT_EQ(b::to_float(b::from_float<b::bfloat16>(1.01171875f)), 1.015625f);
  EXPECT_EQ(b::to_float(b::from_float<b::fp8e4m3>(1000.0f)), 448.0f);
  EXPECT_EQ(b::to_float(b::from_float<b::half>(65519.0f)), 65504.0f);
}

}  // namespace
}  // namespace te_fl
