#include <algorithm>
#include <array>
#include <utility>

#include "core/base/text.hpp"
#include "core/device/allocations.hpp"
#include "core/tensor/memory_streams.hpp"
#include "core/tensor/shared_blocks.hpp"
#include "core/tensor/tensor_access.hpp"

namespace te_fl {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The number of scale factors along one extent.
int64_t factors(int64_t extent, uint32_t block, uint32_t pad) {
  return round_up(ceil_div(extent, block), pad);
}

Status check_spec(std::span<const int64_t> shape, const QuantSpec& spec) {
  const auto refuse = [&](const std::string& why) {
    return invalid_argument("a quantised tensor " + std::string(name(spec.dtype)) +
                            core::shape_text(shape) + " with scaling " +
                            std::string(name(spec.scaling)) + " cannot be: " + why);
  };
  if (spec.scaling == Scaling::kNone) return refuse("scaling none is not quantised; use empty()");
  if (spec.own_columnwise_amax && (describe(spec.scaling).second_level == 0 || !spec.columnwise)) {
    return refuse("only the column-wise copy of a scaling with a second level has its own amax");
  }
  const bool four_bit = spec.scaling == Scaling::kNVFP4;
  if (four_bit && spec.dtype != DType::kF4E2M1) return refuse("nvfp4 needs dtype f4e2m1");
  if (!four_bit && !is_fp8(spec.dtype)) return refuse("this scaling needs dtype f8e4m3 or f8e5m2");
  if (!spec.rowwise && !spec.columnwise)
    return refuse("it needs a row-wise copy, a column-wise one or both");
  if (!(spec.amax_epsilon >= 0)) return refuse("amax_epsilon must not be negative or NaN");
  return core::checked_bytes(shape, spec.dtype).status();
}

Status check_state(const char* what, const Tensor* t, Device device) {
  if (t == nullptr) return {};
  const bool good = t->defined() && t->dtype() == DType::kF32 && t->numel() == 1 &&
                    t->device() == device && !t->quantized();
  if (good) return {};
  return invalid_argument("the " + std::string(what) +
                          " of a quantised tensor must be one f32 on " + to_string(device) +
                          ", not " + t->describe());
}

// The offsets of column-wise data, scales and amaxes in one block of memory, each aligned to 256
// bytes.
struct Layout {
  int64_t columnwise = -1, scale_inv = -1, columnwise_scale_inv = -1, amax = -1, scale = -1;
  int64_t columnwise_amax = -1;
  int64_t zeroed_from = 0;
  int64_t total = 0;

  int64_t place(int64_t bytes) {
    const int64_t at = total;
    total += round_up(std::max<int64_t>(bytes, 1), 256);
    return at;
  }
};

Layout plan(const QuantSpec& spec, const core::QuantBytes& bytes, bool own_scale, bool own_amax) {
  Layout l;
  const bool tensor_mode = spec.scaling == Scaling::kTensor;
  if (spec.columnwise) l.columnwise = l.place(bytes.codes);
  l.zeroed_from = l.total;
  if (spec.rowwise || tensor_mode) l.scale_inv = l.place(bytes.scale_inv);
  if (spec.columnwise && !tensor_mode) l.columnwise_scale_inv = l.place(bytes.columnwise_scale_inv);
  if (own_amax) l.amax = l.place(4);
  if (own_scale) l.scale = l.place(4);
  if (spec.own_columnwise_amax) l.columnwise_amax = l.place(4);
  return l;
}

}  // namespace

std::array<int64_t, 2> scale_inv_shape(Scaling scaling, bool columnwise, int64_t m, int64_t k) {
  const te_fl_scaling_desc& d = describe(scaling);
  if (scaling == Scaling::kNone) return {0, 0};
  if (d.block_cols == 0) return {1, 1};
  if (columnwise && d.transposed == 0) {
    return {factors(m, d.block_cols, d.pad_cols), factors(k, d.block_rows, d.pad_rows)};
  }
  if (columnwise) std::swap(m, k);
  const int64_t along_m = factors(m, d.block_rows, d.pad_rows);
  const int64_t along_k = factors(k, d.block_cols, d.pad_cols);
  if (d.layout == TE_FL_SCALE_LAYOUT_COLUMNS) return {along_k, along_m};
  return {along_m, along_k};
}

