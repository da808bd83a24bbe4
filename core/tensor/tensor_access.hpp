#pragma once

#include <memory>
#include <span>

#include "te_fl/tensor.hpp"

namespace te_fl {

// Gives the library access to Tensor's private members. All code outside class Tensor that needs
// them goes through this struct.
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
  // Makes a tensor without checks; the caller has validated the parts.
  static Tensor make(Parts parts);
  static void set_quant(Tensor& tensor, const te_fl_quant& quant, std::shared_ptr<void> storage);
  static const std::shared_ptr<void>& storage(const Tensor& tensor) { return tensor.storage_; }
  static const std::shared_ptr<void>& quant_storage(const Tensor& tensor) {
    return tensor.quant_storage_;
  }
  static const te_fl_quant& quant(const Tensor& tensor) { return tensor.quant_; }
};

namespace core {

// The size of a compact tensor in bytes. Errors: rank, negative extents, a size that exceeds 63
// bits.
Result<int64_t> checked_bytes(std::span<const int64_t> shape, DType dtype);
// Allocates memory on the thread's current stream of the device. The last owner frees it on that
// stream.
Result<std::shared_ptr<void>> shared_memory(Device device, int64_t bytes);
// Validates foreign memory: rank, extents, number of strides, alignment, and that offsets fit 63
// bits.
Status check_view(const void* data, std::span<const int64_t> shape,
                  std::span<const int64_t> strides, DType dtype);
std::vector<int64_t> compact_strides(std::span<const int64_t> shape);
// The bytes of each part of a quantised tensor whose logical matrix is [m, k].
struct QuantBytes {
  int64_t codes = 0;  // size of the row-wise data, and of the column-wise data
  int64_t scale_inv = 0;
  int64_t columnwise_scale_inv = 0;
};
QuantBytes quant_bytes(DType dtype, Scaling scaling, int64_t m, int64_t k);
std::array<int64_t, 2> logical_matrix(std::span<const int64_t> shape);
// True if a quantised tensor may have strides: it has one scale and no column-wise copy.
inline bool may_be_strided(const te_fl_quant& q) noexcept {
  return q.scaling == TE_FL_SCALING_TENSOR && q.columnwise_data == nullptr;
}
// The dtype of the scale_inv array.
DType scale_inv_dtype(Scaling scaling);

}  // namespace core
}  // namespace te_fl
