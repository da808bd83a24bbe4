#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/tensor/tensor_access.hpp"
#include "te_fl/plugin.h"

// The list of all memory blocks of a quantised tensor except its row-wise data. All code that
// visits a tensor's memory (checks, call words, copies, saved calls) uses this list, so a new block
// is added here only.
namespace te_fl::core {

struct QuantPart {
  enum Holds : uint8_t {
    kCodes,             // column-wise data
    kScales,            // scales of the row-wise data
    kColumnwiseScales,  // scales of the column-wise data
    kAmax,              // one FP32 value that ops update by maximum
    kScale              // one FP32 value, an input or computed by the op
  };
  const char* name;  // the name of the member
  size_t offset;     // its offset in te_fl_quant
  Holds holds;

  // The address of this memory block of `q`; null if the block is absent.
  const void* in(const te_fl_quant& q) const noexcept {
    const void* data;
    std::memcpy(&data, reinterpret_cast<const char*>(&q) + offset, sizeof data);
    return data;
  }
  // The address of the member that points to the part.
  void* slot(te_fl_quant& q) const noexcept { return reinterpret_cast<char*>(&q) + offset; }
  bool is_value() const noexcept { return holds == kAmax || holds == kScale; }
  int64_t bytes(const QuantBytes& of) const noexcept {
    switch (holds) {
      case kCodes:
        return of.codes;
      case kScales:
        return of.scale_inv;
      case kColumnwiseScales:
        return of.columnwise_scale_inv;
      default:
        return sizeof(float);
    }
  }
  // The dtype of the part's elements in a tensor of this dtype and scaling mode.
  DType dtype(DType codes, Scaling scaling) const noexcept {
    if (holds == kCodes) return codes;
    return is_value() ? DType::kF32 : scale_inv_dtype(scaling);
  }
};

inline constexpr std::array<QuantPart, 6> kQuantParts{{
    {"columnwise_data", offsetof(te_fl_quant, columnwise_data), QuantPart::kCodes},
    {"scale_inv", offsetof(te_fl_quant, scale_inv), QuantPart::kScales},
    {"columnwise_scale_inv", offsetof(te_fl_quant, columnwise_scale_inv),
     QuantPart::kColumnwiseScales},
    {"amax", offsetof(te_fl_quant, amax), QuantPart::kAmax},
    {"columnwise_amax", offsetof(te_fl_quant, columnwise_amax), QuantPart::kAmax},
    {"scale", offsetof(te_fl_quant, scale), QuantPart::kScale},
}};
// The struct has 16 bytes of numbers, followed by one pointer for each part.
static_assert(sizeof(te_fl_quant) == 16 + kQuantParts.size() * sizeof(void*));

}  // namespace te_fl::core
