#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

namespace te_fl {

inline constexpr int kMaxRank = 8;
using Shape = std::vector<int64_t>;

// Parameters of a quantised tensor that is to be created.
struct QuantSpec {
  DType dtype = DType::kF8E4M3;
  Scaling scaling = Scaling::kTensor;
  bool rowwise = true;
  bool columnwise = false;
  bool compute_scale = false;  // current scaling of kTensor; block modes always derive their scales
  bool pow2_scale = false;     // derived scales are truncated to powers of two
  float amax_epsilon = 0;
  // kNVFP4: allocate a separate amax for the column-wise data, initialised to zero
  bool own_columnwise_amax = false;
  // false: scale_inv starts uninitialised, and with compute_scale also amax and scale. This saves a
  // fill and a copy when an op writes the tensor next, because ops write all three.
  bool clear_scales = true;
  // false: the tensor has no amax, and ops do not compute one. Only for kTensor with a given scale.
  bool amax = true;
};

// Extents of the scale_inv array for a logical [M, K] matrix; see te_fl_quant in plugin.h.
TE_FL_API std::array<int64_t, 2> scale_inv_shape(Scaling scaling, bool columnwise, int64_t m,
                                                 int64_t k);

// A tensor. The metadata is stored by value and the storage is shared: copying a Tensor shares its
// storage, moving is cheap. Many threads may read the metadata of one object; the caller orders
// writes of element data. te-fl calls take `const te_fl_tensor*`. A Tensor converts to this
// pointer, which stays valid until the Tensor object is moved from or destroyed.
class TE_FL_API Tensor {
 public:
  Tensor() noexcept;  // undefined: no storage, converts to a null pointer
  Tensor(const Tensor& other);
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(const Tensor& other);
  Tensor& operator=(Tensor&& other) noexcept;
  ~Tensor();

  // Allocates new storage, 256-byte aligned and uninitialised. The storage is allocated on the
  // calling thread's current stream of the device (StreamScope) and freed on that stream after the
  // last copy of the tensor is destroyed. Errors: negative extents, rank > kMaxRank, a size that
  // does not fit 63 bits, no such device, out of memory.
  static Result<Tensor> empty(std::span<const int64_t> shape, DType dtype, Device device = {});
  static Result<Tensor> empty(std::initializer_list<int64_t> shape, DType dtype,
                              Device device = {});
  static Result<Tensor> zeros(std::span<const int64_t> shape, DType dtype, Device device = {});
  static Result<Tensor> zeros(std::initializer_list<int64_t> shape, DType dtype,
                              Device device = {});
  // A compact tensor with a copy of `values`, converted to dtype. On a device the copy is enqueued
  // on the calling thread's current stream; `values` may be changed as soon as the call returns.
  static Result<Tensor> from_values(std::initializer_list<int64_t> shape,
                                    std::span<const float> values, DType dtype = DType::kF32,
                                    Device device = {});
  // A tensor on memory that te-fl did not allocate. The tensor keeps `owner` alive; null means that
  // the memory is borrowed. strides are in elements; empty means compact. Checks that data is
  // aligned to the element size.
  static Result<Tensor> wrap(void* data, std::span<const int64_t> shape,
                             std::span<const int64_t> strides, DType dtype, Device device,
                             std::shared_ptr<void> owner);
  // A quantised tensor with new storage: row-wise and column-wise data as `spec` requests,
  // scale_inv (zero unless spec says otherwise), amax (kTensor and kNVFP4; zero) and scale
  // (kTensor; one). If `scale` or `amax` tensors are given (F32, one element, same device), the
  // result uses them instead of new ones; recipes use this to keep scales and amaxes in arrays.
  // Errors as for empty(), and for a scaling mode that does not support the dtype.
  static Result<Tensor> empty_quantized(std::span<const int64_t> shape, const QuantSpec& spec,
                                        Device device = {}, const Tensor* scale = nullptr,
                                        const Tensor* amax = nullptr);
  // Takes over or shares a DLPack tensor without a copy. `managed` is a DLManagedTensorVersioned*
  // if `versioned`, else a DLManagedTensor*. Its deleter runs when the last Tensor on it is
  // destroyed. After an error `managed` is unchanged and still belongs to the caller.
  static Result<Tensor> from_dlpack(void* managed, bool versioned);
  // Exports the tensor as a new DLManagedTensorVersioned* (or DLManagedTensor*) that shares its
  // storage; the consumer calls the deleter. Quantised tensors are an error: export their parts.
  Result<void*> to_dlpack(bool versioned = true) const;

