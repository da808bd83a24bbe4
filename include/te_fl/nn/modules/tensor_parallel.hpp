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

// The ranks that divide a layer (tensor parallelism). All ranks call its forwards and backwards in
// the same order. A handle: copies share the communicator.
struct TensorParallel {
  std::shared_ptr<const Comm> ranks;  // null, or one rank: nothing is divided
  // Sequence parallelism: the inputs and outputs of a layer are divided by their first dimension
  // among the ranks, and each rank holds its own part. The number of ranks must divide that
  // dimension.
  bool sequence_parallel = false;
  // The random stream of this rank, for dropout of divided activations. Unset: the thread's random
  // stream, with which all ranks would drop the same elements of their parts.
  std::optional<Context> random = {};
  // A framework's process group, used instead of `ranks`. The layers then have this rank's own
  // sizes.
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

// The division of a linear layer among ranks. kColumn: by output features; the input's gradient is
// the sum over the ranks. kRow: by input features; the output is the sum of the ranks' products, of
// which the first rank's includes the bias.
enum class ParallelMode : uint8_t { kNone, kColumn, kRow };

// This rank's part of the first dimension, as a view. INVALID_ARGUMENT if the number of ranks does
// not divide that dimension.
TE_FL_API Result<Tensor> scatter_rows(const TensorParallel& parallel, const Tensor& x);
// Concatenates the ranks' parts along the first dimension.
TE_FL_API Result<Tensor> gather_rows(const TensorParallel& parallel, const Tensor& x);

// Versions for a tape whose computation before scatter_rows() and after gather_rows() is the same
// on all ranks. The gradient of scatter_rows() is gathered from the ranks; the gradient of
// gather_rows() is this rank's part.
TE_FL_API Value scatter_rows(const TensorParallel& parallel, const Value& x);
TE_FL_API Value gather_rows(const TensorParallel& parallel, const Value& x);

// Sums the gradients of parameters with partial_grad (Parameter::partial_grad) over the ranks, by
// one collective per dtype. Call it once per step, after the last backward. Does nothing if there
// are no such parameters. FAILED_PRECONDITION if such a gradient has not been written since
// clear_grad().
TE_FL_API Status sum_partial_gradients(const TensorParallel& parallel,
                                       const std::vector<NamedParameter>& parameters);

}  // namespace te_fl::nn
