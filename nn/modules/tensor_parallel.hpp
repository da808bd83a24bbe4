#pragma once

#include <memory>
#include <string_view>

#include "nn/modules/gemm_unit.hpp"
#include "te_fl/nn/modules/tensor_parallel.hpp"

// The steps around the product of a linear map where ranks divide it. All of it does nothing, and
// costs nothing, where they do not.
namespace te_fl::nn::detail {

// `shape` with its first extent times the number of ranks, or divided by it: a column's output, and
// a row's, under sequence parallelism; else `shape` itself.
Result<Shape> output_shape(const TensorParallel& parallel, ParallelMode mode,
                           std::span<const int64_t> shape, std::string_view module);
// The ranks that have parts of the rows; null without sequence parallelism.
std::shared_ptr<SequenceRanks> sequence_ranks_of(const TensorParallel& parallel);
// The sum of the ranks' matrices, or under sequence parallelism this rank's rows of it. May write
// to `partial`.
Result<Tensor> summed(const TensorParallel& parallel, const Tensor& partial);
// summed() of the forward of a map by rows.
Result<Tensor> forward_summed(GemmUnit& gemm, const TensorParallel& parallel, GemmUnit::Use& use,
                              const Tensor& input, const ForwardOptions& options);
// While it lives, dropout on the thread draws from this rank's own stream, where there is one and
// `divided` says that what is dropped is a part.
class OwnRandom {
 public:
  OwnRandom(const TensorParallel& parallel, bool divided, const Device& device);

 private:
  std::optional<ContextScope> scope_;
};
// Makes the gradient of a norm's parameter, or of the bias of a map by rows, partial where each
// rank has rows of its own.
void mark_partial(const TensorParallel& parallel, Parameter* parameter);

}  // namespace te_fl::nn::detail
