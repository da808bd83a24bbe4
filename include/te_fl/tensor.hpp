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

// The form that a quantised tensor is to have.
struct QuantSpec {
  DType dtype = DType::kF8E4M3;
  Scaling scaling = Scaling::kTensor;
  bool rowwise = true;
  bool columnwise = false;
  bool compute_scale = false;  // kTensor: current scaling (block modes always derive their scales)
  bool pow2_scale = false;     // derived scales are truncated to powers of two
  float amax_epsilon = 0;
  bool own_columnwise_amax = false;  // kNVFP4: an amax for the column-wise copy alone (zero)
  // false: scale_inv, and with compute_scale amax and scale, start uninitialised, which spares a
  // fill and a copy where an op writes the tensor next (ops write all of them).
  bool clear_scales = true;
  // false: no memory for an amax, which ops then leave out; of kTensor under a given scale.
  bool amax = true;
};

// Extents of the scale_inv array for a logical [M, K] matrix; see te_fl_quant in plugin.h.
TE_FL_API std::array<int64_t, 2> scale_inv_shape(Scaling scaling, bool columnwise, int64_t m,
                                                 int64_t k);

// A tensor: metadata by value, storage shared. Copying shares the storage; moving is cheap.
// Metadata of one object may be read by many threads; writing element data is the user's to order.
// te-fl calls take `const te_fl_tensor*`; a Tensor converts to it, valid while the Tensor object
// lives unmoved.
class TE_FL_API Tensor {
 public:
  Tensor() noexcept;  // undefined: no storage, converts to a null pointer
  Tensor(const Tensor& other);
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(const Tensor& other);
  Tensor& operator=(Tensor&& other) noexcept;
  ~Tensor();

  // New storage, 256-byte aligned, uninitialised; allocated on the calling thread's current stream
  // of the device (StreamScope) and freed on it when the last copy goes. Errors: negative extents,
  // rank > kMaxRank, a size that does not fit 63 bits, no such device, out of memory.
  static Result<Tensor> empty(std::span<const int64_t> shape, DType dtype, Device device = {});
  static Result<Tensor> empty(std::initializer_list<int64_t> shape, DType dtype,
                              Device device = {});
  static Result<Tensor> zeros(std::span<const int64_t> shape, DType dtype, Device device = {});
  static Result<Tensor> zeros(std::initializer_list<int64_t> shape, DType dtype,
                              Device device = {});
  // A compact host tensor with a copy of `values`, converted to dtype (F32 unless given).
  static Result<Tensor> from_values(std::initializer_list<int64_t> shape,
                                    std::span<const float> values, DType dtype = DType::kF32);
  // Someone else's memory; `owner` is kept alive with the tensor (may be null: borrowed). strides
  // in elements, empty for compact. Checks alignment of data to the element.
  static Result<Tensor> wrap(void* data, std::span<const int64_t> shape,
                             std::span<const int64_t> strides, DType dtype, Device device,
                             std::shared_ptr<void> owner);
  // A quantised tensor with new storage for the copies that spec asks for, scale_inv (zero unless
  // spec says otherwise), amax (zero; kTensor and kNVFP4) and scale (one; kTensor). Given `scale`
  // or `amax` tensors (F32, one element, same device) are used in place of new ones, as recipes do
  // whose state lives in arrays. Errors also for a scaling that the dtype does not go with.
  static Result<Tensor> empty_quantized(std::span<const int64_t> shape, const QuantSpec& spec,
                                        Device device = {}, const Tensor* scale = nullptr,
                                        const Tensor* amax = nullptr);
  // Takes over or shares a DLPack tensor. `managed` is a DLManagedTensorVersioned* (versioned) or a
  // DLManagedTensor*; its deleter runs when the last Tensor on it goes. No copy. Errors leave it
  // untouched.
  static Result<Tensor> from_dlpack(void* managed, bool versioned);
  // A new DLManagedTensorVersioned* (or DLManagedTensor*) that shares this storage; the consumer
  // calls its deleter. Error for quantised tensors: export the parts.
  Result<void*> to_dlpack(bool versioned = true) const;

