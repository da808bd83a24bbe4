// Writes the output of an op. An op's kernel writes an unquantised output directly. For an FP8
// output, the kernel writes FP32 values to the workspace, and a second kernel quantises them,
// because the amax is known only when all values are computed.
#pragma once

#include <cstddef>

#include "families.hpp"
#include "launch.hpp"

namespace te_fl::opencl {

constexpr size_t kGroup = 64;   // work-items of a reducing group
constexpr size_t kState = 256;  // bytes: an amax and a scale

// Refuses outputs that are strided, or FP8 on a device without exact division.
Refusal refuse_output(const Device& device, const te_fl_tensor& out) noexcept;
// Bytes of workspace that Output needs.
size_t output_workspace(const te_fl_tensor& out) noexcept;

// Quantises `values` into the row-wise and column-wise data of `out`, as `quant` specifies.
// `state`: kState bytes of device memory. `noop`: if its value is not 0, nothing is written; may be
// NULL.
void quantise(const DeviceCall& call, const void* values, int64_t value_type,
              const te_fl_tensor& out, const te_fl_quant& quant, void* state,
              const te_fl_tensor* noop);
// Writes the largest |value| to `state`.
void find_amax(const DeviceCall& call, const void* values, int64_t value_type, int64_t n,
               void* state);

class Output {
 public:
  // `workspace`: output_workspace() bytes, 256-byte aligned.
  Output(const te_fl_tensor& tensor, void* workspace)
      : tensor_(tensor),
        state_(workspace),
        quantised_(backend::scaling(tensor) != TE_FL_SCALING_NONE) {}

  // Returns the memory that the kernel must write; type() returns the dtype to write.
  void* data() const {
    return quantised_ ? static_cast<char*>(state_) + kState : backend::data<void>(tensor_);
  }
  int64_t type() const {
    return quantised_ ? int64_t{TE_FL_F32} : int64_t{dtype_index(tensor_.dl.dtype)};
  }
  // Must be called after the kernel. Quantises the values if the output is FP8.
  void write_codes(const DeviceCall& call) const {
    if (!quantised_) return;
    quantise(call, data(), TE_FL_F32, tensor_, *tensor_.quant, state_, nullptr);
  }

 private:
  const te_fl_tensor& tensor_;
  void* state_;
  bool quantised_;
};

}  // namespace te_fl::opencl
