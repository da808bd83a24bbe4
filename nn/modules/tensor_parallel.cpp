#include "nn/modules/tensor_parallel.hpp"

#include <optional>
#include <string>
#include <utility>

#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/comm_ranks.hpp"
#include "nn/modules/gathered_rows.hpp"

namespace te_fl::nn {
namespace {

Status check_rows(const TensorParallel& parallel, const Tensor& x, std::string_view who) {
  if (x.defined() && x.rank() >= 1 && x.size(0) % parallel.size() == 0) return {};
  return invalid_argument(std::string(who) + ": x is " +
                          (x.defined() ? x.describe() : std::string("undefined")) +
                          "; under sequence parallelism its first dimension must be a multiple of "
                          "the number of ranks, which is " +
                          std::to_string(parallel.size()));
}

// The ranks of a TensorParallel with several ranks: the framework's, or those of its communicator.
class Ranks {
 public:
  explicit Ranks(const TensorParallel& parallel) : ranks_(parallel.framework_ranks.get()) {
    if (ranks_ == nullptr) ranks_ = &own_.emplace(parallel.ranks);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  SequenceRanks& operator*() const noexcept { return *ranks_; }
  SequenceRanks* operator->() const noexcept { return ranks_; }

 private:
  std::optional<detail::CommRanks> own_;
  SequenceRanks* ranks_;
};

}  // namespace

namespace detail {

Result<Shape> output_shape(const TensorParallel& parallel, ParallelMode mode,
                           std::span<const int64_t> shape, std::string_view module) {
  Shape result(shape.begin(), shape.end());
  if (!parallel.divides_sequence() || mode == ParallelMode::kNone) return result;
  if (mode == ParallelMode::kColumn) {
    result.front() *= parallel.size();
    return result;
  }
  if (result.front() % parallel.size() != 0) {
    return invalid_argument(std::string(module) + ": the first dimension of x is " +
                            std::to_string(result.front()) +
                            "; under sequence parallelism it must be a multiple of the number of "
                            "ranks, which is " +
                            std::to_string(parallel.size()));
  }
  result.front() /= parallel.size();
  return result;
}

std::shared_ptr<SequenceRanks> make_sequence_ranks(const TensorParallel& parallel) {
  if (!parallel.divides_sequence()) return nullptr;
  if (parallel.framework_ranks != nullptr) return parallel.framework_ranks;
  return std::make_shared<CommRanks>(parallel.ranks);
}

Result<Tensor> summed(const TensorParallel& parallel, const Tensor& partial) {
  if (!parallel.divides()) return partial;
  const Ranks ranks(parallel);
  if (!parallel.sequence_parallel) {
    TE_FL_RETURN_IF_ERROR(ranks->sum(partial));
    return partial;
  }
  return scatter_rows_now(*ranks, partial);
}

Result<Tensor> forward_summed(GemmUnit& gemm, const TensorParallel& parallel, GemmUnit::Use& use,
                              const Tensor& input, const ForwardOptions& options) {
  if (gemm.spec().gradient_rows != nullptr) return gemm.forward_scattered(use, input, options);
  TE_FL_ASSIGN_OR_RETURN(const Tensor y, gemm.forward(use, input, options));
  return summed(parallel, y);
}

OwnRandom::OwnRandom(const TensorParallel& parallel, bool divided, const Device& device) {
  if (!divided || !parallel.random.has_value()) return;
  scope_.emplace(parallel.random->with_stream(device, devices::current_stream(device)));
}

void mark_partial(const TensorParallel& parallel, Parameter* parameter) {
  if (parameter != nullptr && parallel.divides_sequence()) parameter->partial_grad = true;
}

}  // namespace detail

Result<Tensor> scatter_rows(const TensorParallel& parallel, const Tensor& x) {
  if (!parallel.divides()) return x;
  TE_FL_RETURN_IF_ERROR(check_rows(parallel, x, "scatter_rows"));
  const int64_t rows = x.size(0) / parallel.size();
  return x.slice(0, parallel.rank() * rows, (parallel.rank() + 1) * rows);
}

Result<Tensor> gather_rows(const TensorParallel& parallel, const Tensor& x) {
  if (!parallel.divides()) return x;
  if (!x.defined() || x.rank() < 1 || x.quantized()) {
    return invalid_argument("gather_rows: x is " +
                            (x.defined() ? x.describe() : std::string("undefined")) +
                            "; it must be unquantised and have a first dimension");
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor part, detail::compact(x));
  Shape shape(x.shape().begin(), x.shape().end());
  shape.front() *= parallel.size();
  TE_FL_ASSIGN_OR_RETURN(Tensor whole, Tensor::empty(shape, x.dtype(), x.device()));
  TE_FL_ASSIGN_OR_RETURN(const auto work, Ranks(parallel)->all_gather(part, whole, true));
  if (work != nullptr) TE_FL_RETURN_IF_ERROR(work->wait());
  return whole;
}

namespace {

using OnTensor = Result<Tensor> (*)(const TensorParallel&, const Tensor&);

Value recorded(const TensorParallel& parallel, const Value& x, OnTensor forward,
               OnTensor backward) {
  if (!x.ok() || !parallel.divides()) return x;
  const auto run = [&](bool) -> Result<Tape::Recorded> {
    TE_FL_ASSIGN_OR_RETURN(Tensor y, forward(parallel, x.tensor()));
    return Tape::Recorded{{std::move(y)},
                          [parallel, backward](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
                            if (!dys[0].defined()) return Tape::Tensors{Tensor()};
                            TE_FL_ASSIGN_OR_RETURN(Tensor dx, backward(parallel, dys[0]));
                            return Tape::Tensors{std::move(dx)};
                          }};
  };
  return x.tape()->record(std::span(&x, 1), 1, run).front();
}

}  // namespace

Value scatter_rows(const TensorParallel& parallel, const Value& x) {
  return recorded(parallel, x, &scatter_rows, &gather_rows);
}

Value gather_rows(const TensorParallel& parallel, const Value& x) {
  return recorded(parallel, x, &gather_rows, &scatter_rows);
}

namespace {

// Sums several gradients over the ranks with one collective: copies them into one tensor and back.
Status sum_together(const TensorParallel& parallel, const std::vector<Tensor>& gradients) {
  int64_t total = 0;
  for (const Tensor& g : gradients) total += g.numel();
  const Tensor& like = gradients.front();
  TE_FL_ASSIGN_OR_RETURN(const Tensor flat, Tensor::empty({total}, like.dtype(), like.device()));
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (const Tensor& g : gradients) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor slice, flat.slice(0, begin, begin + g.numel()));
    TE_FL_ASSIGN_OR_RETURN(Tensor part, slice.view(g.shape()));
    TE_FL_RETURN_IF_ERROR(detail::copy(g, part));
    parts.push_back(std::move(part));
    begin += g.numel();
  }
  TE_FL_RETURN_IF_ERROR(Ranks(parallel)->sum(flat));
  for (size_t i = 0; i < parts.size(); ++i) {
    TE_FL_RETURN_IF_ERROR(detail::copy(parts[i], gradients[i]));
  }
  return {};
}

}  // namespace

Status sum_partial_gradients(const TensorParallel& parallel,
                             const std::vector<NamedParameter>& parameters) {
  if (!parallel.divides()) return {};
  std::vector<std::vector<Tensor>> by_dtype;
  for (const NamedParameter& p : parameters) {
    if (!p.parameter->partial_grad || !p.parameter->requires_grad) continue;
    TE_FL_RETURN_IF_ERROR(detail::check_complete("sum_partial_gradients", p));
    if (!p.grad().defined()) continue;
    if (p.parameter->internals().grad_stale) {
      return failed_precondition("sum_partial_gradients: the gradient of " + p.name +
                                 " was cleared by clear_grad() and not written since; run a "
                                 "backward first, or use zero_grad() where it is to count as zero");
    }
    auto found = by_dtype.begin();
    while (found != by_dtype.end() && found->front().dtype() != p.grad().dtype()) ++found;
    if (found == by_dtype.end()) found = by_dtype.insert(found, std::vector<Tensor>());
    found->push_back(p.grad());
  }
  for (const auto& gradients : by_dtype) TE_FL_RETURN_IF_ERROR(sum_together(parallel, gradients));
  return {};
}

}  // namespace te_fl::nn
