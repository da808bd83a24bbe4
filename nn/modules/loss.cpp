#include "te_fl/nn/modules/loss.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "nn/autograd/ctx.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/id_table.hpp"

namespace te_fl::nn {

struct CrossEntropyLoss::Saved : Ctx::Record {
  Tensor logits;
  Tensor targets;
  Tensor lse;  // over the complete vocabulary
  double divisor = 1;
  std::vector<Tensor> own;  // sharded vocabulary: the columns of kColumns for each target
};

namespace {

// Computes alpha * (sum of the elements), F32 [1], as a GEMM with a vector of ones.
Result<Tensor> scaled_sum(const Tensor& values, double alpha) {
  const int64_t n = values.numel();
  TE_FL_ASSIGN_OR_RETURN(Tensor ones, Tensor::empty({1, n}, DType::kF32, values.device()));
  TE_FL_RETURN_IF_ERROR(detail::fill(ones, 1));
  TE_FL_ASSIGN_OR_RETURN(Tensor column, values.view({n, 1}));
  TE_FL_ASSIGN_OR_RETURN(Tensor sum, Tensor::empty({1, 1}, DType::kF32, values.device()));
  te_fl_generic_gemm_args args{};
  args.a = ones;
  args.b = column;
  args.d = sum;
  args.alpha = static_cast<float>(alpha);
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, detail::call_options(sum.device())));
  return sum.view({1});
}

// Computes alpha * value * weights[i] as a GEMM. The result is F32 with the shape of `weights`.
Result<Tensor> weighted(const Tensor& weights, const Tensor& value, double alpha) {
  const int64_t n = weights.numel();
  TE_FL_ASSIGN_OR_RETURN(const Tensor column, weights.view({n, 1}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor scalar, value.view({1, 1}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows, Tensor::empty({n, 1}, DType::kF32, value.device()));
  te_fl_generic_gemm_args args{};
  args.a = column;
  args.b = scalar;
  args.d = rows;
  args.alpha = static_cast<float>(alpha);
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, detail::call_options(value.device())));
  return rows.view(weights.shape());
}

// The entries of IdTable for a target in a sharded vocabulary. With them, ops for a complete
// vocabulary work on one rank's columns of the logits. An ignored target gets the number of these
// columns as its id, which is passed as ignore_index.
enum Column : size_t {
  kForward,    // the target's column here; for another rank's target: ignored, so its loss is 0
  kBackward,   // the target's column here; for another rank's target 0, which kWeight cancels
  kOwner,      // the rank that has the target; ignored target: the number of ranks
  kWeight,     // F32: 1 if the target is here, else kTiny
  kLogWeight,  // F32: log(kWeight)
};
// The op computes w (exp(x - (lse + log w)) - [target]). With w = kTiny this is exp(x - lse), with
// an error of w in one column.
constexpr float kTiny = 0x1p-40f;

std::shared_ptr<detail::IdTable> make_id_table(const TensorParallel& parallel, int64_t columns,
                                               int64_t ignored) {
  const int64_t begin = parallel.rank() * columns, ranks = parallel.size();
  return std::make_shared<detail::IdTable>(
      std::vector<DType>{DType::kI32, DType::kI32, DType::kI32, DType::kF32, DType::kF32},
      columns * ranks, ignored, [=](int64_t id, detail::IdTable::Word* words) {
        const auto none = static_cast<int32_t>(columns);
        const bool own = id >= begin && id < begin + columns;
        const auto column = static_cast<int32_t>(own ? id - begin : 0);
        words[kForward].integer = own ? column : none;
        words[kBackward].integer = id < 0 ? none : column;
        words[kOwner].integer = static_cast<int32_t>(id < 0 ? ranks : id / columns);
        words[kWeight].real = own ? 1.0f : kTiny;
        words[kLogWeight].real = own ? 0.0f : std::log(kTiny);
      });
}

struct RowLosses {
  Tensor loss, lse;  // F32, shape of the targets
};

Result<RowLosses> row_losses(const Tensor& logits, const Tensor& targets, float smoothing,
                             int64_t ignored) {
  RowLosses rows;
  TE_FL_ASSIGN_OR_RETURN(rows.loss, detail::empty_like(targets, DType::kF32));
  TE_FL_ASSIGN_OR_RETURN(rows.lse, detail::empty_like(targets, DType::kF32));
  te_fl_cross_entropy_fwd_args args{};
  args.logits = logits;
  args.targets = targets;
  args.loss = rows.loss;
  args.lse = rows.lse;
  args.label_smoothing = smoothing;
  args.ignore_index = ignored;
  TE_FL_RETURN_IF_ERROR(ops::cross_entropy_fwd(args, detail::call_options(logits.device())));
  return rows;
}

