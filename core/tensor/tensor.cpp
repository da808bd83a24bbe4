#include "te_fl/tensor.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "core/base/abi_struct.hpp"
#include "core/base/text.hpp"
#include "core/device/allocations.hpp"
#include "core/tensor/memory_streams.hpp"
#include "core/tensor/tensor_access.hpp"
#include "te_fl/result_memory.hpp"

namespace te_fl {
namespace core {
namespace {

static_assert(core::AllocationUse::kMaxRank >= kMaxRank);

// Writes contiguous strides. `strides` has room for one entry per extent.
void write_compact_strides(std::span<const int64_t> shape, int64_t* strides) {
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
}

Status bad_shape(std::span<const int64_t> shape, DType dtype, const std::string& why) {
  const bool long_list = shape.size() > 32;  // keeps the message short if the rank is garbage
  return invalid_argument("a tensor " + std::string(name(dtype)) +
                          (long_list ? "" : shape_text(shape)) + " cannot be: " + why);
}

}  // namespace

Result<int64_t> checked_bytes(std::span<const int64_t> shape, DType dtype) {
  if (shape.size() > kMaxRank) {
    return bad_shape(
        shape, dtype,
        "rank " + std::to_string(shape.size()) + " is more than " + std::to_string(kMaxRank));
  }
  // Extents of zero count as one, so that [0, 2^62, 2^62] is refused: its strides would overflow.
  int64_t count = 1, bytes = 0;
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0)
      return bad_shape(shape, dtype, "extent " + std::to_string(extent) + " is negative");
    empty |= extent == 0;
    if (__builtin_mul_overflow(count, std::max<int64_t>(extent, 1), &count)) {
      return bad_shape(shape, dtype, "its size does not fit 63 bits");
    }
  }
  const int width = std::max(bits(dtype) / 8, 1);
  if (__builtin_mul_overflow(count, width, &bytes) || bytes > INT64_MAX - 4096) {
    return bad_shape(shape, dtype, "its size does not fit 63 bits");
  }
  return empty ? 0 : bytes_for(dtype, count);
}

std::vector<int64_t> compact_strides(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size());
  write_compact_strides(shape, strides.data());
  return strides;
}

Status check_view(const void* data, std::span<const int64_t> shape,
                  std::span<const int64_t> strides, DType dtype) {
  TE_FL_ASSIGN_OR_RETURN(const int64_t bytes, checked_bytes(shape, dtype));
  if (!strides.empty() && strides.size() != shape.size()) {
    return bad_shape(
        shape, dtype,
        std::to_string(strides.size()) + " strides for rank " + std::to_string(shape.size()));
  }
  if (bytes > 0 && data == nullptr) return bad_shape(shape, dtype, "its data is null");
  const auto width = static_cast<uintptr_t>(std::max(bits(dtype) / 8, 1));
  if (reinterpret_cast<uintptr_t>(data) % width != 0) {
    return bad_shape(shape, dtype,
                     "its data is not aligned to the element's " + std::to_string(width) +
                         " bytes; copy it into aligned memory");
  }
  int64_t reach = 0;  // the largest offset of an element, in bytes
  for (size_t i = 0; i < strides.size(); ++i) {
    int64_t step = 0;
    if (__builtin_mul_overflow(strides[i], std::max<int64_t>(shape[i] - 1, 0), &step) ||
        __builtin_mul_overflow(step, static_cast<int64_t>(width), &step) || step == INT64_MIN ||
        __builtin_add_overflow(reach, std::abs(step), &reach)) {
      return bad_shape(shape, dtype, "strides " + shape_text(strides) + " reach beyond 63 bits");
    }
  }
  return {};
}

Result<std::shared_ptr<void>> shared_memory(Device device, int64_t bytes) {
  TE_FL_ASSIGN_OR_RETURN(StreamRef stream, current_stream(device));
  void* const handle = stream != nullptr ? stream->handle : nullptr;
  TE_FL_ASSIGN_OR_RETURN(void* data, devices::allocate(device, static_cast<size_t>(bytes), handle));
  return std::shared_ptr<void>(data, FreeOnStream{device, std::move(stream)});
}

}  // namespace core

namespace {

bool is_compact(std::span<const int64_t> shape, std::span<const int64_t> strides) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return true;  // no elements
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

}  // namespace

