#include "te_fl/dtype.hpp"
#include "support/expect.hpp"

#include <gtest/gtest.h>

#include <cctype>
#include <set>

namespace te_fl {
namespace {

constexpr int kCount = TE_FL_DTYPE_COUNT;
DType at(int i) { return static_cast<DType>(i); }

TEST(DType, CFormAndIndexAreInverse) {
  for (int i = 0; i < kCount; ++i) {
    EXPECT_EQ(dtype_index(to_c(at(i))), i) << name(at(i));
    EXPECT_EQ(dtype_from_c(to_c(at(i))).value(), at(i));
  }
}

// Tests every combination of code, bits and lanes: only the combinations of te-fl's dtypes have an
// index.
TEST(DType, ExactlyOurTriplesHaveAnIndex) {
  std::set<int> found;
  for (int code = 0; code < 256; ++code) {
    for (int bits = 0; bits < 256; ++bits) {
      const te_fl_dtype t{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
      if (dtype_index(t) != kInvalidDType) {
        EXPECT_TRUE(found.insert(dtype_index(t)).second);
      }
      const te_fl_dtype vector{t.code, t.bits, 2};
      EXPECT_EQ(dtype_index(vector), kInvalidDType);
    }
  }
  EXPECT_EQ(found.size(), static_cast<size_t>(kCount));
}

TEST(DType, BitsAndBytes) {
  const int expected[kCount] = {64, 32, 16, 16, 8, 8, 4, 8, 8, 16, 32, 64, 8, 16, 32, 64, 8};
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(bits(at(i)), expected[i]) << name(at(i));
  EXPECT_EQ(bytes_for(DType::kF32, 3), 12);
  EXPECT_EQ(bytes_for(DType::kF4E2M1, 0), 0);
  EXPECT_EQ(bytes_for(DType::kF4E2M1, 1), 1);
  EXPECT_EQ(bytes_for(DType::kF4E2M1, 4), 2);
  EXPECT_EQ(bytes_for(DType::kF4E2M1, INT64_MAX), INT64_C(1) << 62);
}

TEST(DType, NamesParseInAnyCase) {
  for (int i = 0; i < kCount; ++i) {
    std::string text(name(at(i)));
    EXPECT_EQ(parse_dtype(text).value(), at(i));
    for (char& c : text) c = static_cast<char>(std::toupper(c));
    EXPECT_EQ(parse_dtype(" " + text + "\t").value(), at(i));
  }
  EXPECT_EQ(parse_dtype("FP32").value(), DType::kF32);
  EXPECT_EQ(parse_dtype("bfloat16").value(), DType::kBF16);
  EXPECT_EQ(parse_dtype("e4m3").value(), DType::kF8E4M3);
  EXPECT_EQ(parse_dtype("float8_e5m2").value(), DType::kF8E5M2);
}

TEST(DType, AMisspeltNameGetsTheNearest) {
  const Status s = parse_dtype("bf61").status();
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(s.message().substr(0, 46), "unknown dtype 'bf61'; did you mean 'bf16'? (ac");
  EXPECT_LACKS(parse_dtype("zebra").status().message(), "did you mean");
  EXPECT_FALSE(parse_dtype("").ok());
}

TEST(DType, AForeignDLPackTypeIsNamed) {
  EXPECT_HAS(dtype_from_c({TE_FL_CODE_COMPLEX, 64, 1}).status().message(), "code 5, bits 64");
  EXPECT_HAS(dtype_from_c({TE_FL_CODE_FLOAT, 32, 4}).status().message(), "lanes must be 1");
}

TEST(Scaling, NamesAndAliases) {
  for (int i = 0; i < TE_FL_SCALING_COUNT; ++i) {
    const auto scaling = static_cast<Scaling>(i);
    EXPECT_EQ(parse_scaling(name(scaling)).value(), scaling);
  }
  EXPECT_EQ(parse_scaling("delayed").value(), Scaling::kTensor);
  EXPECT_EQ(parse_scaling("Current").value(), Scaling::kTensor);
  EXPECT_EQ(parse_scaling("block1d").value(), Scaling::kBlock1x128);
  EXPECT_EQ(parse_scaling("block2d").value(), Scaling::kBlock128x128);
  EXPECT_HAS(parse_scaling("mxpf8").status().message(), "did you mean 'mxfp8'?");
}

}  // namespace
}  // namespace te_fl