Result<Tensor> row_gradients(const Tensor& grad_loss, const Tensor& logits, const Tensor& targets,
                             const Tensor& lse, float smoothing, int64_t ignored) {
  TE_FL_ASSIGN_OR_RETURN(Tensor grad, detail::empty_like(logits, logits.dtype()));
  te_fl_cross_entropy_bwd_args args{};
  args.grad_loss = grad_loss;
  args.logits = logits;
  args.targets = targets;
  args.lse = lse;
  args.grad_logits = grad;
  args.label_smoothing = smoothing;
  args.ignore_index = ignored;
  TE_FL_RETURN_IF_ERROR(ops::cross_entropy_bwd(args, detail::call_options(grad.device())));
  return grad;
}

// The log-sum-exps of each row on all ranks, [rows, ranks], compact, and each rank's sum of losses,
// [ranks].
struct OfRanks {
  Tensor lse, sums;
};

Result<OfRanks> gather(const TensorParallel& parallel, const Tensor& lse, const Tensor& sum) {
  const int64_t rows = lse.numel(), ranks = parallel.size();
  const Device& device = lse.device();
  TE_FL_ASSIGN_OR_RETURN(const Tensor own, Tensor::empty({rows + 1}, DType::kF32, device));
  TE_FL_ASSIGN_OR_RETURN(const Tensor own_lse, own.slice(0, 0, rows));
  TE_FL_ASSIGN_OR_RETURN(const Tensor own_sum, own.slice(0, rows, rows + 1));
  TE_FL_ASSIGN_OR_RETURN(const Tensor flat, lse.view({rows}));
  TE_FL_RETURN_IF_ERROR(detail::copy(flat, own_lse));
  TE_FL_RETURN_IF_ERROR(detail::copy(sum, own_sum));
  TE_FL_ASSIGN_OR_RETURN(const Tensor every, gather_rows(parallel, own));
  const std::array<int64_t, 2> shape = {rows, ranks}, strides = {1, rows + 1};
  TE_FL_ASSIGN_OR_RETURN(const Tensor transposed, Tensor::wrap(every.raw_data(), shape, strides,
                                                               DType::kF32, device, nullptr));
  TE_FL_ASSIGN_OR_RETURN(const Tensor matrix, every.view({ranks, rows + 1}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor sums, matrix.slice(1, rows, rows + 1));
  OfRanks result;
  TE_FL_ASSIGN_OR_RETURN(result.lse, Tensor::empty(shape, DType::kF32, device));
  TE_FL_RETURN_IF_ERROR(detail::copy(transposed, result.lse));
  TE_FL_ASSIGN_OR_RETURN(result.sums, detail::compact(sums));
  return result;
}

}  // namespace

// The loss for a vocabulary that is sharded over n ranks. Let e = label_smoothing, and l_r the
// log-sum-exp of rank r's columns. The loss of a row is the sum of: the loss with smoothing e over
// the n classes l_0 to l_(n-1), whose target is the rank that has the row's target; (1 - e) times
// that rank's loss with smoothing 0; and e / n times the sum of all ranks' losses with smoothing 1.
Result<Tensor> CrossEntropyLoss::divided_forward(const Tensor& targets, Saved& saved) {
  const TensorParallel& parallel = options_.parallel;
  TE_FL_RETURN_IF_ERROR(detail::check_has_ranks("CrossEntropyLoss", parallel));
  const float smoothing = options_.label_smoothing;
  const int64_t ranks = parallel.size();
  if (saved.logits.rank() < 1) {
    return invalid_argument("CrossEntropyLoss: logits is " + saved.logits.describe() +
                            "; it must have a last dimension, this rank's columns");
  }
  const int64_t columns = saved.logits.size(-1);
  if (targets_ == nullptr || targets_->count() != columns * ranks) {
    targets_ = make_id_table(parallel, columns, options_.ignore_index);
  }
  TE_FL_ASSIGN_OR_RETURN(saved.own, targets_->look_up(targets));
  TE_FL_ASSIGN_OR_RETURN(const RowLosses own,
                         row_losses(saved.logits, saved.own[kForward], 0, columns));
  TE_FL_ASSIGN_OR_RETURN(Tensor sum, scaled_sum(own.loss, (1 - smoothing) / saved.divisor));
  if (smoothing > 0) {
    TE_FL_ASSIGN_OR_RETURN(const RowLosses even,
                           row_losses(saved.logits, saved.own[kBackward], 1, columns));
    TE_FL_ASSIGN_OR_RETURN(
        const Tensor more,
        scaled_sum(even.loss, smoothing / static_cast<double>(ranks) / saved.divisor));
    TE_FL_RETURN_IF_ERROR(detail::add(sum, more, sum));
  }
  TE_FL_ASSIGN_OR_RETURN(const OfRanks every, gather(parallel, own.lse, sum));
  TE_FL_ASSIGN_OR_RETURN(const Tensor owners, saved.own[kOwner].view({targets.numel()}));
  TE_FL_ASSIGN_OR_RETURN(const RowLosses over_ranks,
                         row_losses(every.lse, owners, smoothing, ranks));
  saved.lse = over_ranks.lse;
  TE_FL_ASSIGN_OR_RETURN(Tensor loss, scaled_sum(over_ranks.loss, 1 / saved.divisor));
  TE_FL_ASSIGN_OR_RETURN(const Tensor rest, scaled_sum(every.sums, 1));
  TE_FL_RETURN_IF_ERROR(detail::add(loss, rest, loss));
  return loss;
}