  bool defined() const noexcept { return rank_ >= 0; }
  int rank() const noexcept { return rank_; }
  std::span<const int64_t> shape() const noexcept;
  int64_t size(
      int dim) const;  // negative dims count from the end; out of range aborts with a message
  int64_t numel() const noexcept;
  std::span<const int64_t> strides() const noexcept;  // always filled, in elements
  bool contiguous() const noexcept;
  DType dtype() const noexcept { return dtype_; }
  Device device() const noexcept { return device_; }
  // First element (byte_offset applied); null if only a column-wise copy exists.
  void* raw_data() const noexcept;
  template <class T>
  T* data() const noexcept {
    return static_cast<T*>(raw_data());
  }

  // Views on the same storage. Errors name the shapes. view() needs a contiguous tensor; one extent
  // may be -1. A quantised tensor (kTensor or block scaling) can be viewed if the last dimension
  // stays the same; scaled by tensor without a column-wise copy, in any shape.
  Result<Tensor> view(std::span<const int64_t> shape) const;
  Result<Tensor> view(std::initializer_list<int64_t> shape) const;
  // A quantised tensor can be sliced only if it is scaled by tensor and has no column-wise copy.
  Result<Tensor> slice(int dim, int64_t begin, int64_t end) const;
  Result<Tensor> transpose(int dim0, int dim1) const;  // unquantised only; swaps strides

  bool quantized() const noexcept;
  Scaling scaling() const noexcept;
  bool has_rowwise() const noexcept;
  bool has_columnwise() const noexcept;
  // Parts as tensors that share the storage; undefined if the part is absent.
  // The same quantised tensor without its column-wise copy; undefined without a row-wise one.
  Tensor rowwise_only() const;
  // The converse; the row-wise codes' memory is free once no other tensor holds it. Undefined
  // without a column-wise copy.
  Tensor columnwise_only() const;
  Tensor rowwise_codes() const;     // U8, the tensor's shape; 4-bit codes packed, [bytes]
  Tensor columnwise_codes() const;  // U8, [K, M] (kMXFP8: [M, K]); 4-bit codes packed, [bytes]
  Tensor scale_inv() const;         // kTensor: F32 [1]; else 2-D by scale_inv_shape
  Tensor columnwise_scale_inv() const;
  Tensor amax() const;             // F32 [1]
  Tensor columnwise_amax() const;  // F32 [1]; undefined where amax() is both copies'
  Tensor scale() const;            // F32 [1]

  // New storage on `device`, same strides normalised to compact; copies all quantised parts.
  // Ordered on `stream`, which the new storage belongs to: a stream of `device`, or of the source's
  // device if `device` is the host; null: the calling thread's current stream there. Waits for it
  // when copying to the host.
  // The copy has what the producer's stream writes, that being the stream that this tensor's memory
  // was allocated on, or, between two devices, also the calling thread's current stream of the
  // source's device: the copy comes after what is enqueued there, and what is enqueued there later,
  // freeing the source among it, comes after the copy. If another stream writes the tensor, or if
  // it wraps memory that te-fl did not allocate, `stream` (between two devices the current stream
  // of the source's device) must wait for the writer first: Stream::wait. In a capture nothing is
  // ordered with streams outside it, and copies between two devices are FAILED_PRECONDITION.
  // INVALID_ARGUMENT for a stream of the source's device where the destination's is wanted.
  Result<Tensor> to(Device device, void* stream = nullptr) const;
  Result<Tensor> clone() const { return to(device_); }

  operator const te_fl_tensor*() const noexcept;  // NOLINT: implicit on purpose; null if undefined
  const te_fl_tensor* c() const noexcept { return *this; }

  // "f32[2,3] cpu", "f8e4m3[8,16] tensor row+col cuda:0"
  std::string describe() const;

  struct Access;  // the library's own door to the members

 private:
  void rebind() noexcept;  // points c_ at this object's own arrays

  te_fl_tensor c_{};
  te_fl_quant quant_{};
  std::array<int64_t, kMaxRank> shape_{};
  std::array<int64_t, kMaxRank> strides_{};
  std::shared_ptr<void> storage_;        // row-wise data, or whatever owns it
  std::shared_ptr<void> quant_storage_;  // the other parts
  Device device_{};
  int32_t rank_ = -1;
  DType dtype_ = DType::kF32;
};

// "f32[2,3] cpu" of an ABI tensor; for messages. Accepts null and nonsense.
TE_FL_API std::string describe(const te_fl_tensor* tensor);

}  // namespace te_fl
