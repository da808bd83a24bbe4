#pragma once

#include <memory>
#include <string_view>

#include "nn/modules/gemm_unit.hpp"
#include "te_fl/nn/modules/tensor_parallel.hpp"

// The steps before and after the GEMM of a linear map that is sharded over ranks. Without sharding
// these functions do nothing.
namespace te_fl::nn::detail {

// The shape of a map's output. Under sequence parallelism the first extent is multiplied by the
// number of ranks for a column-parallel map, and divided by it for a row-parallel one; otherwise
// `shape` itself.
Result<Shape> output_shape(const TensorParallel& parallel, ParallelMode mode,
                           std::span<const int64_t> shape, std::string_view module);
// The ranks over which the rows are sharded; null without sequence parallelism.
std::shared_ptr<SequenceRanks> make_sequence_ranks(const TensorParallel& parallel);
// The sum of the ranks' matrices; under sequence parallelism this rank's rows of it. May overwrite
// `partial`.
Result<Tensor> summed(const TensorParallel& parallel, const Tensor& partial);
// Computes the GEMM of a row-parallel map's forward and sums its result over the ranks like
// summed().
Result<Tensor> forward_summed(GemmUnit& gemm, const TensorParallel& parallel, GemmUnit::Use& use,
                              const Tensor& input, const ForwardOptions& options);
// While this object lives, dropout on this thread uses this rank's own random stream, if there is
// one and `divided` is true (the tensor is sharded).
class OwnRandom {
 public:
  OwnRandom(const TensorParallel& parallel, bool divided, const Device& device);

 private:
  std::optional<ContextScope> scope_;
};
// Marks the gradient of a norm's parameter, or of the bias of a row-parallel map, as partial if
// each rank has its own rows.
void mark_partial(const TensorParallel& parallel, Parameter* parameter);

}  // namespace te_fl::nn::detail
