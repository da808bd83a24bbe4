#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "te_fl/ops.hpp"
#include "te_fl/tensor.hpp"

// Catalogue ops on Tensors, on the calling thread's stream of their device.
namespace te_fl::nn::detail {

// The calling thread's stream of `device`, on which the op's tensors are; no random numbers.
CallOptions call_options(const Device& device);

// True if the two have bytes in common: of values or codes, row-wise and column-wise. Views that
// lie between each other's rows count as having.
bool shares_memory(const Tensor& a, const Tensor& b);
Result<Tensor> empty_like(const Tensor& tensor, DType dtype);
Status fill(const Tensor& tensor, double value);
Status copy(const Tensor& from, const Tensor& to);
Status add(const Tensor& a, const Tensor& b, const Tensor& out);
// `noop`, if defined: F32 [1], not 0: nothing is written.
Status quantize(const Tensor& from, const Tensor& to, const Tensor& noop = {});
// The column-wise copy from the row-wise one, of a tensor quantised by tensor; its columns' sums
// into `sums` [K] if that is defined.
Status fill_columns(const Tensor& tensor, const Tensor& sums = {});
// `tensor` itself if it is compact (and, for cast, of that dtype), else a copy.
Result<Tensor> compact(const Tensor& tensor);
Result<Tensor> cast(const Tensor& tensor, DType dtype);
// amax = max(amax, max|tensor|); amax is F32 [1].
Status running_amax(const Tensor& tensor, const Tensor& amax);

// x [..., last] as compact [rows, last]. INVALID_ARGUMENT naming `what` if the last dimension is
// another or the dtype is not F32, BF16 or F16.
Result<Tensor> as_matrix(const Tensor& x, int64_t last, std::string_view what);
// As as_matrix(); also of a tensor quantised by tensor, every copy it has.
Result<Tensor> as_operand(const Tensor& x, int64_t last, std::string_view what);
// `like`'s shape with another last dimension.
Shape with_last(std::span<const int64_t> like, int64_t last);

// A residual branch as as_matrix() gives it; undefined without one. INVALID_ARGUMENT unless it has
// the shape of x with `last` as its last dimension.
Result<Tensor> residual_matrix(const Tensor* residual, std::span<const int64_t> x_shape,
                               int64_t last, std::string_view what);

// INVALID_ARGUMENT naming the module unless dy has x's shape with `last` as its last dimension, as
// the forward's result had.
Status check_gradient(const Tensor& dy, std::span<const int64_t> x_shape, int64_t last,
                      std::string_view module);

}  // namespace te_fl::nn::detail
