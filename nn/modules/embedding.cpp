#include "te_fl/nn/modules/embedding.hpp"

#include <memory>
#include <string>
#include <vector>

#include "nn/autograd/ctx.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/autograd/random.hpp"
#include "nn/autograd/recompute.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/id_table.hpp"
#include "nn/modules/make_gemm.hpp"
#include "nn/modules/tensor_parallel.hpp"
#include "te_fl/nn/modules/init.hpp"

namespace te_fl::nn {
namespace {

struct IndicesRecord : Ctx::Record {
  Tensor indices;  // rows of this rank's table
  Tensor mask;     // F32: 1 if this rank has the index, else 0; undefined: has all
  Shape shape;     // of the result
};

// A dropout mask; undefined if nothing was dropped.
struct MaskRecord : Ctx::Record {
  Tensor mask;
  Shape shape;  // of the result
};

Result<Tensor> new_mask(const Tensor& like) {
  return Tensor::empty({(like.numel() + 7) / 8}, DType::kU8, like.device());
}

Result<Tensor> dropout_backward(const Tensor& dy, const MaskRecord& record, float p,
                                std::string_view module) {
  const Tensor& mask = record.mask;
  const int64_t last = record.shape.empty() ? 0 : record.shape.back();
  TE_FL_RETURN_IF_ERROR(detail::check_gradient(dy, record.shape, last, module));
  if (!mask.defined()) return dy;
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, detail::empty_like(dy, dy.dtype()));
  te_fl_dropout_bwd_args args{};
  args.grad_output = dy;
  args.mask = mask;
  args.grad_input = dx;
  args.p = p;
  TE_FL_RETURN_IF_ERROR(ops::dropout_bwd(args, detail::call_options(dy.device())));
  return dx;
}

// Computes x[i, ...] * factors[i] as relu(factor) * x, since the factors are non-negative.
Result<Tensor> scale_rows(const Tensor& x, const Tensor& factors) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows, detail::compact(x));
  const int64_t n = x.size(0), width = n == 0 ? 0 : x.numel() / n;
  TE_FL_ASSIGN_OR_RETURN(Tensor y, detail::empty_like(x, x.dtype()));
  if (y.numel() == 0) return y;
  TE_FL_ASSIGN_OR_RETURN(const Tensor pair, Tensor::empty({n, 2 * width}, DType::kF32, x.device()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor left, pair.slice(1, 0, width));
  TE_FL_ASSIGN_OR_RETURN(const Tensor right, pair.slice(1, width, 2 * width));
  const Shape shape = {n, width}, strides = {1, 0};
  TE_FL_ASSIGN_OR_RETURN(const Tensor wide, Tensor::wrap(factors.raw_data(), shape, strides,
                                                         DType::kF32, x.device(), nullptr));
  TE_FL_RETURN_IF_ERROR(detail::copy(wide, left));
  TE_FL_ASSIGN_OR_RETURN(const Tensor flat, rows.view(shape));
  TE_FL_RETURN_IF_ERROR(detail::copy(flat, right));
  TE_FL_ASSIGN_OR_RETURN(const Tensor out, y.view(shape));
  te_fl_reglu_args args{};
  args.input = pair;
  args.output = out;
  TE_FL_RETURN_IF_ERROR(ops::reglu(args, detail::call_options(x.device())));
  return y;
}

// Makes a table with two columns for each id of the complete vocabulary: its row on this rank (0 if
// this rank does not have it), and 1 if this rank has it, otherwise 0.
std::shared_ptr<detail::IdTable> make_id_table(const EmbeddingOptions& options) {
  const int64_t rows = options.num_embeddings, begin = options.parallel.rank() * rows;
  return std::make_shared<detail::IdTable>(
      std::vector<DType>{DType::kI32, DType::kF32}, rows * options.parallel.size(), std::nullopt,
      [=](int64_t id, detail::IdTable::Word* words) {
        const bool own = id >= begin && id < begin + rows;
        words[0].integer = own ? static_cast<int32_t>(id - begin) : 0;
        words[1].real = own ? 1.0f : 0.0f;
      });
}

}  // namespace

Result<EmbeddingOptions> shard_of(EmbeddingOptions whole, const TensorParallel& parallel) {
  if (!whole.shard.whole.empty()) {
    return invalid_argument(
        "Embedding: shard is given, and shard_of() divides whole tables; leave it out");
  }
  whole.parallel = parallel;
  if (!parallel.divides()) return whole;
  if (whole.num_embeddings % parallel.size() != 0) {
    return invalid_argument("Embedding: num_embeddings is " + std::to_string(whole.num_embeddings) +
                            "; it must be a multiple of the number of tensor-parallel ranks, "
                            "which is " +
                            std::to_string(parallel.size()) + "; add rows that no index names");
  }
  const Shape extents = {whole.num_embeddings, whole.hidden_size};
  whole.num_embeddings /= parallel.size();
  whole.shard = {extents, {parallel.rank() * whole.num_embeddings, 0}};
  return whole;
}

