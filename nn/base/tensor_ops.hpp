#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "te_fl/ops.hpp"
#include "te_fl/tensor.hpp"

// Functions that call te-fl's ops with Tensors. The ops run on the calling thread's stream of the
// tensors' device.
namespace te_fl::nn::detail {

// Options for a call on `device` with the calling thread's stream and without random numbers.
CallOptions call_options(const Device& device);

// True if the byte ranges of the two tensors overlap, in the row-wise or column-wise data.
// Interleaved views count as overlapping.
bool shares_memory(const Tensor& a, const Tensor& b);
Result<Tensor> empty_like(const Tensor& tensor, DType dtype);
Status fill(const Tensor& tensor, double value);
Status copy(const Tensor& from, const Tensor& to);
Status add(const Tensor& a, const Tensor& b, const Tensor& out);
// Quantises a tensor. `noop`: F32 [1] or undefined; if its value is not 0, nothing is written.
Status quantize(const Tensor& from, const Tensor& to, const Tensor& noop = {});
// Computes the column-wise data of a per-tensor quantised tensor from its row-wise data. If `sums`
// [K] is defined, also writes the column sums.
Status fill_columns(const Tensor& tensor, const Tensor& sums = {});
// Return `tensor` itself if it is compact (and, for cast, has the dtype), otherwise a copy.
Result<Tensor> compact(const Tensor& tensor);
Result<Tensor> cast(const Tensor& tensor, DType dtype);
// amax = max(amax, max|tensor|); amax is F32 [1].
Status running_amax(const Tensor& tensor, const Tensor& amax);

// Views or copies x [..., last] as compact [rows, last]. INVALID_ARGUMENT with `what` if the last
// dimension differs or the dtype is not F32, BF16 or F16.
Result<Tensor> as_matrix(const Tensor& x, int64_t last, std::string_view what);
// Like as_matrix(), but also accepts a per-tensor quantised tensor. Its view keeps the row-wise
// data and, if present, the column-wise data.
Result<Tensor> as_operand(const Tensor& x, int64_t last, std::string_view what);
// The shape of `like` with another last dimension.
Shape with_last(std::span<const int64_t> like, int64_t last);

// Returns a residual branch in the form of as_matrix(); undefined if there is none.
// INVALID_ARGUMENT unless it has the shape of x with `last` as its last dimension.
Result<Tensor> residual_matrix(const Tensor* residual, std::span<const int64_t> x_shape,
                               int64_t last, std::string_view what);

// INVALID_ARGUMENT, with the module's name, unless dy has the shape of the forward's result: x's
// shape with `last` as its last dimension.
Status check_gradient(const Tensor& dy, std::span<const int64_t> x_shape, int64_t last,
                      std::string_view module);

}  // namespace te_fl::nn::detail
