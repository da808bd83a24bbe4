#include "nn/modules/row_factors.hpp"

#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {

Result<Tensor> identity_rows(int64_t n, const Device& device) {
  // The stable order of tokens that all go to expert 0 is the identity.
  TE_FL_ASSIGN_OR_RETURN(const Tensor indices, Tensor::zeros({n, 1}, DType::kI32, device));
  TE_FL_ASSIGN_OR_RETURN(const Tensor column, Tensor::empty({n, 1}, DType::kU8, device));
  TE_FL_ASSIGN_OR_RETURN(const Tensor unread, Tensor::empty({n, 1}, DType::kU8, device));
  TE_FL_ASSIGN_OR_RETURN(Tensor map, Tensor::empty({1, n}, DType::kI32, device));
  te_fl_moe_permute_fwd_args args{};
  args.input = column;
  args.indices = indices;
  args.output = unread;
  args.row_id_map = map;
  args.num_experts = 1;
  TE_FL_RETURN_IF_ERROR(ops::moe_permute_fwd(args, call_options(device)));
  return map;
}

Status scale_rows(const Tensor& rows, const Tensor& identity, const Tensor& factors,
                  const Tensor& out) {
  te_fl_moe_unpermute_fwd_args args{};
  args.input = rows;
  args.row_id_map = identity;
  args.probs = factors;
  args.output = out;
  return ops::moe_unpermute_fwd(args, call_options(rows.device()));
}

Status scale_rows_backward(const Tensor& grad, const Tensor& rows, const Tensor& identity,
                           const Tensor& factors, const Tensor& d_rows, const Tensor& d_factors) {
  te_fl_moe_unpermute_bwd_args args{};
  args.grad_output = grad;
  args.fwd_input = rows;
  args.row_id_map = identity;
  args.probs = factors;
  args.grad_input = d_rows;
  args.grad_probs = d_factors;
  return ops::moe_unpermute_bwd(args, call_options(rows.device()));
}

}  // namespace te_fl::nn::detail