Embedding::Embedding(const EmbeddingOptions& options) : options_(options) {}
Embedding::~Embedding() = default;

Result<std::unique_ptr<Embedding>> Embedding::create(const EmbeddingOptions& options) {
  TE_FL_RETURN_IF_ERROR(detail::check_size("Embedding", "num_embeddings", options.num_embeddings));
  TE_FL_RETURN_IF_ERROR(detail::check_size("Embedding", "hidden_size", options.hidden_size));
  TE_FL_RETURN_IF_ERROR(detail::check_has_ranks("Embedding", options.parallel));
  std::unique_ptr<Embedding> module(new Embedding(options));
  TE_FL_ASSIGN_OR_RETURN(module->weight_,
                         init::normal(Shape{options.num_embeddings, options.hidden_size},
                                      options.init_std, init::subseed(options.seed, 0),
                                      options.param_dtype, options.device, options.shard));
  module->register_parameter("weight", module->weight_);
  if (options.parallel.divides()) module->own_ = make_id_table(options);
  return module;
}

// Looks up the indices in this rank's table.
Result<Tensor> Embedding::rows(const Tensor& indices) {
  Shape shape(indices.shape().begin(), indices.shape().end());
  shape.push_back(options_.hidden_size);
  TE_FL_ASSIGN_OR_RETURN(Tensor y,
                         Tensor::empty(shape, options_.activation_dtype, options_.device));
  te_fl_embedding_fwd_args args{};
  args.indices = indices;
  args.weight = weight_->value;
  args.output = y;
  TE_FL_RETURN_IF_ERROR(ops::embedding_fwd(args, detail::call_options(options_.device)));
  return y;
}

Result<Tensor> Embedding::forward(const Tensor& indices, Ctx* ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<IndicesRecord>(ctx, "Embedding"));
  if (!indices.defined()) return invalid_argument("Embedding: indices is undefined");
  TE_FL_RETURN_IF_ERROR(detail::same_parameter(weight_.get()));
  record->indices = indices;
  record->shape.assign(indices.shape().begin(), indices.shape().end());
  record->shape.push_back(options_.hidden_size);
  Tensor y;
  if (own_ == nullptr) {
    TE_FL_ASSIGN_OR_RETURN(y, rows(indices));
  } else {
    TE_FL_ASSIGN_OR_RETURN(
        record->shape,
        detail::output_shape(options_.parallel, ParallelMode::kRow, record->shape, "Embedding"));
    TE_FL_ASSIGN_OR_RETURN(const std::vector<Tensor> found, own_->look_up(indices));
    TE_FL_ASSIGN_OR_RETURN(record->indices, found[0].view({indices.numel()}));
    TE_FL_ASSIGN_OR_RETURN(record->mask, found[1].view({indices.numel()}));
    TE_FL_ASSIGN_OR_RETURN(y, rows(record->indices));
    TE_FL_ASSIGN_OR_RETURN(y, scale_rows(y, record->mask));
    TE_FL_ASSIGN_OR_RETURN(y, detail::summed(options_.parallel, y));
    TE_FL_ASSIGN_OR_RETURN(y, y.view(record->shape));
  }
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Status Embedding::backward(const Tensor& dy, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "Embedding"));
  const auto& record = static_cast<IndicesRecord&>(*taken);
  te_fl_embedding_bwd_args args{};
  args.indices = record.indices;
  Tensor rows = dy;
  if (own_ != nullptr) {  // even if this table is frozen: other ranks gather too
    TE_FL_RETURN_IF_ERROR(
        detail::check_gradient(dy, record.shape, options_.hidden_size, "Embedding"));
    TE_FL_ASSIGN_OR_RETURN(rows, detail::as_operand(dy, options_.hidden_size, "Embedding: dy"));
    if (options_.parallel.divides_sequence()) {
      TE_FL_ASSIGN_OR_RETURN(rows, gather_rows(options_.parallel, rows));
    }
    TE_FL_ASSIGN_OR_RETURN(rows, scale_rows(rows, record.mask));
  }
  if (!weight_->requires_grad) return {};
  args.grad_output = rows;
  TE_FL_ASSIGN_OR_RETURN(args.accumulate, detail::adds(*weight_));
  args.grad_weight = weight_->grad;
  TE_FL_RETURN_IF_ERROR(ops::embedding_bwd(args, detail::call_options(options_.device)));
  detail::wrote(*weight_);
  return {};
}

