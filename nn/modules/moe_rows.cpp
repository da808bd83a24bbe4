#include "nn/modules/moe_rows.hpp"

#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {

Result<std::vector<int64_t>> count_tokens(const Routing& routing, int64_t num_experts) {
  Tensor indices = routing.topk_indices;
  if (!indices.device().is_host()) {
    TE_FL_ASSIGN_OR_RETURN(indices, indices.to(Device()));
  }
  std::vector<int64_t> counts(static_cast<size_t>(num_experts));
  const auto* const expert = indices.data<int32_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) ++counts[static_cast<size_t>(expert[i])];
  return counts;
}

int64_t row_alignment(const Fp8Mode& mode) {
  // Tensor cores read FP8 operands in pieces of 16 bytes, and the weight gradient's GEMM reads the
  // rows of an expert as such pieces.
  if (!mode.fp8) return 1;
  return mode.recipe != nullptr && std::holds_alternative<MXFP8BlockScaling>(*mode.recipe) ? 32
                                                                                           : 16;
}

Result<ExpertRows> dispatch(const Tensor& x, const Routing& routing,
                            const std::vector<int64_t>& counts, int64_t alignment,
                            Dispatched& dispatched) {
  const Device device = x.device();
  const auto experts = static_cast<int64_t>(counts.size());
  ExpertRows made;
  TE_FL_ASSIGN_OR_RETURN(Tensor padding, Tensor::empty({experts}, DType::kI64));
  int64_t rows = 0, added = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    const int64_t padded = (counts[e] + alignment - 1) / alignment * alignment;
    padding.data<int64_t>()[e] = added;
    made.splits.push_back(padded);
    added += padded - counts[e];
    rows += padded;
  }
  TE_FL_ASSIGN_OR_RETURN(made.rows, Tensor::empty({rows, x.size(1)}, x.dtype(), device));
  TE_FL_ASSIGN_OR_RETURN(made.probs, Tensor::empty({rows}, DType::kF32, device));
  TE_FL_ASSIGN_OR_RETURN(dispatched.row_id_map,
                         Tensor::empty({experts, x.size(0)}, DType::kI32, device));
  dispatched.rows = rows;
  dispatched.splits = made.splits;
  te_fl_moe_permute_by_mask_fwd_args args{};
  args.input = x;
  args.routing_map = routing.routing_map;
  args.probs = routing.probs;
  if (added != 0) {
    if (!device.is_host()) {
      TE_FL_ASSIGN_OR_RETURN(padding, padding.to(device));
    }
    args.pad_offsets = padding;
  }
  args.output = made.rows;
  args.permuted_probs = made.probs;
  args.row_id_map = dispatched.row_id_map;
  TE_FL_RETURN_IF_ERROR(ops::moe_permute_by_mask_fwd(args, call_options(device)));
  return made;
}

namespace {

// Copies the row of each token to its rows; rows without a token become 0.
Result<Tensor> spread(const Tensor& tokens, const Dispatched& dispatched) {
  TE_FL_ASSIGN_OR_RETURN(Tensor rows, Tensor::empty({dispatched.rows, tokens.size(1)},
                                                    tokens.dtype(), tokens.device()));
  // Without gradients of probabilities the op reads no value of fwd_input, which has the output's
  // shape.
  TE_FL_ASSIGN_OR_RETURN(const Tensor unread, empty_like(rows, rows.dtype()));
  te_fl_moe_unpermute_bwd_args args{};
  args.grad_output = tokens;
  args.fwd_input = unread;
  args.row_id_map = dispatched.row_id_map;
  args.grad_input = rows;
  TE_FL_RETURN_IF_ERROR(ops::moe_unpermute_bwd(args, call_options(tokens.device())));
  return rows;
}

Status sum_rows(const Tensor& rows, const Tensor& row_id_map, const Tensor& out) {
  te_fl_moe_permute_bwd_args args{};
  args.grad_output = rows;
  args.row_id_map = row_id_map;
  args.grad_input = out;
  return ops::moe_permute_bwd(args, call_options(rows.device()));
}

}  // namespace

Result<Tensor> dispatch_again(const Tensor& x, const Dispatched& dispatched) {
  return spread(x, dispatched);
}

Result<Tensor> dispatch_backward(const Tensor& d_rows, const Dispatched& dispatched) {
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, Tensor::empty({dispatched.row_id_map.size(1), d_rows.size(1)},
                                                  d_rows.dtype(), d_rows.device()));
  TE_FL_RETURN_IF_ERROR(sum_rows(d_rows, dispatched.row_id_map, dx));
  return dx;
}

Result<Tensor> probs_backward(const Tensor& d_row_probs, const Dispatched& dispatched) {
  // Each of the E T pairs is a token of one column that has at most one row.
  const int64_t experts = dispatched.row_id_map.size(0), tokens = dispatched.row_id_map.size(1);
  TE_FL_ASSIGN_OR_RETURN(const Tensor column, d_row_probs.view({dispatched.rows, 1}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor map, dispatched.row_id_map.view({1, experts * tokens}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor pairs,
                         Tensor::empty({experts * tokens, 1}, DType::kF32, d_row_probs.device()));
  TE_FL_RETURN_IF_ERROR(sum_rows(column, map, pairs));
  TE_FL_ASSIGN_OR_RETURN(const Tensor by_expert, pairs.view({experts, tokens}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor by_token, by_expert.transpose(0, 1));
  return compact(by_token);
}

Result<Tensor> combine(const Tensor& rows, const Dispatched& dispatched, const Tensor& probs) {
  TE_FL_ASSIGN_OR_RETURN(Tensor y, Tensor::empty({dispatched.row_id_map.size(1), rows.size(1)},
                                                 rows.dtype(), rows.device()));
  te_fl_moe_unpermute_fwd_args args{};
  args.input = rows;
  args.row_id_map = dispatched.row_id_map;
  if (probs.defined()) args.probs = probs;
  args.output = y;
  TE_FL_RETURN_IF_ERROR(ops::moe_unpermute_fwd(args, call_options(rows.device())));
  return y;
}

Result<Tensor> combine_backward(const Tensor& dy, const Dispatched& dispatched, const Tensor& rows,
                                const Tensor& probs, Tensor* d_probs) {
  if (!probs.defined()) return spread(dy, dispatched);
  TE_FL_ASSIGN_OR_RETURN(Tensor d_rows, empty_like(rows, dy.dtype()));
  TE_FL_ASSIGN_OR_RETURN(*d_probs, empty_like(probs, DType::kF32));
  te_fl_moe_unpermute_bwd_args args{};
  args.grad_output = dy;
  args.fwd_input = rows;
  args.row_id_map = dispatched.row_id_map;
  args.probs = probs;
  args.grad_input = d_rows;
  args.grad_probs = *d_probs;
  TE_FL_RETURN_IF_ERROR(ops::moe_unpermute_bwd(args, call_options(dy.device())));
  return d_rows;
}

}  // namespace te_fl::nn::detail
