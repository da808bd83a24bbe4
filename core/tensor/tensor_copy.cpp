#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/text.hpp"
#include "core/device/in_flight.hpp"
#include "core/tensor/memory_streams.hpp"
#include "core/tensor/tensor_access.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl {
namespace {

// Copies the values of `t` in contiguous order to host memory at `out`. `first` is the address of
// its first element.
void gather(const Tensor& t, const char* first, char* out) {
  const auto shape = t.shape(), strides = t.strides();
  const auto width = static_cast<size_t>(bits(t.dtype()) / 8);
  std::array<int64_t, kMaxRank> index{};
  int64_t offset = 0;
  for (int64_t n = t.numel(); n > 0; --n) {
    std::memcpy(out, first + offset * static_cast<int64_t>(width), width);
    out += width;
    for (size_t d = shape.size(); d-- > 0;) {
      offset += strides[d];
      if (++index[d] < shape[d]) break;
      offset -= strides[d] * shape[d];
      index[d] = 0;
    }
  }
}

// The lowest and the highest element offset of a non-empty tensor.
struct Extent {
  int64_t low = 0, high = 0;
};
Extent extent_of(const Tensor& t) {
  Extent e;
  for (size_t d = 0; d < t.shape().size(); ++d) {
    const int64_t reach = t.strides()[d] * (t.shape()[d] - 1);
    (reach < 0 ? e.low : e.high) += reach;
  }
  return e;
}

// The two streams of a copy, one on the source's device and one on the destination's. They are
// equal if one device does the copy.
struct CopyStreams {
  void* from;
  void* to;
};

Status copy_strided(const Tensor& from, const Tensor& to, CopyStreams streams) {
  const auto width = static_cast<int64_t>(bits(from.dtype()) / 8);
  const Extent e = extent_of(from);
  const char* first = static_cast<const char*>(from.raw_data());
  Tensor
      host_source;  // host copy of the source's address range, if the source is not in host memory
  if (!from.device().is_host()) {
    const int64_t bytes = (e.high - e.low + 1) * width;
    TE_FL_ASSIGN_OR_RETURN(host_source, Tensor::empty({bytes}, DType::kU8));
    const Status copied =
        devices::copy(Device{}, host_source.raw_data(), from.device(), first + e.low * width,
                      static_cast<size_t>(bytes), streams.from);
    const Status waited =
        core::wait_for_copies(from.device(), streams.from, Tensor::Access::storage(host_source));
    TE_FL_RETURN_IF_ERROR(copied.ok() ? waited : copied);
    first = host_source.data<char>() - e.low * width;
  }
  if (to.device().is_host()) {
    gather(from, first, to.data<char>());
    return {};
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor compact, Tensor::empty(from.shape(), from.dtype()));
  gather(from, first, compact.data<char>());
  const auto bytes = static_cast<size_t>(from.numel() * width);
  const Status copied =
      devices::copy(to.device(), to.raw_data(), Device{}, compact.raw_data(), bytes, streams.to);
  const Status waited =
      core::wait_for_copies(to.device(), streams.to, Tensor::Access::storage(compact));
  return copied.ok() ? waited : copied;
}

Status copy_part(const Tensor& from, const Tensor& to, CopyStreams streams) {
  if (!from.defined() || !to.defined()) return {};
  const auto bytes = static_cast<size_t>(bytes_for(from.dtype(), from.numel()));
  const bool one = from.device().is_host() || to.device().is_host() || from.device() == to.device();
  if (one) {
    return devices::copy(to.device(), to.raw_data(), from.device(), from.raw_data(), bytes,
                         streams.to);
  }
  return devices::copy_between(to.device(), to.raw_data(), streams.to, from.device(),
                               from.raw_data(), streams.from, bytes);
}

Status copy_parts(const Tensor& from, const Tensor& to, CopyStreams streams) {
  if (from.numel() == 0 && !from.quantized()) return {};
  const Tensor source = from.quantized() ? from.rowwise_codes() : from;
  const Tensor target = from.quantized() ? to.rowwise_codes() : to;
  TE_FL_RETURN_IF_ERROR(from.contiguous() ? copy_part(source, target, streams)
                                          : copy_strided(source, target, streams));
  TE_FL_RETURN_IF_ERROR(copy_part(from.columnwise_codes(), to.columnwise_codes(), streams));
  TE_FL_RETURN_IF_ERROR(copy_part(from.scale_inv(), to.scale_inv(), streams));
  TE_FL_RETURN_IF_ERROR(copy_part(from.columnwise_scale_inv(), to.columnwise_scale_inv(), streams));
  TE_FL_RETURN_IF_ERROR(copy_part(from.amax(), to.amax(), streams));
  TE_FL_RETURN_IF_ERROR(copy_part(from.columnwise_amax(), to.columnwise_amax(), streams));
  return copy_part(from.scale(), to.scale(), streams);
}

// Allocates an uninitialised quantised tensor with the same kinds of data and scales as `t`.
Result<Tensor> empty_quantized_like(const Tensor& t, Device device) {
  const te_fl_quant& q = Tensor::Access::quant(t);
  QuantSpec spec;
  spec.dtype = t.dtype();
  spec.scaling = t.scaling();
  spec.rowwise = t.has_rowwise();
  spec.columnwise = t.has_columnwise();
  spec.compute_scale = (q.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
  spec.pow2_scale = (q.flags & TE_FL_QUANT_POW2_SCALE) != 0;
  spec.amax_epsilon = q.amax_epsilon;
  spec.own_columnwise_amax = q.columnwise_amax != nullptr;
  Tensor amax;
  const bool has_default_amax =
      spec.scaling == Scaling::kTensor || describe(spec.scaling).second_level != 0;
  if (t.amax().defined() && !has_default_amax) {
    TE_FL_ASSIGN_OR_RETURN(amax, Tensor::zeros({1}, DType::kF32, device));
  }
  return Tensor::empty_quantized(t.shape(), spec, device, nullptr,
                                 amax.defined() ? &amax : nullptr);
}

template <class T>
Status store_integers(std::span<const float> values, DType dtype, void* out) {
  T* to = static_cast<T*>(out);
  for (const float v : values) {
    // The upper bound is a power of two, so it is exact in FP32; it is itself out of range.
    const double above = std::ldexp(1.0, std::numeric_limits<T>::digits);
    const bool fits = v == std::trunc(v) &&
                      v >= static_cast<double>(std::numeric_limits<T>::min()) &&
                      static_cast<double>(v) < above;
    if (!fits) {
      return invalid_argument("value " + std::to_string(v) + " cannot be stored as " +
                              std::string(name(dtype)) +
                              ": it must be a whole number in its range");
    }
    *to++ = static_cast<T>(v);
  }
  return {};
}

template <class T, class F>
Status store(std::span<const float> values, void* out, F convert) {
  T* to = static_cast<T*>(out);
  for (const float v : values) *to++ = convert(v);
  return {};
}

Status store_f4(std::span<const float> values, void* out) {
  auto* to = static_cast<uint8_t*>(out);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto code = static_cast<uint8_t>(numeric::float_to_e2m1(values[i]) & 0xf);
    if (i % 2 == 0)
      to[i / 2] = code;  // low nibble first; with an odd count the last high nibble is 0
    else
      to[i / 2] = static_cast<uint8_t>(to[i / 2] | code << 4);
  }
  return {};
}

Status store_bool(std::span<const float> values, void* out) {
  for (const float v : values) {
    if (v != 0.0f && v != 1.0f) {
      return invalid_argument("value " + std::to_string(v) +
                              " cannot be stored as bool: it must be 0 or 1");
    }
  }
  return store<uint8_t>(values, out, [](float v) { return static_cast<uint8_t>(v); });
}

Status store_as(DType dtype, std::span<const float> values, void* out) {
  switch (dtype) {
    case DType::kF64:
      return store<double>(values, out, [](float v) { return double{v}; });
    case DType::kF32:
      return store<float>(values, out, [](float v) { return v; });
    case DType::kF16:
      return store<uint16_t>(values, out, numeric::float_to_fp16);
    case DType::kBF16:
      return store<uint16_t>(values, out, numeric::float_to_bf16);
    case DType::kF8E4M3:
      return store<uint8_t>(values, out, numeric::float_to_e4m3);
    case DType::kF8E5M2:
      return store<uint8_t>(values, out, numeric::float_to_e5m2);
    case DType::kF4E2M1:
      return store_f4(values, out);
    case DType::kF8E8M0:
      return store<uint8_t>(values, out, numeric::float_to_e8m0);
    case DType::kI8:
      return store_integers<int8_t>(values, dtype, out);
    case DType::kI16:
      return store_integers<int16_t>(values, dtype, out);
    case DType::kI32:
      return store_integers<int32_t>(values, dtype, out);
    case DType::kI64:
      return store_integers<int64_t>(values, dtype, out);
    case DType::kU8:
      return store_integers<uint8_t>(values, dtype, out);
    case DType::kU16:
      return store_integers<uint16_t>(values, dtype, out);
    case DType::kU32:
      return store_integers<uint32_t>(values, dtype, out);
    case DType::kU64:
      return store_integers<uint64_t>(values, dtype, out);
    case DType::kBool:
      return store_bool(values, out);
  }
  return internal_error("from_values: dtype out of range");
}

}  // namespace