Result<Tensor> Residual::forward(const Tensor& a, const Tensor& b, Ctx* ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<MaskRecord>(ctx, "Residual"));
  TE_FL_RETURN_IF_ERROR(detail::check_dropout("Residual", "dropout", p_));
  if (!a.defined() || !b.defined()) return invalid_argument("Residual: a or b is undefined");
  TE_FL_ASSIGN_OR_RETURN(Tensor y, detail::empty_like(a, a.dtype()));
  te_fl_add_args args{};
  args.a = a;
  args.b = b;
  args.output = y;
  CallOptions options = detail::call_options(a.device());
  if (p_ > 0 && ctx != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(record->mask, new_mask(b));
    args.mask = record->mask;
    args.p = p_;
    TE_FL_ASSIGN_OR_RETURN(options, detail::random_options(b.numel(), b.device()));
  }
  TE_FL_RETURN_IF_ERROR(ops::add(args, options));
  record->shape.assign(y.shape().begin(), y.shape().end());
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<Tensor> Residual::backward(const Tensor& dy, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "Residual"));
  return dropout_backward(dy, static_cast<MaskRecord&>(*taken), p_, "Residual");
}

Result<Tensor> Dropout::forward(const Tensor& x, Ctx* ctx) {
  TE_FL_RETURN_IF_ERROR(detail::check_dropout("Dropout", "p", p_));
  if (!x.defined()) return invalid_argument("Dropout: x is undefined");
  if (ctx == nullptr) return x;
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<MaskRecord>(ctx, "Dropout"));
  record->shape.assign(x.shape().begin(), x.shape().end());
  Tensor y = x;
  if (p_ > 0) {
    TE_FL_ASSIGN_OR_RETURN(y, detail::empty_like(x, x.dtype()));
    TE_FL_ASSIGN_OR_RETURN(record->mask, new_mask(x));
    te_fl_dropout_fwd_args args{};
    args.input = x;
    args.output = y;
    args.mask = record->mask;
    args.p = p_;
    TE_FL_ASSIGN_OR_RETURN(const CallOptions options,
                           detail::random_options(x.numel(), x.device()));
    TE_FL_RETURN_IF_ERROR(ops::dropout_fwd(args, options));
  }
  TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<Tensor> Dropout::backward(const Tensor& dy, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "Dropout"));
  return dropout_backward(dy, static_cast<MaskRecord&>(*taken), p_, "Dropout");
}

namespace {

struct DropPathRecord : Ctx::Record {
  Tensor factors;  // F32 [first extent]; undefined if nothing was dropped
  Shape shape;     // of the result
};

// Draws a factor for each of `count` rows: 0 or 1 / (1 - p).
Result<Tensor> draw_factors(int64_t count, float p, const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(Tensor factors, Tensor::empty({count}, DType::kF32, device));
  TE_FL_RETURN_IF_ERROR(detail::fill(factors, 1));
  TE_FL_ASSIGN_OR_RETURN(const Tensor mask, new_mask(factors));
  te_fl_dropout_fwd_args args{};
  args.input = factors;
  args.output = factors;
  args.mask = mask;
  args.p = p;
  TE_FL_ASSIGN_OR_RETURN(const CallOptions options, detail::random_options(count, device));
  TE_FL_RETURN_IF_ERROR(ops::dropout_fwd(args, options));
  return factors;
}

}  // namespace

Result<Tensor> DropPath::forward(const Tensor& x, Ctx* ctx) {
  TE_FL_RETURN_IF_ERROR(detail::check_dropout("DropPath", "p", p_));
  if (!x.defined() || x.rank() < 1) {
    return invalid_argument("DropPath: x is " +
                            (x.defined() ? x.describe() : std::string("undefined")) +
                            "; it must have at least one dimension, whose parts are dropped");
  }
  if (ctx == nullptr) return x;
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<DropPathRecord>(ctx, "DropPath"));
  record->shape.assign(x.shape().begin(), x.shape().end());
  Tensor y = x;
  if (p_ > 0) {
    TE_FL_ASSIGN_OR_RETURN(record->factors, draw_factors(x.size(0), p_, x.device()));
    TE_FL_ASSIGN_OR_RETURN(y, scale_rows(x, record->factors));
  }
  TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<Tensor> DropPath::backward(const Tensor& dy, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "DropPath"));
  auto& record = static_cast<DropPathRecord&>(*taken);
  TE_FL_RETURN_IF_ERROR(detail::check_gradient(dy, record.shape, record.shape.back(), "DropPath"));
  return record.factors.defined() ? scale_rows(dy, record.factors) : dy;
}

}  // namespace te_fl::nn
