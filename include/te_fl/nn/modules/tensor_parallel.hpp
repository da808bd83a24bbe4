#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/nn/autograd/tape.hpp"
#include "te_fl/nn/modules/sequence_ranks.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// The ranks among which a layer is sharded (tensor parallelism). All ranks call the layer's forward
// and backward in the same order. Copies of this object share the communicator.
struct TensorParallel {
  std::shared_ptr<const Comm> ranks;  // null, or one rank: not sharded
  // Sequence parallelism: the inputs and outputs of a layer are sharded along their first
  // dimension, and each rank holds its own shard. The number of ranks must divide that dimension.
  bool sequence_parallel = false;
  // The random stream of this rank, for dropout of sharded activations. Unset: dropout uses the
  // thread's random stream; all ranks then drop the same elements of their shards.
  std::optional<Context> random = {};
  // A framework's process group, used instead of `ranks`. The options of the layers then state this
  // rank's own sizes, not those of the full layer.
  std::shared_ptr<SequenceRanks> framework_ranks = {};

  int size() const noexcept {
    if (framework_ranks != nullptr) return framework_ranks->size();
    return ranks == nullptr ? 1 : ranks->size();
  }
  int rank() const noexcept {
    if (framework_ranks != nullptr) return framework_ranks->rank();
    return ranks == nullptr ? 0 : ranks->rank();
  }
  bool divides() const noexcept { return size() > 1; }
  bool divides_sequence() const noexcept { return divides() && sequence_parallel; }
};

// The way in which a linear layer is sharded among ranks. kColumn: by output features; the input's
// gradient is summed over the ranks. kRow: by input features; each rank computes a partial output,
// and the output is the sum over the ranks. The first rank adds the bias to its partial output.
enum class ParallelMode : uint8_t { kNone, kColumn, kRow };

// This rank's rows of x (dimension 0), as a view. INVALID_ARGUMENT if the number of ranks does not
// divide that dimension.
TE_FL_API Result<Tensor> scatter_rows(const TensorParallel& parallel, const Tensor& x);
// Concatenates the ranks' tensors x along dimension 0.
TE_FL_API Result<Tensor> gather_rows(const TensorParallel& parallel, const Tensor& x);

// Versions for tape values, for models in which all ranks compute the same values before
// scatter_rows() and after gather_rows(). The gradient of scatter_rows() is gathered from the
// ranks; the gradient of gather_rows() is this rank's rows.
TE_FL_API Value scatter_rows(const TensorParallel& parallel, const Value& x);
TE_FL_API Value gather_rows(const TensorParallel& parallel, const Value& x);

// Sums the gradients of parameters with Parameter::partial_grad over the ranks, by one collective
// per dtype. Call it once per step, after the last backward. Does nothing if there are no such
// parameters. FAILED_PRECONDITION if the gradient of such a parameter has not been written since
// clear_grad().
TE_FL_API Status sum_partial_gradients(const TensorParallel& parallel,
                                       const std::vector<NamedParameter>& parameters);

}  // namespace te_fl::nn
