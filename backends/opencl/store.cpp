#include "store.hpp"

#include <algorithm>

#include "overlap.hpp"

namespace te_fl::opencl {
namespace {

// Flags with the same values as in kernels/quantize.cl.
enum : uint32_t {
  kCurrent = 1,
  kPow2 = 2,
  kHasAmax = 4,
  kHasScale = 8,
  kHasScaleInv = 16,
  kHasColumnScaleInv = 32,
  kHasNoop = 64,
  kHasRows = 1,
  kHasColumns = 2,
};

uint32_t written_parts(const te_fl_quant& q, const te_fl_tensor* noop) {
  uint32_t flags = 0;
  if ((q.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0) flags |= kCurrent;
  if ((q.flags & TE_FL_QUANT_POW2_SCALE) != 0) flags |= kPow2;
  if (q.amax != nullptr) flags |= kHasAmax;
  if (q.scale != nullptr) flags |= kHasScale;
  if (q.scale_inv != nullptr) flags |= kHasScaleInv;
  if (q.columnwise_scale_inv != nullptr) flags |= kHasColumnScaleInv;
  if (noop != nullptr) flags |= kHasNoop;
  return flags;
}

}  // namespace

Refusal refuse_output(const Device& device, const te_fl_tensor& out) noexcept {
  if (!all_dense(&out)) return kNotContiguous;
  if (device.exact || backend::scaling(out) == TE_FL_SCALING_NONE) return nullptr;
  return "this device does not divide with one rounding, which FP8 scales need";
}

size_t output_workspace(const te_fl_tensor& out) noexcept {
  if (backend::scaling(out) == TE_FL_SCALING_NONE) return 0;
  return kState + static_cast<size_t>(backend::numel(out)) * sizeof(float);
}

void find_amax(const DeviceCall& call, const void* values, int64_t value_type, int64_t n,
               void* state) {
  constexpr int64_t kItemValues = 16, kMaxGroups = 1024;
  const cl_uint zero = 0;
  check(clEnqueueSVMMemFill(call.device.queue_of(call.stream()), state, &zero, sizeof zero,
                            sizeof zero, 0, nullptr, nullptr),
        "clEnqueueSVMMemFill");
  const int64_t each = kItemValues * static_cast<int64_t>(kGroup);
  Launch(call.device, call.stream(), "quantize",
         define("TX", value_type) + define("TY", TE_FL_F32) + define("GROUP", kGroup), "amax")
      .memory(values)
      .value<int64_t>(n)
      .memory(state)
      .groups(std::min((n + each - 1) / each, kMaxGroups), kGroup);
}

void quantise(const DeviceCall& call, const void* values, int64_t value_type,
              const te_fl_tensor& out, const te_fl_quant& quant, void* state,
              const te_fl_tensor* noop) {
  const backend::Matrix matrix = backend::as_matrix(out);
  const int64_t code_type = dtype_index(out.dl.dtype);
  const std::string types =
      define("TX", value_type) + define("TY", code_type) + define("GROUP", kGroup);
  const bool current = (quant.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
  if (current || quant.amax != nullptr) {
    find_amax(call, values, value_type, matrix.rows * matrix.cols, state);
  }
  const uint32_t flags = written_parts(quant, noop);
  Launch(call.device, call.stream(), "quantize", types, "settle")
      .memory(state)
      .memory(quant.amax)
      .memory(quant.scale)
      .memory(quant.scale_inv)
      .memory(quant.columnwise_scale_inv)
      .data(noop)
      .value(flags)
      .value(quant.amax_epsilon)
      .value(code_type == TE_FL_F8E4M3 ? 448.0f : 57344.0f)
      .groups(1, 1);
  const uint32_t copies = (out.dl.data != nullptr ? uint32_t{kHasRows} : 0u) |
                          (quant.columnwise_data != nullptr ? uint32_t{kHasColumns} : 0u) |
                          (flags & kHasNoop);
  Launch(call.device, call.stream(), "quantize", types, "cast")
      .memory(values)
      .data(&out)
      .memory(quant.columnwise_data)
      .value<int64_t>(matrix.rows)
      .value<int64_t>(matrix.cols)
      .memory(state)
      .data(noop)
      .value(copies)
      .items(matrix.rows * matrix.cols, kGroup);
}

}  // namespace te_fl::opencl
