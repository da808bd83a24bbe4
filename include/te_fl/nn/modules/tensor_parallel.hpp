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

// The ranks that divide a layer among them. All of them call its forwards and backwards in the same
// order. A handle: copies share the communicator.
struct TensorParallel {
  std::shared_ptr<const Comm> ranks;  // null, or of one rank: nothing is divided
  // Between the linear maps each rank has its part of the activations' first dimension, which the
  // number of ranks divides, instead of all of them: what a layer takes and gives.
  bool sequence_parallel = false;
  // Dropout of divided activations draws from it: a random stream of this rank's own. Absent: the
  // thread's, with which the ranks' parts would be dropped alike.
  std::optional<Context> random = {};
  // Ranks that a framework has in place of `ranks`, for layers of the rank's own sizes.
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

// Says how ranks divide a linear map. kColumn: its output features; the input's gradient is the sum
// of the ranks'. kRow: its input features; the output is the sum of the ranks' products, of which
// the first rank's has the bias.
enum class ParallelMode : uint8_t { kNone, kColumn, kRow };

// This rank's part of the first dimension: a view. INVALID_ARGUMENT if the number of ranks does not
// divide that.
TE_FL_API Result<Tensor> scatter_rows(const TensorParallel& parallel, const Tensor& x);
// The ranks' parts one behind the other along the first dimension.
TE_FL_API Result<Tensor> gather_rows(const TensorParallel& parallel, const Tensor& x);

// They work on a tape, where all ranks compute the same before and after the divided region. Into
// it: scatter_rows(), whose gradient the ranks gather. Out of it: gather_rows(), of whose gradient
// each rank takes its part.
TE_FL_API Value scatter_rows(const TensorParallel& parallel, const Value& x);
TE_FL_API Value gather_rows(const TensorParallel& parallel, const Value& x);

// Sums the gradients of those parameters of which each rank has a part (Parameter::partial_grad),
// by one collective for each dtype. Once a step, after the last backward; nothing if there are
// none. FAILED_PRECONDITION if one has not been written since clear_grad().
TE_FL_API Status sum_partial_gradients(const TensorParallel& parallel,
                                       const std::vector<NamedParameter>& parameters);

}  // namespace te_fl::nn
