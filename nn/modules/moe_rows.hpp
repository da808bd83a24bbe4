#pragma once

#include <cstdint>
#include <vector>

#include "nn/fp8/autocast.hpp"
#include "nn/modules/moe_router.hpp"
#include "te_fl/nn/autograd/ctx.hpp"
#include "te_fl/tensor.hpp"

// The way of tokens to their experts and back: dispatch() copies the row of each token to each of
// its experts, and combine() sums the experts' rows of each token. Modules use only these
// functions, so that a dispatch over ranks can take their place.
namespace te_fl::nn::detail {

// The rows of all experts, ordered by expert, and then by token. The rows of an expert may end with
// rows of zeros that belong to no token.
struct ExpertRows {
  Tensor rows;                  // [R, hidden]
  Tensor probs;                 // F32 [R], probability of each row; 0 for rows without a token
  std::vector<int64_t> splits;  // number of rows of each expert
};

// The data that combine() and the backward functions read.
struct Dispatched {
  Tensor row_id_map;  // I32 [E, T], row of each pair of an expert and a token, or -1
  int64_t rows = 0;   // R
  std::vector<int64_t> splits;
  void visit_tensors(const Ctx::Visitor& visitor) { visitor(row_id_map); }
};

// The number of tokens of each expert, on the host. Waits for the device.
Result<std::vector<int64_t>> count_tokens(const Routing& routing, int64_t num_experts);
// The number to whose multiples the rows of each expert are padded, so that FP8 GEMMs can read
// them: 16, and 1 without FP8.
int64_t row_alignment(const Fp8Mode& mode);

// x [T, hidden] -> the rows of all experts, each padded to a multiple of `alignment`.
Result<ExpertRows> dispatch(const Tensor& x, const Routing& routing,
                            const std::vector<int64_t>& counts, int64_t alignment,
                            Dispatched& dispatched);
// Copies x's rows again as dispatch() did.
Result<Tensor> dispatch_again(const Tensor& x, const Dispatched& dispatched);
// d_rows [R, hidden] -> the gradient of x.
Result<Tensor> dispatch_backward(const Tensor& d_rows, const Dispatched& dispatched);
// d_row_probs F32 [R] -> the gradient of Routing::probs.
Result<Tensor> probs_backward(const Tensor& d_row_probs, const Dispatched& dispatched);

// rows [R, hidden] -> [T, hidden], the sum of each token's rows; weighted by `probs` F32 [T, E] if
// that is defined.
Result<Tensor> combine(const Tensor& rows, const Dispatched& dispatched, const Tensor& probs);
// dy [T, hidden] -> the gradient of the rows. With `probs`, `rows` must be combine()'s, and d_probs
// receives the gradient of the probabilities.
Result<Tensor> combine_backward(const Tensor& dy, const Dispatched& dispatched, const Tensor& rows,
                                const Tensor& probs, Tensor* d_probs);

}  // namespace te_fl::nn::detail