namespace core {

std::array<int64_t, 2> logical_matrix(std::span<const int64_t> shape) {
  std::array<int64_t, 2> mk{1, 1};
  for (size_t i = 0; i + 1 < shape.size(); ++i) mk[0] *= shape[i];
  if (!shape.empty()) mk[1] = shape.back();
  return mk;
}

DType scale_inv_dtype(Scaling scaling) { return static_cast<DType>(describe(scaling).scale_dtype); }

QuantBytes quant_bytes(DType dtype, Scaling scaling, int64_t m, int64_t k) {
  const DType scale = scale_inv_dtype(scaling);
  const auto row = scale_inv_shape(scaling, false, m, k),
             column = scale_inv_shape(scaling, true, m, k);
  return {bytes_for(dtype, m * k), bytes_for(scale, row[0] * row[1]),
          bytes_for(scale, column[0] * column[1])};
}

}  // namespace core

Result<Tensor> Tensor::empty_quantized(std::span<const int64_t> shape, const QuantSpec& spec,
                                       Device device, const Tensor* scale, const Tensor* amax) {
  TE_FL_RETURN_IF_ERROR(check_spec(shape, spec));
  TE_FL_RETURN_IF_ERROR(check_state("scale", scale, device));
  TE_FL_RETURN_IF_ERROR(check_state("amax", amax, device));
  const bool tensor_mode = spec.scaling == Scaling::kTensor;
  if (scale != nullptr && !tensor_mode) {
    return invalid_argument("scaling " + std::string(name(spec.scaling)) +
                            " derives its scales: a given scale would be ignored; leave it out");
  }
  const bool optional = tensor_mode && !spec.compute_scale && scale != nullptr;
  if (!spec.amax && (!optional || amax != nullptr)) {
    return invalid_argument(
        "a quantised tensor without amax is one of scaling tensor under a given scale, for which "
        "no amax is given; set QuantSpec::amax");
  }
  const bool second_level = te_fl::describe(spec.scaling).second_level != 0;
  const bool has_amax = (tensor_mode && spec.amax) || second_level || amax != nullptr;
  const auto [m, k] = core::logical_matrix(shape);
  const core::QuantBytes bytes = core::quant_bytes(spec.dtype, spec.scaling, m, k);
  const Layout l = plan(spec, bytes, tensor_mode && scale == nullptr, has_amax && amax == nullptr);

  const core::AllocationUse use(spec.dtype, shape);
  std::shared_ptr<void> codes;
  if (spec.rowwise) {
    TE_FL_ASSIGN_OR_RETURN(
        codes, core::SharedBlocks::memory(device, bytes.codes, core::MemoryPart::kRows));
  }
  const std::shared_ptr<core::QuantStorage> parts(new core::QuantStorage, core::FreeQuantStorage());
  TE_FL_ASSIGN_OR_RETURN(parts->block,
                         core::SharedBlocks::memory(device, l.total, core::MemoryPart::kOther));
  char* const base = static_cast<char*>(parts->block.get());
  void* stream = devices::current_stream(device);
  const bool sets_amax = tensor_mode && spec.compute_scale;
  const int64_t zeroed_from = spec.clear_scales ? l.zeroed_from : sets_amax ? -1 : l.amax;
  if (zeroed_from >= 0) {
    TE_FL_RETURN_IF_ERROR(devices::fill(device, base + zeroed_from, 0,
                                        static_cast<size_t>(l.total - zeroed_from), stream));
  }
  const auto at = [&](int64_t offset) { return offset < 0 ? nullptr : base + offset; };
  te_fl_quant q;
  q.scaling = static_cast<uint32_t>(spec.scaling);
  if (spec.compute_scale) q.flags |= TE_FL_QUANT_COMPUTE_SCALE;
  if (spec.pow2_scale) q.flags |= TE_FL_QUANT_POW2_SCALE;
  q.amax_epsilon = spec.amax_epsilon;
  q.columnwise_data = at(l.columnwise);
  q.scale_inv = at(l.scale_inv);
  q.columnwise_scale_inv = at(l.columnwise_scale_inv);
  q.amax = reinterpret_cast<float*>(at(l.amax));
  q.scale = reinterpret_cast<float*>(at(l.scale));
  q.columnwise_amax = reinterpret_cast<float*>(at(l.columnwise_amax));
  if (q.scale != nullptr && (spec.clear_scales || !spec.compute_scale)) {
    const float one = 1.0f;
    TE_FL_RETURN_IF_ERROR(devices::copy(device, q.scale, Device{}, &one, sizeof one, stream));
  }
  if (scale != nullptr) q.scale = (parts->scale = *scale).data<float>();
  if (amax != nullptr) q.amax = (parts->amax = *amax).data<float>();
  void* data = codes.get();
  Tensor t = Access::make({data, shape, {}, spec.dtype, device, std::move(codes)});
  Access::set_quant(t, q, parts);
  return t;
}

