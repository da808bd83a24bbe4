// Results: into a plain tensor by the op's own kernel, into an FP8 tensor by way of FP32 values in
// the workspace, because their largest is known only when all are there.
#pragma once

#include <cstddef>

#include "families.hpp"
#include "launch.hpp"

namespace te_fl::opencl {

constexpr size_t kGroup = 64;   // work-items of a reducing group
constexpr size_t kState = 256;  // bytes: an amax and a scale

// Refuses what an op's result cannot be: strided, or FP8 on a device without exact division.
Refusal refuse_output(const Device& device, const te_fl_tensor& out) noexcept;
// Bytes of workspace that Output needs.
size_t output_workspace(const te_fl_tensor& out) noexcept;

// Quantises values of a dtype into every copy that `out` has, as `quant` says. state: kState bytes
// of device memory. noop: if its value is not 0 nothing is written; may be NULL.
void quantise(const DeviceCall& call, const void* values, int64_t value_type,
              const te_fl_tensor& out, const te_fl_quant& quant, void* state,
              const te_fl_tensor* noop);
// Leaves the largest |value| in state.
void find_amax(const DeviceCall& call, const void* values, int64_t value_type, int64_t n,
               void* state);

class Output {
 public:
  // workspace: output_workspace() bytes, 256-byte aligned.
  Output(const te_fl_tensor& tensor, void* workspace)
      : tensor_(tensor),
        state_(workspace),
        quantised_(backend::scaling(tensor) != TE_FL_SCALING_NONE) {}

  // Where the kernel writes, and as which dtype.
  void* data() const {
    return quantised_ ? static_cast<char*>(state_) + kState : backend::data<void>(tensor_);
  }
  int64_t type() const {
    return quantised_ ? int64_t{TE_FL_F32} : int64_t{dtype_index(tensor_.dl.dtype)};
  }
  // After the kernel.
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