Tensor Tensor::Access::make(Parts parts) {
  Tensor t;
  t.rank_ = static_cast<int32_t>(parts.shape.size());
  std::copy(parts.shape.begin(), parts.shape.end(), t.shape_.begin());
  const bool strided = !parts.strides.empty() && !is_compact(parts.shape, parts.strides);
  if (strided) {
    std::ranges::copy(parts.strides, t.strides_.begin());
  } else {
    core::write_compact_strides(parts.shape, t.strides_.data());
  }
  t.dtype_ = parts.dtype;
  t.device_ = parts.device;
  t.storage_ = std::move(parts.storage);
  t.c_.provider = parts.device.provider;
  t.c_.dl.data = parts.data;
  t.c_.dl.device = parts.device.to_c();
  t.c_.dl.ndim = t.rank_;
  t.c_.dl.dtype = to_c(parts.dtype);
  t.c_.dl.byte_offset = parts.byte_offset;
  // A compact tensor has null strides in the ABI, the fastest case for readers.
  t.c_.dl.strides = strided ? t.strides_.data() : nullptr;
  t.rebind();
  return t;
}

void Tensor::Access::set_quant(Tensor& tensor, const te_fl_quant& quant,
                               std::shared_ptr<void> storage) {
  tensor.quant_ = quant;
  tensor.quant_storage_ = std::move(storage);
  tensor.c_.quant = &tensor.quant_;
}

Tensor::Tensor() noexcept = default;
Tensor::~Tensor() = default;

Tensor::Tensor(const Tensor& other)
    : c_(other.c_),
      quant_(other.quant_),
      shape_(other.shape_),
      strides_(other.strides_),
      storage_(other.storage_),
      quant_storage_(other.quant_storage_),
      device_(other.device_),
      rank_(other.rank_),
      dtype_(other.dtype_) {
  rebind();
}

Tensor::Tensor(Tensor&& other) noexcept
    : c_(other.c_),
      quant_(other.quant_),
      shape_(other.shape_),
      strides_(other.strides_),
      storage_(std::move(other.storage_)),
      quant_storage_(std::move(other.quant_storage_)),
      device_(other.device_),
      rank_(other.rank_),
      dtype_(other.dtype_) {
  rebind();
  other.rank_ = -1;  // -1: undefined, after a move
  other.c_ = te_fl_tensor{};
}

Tensor& Tensor::operator=(const Tensor& other) {
  if (this != &other) *this = Tensor(other);
  return *this;
}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  if (this == &other) return *this;
  c_ = other.c_;
  quant_ = other.quant_;
  shape_ = other.shape_;
  strides_ = other.strides_;
  storage_ = std::move(other.storage_);
  quant_storage_ = std::move(other.quant_storage_);
  device_ = other.device_;
  rank_ = other.rank_;
  dtype_ = other.dtype_;
  rebind();
  other.rank_ = -1;
  other.c_ = te_fl_tensor{};
  return *this;
}

void Tensor::rebind() noexcept {
  c_.dl.shape = shape_.data();
  if (c_.dl.strides != nullptr) c_.dl.strides = strides_.data();
  if (c_.quant != nullptr) c_.quant = &quant_;
}

std::span<const int64_t> Tensor::shape() const noexcept {
  return {shape_.data(), static_cast<size_t>(std::max(rank_, 0))};
}
std::span<const int64_t> Tensor::strides() const noexcept {
  return {strides_.data(), static_cast<size_t>(std::max(rank_, 0))};
}

int64_t Tensor::size(int dim) const {
  const int index = dim < 0 ? dim + rank_ : dim;
  if (index < 0 || index >= rank_) {
    die(invalid_argument("Tensor::size(" + std::to_string(dim) + ") of " + describe() +
                         ": there is no such dimension"));
  }
  return shape_[static_cast<size_t>(index)];
}

int64_t Tensor::numel() const noexcept {
  if (!defined()) return 0;
  int64_t count = 1;
  for (const int64_t extent : shape()) count *= extent;
  return count;
}

bool Tensor::contiguous() const noexcept { return c_.dl.strides == nullptr; }

void* Tensor::raw_data() const noexcept {
  return c_.dl.data == nullptr ? nullptr : static_cast<char*>(c_.dl.data) + c_.dl.byte_offset;
}

Tensor::operator const te_fl_tensor*() const noexcept { return defined() ? &c_ : nullptr; }

std::string Tensor::describe() const { return te_fl::describe(c()); }

// ---- creation of tensors

