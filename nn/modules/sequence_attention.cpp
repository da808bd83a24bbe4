#include "te_fl/nn/modules/sequence_attention.hpp"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "nn/autograd/ctx.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/comm_ranks.hpp"

namespace te_fl::nn {
namespace {

constexpr const char* kSequence = "SequenceAttention";

struct SequenceRecord : Ctx::Record {
  std::array<Ctx, 2> pieces;  // of this rank's two chunks of queries
  Shape q, k, v;              // shapes of the inputs
  DType k_dtype = DType::kF32, v_dtype = DType::kF32;
  void visit_tensors(const Ctx::Visitor& visitor) {
    for (Ctx& piece : pieces) piece.visit(visitor);
  }
};

Status check_tokens(const char* name, const Tensor& t, int ranks) {
  if (t.defined() && t.rank() == 4 && t.size(0) > 0 && t.size(0) % 2 == 0) return {};
  return invalid_argument(
      std::string(kSequence) + ": " + name + " is " +
      (t.defined() ? t.describe() : std::string("undefined")) +
      "; it must be [tokens of this rank, batch, heads, head size] with an even number of tokens, "
      "two chunks of each sequence: pad the sequences to a multiple of " +
      std::to_string(2 * ranks) + " tokens");
}

}  // namespace

struct SequenceAttention::Impl {
  DotProductAttentionOptions options;
  std::shared_ptr<const Comm> ranks;
  std::unique_ptr<DotProductAttention> attention;

  bool causal() const { return options.attention.mask_type == MaskType::kCausal; }
  // The number, in the sequence, of this rank's chunk 0 or 1 (or of another rank's).
  int64_t number(int rank, int chunk) const {
    return chunk == 0 ? rank : 2 * ranks->size() - 1 - rank;
  }
  // Copies all chunks between the order of the ranks and that of the sequence.
  Status reorder(const Tensor& by_rank, const Tensor& by_position, bool to_position) const;
  Result<Tensor> gather(const Tensor& part) const;
  Result<Tensor> scatter(const Tensor& whole) const;
};

Status SequenceAttention::Impl::reorder(const Tensor& by_rank, const Tensor& by_position,
                                        bool to_position) const {
  const int64_t chunk = by_rank.size(0) / (2 * ranks->size());
  for (int rank = 0; rank < ranks->size(); ++rank) {
    for (int i = 0; i < 2; ++i) {
      const int64_t from = (2 * rank + i) * chunk, at = number(rank, i) * chunk;
      TE_FL_ASSIGN_OR_RETURN(const Tensor of_rank, by_rank.slice(0, from, from + chunk));
      TE_FL_ASSIGN_OR_RETURN(const Tensor placed, by_position.slice(0, at, at + chunk));
      TE_FL_RETURN_IF_ERROR(to_position ? detail::copy(of_rank, placed)
                                        : detail::copy(placed, of_rank));
    }
  }
  return {};
}

Result<Tensor> SequenceAttention::Impl::gather(const Tensor& part) const {
  Shape shape(part.shape().begin(), part.shape().end());
  shape[0] *= ranks->size();
  TE_FL_ASSIGN_OR_RETURN(const Tensor own, detail::compact(part));
  TE_FL_ASSIGN_OR_RETURN(const Tensor by_rank, Tensor::empty(shape, part.dtype(), part.device()));
  TE_FL_RETURN_IF_ERROR(detail::all_gather(*ranks, own, by_rank));
  TE_FL_ASSIGN_OR_RETURN(Tensor whole, Tensor::empty(shape, part.dtype(), part.device()));
  TE_FL_RETURN_IF_ERROR(reorder(by_rank, whole, true));
  return whole;
}

Result<Tensor> SequenceAttention::Impl::scatter(const Tensor& whole) const {
  TE_FL_ASSIGN_OR_RETURN(const Tensor by_rank, detail::empty_like(whole, whole.dtype()));
  TE_FL_RETURN_IF_ERROR(reorder(by_rank, whole, false));
  Shape shape(whole.shape().begin(), whole.shape().end());
  shape[0] /= ranks->size();
  TE_FL_ASSIGN_OR_RETURN(Tensor part, Tensor::empty(shape, whole.dtype(), whole.device()));
  TE_FL_RETURN_IF_ERROR(detail::reduce_scatter(*ranks, by_rank, part));
  return part;
}

SequenceAttention::SequenceAttention(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SequenceAttention::~SequenceAttention() = default;

Result<std::unique_ptr<SequenceAttention>> SequenceAttention::create(
    const DotProductAttentionOptions& options, std::shared_ptr<const Comm> ranks) {
  const AttentionOptions& attention = options.attention;
  if (ranks == nullptr) {
    return invalid_argument(std::string(kSequence) + ": ranks is null; give a communicator");
  }
  const bool causal = attention.mask_type == MaskType::kCausal;
  if (attention.layout != Layout::kSBHD || (!causal && attention.mask_type != MaskType::kNone)) {
    return invalid_argument(std::string(kSequence) +
                            ": the layout must be kSBHD, and the mask kNone or kCausal");
  }
  if (!causal && (attention.window_left >= 0 || attention.window_right >= 0)) {
    return invalid_argument(std::string(kSequence) + ": window_left is " +
                            std::to_string(attention.window_left) + " and window_right " +
                            std::to_string(attention.window_right) +
                            " without a causal mask; leave them -1, or take kCausal");
  }
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->ranks = std::move(ranks);
  TE_FL_ASSIGN_OR_RETURN(impl->attention, DotProductAttention::create(options));
  std::unique_ptr<SequenceAttention> module(new SequenceAttention(std::move(impl)));
  module->register_module("attention", *module->impl_->attention);
  return module;
}

Result<Tensor> SequenceAttention::forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                          Ctx* ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<SequenceRecord>(ctx, kSequence));
  Impl& impl = *impl_;
  const std::array<std::pair<const char*, const Tensor*>, 3> named = {
      {{"q", &q}, {"k", &k}, {"v", &v}}};
  for (const auto& [name, t] : named) {
    TE_FL_RETURN_IF_ERROR(check_tokens(name, *t, impl.ranks->size()));
  }
  if (impl.causal() && q.size(0) != k.size(0)) {
    return invalid_argument(std::string(kSequence) + ": q has " + std::to_string(q.size(0)) +
                            " tokens and k " + std::to_string(k.size(0)) +
                            "; a causal mask takes as many keys as queries");
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor keys, impl.gather(k));
  TE_FL_ASSIGN_OR_RETURN(const Tensor values, impl.gather(v));
  AttentionInputs inputs;
  if (impl.causal()) inputs.mask_type = MaskType::kCausalBottomRight;
  Shape shape(q.shape().begin(), q.shape().end());
  shape[3] = v.size(3);
  TE_FL_ASSIGN_OR_RETURN(Tensor o, Tensor::empty(shape, impl.options.activation_dtype, q.device()));
  const int64_t chunk = q.size(0) / 2;
  for (int i = 0; i < 2; ++i) {
    // A piece of contiguous queries sees the keys up to its last one.
    const int64_t end =
        impl.causal() ? (impl.number(impl.ranks->rank(), i) + 1) * chunk : keys.size(0);
    TE_FL_ASSIGN_OR_RETURN(const Tensor queries, q.slice(0, i * chunk, (i + 1) * chunk));
    TE_FL_ASSIGN_OR_RETURN(const Tensor own_keys, keys.slice(0, 0, end));
    TE_FL_ASSIGN_OR_RETURN(const Tensor own_values, values.slice(0, 0, end));
    TE_FL_ASSIGN_OR_RETURN(
        const Tensor piece,
        impl.attention->forward(queries, own_keys, own_values,
                                ctx == nullptr ? nullptr : &record->pieces[i], inputs));
    TE_FL_ASSIGN_OR_RETURN(const Tensor rows, o.slice(0, i * chunk, (i + 1) * chunk));
    TE_FL_RETURN_IF_ERROR(detail::copy(piece, rows));
  }
  if (ctx == nullptr) return o;
  record->q = Shape(q.shape().begin(), q.shape().end());
  record->k = Shape(keys.shape().begin(), keys.shape().end());
  record->v = Shape(values.shape().begin(), values.shape().end());
  record->k_dtype = k.dtype();
  record->v_dtype = v.dtype();
  TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return o;
}

