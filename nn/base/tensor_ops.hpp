#pragma once

#include <cstdint>
#include <span>

#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/tensor.hpp"

// Catalogue ops on Tensors, on the calling thread's stream of their device.
namespace te_fl::nn::detail {

// The calling thread's stream of `device`, on which the op's tensors are; no random state.
CallOptions call_options(const Device& device);
// The same with the next `count` random numbers of the context, for an op on `device`.
// FAILED_PRECONDITION if it is captured into a graph whose launches do not advance the context.
Result<CallOptions> random_options(int64_t count, const Device& device);

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
// The same; also of a tensor quantised by tensor, every copy it has.
Result<Tensor> as_operand(const Tensor& x, int64_t last, std::string_view what);
// `like`'s shape with another last dimension.
Shape with_last(std::span<const int64_t> like, int64_t last);

// What a forward that is given `ctx` fills for its backward; FAILED_PRECONDITION, naming the
// module, if ctx still holds another forward.
template <class Record>
Result<std::unique_ptr<Record>> new_record(const Ctx* ctx, std::string_view module) {
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->check_empty(module));
  auto record = std::make_unique<Record>();
  record->copy = [](const Ctx::Record& other) -> std::unique_ptr<Ctx::Record> {
    return std::make_unique<Record>(static_cast<const Record&>(other));
  };
  return record;
}

// A residual branch as as_matrix() gives it; undefined without one. INVALID_ARGUMENT unless it has
// the shape of x with `last` as its last dimension.
Result<Tensor> residual_matrix(const Tensor* residual, std::span<const int64_t> x_shape,
                               int64_t last, std::string_view what);

// INVALID_ARGUMENT naming the module unless dy has x's shape with `last` as its last dimension, as
// the forward's result had.
Status check_gradient(const Tensor& dy, std::span<const int64_t> x_shape, int64_t last,
                      std::string_view module);

// Where a gradient that an op can only set, not add, is to be written: the parameter's own tensor,
// or scratch that commit() adds to it.
class GradTarget {
 public:
  static Result<GradTarget> open(Parameter* parameter);  // null or frozen: an undefined target
  const Tensor& tensor() const noexcept { return tensor_; }
  Status commit();

 private:
  Parameter* parameter_ = nullptr;
  Tensor tensor_;
  bool scratch_ = false;
};

}  // namespace te_fl::nn::detail