Result<Tensor> Tensor::empty(std::span<const int64_t> shape, DType dtype, Device device) {
  TE_FL_ASSIGN_OR_RETURN(const int64_t bytes, core::checked_bytes(shape, dtype));
  if (const ResultMemory* results = ResultMemory::innermost(); results != nullptr) [[unlikely]] {
    TE_FL_ASSIGN_OR_RETURN(auto lent, results->make()(shape, dtype, device));
    if (void* data = lent.get(); data != nullptr) {
      return Access::make({data, shape, {}, dtype, device, std::move(lent)});
    }
  }
  const core::AllocationUse use(dtype, shape);
  TE_FL_ASSIGN_OR_RETURN(auto storage, core::shared_memory(device, bytes));
  void* data = storage.get();
  return Access::make({data, shape, {}, dtype, device, std::move(storage)});
}

Result<Tensor> Tensor::zeros(std::span<const int64_t> shape, DType dtype, Device device) {
  TE_FL_ASSIGN_OR_RETURN(Tensor t, empty(shape, dtype, device));
  const auto bytes = static_cast<size_t>(bytes_for(dtype, t.numel()));
  TE_FL_RETURN_IF_ERROR(
      devices::fill(device, t.raw_data(), 0, bytes, devices::current_stream(device)));
  return t;
}

Result<Tensor> Tensor::empty(std::initializer_list<int64_t> shape, DType dtype, Device device) {
  return empty(std::span(shape.begin(), shape.size()), dtype, device);
}
Result<Tensor> Tensor::zeros(std::initializer_list<int64_t> shape, DType dtype, Device device) {
  return zeros(std::span(shape.begin(), shape.size()), dtype, device);
}

Result<Tensor> Tensor::wrap(void* data, std::span<const int64_t> shape,
                            std::span<const int64_t> strides, DType dtype, Device device,
                            std::shared_ptr<void> owner) {
  TE_FL_RETURN_IF_ERROR(core::check_view(data, shape, strides, dtype));
  Tensor t = Access::make({data, shape, strides, dtype, device, std::move(owner)});
  if (dtype == DType::kF4E2M1 && !t.contiguous()) {
    return invalid_argument("a tensor f4e2m1" + core::shape_text(shape) +
                            " with strides cannot be: 4-bit elements are packed; make it compact");
  }
  return t;
}

// ---- views of tensors

Result<Tensor> Tensor::view(std::initializer_list<int64_t> shape) const {
  return view(std::span(shape.begin(), shape.size()));
}

Result<Tensor> Tensor::view(std::span<const int64_t> wanted) const {
  const auto refuse = [&](const std::string& why) {
    return invalid_argument("cannot view " + describe() + " as " + core::shape_text(wanted) + ": " +
                            why);
  };
  if (!defined()) return refuse("it is undefined");
  if (!contiguous()) return refuse("it is not contiguous; clone() it first");
  Shape shape(wanted.begin(), wanted.end());
  const auto open = std::find(shape.begin(), shape.end(), -1);
  if (open != shape.end()) {
    *open = 1;
    if (std::find(open, shape.end(), -1) != shape.end()) return refuse("only one extent may be -1");
    const Result<int64_t> rest = core::checked_bytes(shape, DType::kU8);
    if (!rest) return refuse(rest.status().message());
    if (*rest == 0 || numel() % *rest != 0)
      return refuse("the extent -1 stands for is not determined");
    *open = numel() / *rest;
  }
  const Result<int64_t> count = core::checked_bytes(shape, DType::kU8);
  if (!count) return refuse(count.status().message());
  if (*count != numel()) {
    return refuse("it has " + std::to_string(numel()) + " elements, not " + std::to_string(*count));
  }
  if (quantized()) {
    const bool may = scaling() == Scaling::kTensor || scaling() == Scaling::kBlock1x128 ||
                     scaling() == Scaling::kBlock128x128;
    if (!may) return refuse("scaling " + std::string(name(scaling())) + " does not allow views");
    const bool same_last = rank_ > 0 && !shape.empty() && shape.back() == size(-1);
    if (!same_last && !core::may_be_strided(quant_)) {
      return refuse(
          "a quantised tensor's last dimension must stay the same, unless it is scaled by tensor "
          "and "
          "has no column-wise copy (rowwise_only())");
    }
  }
  Tensor t = Access::make({c_.dl.data, shape, {}, dtype_, device_, storage_, c_.dl.byte_offset});
  if (quantized()) Access::set_quant(t, quant_, quant_storage_);
  return t;
}