Result<Tensor> CrossEntropyLoss::divided_backward(const Saved& saved, const Tensor& dloss) {
  const double ranks = options_.parallel.size(), smoothing = options_.label_smoothing;
  const int64_t columns = saved.logits.size(-1);
  const Tensor& targets = saved.own[kBackward];
  TE_FL_ASSIGN_OR_RETURN(const Tensor base, saved.lse.view(targets.shape()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor lse, detail::empty_like(base, DType::kF32));
  TE_FL_RETURN_IF_ERROR(detail::add(base, saved.own[kLogWeight], lse));
  TE_FL_ASSIGN_OR_RETURN(const Tensor grad_loss,
                         weighted(saved.own[kWeight], dloss, (1 - smoothing) / saved.divisor));
  TE_FL_ASSIGN_OR_RETURN(Tensor grad,
                         row_gradients(grad_loss, saved.logits, targets, lse, 0, columns));
  if (smoothing == 0) return grad;
  // The gradient's smoothing term, e g (exp(x - lse) - 1 / (n columns)), is computed as the
  // gradient of this rank's loss with smoothing 1.
  TE_FL_RETURN_IF_ERROR(detail::fill(grad_loss, 1));
  TE_FL_ASSIGN_OR_RETURN(const Tensor even_loss,
                         weighted(grad_loss, dloss, smoothing / ranks / saved.divisor));
  TE_FL_RETURN_IF_ERROR(detail::fill(lse, -std::log(ranks)));
  TE_FL_RETURN_IF_ERROR(detail::add(base, lse, lse));
  TE_FL_ASSIGN_OR_RETURN(const Tensor even,
                         row_gradients(even_loss, saved.logits, targets, lse, 1, columns));
  TE_FL_RETURN_IF_ERROR(detail::add(grad, even, grad));
  return grad;
}

Result<Tensor> CrossEntropyLoss::forward(const Tensor& logits, const Tensor& targets, Ctx* ctx,
                                         double divisor) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<Saved>(ctx, "CrossEntropyLoss"));
  if (!logits.defined() || !targets.defined()) {
    return invalid_argument("CrossEntropyLoss: logits or targets is undefined");
  }
  if (!(divisor >= 0)) {
    return invalid_argument("CrossEntropyLoss: divisor is " + std::to_string(divisor) +
                            "; it must be greater than 0, or 0 for the number of rows");
  }
  record->logits = logits;
  record->targets = targets;
  record->divisor =
      divisor > 0 ? divisor : static_cast<double>(std::max<int64_t>(targets.numel(), 1));
  Tensor loss;
  if (options_.parallel.divides()) {
    TE_FL_ASSIGN_OR_RETURN(loss, divided_forward(targets, *record));
  } else {
    TE_FL_ASSIGN_OR_RETURN(
        const RowLosses rows,
        row_losses(logits, targets, options_.label_smoothing, options_.ignore_index));
    record->lse = rows.lse;
    TE_FL_ASSIGN_OR_RETURN(loss, scaled_sum(rows.loss, 1 / record->divisor));
  }
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return loss;
}

Result<Tensor> CrossEntropyLoss::backward(Ctx& ctx, double grad_scale) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "CrossEntropyLoss"));
  const auto& saved = static_cast<Saved&>(*taken);
  if (options_.parallel.divides()) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor dloss,
                           Tensor::empty({1}, DType::kF32, saved.logits.device()));
    TE_FL_RETURN_IF_ERROR(detail::fill(dloss, grad_scale));
    return divided_backward(saved, dloss);
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor grad_loss, detail::empty_like(saved.lse, DType::kF32));
  TE_FL_RETURN_IF_ERROR(detail::fill(grad_loss, grad_scale / saved.divisor));
  return row_gradients(grad_loss, saved.logits, saved.targets, saved.lse, options_.label_smoothing,
                       options_.ignore_index);
}

Result<Tensor> CrossEntropyLoss::backward(Ctx& ctx, const Tensor& dloss) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "CrossEntropyLoss"));
  const auto& saved = static_cast<Saved&>(*taken);
  if (!dloss.defined() || dloss.dtype() != DType::kF32 || dloss.numel() != 1) {
    return invalid_argument("CrossEntropyLoss: dloss is " +
                            (dloss.defined() ? dloss.describe() : std::string("undefined")) +
                            "; it must be F32 with one element");
  }
  if (options_.parallel.divides()) return divided_backward(saved, dloss);
  TE_FL_ASSIGN_OR_RETURN(const Tensor ones, detail::empty_like(saved.lse, DType::kF32));
  TE_FL_RETURN_IF_ERROR(detail::fill(ones, 1));
  TE_FL_ASSIGN_OR_RETURN(const Tensor grad_loss, weighted(ones, dloss, 1 / saved.divisor));
  return row_gradients(grad_loss, saved.logits, saved.targets, saved.lse, options_.label_smoothing,
                       options_.ignore_index);
}

}  // namespace te_fl::nn
