// The mapping of CUDA errors to te-fl's status codes. The numbers are part of CUDA's ABI: the test
// lists those of which driver_types.h says "the process must be terminated and relaunched", and
// those after which the context or device is lost.
#include <gtest/gtest.h>

#include <set>

#include "backends/cuda/device/cuda_check.hpp"

namespace te_fl::cuda {
namespace {

const std::set<int> kNewProcess = {226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};
const std::set<int> kGone = {201, 214, 220, 709};

te_fl_status of(int number) { return to_status(static_cast<cudaError_t>(number)); }

TEST(CudaStatus, ErrorsThatNeedANewProcessLoseTheDevice) {
  for (int number = 0; number < 1100; ++number) {
    const bool lost = kNewProcess.count(number) + kGone.count(number) > 0;
    EXPECT_EQ(of(number) == TE_FL_DEVICE_LOST, lost) << "cudaError " << number;
    EXPECT_EQ(is_sticky(static_cast<cudaError_t>(number)), lost) << "cudaError " << number;
  }
}

TEST(CudaStatus, OtherErrorsHaveTheirOwnCodes) {
  EXPECT_EQ(of(0), TE_FL_OK);
  EXPECT_EQ(of(2), TE_FL_OUT_OF_MEMORY);
  EXPECT_EQ(of(400), TE_FL_INVALID_ARGUMENT);  // 400: a stream or event of another device
  EXPECT_EQ(of(209), TE_FL_UNSUPPORTED);       // 209: no kernel image for the device
  for (const int capture : {900, 901, 906}) EXPECT_EQ(of(capture), TE_FL_FAILED_PRECONDITION);
  EXPECT_EQ(of(1), TE_FL_INTERNAL);
  EXPECT_EQ(of(999), TE_FL_INTERNAL);  // 999: unknown error; the device may still work
}

}  // namespace
}  // namespace te_fl::cuda