  bool defined() const noexcept { return rank_ >= 0; }
  int rank() const noexcept { return rank_; }
  std::span<const int64_t> shape() const noexcept;
  int64_t size(
      int dim) const;  // a negative dim counts from the end; a dim out of range aborts the process
  int64_t numel() const noexcept;
  std::span<const int64_t> strides() const noexcept;  // in elements; always present
  bool contiguous() const noexcept;
  DType dtype() const noexcept { return dtype_; }
  Device device() const noexcept { return device_; }
  // Address of the first element (byte_offset applied); null if only a column-wise copy exists.
  void* raw_data() const noexcept;
  template <class T>
  T* data() const noexcept {
    return static_cast<T*>(raw_data());
  }

  // Views on the same storage. Errors name the shapes. view() needs a contiguous tensor; one extent
  // may be -1. A quantised tensor (kTensor or block scaling) can be viewed if the last dimension
  // stays the same. With kTensor scaling and no column-wise copy it can be viewed in any shape.
  Result<Tensor> view(std::span<const int64_t> shape) const;
  Result<Tensor> view(std::initializer_list<int64_t> shape) const;
  // A quantised tensor can be sliced only with kTensor scaling and without a column-wise copy.
  Result<Tensor> slice(int dim, int64_t begin, int64_t end) const;
  Result<Tensor> transpose(int dim0, int dim1) const;  // unquantised only; swaps strides

  bool quantized() const noexcept;
  Scaling scaling() const noexcept;
  bool has_rowwise() const noexcept;
  bool has_columnwise() const noexcept;
  // This quantised tensor without its column-wise data, sharing the storage. Undefined if there
  // is no row-wise data.
  Tensor rowwise_only() const;
  // This quantised tensor without its row-wise data, sharing the storage. The memory of the
  // row-wise data is freed once no other tensor holds it. Undefined if there is no column-wise
  // data.
  Tensor columnwise_only() const;
  // The data, scales and amaxes of a quantised tensor, as tensors that share the storage. The
  // result is an undefined tensor if this tensor lacks the item.
  Tensor rowwise_codes() const;     // U8 in the tensor's shape; packed 4-bit codes: [bytes]
  Tensor columnwise_codes() const;  // U8 [K, M] (kMXFP8: [M, K]); packed 4-bit codes: [bytes]
  Tensor scale_inv() const;         // kTensor: F32 [1]; else 2-D by scale_inv_shape
  Tensor columnwise_scale_inv() const;
  Tensor amax() const;             // F32 [1]
  Tensor columnwise_amax() const;  // F32 [1]; undefined if amax() applies to all data
  Tensor scale() const;            // F32 [1]

  // Copies the tensor, with all data and scales if quantised, to new compact storage on `device`.
  //
  // The copy is ordered on `stream`, which also becomes the stream of the new storage. `stream` is
  // a stream of `device`, or of the source's device if `device` is the host. Null: the calling
  // thread's current stream of that device. A copy to the host waits until the data has arrived.
  //
  // The copy also waits for work on the stream that this tensor's memory was allocated on and,
  // between two devices, on the calling thread's current stream of the source's device. Work
  // enqueued later on these streams, including the freeing of the source, runs after the copy. If
  // another stream writes the tensor, or if the tensor wraps memory that te-fl did not allocate,
  // `stream` must wait for the writer first (Stream::wait); between two devices the current stream
  // of the source's device must wait instead.
  //
  // In a capture the copy is not ordered with streams outside of the capture, and a copy between
  // two devices is FAILED_PRECONDITION. INVALID_ARGUMENT if `stream` belongs to the source's device
  // but must belong to the destination's.
  Result<Tensor> to(Device device, void* stream = nullptr) const;
  Result<Tensor> clone() const { return to(device_); }

  operator const te_fl_tensor*() const noexcept;  // NOLINT: implicit on purpose; null if undefined
  const te_fl_tensor* c() const noexcept { return *this; }

  // A short description for messages: "f32[2,3] cpu", "f8e4m3[8,16] tensor row+col cuda:0".
  std::string describe() const;

  struct Access;  // gives the library access to the members

 private:
  void rebind() noexcept;  // points c_ at this object's own arrays

  te_fl_tensor c_{};
  te_fl_quant quant_{};
  std::array<int64_t, kMaxRank> shape_{};
  std::array<int64_t, kMaxRank> strides_{};
  std::shared_ptr<void> storage_;        // row-wise data, or the owner of that memory
  std::shared_ptr<void> quant_storage_;  // all other data and scales of a quantised tensor
  Device device_{};
  int32_t rank_ = -1;
  DType dtype_ = DType::kF32;
};

// A short description of an ABI tensor for messages, "f32[2,3] cpu". Accepts null and invalid
// tensors.
TE_FL_API std::string describe(const te_fl_tensor* tensor);

}  // namespace te_fl