// ---- parts of quantised tensors

bool Tensor::quantized() const noexcept {
  return c_.quant != nullptr && c_.quant->scaling != TE_FL_SCALING_NONE;
}
Scaling Tensor::scaling() const noexcept {
  return quantized() ? static_cast<Scaling>(quant_.scaling) : Scaling::kNone;
}
bool Tensor::has_rowwise() const noexcept { return defined() && c_.dl.data != nullptr; }
bool Tensor::has_columnwise() const noexcept {
  return quantized() && quant_.columnwise_data != nullptr;
}

Tensor Tensor::rowwise_only() const {
  if (!quantized() || !has_rowwise()) return {};
  Tensor t = *this;
  t.quant_.columnwise_data = t.quant_.columnwise_scale_inv = nullptr;
  t.quant_.columnwise_amax = nullptr;
  return t;
}

Tensor Tensor::columnwise_only() const {
  if (!has_columnwise()) return {};
  Tensor t = *this;
  t.storage_.reset();
  t.c_.dl.data = nullptr;
  t.c_.dl.byte_offset = 0;
  if (scaling() != Scaling::kTensor) t.quant_.scale_inv = nullptr;  // kTensor: shared scale
  return t;
}

Tensor Tensor::rowwise_codes() const {
  if (!quantized() || !has_rowwise()) return {};
  const Shape packed{bytes_for(dtype_, numel())};
  const bool four_bit = dtype_ == DType::kF4E2M1;
  return Access::make({raw_data(), four_bit ? std::span<const int64_t>(packed) : shape(),
                       four_bit ? std::span<const int64_t>() : strides(), DType::kU8, device_,
                       storage_});
}

Tensor Tensor::columnwise_codes() const {
  if (!has_columnwise()) return {};
  const auto [m, k] = core::logical_matrix(shape());
  Shape codes{k, m};
  if (scaling() == Scaling::kMXFP8) codes = {m, k};
  if (dtype_ == DType::kF4E2M1) codes = {bytes_for(dtype_, m * k)};
  return Access::make({quant_.columnwise_data, codes, {}, DType::kU8, device_, quant_storage_});
}

namespace {

Tensor scale_part(Tensor::Access::Parts parts, Scaling scaling, bool columnwise,
                  std::span<const int64_t> shape) {
  const auto [m, k] = core::logical_matrix(shape);
  const auto extents = scale_inv_shape(scaling, columnwise, m, k);
  // The scale of per-tensor scaling has shape [1], as the ABI requires, not [1, 1].
  parts.shape = std::span(extents).subspan(scaling == Scaling::kTensor ? 1 : 0);
  parts.dtype = core::scale_inv_dtype(scaling);
  return Tensor::Access::make(parts);
}

}  // namespace

Tensor Tensor::scale_inv() const {
  if (!quantized() || quant_.scale_inv == nullptr) return {};
  return scale_part({quant_.scale_inv, {}, {}, DType::kF32, device_, quant_storage_}, scaling(),
                    false, shape());
}

Tensor Tensor::columnwise_scale_inv() const {
  if (!quantized()) return {};
  const bool shared = scaling() == Scaling::kTensor && has_columnwise();
  void* data = quant_.columnwise_scale_inv;
  if (data == nullptr && shared) data = quant_.scale_inv;
  if (data == nullptr) return {};
  return scale_part({data, {}, {}, DType::kF32, device_, quant_storage_}, scaling(), true, shape());
}

Tensor Tensor::amax() const {
  if (!quantized() || quant_.amax == nullptr) return {};
  const int64_t one[] = {1};
  return Access::make({quant_.amax, one, {}, DType::kF32, device_, quant_storage_});
}

Tensor Tensor::columnwise_amax() const {
  if (!quantized() || quant_.columnwise_amax == nullptr) return {};
  const int64_t one[] = {1};
  return Access::make({quant_.columnwise_amax, one, {}, DType::kF32, device_, quant_storage_});
}

Tensor Tensor::scale() const {
  if (!quantized() || quant_.scale == nullptr) return {};
  const int64_t one[] = {1};
  return Access::make({quant_.scale, one, {}, DType::kF32, device_, quant_storage_});
}

}  // namespace te_fl