Result<Tensor> Tensor::from_values(std::initializer_list<int64_t> shape,
                                   std::span<const float> values, DType dtype, Device device) {
  TE_FL_ASSIGN_OR_RETURN(Tensor t, empty(shape, dtype, device.is_host() ? device : Device{}));
  if (static_cast<size_t>(t.numel()) != values.size()) {
    return invalid_argument("from_values: " + std::to_string(values.size()) + " values for shape " +
                            core::shape_text(t.shape()) + ", which has " +
                            std::to_string(t.numel()) + " elements");
  }
  TE_FL_RETURN_IF_ERROR(store_as(dtype, values, t.raw_data()));
  if (device.is_host()) return t;
  return t.to(device);
}

Result<Tensor> Tensor::to(Device device, void* stream) const {
  if (!defined()) return invalid_argument("an undefined tensor cannot be copied");
  const Device copying = device.is_host() ? device_ : device;
  if (stream == nullptr) stream = devices::current_stream(copying);
  CopyStreams streams{stream, stream};
  if (!device_.is_host() && device_ != copying) {
    TE_FL_RETURN_IF_ERROR(core::check_side(device, stream, device_));
    TE_FL_ASSIGN_OR_RETURN(const core::StreamRef current, core::current_stream(device_));
    streams.from = current != nullptr ? current->handle : nullptr;
  }
  std::optional<StreamScope> scope;  // the result's memory belongs to the stream of the copy
  if (!copying.is_host() && stream != devices::current_stream(copying)) {
    scope.emplace(copying, stream);
  }
  // The copy waits for pending writes on the streams that own the tensor's memory. Below, those
  // streams wait for the copy before they may free the memory.
  const std::vector<void*> own = core::memory_streams(*this);
  for (void* first : own) {
    TE_FL_RETURN_IF_ERROR(core::order_streams(device_, first, streams.from));
  }
  Result<Tensor> t =
      quantized() ? empty_quantized_like(*this, device) : empty(shape(), dtype_, device);
  TE_FL_RETURN_IF_ERROR(t.status());
  // Continues after an error: copies from or to memory that is about to be freed may be in
  // progress.
  Status status = copy_parts(*this, *t, streams);
  const auto keep_first = [&](Status next) {
    if (status.ok()) status = std::move(next);
  };
  if (device.is_host() && !device_.is_host()) {
    const auto kept = std::make_shared<Tensor>(*t);
    if (numel() > 0 || quantized()) keep_first(core::wait_for_copies(device_, stream, kept));
  } else {
    for (void* later : own) keep_first(core::order_streams(device_, streams.from, later));
  }
  TE_FL_RETURN_IF_ERROR(status);
  return t;
}

}  // namespace te_fl
