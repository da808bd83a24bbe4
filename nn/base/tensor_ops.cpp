#include "nn/base/tensor_ops.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "te_fl/device.hpp"

namespace te_fl::nn::detail {

namespace {

bool parts_share_memory(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined() || a.numel() == 0 || b.numel() == 0) return false;
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.raw_data()); };
  const auto end = [&](const Tensor& t) {
    int64_t last = 0;
    for (int i = 0; i < t.rank(); ++i) {
      last += (t.size(i) - 1) * t.strides()[static_cast<size_t>(i)];
    }
    return begin(t) + static_cast<uintptr_t>(bytes_for(t.dtype(), last + 1));
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

std::array<Tensor, 2> code_parts(const Tensor& t) {
  if (!t.quantized()) return {t, Tensor()};
  return {t.rowwise_codes(), t.columnwise_codes()};
}

}  // namespace

bool shares_memory(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined() || a.device() != b.device()) return false;
  if (!a.quantized() && !b.quantized()) return parts_share_memory(a, b);
  for (const Tensor& x : code_parts(a)) {
    for (const Tensor& y : code_parts(b)) {
      if (parts_share_memory(x, y)) return true;
    }
  }
  return false;
}

CallOptions call_options(const Device& device) {
  CallOptions options;
  options.stream = devices::current_stream(device);
  return options;
}

Result<Tensor> empty_like(const Tensor& tensor, DType dtype) {
  return Tensor::empty(tensor.shape(), dtype, tensor.device());
}

Status fill(const Tensor& tensor, double value) {
  te_fl_fill_args args{};
  args.output = tensor;
  args.value = value;
  return ops::fill(args, call_options(tensor.device()));
}

Status copy(const Tensor& from, const Tensor& to) {
  te_fl_strided_copy_args args{};
  args.input = from;
  args.output = to;
  return ops::strided_copy(args, call_options(to.device()));
}

Status add(const Tensor& a, const Tensor& b, const Tensor& out) {
  te_fl_add_args args{};
  args.a = a;
  args.b = b;
  args.output = out;
  return ops::add(args, call_options(out.device()));
}

Status quantize(const Tensor& from, const Tensor& to, const Tensor& noop) {
  te_fl_quantize_args args{};
  args.input = from;
  args.output = to;
  if (noop.defined()) args.noop_flag = noop;
  return ops::quantize(args, call_options(to.device()));
}

Status fill_columns(const Tensor& tensor, const Tensor& sums) {
  const int64_t k = tensor.size(-1), m = k == 0 ? 0 : tensor.numel() / k;
  const auto matrix = [&](void* codes, const Shape& shape) {
    return Tensor::wrap(codes, shape, {}, tensor.dtype(), tensor.device(), nullptr);
  };
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows, matrix(tensor.raw_data(), {m, k}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor columns,
                         matrix(tensor.columnwise_codes().raw_data(), {k, m}));
  const Tensor scale_inv = tensor.scale_inv();
  te_fl_fp8_transpose_args args{};
  args.input = rows;
  args.output = columns;
  if (sums.defined()) {
    args.scale_inv = scale_inv;
    args.column_sums = sums;
  }
  return ops::fp8_transpose(args, call_options(tensor.device()));
}

Result<Tensor> cast(const Tensor& tensor, DType dtype) {
  if (tensor.dtype() == dtype && tensor.contiguous()) return tensor;
  TE_FL_ASSIGN_OR_RETURN(Tensor result, empty_like(tensor, dtype));
  TE_FL_RETURN_IF_ERROR(copy(tensor, result));
  return result;
}

Result<Tensor> compact(const Tensor& tensor) { return cast(tensor, tensor.dtype()); }

Status running_amax(const Tensor& tensor, const Tensor& amax) {
  // compute_amax overwrites its result, so the running amax is the amax of the tensor {new, old}.
  TE_FL_ASSIGN_OR_RETURN(Tensor pair, Tensor::empty({2}, DType::kF32, tensor.device()));
  TE_FL_ASSIGN_OR_RETURN(Tensor fresh, pair.slice(0, 0, 1));
  TE_FL_ASSIGN_OR_RETURN(Tensor old, pair.slice(0, 1, 2));
  te_fl_compute_amax_args args{};
  args.input = tensor;
  args.amax = fresh;
  TE_FL_RETURN_IF_ERROR(ops::compute_amax(args, call_options(tensor.device())));
  TE_FL_RETURN_IF_ERROR(copy(amax, old));
  args.input = pair;
  args.amax = amax;
  return ops::compute_amax(args, call_options(tensor.device()));
}

Result<Tensor> as_matrix(const Tensor& x, int64_t last, std::string_view what) {
  if (!x.defined() || x.quantized() || !is_high(x.dtype()) || x.rank() < 1 || x.size(-1) != last) {
    return invalid_argument(
        std::string(what) + " is " + (x.defined() ? x.describe() : std::string("undefined")) +
        "; it must be F32, BF16 or F16 of shape [..., " + std::to_string(last) + "]");
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor flat, compact(x));
  if (flat.rank() == 2) return flat;
  int64_t rows = 1;
  for (int i = 0; i + 1 < flat.rank(); ++i) rows *= flat.size(i);
  return flat.view({rows, last});
}

Result<Tensor> as_operand(const Tensor& x, int64_t last, std::string_view what) {
  const bool codes = x.defined() && x.quantized() && x.scaling() == Scaling::kTensor &&
                     x.has_rowwise() && x.rank() > 0 && x.size(-1) == last;
  if (!codes) return as_matrix(x, last, what);
  return x.view({-1, last});
}

Shape with_last(std::span<const int64_t> like, int64_t last) {
  Shape shape(like.begin(), like.end());
  if (!shape.empty()) shape.back() = last;
  return shape;
}

namespace {

// An error for a wrong shape, as INVALID_ARGUMENT: "WHAT f32[3,2] cpu RULE [2,3]".
Status check_shape(const Tensor& t, std::span<const int64_t> want, const std::string& what,
                   const char* rule) {
  if (t.defined() && std::ranges::equal(t.shape(), want)) return {};
  std::string shape;
  for (const int64_t n : want) shape += (shape.empty() ? "[" : ",") + std::to_string(n);
  return invalid_argument(what + (t.defined() ? t.describe() : std::string("undefined")) + rule +
                          shape + "]");
}

}  // namespace

Status check_gradient(const Tensor& dy, std::span<const int64_t> x_shape, int64_t last,
                      std::string_view module) {
  return check_shape(dy, with_last(x_shape, last), std::string(module) + ": dy is ",
                     "; it must have the shape of the forward's result, ");
}

Result<Tensor> residual_matrix(const Tensor* residual, std::span<const int64_t> x_shape,
                               int64_t last, std::string_view what) {
  if (residual == nullptr) return Tensor();
  TE_FL_RETURN_IF_ERROR(check_shape(*residual, with_last(x_shape, last), std::string(what) + " is ",
                                    "; it must have the shape of what it is added to, "));
  return as_matrix(*residual, last, what);
}

}  // namespace te_fl::nn::detail
