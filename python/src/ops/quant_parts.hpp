// The parts of a quantised tensor and the scaling modes by their names in Python. Independent of
// Python.
#pragma once

#include <cstddef>
#include <iterator>

#include "te_fl/plugin.h"

namespace te_fl::python {

// The pointers of te_fl_quant and their names in te_fl.Quantized.
struct Part {
  const char* name;
  size_t offset;
};
inline constexpr Part kParts[] = {
    {"columnwise_data", offsetof(te_fl_quant, columnwise_data)},
    {"scale_inv", offsetof(te_fl_quant, scale_inv)},
    {"columnwise_scale_inv", offsetof(te_fl_quant, columnwise_scale_inv)},
    {"amax", offsetof(te_fl_quant, amax)},
    {"columnwise_amax", offsetof(te_fl_quant, columnwise_amax)},
    {"scale", offsetof(te_fl_quant, scale)},
};
inline constexpr size_t kPartCount = std::size(kParts);
// Indices into kParts.
inline constexpr int kColumnwiseData = 0, kScaleInv = 1, kColumnwiseScaleInv = 2;

// te_fl.tensors.SCALINGS
inline constexpr const char* kScalingNames[] = {"none",          "tensor", "block_1x128",
                                                "block_128x128", "mxfp8",  "nvfp4"};
static_assert(std::size(kScalingNames) == TE_FL_SCALING_COUNT);

}  // namespace te_fl::python
