#pragma once

#include <memory>
#include <span>

#include "te_fl/tensor.hpp"

namespace te_fl {

// Makes tensors for the library; besides Tensor's own functions, nothing else reaches its members.
struct Tensor::Access {
  struct Parts {
    void* data = nullptr;
    std::span<const int64_t> shape;
    std::span<const int64_t> strides;  // empty: compact
    DType dtype = DType::kF32;
    Device device;
    std::shared_ptr<void> storage;
    uint64_t byte_offset = 0;
  };
  // Trusts its caller: everything has been checked.
  static Tensor make(Parts parts);
  static void set_quant(Tensor& tensor, const te_fl_quant& quant, std::shared_ptr<void> storage);
  static const std::shared_ptr<void>& storage(const Tensor& tensor) { return tensor.storage_; }
  static const std::shared_ptr<void>& quant_storage(const Tensor& tensor) {
    return tensor.quant_storage_;
  }
  static const te_fl_quant& quant(const Tensor& tensor) { return tensor.quant_; }
};

namespace core {

// Bytes of a compact tensor. Errors: rank, negative extents, a size that does not fit 63 bits.
Result<int64_t> checked_bytes(std::span<const int64_t> shape, DType dtype);
// Memory on a device, allocated on the thread's current stream, that frees itself there.
Result<std::shared_ptr<void>> shared_memory(Device device, int64_t bytes);
// Checks someone else's memory: rank, extents, strides' count, that offsets fit 63 bits, alignment.
Status check_view(const void* data, std::span<const int64_t> shape,
                  std::span<const int64_t> strides, DType dtype);
std::vector<int64_t> compact_strides(std::span<const int64_t> shape);
// Bytes of each part of a quantised tensor; the logical matrix is [m, k].
struct QuantBytes {
  int64_t codes = 0;  // of one copy
  int64_t scale_inv = 0;
  int64_t columnwise_scale_inv = 0;
};
QuantBytes quant_bytes(DType dtype, Scaling scaling, int64_t m, int64_t k);
std::array<int64_t, 2> logical_matrix(std::span<const int64_t> shape);
// True if a quantised tensor needs no layout but its strides': one scale, no second copy.
inline bool may_be_strided(const te_fl_quant& q) noexcept {
  return q.scaling == TE_FL_SCALING_TENSOR && q.columnwise_data == nullptr;
}
// Dtype of the scale_inv array.
DType scale_inv_dtype(Scaling scaling);

}  // namespace core
}  // namespace te_fl
