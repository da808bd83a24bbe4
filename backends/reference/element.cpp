#include "element.hpp"

#include "dispatch.hpp"
#include "scaling.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::reference {

const char* dtype_name(int dtype) noexcept {
  static constexpr const char* kNames[TE_FL_DTYPE_COUNT] = {
      "f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "f4e2m1", "f8e8m0", "i8",
      "i16", "i32", "i64", "u8",   "u16",    "u32",    "u64",    "bool"};
  return dtype >= 0 && dtype < TE_FL_DTYPE_COUNT ? kNames[dtype] : "an unknown dtype";
}

int64_t element_offset(const te_fl_tensor& t, int64_t i) noexcept {
  if (t.dl.strides == nullptr) return i;
  int64_t offset = 0;
  for (int d = t.dl.ndim - 1; d >= 0; --d) {
    offset += i % t.dl.shape[d] * t.dl.strides[d];
    i /= t.dl.shape[d];
  }
  return offset;
}

float largest_finite_of(int dtype) noexcept {
  switch (dtype) {
    case TE_FL_F16:
      return numeric::largest_finite<numeric::half>;
    case TE_FL_BF16:
      return numeric::largest_finite<numeric::bfloat16>;
    case TE_FL_F8E4M3:
      return numeric::kE4m3Max;
    case TE_FL_F8E5M2:
      return numeric::kE5m2Max;
    case TE_FL_F4E2M1:
      return numeric::kE2m1Max;
    default:
      return FLT_MAX;
  }
}

Reader::Reader(const te_fl_tensor& tensor, Copy preferred)
    : tensor_(tensor), size_(backend::numel(tensor)) {
  const uint32_t scaling = backend::scaling(tensor);
  if (scaling == TE_FL_SCALING_NONE || size_ == 0) return;
  const te_fl_quant& quant = *tensor.quant;
  columnwise_ =
      preferred == Copy::kColumnwise ? quant.columnwise_data != nullptr : tensor.dl.data == nullptr;
  if (scaling == TE_FL_SCALING_NVFP4) {
    const bool own = columnwise_ && quant.columnwise_amax != nullptr;
    nvfp4_amax_ = own ? *quant.columnwise_amax : *quant.amax;
  }
}

double Reader::scale_of(int64_t row, int64_t col) const {
  const te_fl_quant& quant = *tensor_.quant;
  const void* scale = columnwise_ ? quant.columnwise_scale_inv : quant.scale_inv;
  if (scale == nullptr) scale = columnwise_ ? quant.scale_inv : quant.columnwise_scale_inv;
  const int64_t index =
      scale_index(quant.scaling, columnwise_, backend::as_matrix(tensor_), row, col);
  switch (quant.scaling) {
    case TE_FL_SCALING_MXFP8:
      return numeric::to_double(load<numeric::e8m0>(scale, index));
    case TE_FL_SCALING_NVFP4:
      return numeric::to_double(load<numeric::fp8e4m3>(scale, index));
    default:
      return load<float>(scale, index);
  }
}

template <class Code, class Out>
void Reader::decode(int64_t begin, int64_t n, Out* out) const {
  const te_fl_quant& quant = *tensor_.quant;
  const backend::Matrix matrix = backend::as_matrix(tensor_);
  const bool per_tensor = quant.scaling == TE_FL_SCALING_TENSOR;
  const double tensor_scale = per_tensor && n > 0 ? scale_of(0, 0) : 1.0;
  const bool second_level = quant.scaling == TE_FL_SCALING_NVFP4 && nvfp4_amax_ > 0.0 &&
                            nvfp4_amax_ <= static_cast<double>(FLT_MAX);
  const bool compact = backend::is_contiguous(tensor_);
  for (int64_t i = begin; i < begin + n; ++i) {
    const int64_t row = i / matrix.cols;
    const int64_t col = i % matrix.cols;
    const Code code = columnwise_ ? load<Code>(quant.columnwise_data,
                                               columnwise_index(quant.scaling, matrix, row, col))
                                  : load<Code>(backend::data<const char>(tensor_),
                                               compact ? i : element_offset(tensor_, i));
    double value = numeric::to_double(code) * (per_tensor ? tensor_scale : scale_of(row, col));
    // The value so far is exact, and so is the multiplication; only the division rounds.
    if (second_level) value = value * nvfp4_amax_ / (numeric::kE4m3Max * numeric::kE2m1Max);
    *out++ = static_cast<Out>(value);
  }
}

template <class Out>
void Reader::read_as(int64_t begin, int64_t n, Out* out) const {
  visit_float(dtype_of(tensor_), [&](auto type) {
    using T = typename decltype(type)::type;
    if (backend::scaling(tensor_) != TE_FL_SCALING_NONE) {
      if constexpr (sizeof(T) == 1) return decode<T>(begin, n, out);
    }
    const auto* data = backend::data<const char>(tensor_);
    for_each_run(tensor_, begin, n, [&](int64_t offset, int64_t stride, int64_t count) {
      for (int64_t j = 0; j < count; ++j) {
        const T element = load<T>(data, offset + j * stride);
        *out++ = std::is_same_v<Out, double> ? static_cast<Out>(numeric::to_double(element))
                                             : static_cast<Out>(numeric::to_float(element));
      }
    });
  });
}

void Reader::read(int64_t begin, int64_t n, float* out) const { read_as(begin, n, out); }
void Reader::read(int64_t begin, int64_t n, double* out) const { read_as(begin, n, out); }

std::vector<float> Reader::all() const {
  std::vector<float> values(static_cast<size_t>(size_));
  read(0, size_, values.data());
  return values;
}
std::vector<double> Reader::all_double() const {
  std::vector<double> values(static_cast<size_t>(size_));
  read(0, size_, values.data());
  return values;
}

namespace {

template <class In>
void write_as(const te_fl_tensor& tensor, int64_t begin, int64_t n, const In* values) {
  visit_float(dtype_of(tensor), [&](auto type) {
    using T = typename decltype(type)::type;
    auto* data = backend::data<char>(tensor);
    for_each_run(tensor, begin, n, [&](int64_t offset, int64_t stride, int64_t count) {
      for (int64_t j = 0; j < count; ++j) {
        if constexpr (std::is_same_v<In, double>) {
          save<T>(data, offset + j * stride, numeric::from_double<T>(*values++));
        } else {
          save<T>(data, offset + j * stride, numeric::from_float<T>(*values++));
        }
      }
    });
  });
}

}  // namespace

void Writer::write(int64_t begin, int64_t n, const float* values) const {
  write_as(tensor_, begin, n, values);
}
void Writer::write(int64_t begin, int64_t n, const double* values) const {
  write_as(tensor_, begin, n, values);
}

}  // namespace te_fl::reference