Result<DotProductAttention::Gradients> SequenceAttention::backward(const Tensor& d_o, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, kSequence));
  auto& record = static_cast<SequenceRecord&>(*taken);
  Impl& impl = *impl_;
  TE_FL_RETURN_IF_ERROR(detail::check_gradient(d_o, record.q, record.v[3], kSequence));
  const Device& device = impl.options.device;
  TE_FL_ASSIGN_OR_RETURN(const Tensor dk, Tensor::zeros(record.k, record.k_dtype, device));
  TE_FL_ASSIGN_OR_RETURN(const Tensor dv, Tensor::zeros(record.v, record.v_dtype, device));
  DotProductAttention::Gradients grads;
  const int64_t chunk = record.q[0] / 2;
  for (int i = 0; i < 2; ++i) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor rows, d_o.slice(0, i * chunk, (i + 1) * chunk));
    TE_FL_ASSIGN_OR_RETURN(const auto piece, impl.attention->backward(rows, record.pieces[i]));
    if (!grads.dq.defined()) {
      TE_FL_ASSIGN_OR_RETURN(grads.dq, Tensor::empty(record.q, piece.dq.dtype(), device));
    }
    TE_FL_ASSIGN_OR_RETURN(const Tensor dq, grads.dq.slice(0, i * chunk, (i + 1) * chunk));
    TE_FL_RETURN_IF_ERROR(detail::copy(piece.dq, dq));
    TE_FL_ASSIGN_OR_RETURN(const Tensor own_dk, dk.slice(0, 0, piece.dk.size(0)));
    TE_FL_ASSIGN_OR_RETURN(const Tensor own_dv, dv.slice(0, 0, piece.dv.size(0)));
    TE_FL_RETURN_IF_ERROR(detail::add(own_dk, piece.dk, own_dk));
    TE_FL_RETURN_IF_ERROR(detail::add(own_dv, piece.dv, own_dv));
  }
  TE_FL_ASSIGN_OR_RETURN(grads.dk, impl.scatter(dk));
  TE_FL_ASSIGN_OR_RETURN(grads.dv, impl.scatter(dv));
  return grads;
}

}  // namespace te_fl::nn
