// An output is taken for unwritten only if it still has the bits that the case put there: a NaN
// with any other bits is a result.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "conformance/case.hpp"
#include "conformance/compare.hpp"

namespace te_fl::conformance {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Poison, IsNoResultAndEveryNanIs) {
  for (const int dtype : {TE_FL_F64, TE_FL_F32, TE_FL_F16, TE_FL_BF16}) {
    Problem p("relu", 1);
    Tensor* y = p.out("output", dtype, {2, 3});
    const Expectation& e = p.expect(y, std::vector<double>(6, kNan));
    EXPECT_NE(compare(e).find("was not written"), std::string::npos) << name_of(dtype);
    for (int64_t i = 0; i < 6; ++i) y->put(i, kNan);
    EXPECT_EQ(compare(e), "") << name_of(dtype);
    std::fill_n(y->data->data(), y->data->size(), uint8_t{0xff});  // as AVX's masks
    EXPECT_EQ(compare(e), "") << name_of(dtype);
    const size_t width = y->data->size() / 6;
    std::memcpy(y->data->data() + 4 * width, y->data->initial(), width);
    EXPECT_NE(compare(e).find("output[1,1] was not written"), std::string::npos) << name_of(dtype);
  }
}

}  // namespace
}  // namespace te_fl::conformance