Result<Tensor> Tensor::slice(int dim, int64_t begin, int64_t end) const {
  const auto refuse = [&](const std::string& why) {
    return invalid_argument("cannot slice dimension " + std::to_string(dim) + " of " + describe() +
                            " from " + std::to_string(begin) + " to " + std::to_string(end) + ": " +
                            why);
  };
  if (!defined()) return refuse("it is undefined");
  if (quantized() && !core::may_be_strided(quant_)) {
    return refuse(
        "it is quantised, and not by tensor without a column-wise copy; dequantize it first");
  }
  const int index = dim < 0 ? dim + rank_ : dim;
  if (index < 0 || index >= rank_) return refuse("there is no such dimension");
  const auto at = static_cast<size_t>(index);
  if (begin < 0 || end < begin || end > shape_[at]) {
    return refuse("the range must lie in [0, " + std::to_string(shape_[at]) + "]");
  }
  if (dtype_ == DType::kF4E2M1) return refuse("4-bit elements are packed");
  Shape shape(shape_.begin(), shape_.begin() + rank_);
  shape[at] = end - begin;
  const int64_t offset = begin * strides_[at] * (bits(dtype_) / 8);
  Tensor t = Access::make({c_.dl.data, shape, strides(), dtype_, device_, storage_,
                           c_.dl.byte_offset + static_cast<uint64_t>(offset)});
  if (quantized()) Access::set_quant(t, quant_, quant_storage_);
  return t;
}

Result<Tensor> Tensor::transpose(int dim0, int dim1) const {
  const auto refuse = [&](const std::string& why) {
    return invalid_argument("cannot transpose dimensions " + std::to_string(dim0) + " and " +
                            std::to_string(dim1) + " of " + describe() + ": " + why);
  };
  if (!defined()) return refuse("it is undefined");
  if (quantized()) return refuse("it is quantised; dequantize it first");
  if (dtype_ == DType::kF4E2M1) return refuse("4-bit elements are packed");
  const int a = dim0 < 0 ? dim0 + rank_ : dim0, b = dim1 < 0 ? dim1 + rank_ : dim1;
  if (std::min(a, b) < 0 || std::max(a, b) >= rank_) return refuse("there is no such dimension");
  Shape shape(shape_.begin(), shape_.begin() + rank_);
  std::vector<int64_t> steps(strides_.begin(), strides_.begin() + rank_);
  std::swap(shape[static_cast<size_t>(a)], shape[static_cast<size_t>(b)]);
  std::swap(steps[static_cast<size_t>(a)], steps[static_cast<size_t>(b)]);
  return Access::make({c_.dl.data, shape, steps, dtype_, device_, storage_, c_.dl.byte_offset});
}

// ---- texts about tensors for messages

std::string describe(const te_fl_tensor* tensor) {
  if (tensor == nullptr) return "null";
  if (tensor->struct_size < offsetof(te_fl_tensor, quant)) {
    return "a tensor with struct_size " + std::to_string(tensor->struct_size);
  }
  const te_fl_dltensor& dl = tensor->dl;
  const int index = dtype_index(dl.dtype);
  std::string text = index == kInvalidDType ? "dtype{code " + std::to_string(dl.dtype.code) +
                                                  ", bits " + std::to_string(dl.dtype.bits) +
                                                  ", lanes " + std::to_string(dl.dtype.lanes) + "}"
                                            : std::string(name(static_cast<DType>(index)));
  if (dl.ndim < 0 || dl.ndim > kMaxRank || (dl.ndim > 0 && dl.shape == nullptr)) {
    text += "[rank " + std::to_string(dl.ndim) + "]";
  } else {
    text += "[";
    for (int i = 0; i < dl.ndim; ++i) text += (i > 0 ? "," : "") + std::to_string(dl.shape[i]);
    text += "]";
  }
  const te_fl_quant* quant = tensor->struct_size >= core::kLeastTensor ? tensor->quant : nullptr;
  if (quant != nullptr && quant->struct_size >= core::kLeastQuant &&
      quant->scaling != TE_FL_SCALING_NONE) {
    const bool known = quant->scaling < TE_FL_SCALING_COUNT;
    text += " " + (known ? std::string(name(static_cast<Scaling>(quant->scaling)))
                         : "scaling " + std::to_string(quant->scaling));
    const bool row = dl.data != nullptr, column = quant->columnwise_data != nullptr;
    if (row || column) text += row && column ? " row+col" : row ? " row" : " col";
  }
  return text + " " + to_string(Device{dl.device.type, dl.device.index, tensor->provider});
}

}  // namespace te_fl
