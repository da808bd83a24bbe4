#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "nn/autograd/delayed_wgrad.hpp"
#include "nn/fp8/autocast.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "nn/fp8/weight_copy.hpp"
#include "nn/modules/gathered_rows.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::nn::detail {

// INVALID_ARGUMENT if `into`, the caller's memory for the result `what`, shares memory with `read`,
// which it says as "the memory of `reader`".
Status check_apart(const Tensor& into, const Tensor& read, const char* what, const char* reader);

// One linear map with its weight, bias, FP8 state and cached weight copies: what Linear,
// LayerNormLinear and the two halves of LayerNormMLP have in common. Works on matrices [rows,
// features].
class GemmUnit {
 public:
  struct Spec {
    int64_t in = 0;
    int64_t out = 0;
    DType activation_dtype = DType::kF32;
    Device device;
    bool high_precision = false;
    bool adds_bias = true;  // false: the bias is the caller's to add
    // The product is one of several ranks' whose sum is the map's. The first of them has the bias.
    // backward() on all of them has its gradient, with gradient_rows that of this rank's rows.
    bool partial = false, first = true;
    // The ranks that have parts of the rows, of the input or of the output and its gradient: x of
    // prepare_input() and dx of the backward are this rank's rows, or dy of prepare_grad() is.
    std::shared_ptr<SequenceRanks> input_rows, gradient_rows;
  };

  // Holds what one forward decided and kept.
  struct Use {
    Fp8Mode mode;
    bool training = false;
    bool wgrad = false;     // the weight's gradient is wanted
    bool dgrad = true;      // the input's gradient is wanted
    bool unscaled = false;  // no amax has set the scales, which may saturate
    Tensor input;           // quantised or of the activation dtype; with wgrad only
    Tensor part;            // this rank's rows of it, which a backward gathers again
    std::shared_ptr<RowGather> arriving = nullptr;  // of the input: the product waits for it
    Tensor weight;                 // likewise; undefined if it is the parameter's own value
    uint64_t version = 0;          // of the parameter at the forward
    DType dx_dtype = DType::kF32;  // of the input's gradient: the dtype that the input came in

    void visit_tensors(const Ctx::Visitor& visitor) {
      visitor(input);
      visitor(part);
    }
  };

  GemmUnit(const Spec& spec, std::shared_ptr<Parameter> weight, std::shared_ptr<Parameter> bias);

  const Spec& spec() const noexcept { return spec_; }
  const std::shared_ptr<Parameter>& weight() const noexcept { return weight_; }
  const std::shared_ptr<Parameter>& bias() const noexcept { return bias_; }
  const std::shared_ptr<Fp8State>& forward_state() const noexcept { return forward_; }
  const std::shared_ptr<Fp8State>& backward_state() const noexcept { return backward_; }
  const std::shared_ptr<DelayedWgrad>& delayed() const noexcept { return delayed_; }

  // Decides how to compute; `training` if a backward will follow.
  Result<Use> begin(bool training);
  // A tensor [rows, in] for a producer to write the GEMM's input into: quantised under FP8, else
  // high precision.
  Result<Tensor> input_buffer(const Use& use, int64_t rows);
  // `x` [rows, in] as the GEMM wants it: quantised, or cast to the activation dtype, and of all
  // ranks' rows where they have parts; its gradient will have x's dtype. Row-wise codes are taken
  // as they are; for training they bring room for the column-wise copy.
  Result<Tensor> prepare_input(Use& use, const Tensor& x);
  // input W^T + b (+ residual, [rows, out]), [rows, out] in the activation dtype, or in `into`.
  // `input` came from input_buffer() or prepare_input().
  Result<Tensor> forward(Use& use, const Tensor& input, const ForwardOptions& options,
                         const Tensor* residual = nullptr, const Tensor* into = nullptr);

  // The sum of the ranks' forward() by Spec::gradient_rows, of which this is the rank's rows: in
  // one piece, or in the stripes of output features that TE_FL_STRIPES_FILE says, each one's sum
  // beside the next one's product.
  Result<Tensor> forward_scattered(Use& use, const Tensor& input, const ForwardOptions& options);

  // forward() without residual, and its GELU into `activated` [rows, out], quantised or not: in one
  // call if the backend of both says that it costs no more, else in two.
  Result<Tensor> forward_gelu(Use& use, const Tensor& input, const ForwardOptions& options,
                              const Tensor& activated);

  // The weight that the backward of `use` reads.
  const Tensor& weight_of(const Use& use) const {
    return use.weight.defined() ? use.weight : weight_->value;
  }
  // FAILED_PRECONDITION if the backward would read the weight in the parameter itself and that has
  // changed since the forward. First in a backward, before anything is written.
  Status check_unchanged(const Use& use) const;
  // INVALID_ARGUMENT naming `what` if `into`, which dgrad() is to write, shares memory with what
  // the products of that backward read of `use` and of `dy`.
  Status check_result(const Use& use, const Tensor& dy, const Tensor& into, const char* what) const;
  // A quantised tensor [rows, out] for a producer of the output gradient; FP8 only.
  Result<Tensor> grad_buffer(const Use& use, int64_t rows) {
    return grad_buffer(use, rows, wants_wgrad(use));
  }
  struct Gradient {
    Tensor tensor;           // quantised or of the activation dtype
    bool bias_done = false;  // the bias gradient is already accumulated, or not wanted
    std::shared_ptr<RowGather> arriving = nullptr;  // of `tensor`, whole after arrived()
  };
  // dy [rows, out] as the backward GEMMs want it, of all ranks' rows. Row-wise codes are taken as
  // they are and bring room for the column-wise copy. may_arrive: the gather may go on beside
  // dgrad(), which is called next.
  Result<Gradient> prepare_grad(const Use& use, const Tensor& dy, bool may_arrive = false);
  static Status arrived(Gradient& grad);
  // dy W, [rows, in] in Use::dx_dtype, or in `into`. The gradient has arrived then.
  Result<Tensor> dgrad(const Use& use, Gradient& grad, const Tensor* into = nullptr);
  // The gradient behind GELU, gelu'(pre) * (dy W), of the map whose output `pre` [rows, in] was:
  // into `into`, quantised or not, and the sums of its columns into `sums` [in] unless undefined.
  // In one call or in two, as forward_gelu().
  Status dgrad_gelu(const Use& use, Gradient& grad, const Tensor& pre, const Tensor& into,
                    const Tensor& sums);
  // Accumulates dy^T x into the weight's gradient, and the bias gradient unless it is done; neither
  // for frozen parameters. Where they are delayed, leaves that to delayed().
  Status wgrad(const Use& use, const Gradient& grad) { return wgrad(use, grad, use.input); }
  // dgrad, wgrad. Where ranks have parts of the input's rows, its gather runs beside dgrad, and
  // that of the result's sum over the ranks beside wgrad; the result is this rank's rows. Without
  // Use::dgrad it is undefined, and there are no dgrad and no sum.
  Result<Tensor> products(const Use& use, Gradient& grad, const Tensor* into = nullptr);
  // prepare_grad, products. [rows, out] -> [rows, in].
  Result<Tensor> backward(const Use& use, const Tensor& dy, const Tensor* into = nullptr);

  // The parts of the above for a group of units, whose products are one call. They point to their
  // arguments and to the unit's tensors.
  // The arguments of forward() but for D, whose weight `weight` keeps.
  Result<te_fl_generic_gemm_args> product(const Use& use, const Tensor& input,
                                          const ForwardOptions& options, Tensor& weight);
  // Values and the codes that they are to become.
  using Pending = std::vector<std::pair<Tensor, Tensor>>;
  // Until it is called with null, product() leaves the quantisation of weights to the caller, who
  // does it before anything reads them, or forgets the weights that are kept.
  void leave_quantising(Pending* pending) noexcept { pending_ = pending; }
  void forget_weights() noexcept { serving_ = cached_ = flagged_ = {}; }
  // Keeps what backward reads: of a quantised operand the column-wise copy.
  void keep(Use& use, const Tensor& input, const Tensor& weight) const;
  // The arguments of dgrad() but for D.
  te_fl_generic_gemm_args dgrad_product(const Use& use, const Tensor& grad) const;
  // The arguments of wgrad(), after whose call wrote_wgrad() follows. None for a frozen weight:
  // then the bias's gradient, if wanted, is accumulated here.
  Result<std::optional<te_fl_generic_gemm_args>> wgrad_product(const Use& use, const Gradient& grad,
                                                               const Tensor& input);
  void wrote_wgrad(const te_fl_generic_gemm_args& product);
  // Before a delay: what is frozen now stays without a gradient of this backward, whose operands
  // were prepared without it. What is frozen until then has none either.
  void settle(Use& use, Gradient& grad) const;
  // Adds the counts of the parameters whose gradients a delay leaves, after settle().
  void count_left(const Use& use, const Gradient& grad, std::vector<DelayedCount>& counts) const;
  bool wants_wgrad(const Use& use) const { return use.wgrad && weight_->requires_grad; }
  bool wants_bias_grad() const {
    return bias_ != nullptr && spec_.adds_bias && bias_->requires_grad;
  }

 private:
  static constexpr int64_t kInputSlot = 0, kWeightSlot = 1;  // of the forward state
  // One product after the other: of the rows of `rows` that this rank has, and of the others once
  // they have come. A, D and `residual` of `args` are theirs.
  Status product_in_pieces(const te_fl_generic_gemm_args& args, RowGather& rows, const Tensor& d,
                           const Tensor* residual = nullptr) const;
  // forward_scattered() in pieces of the output's rows, each on its way while the next is computed.
  Result<Tensor> forward_in_pieces(Use& use, const Tensor& input, const ForwardOptions& options);
  // forward_scattered() in more than one stripe.
  Result<Tensor> forward_in_stripes(Use& use, const Tensor& input, const ForwardOptions& options,
                                    int stripes);
  // prepare_input() and prepare_grad() of all rows, and of this rank's part of them.
  Result<Tensor> whole_input(Use& use, const Tensor& x);
  Result<Gradient> whole_grad(const Use& use, const Tensor& dy, bool with_bias);
  Result<Tensor> gathered_input(Use& use, const Tensor& x);
  Result<Gradient> gathered_grad(const Use& use, const Tensor& dy, bool may_arrive);
  // x in codes that the ranks gather; see gathers_codes().
  Result<Tensor> part_of_input(const Use& use, const Tensor& x);
  Result<Tensor> grad_buffer(const Use& use, int64_t rows, bool columnwise);
  // wgrad() of that input, and of one that the ranks gather.
  Status wgrad(const Use& use, const Gradient& grad, const Tensor& input);
  Status wgrad_of(const Use& use, const Gradient& grad, RowGather& input);
  Status run_wgrad(const Use& use, const Gradient& grad, const Tensor& input);
  // The bias gradient from dy alone, for a frozen weight, and of this rank's rows.
  Status sum_bias_grad(const Tensor& dy);
  // dy in codes, and the bias gradient.
  Status quantise_with_bias(const Tensor& dy, const Tensor& codes);
  Result<Tensor> gemm_weight(const Use& use, const ForwardOptions& options);
  Result<Tensor> make_weight(const Use& use, bool columnwise);
  // The weight in new memory, quantised.
  Result<Tensor> quantised_weight(const Use& use, bool columnwise);
  // The weight for an inference that says nothing of microbatches.
  Result<Tensor> inference_weight(const Use& use);
  // The codes of an FP8-only weight; the first training forward makes their column-wise copy.
  Result<Tensor> own_codes(const Use& use);
  // Returns the first run's weight, in the second run of a recomputed piece.
  Result<Tensor> repeated_weight(const Use& use);
  // Returns the weight that ForwardOptions::reuse_weights asks for.
  Result<Tensor> flagged_weight(const Use& use, const Tensor& flag);
  // The optimizer's copy, if it is what quantising the weight now would make; else undefined.
  Result<Tensor> written_copy(const Use& use) const;

  Spec spec_;
  std::shared_ptr<Parameter> weight_;
  std::shared_ptr<Parameter> bias_;
  std::shared_ptr<Fp8State> forward_;   // slots: input, weight
  std::shared_ptr<Fp8State> backward_;  // slot: output gradient
  std::shared_ptr<WeightCopy>
      copy_;  // an optimizer may write it; null in high precision and of FP8-only weights
  std::shared_ptr<DelayedWgrad> delayed_ = std::make_shared<DelayedWgrad>();
  Pending* pending_ = nullptr;
  struct Kept {
    Tensor weight;
    uint64_t version = 0;  // of the parameter
    std::shared_ptr<const Recipe> recipe;
    uint64_t capture = 0;     // that made it; 0: none
    uint64_t generation = 0;  // of the scales, for serving_ alone
    void* stream = nullptr;   // that made it, likewise
    bool fits(const Use& use) const;
  };
  Kept serving_;  // by inference
  Kept cached_;   // by is_first_microbatch = true
  Kept flagged_;  // by reuse_weights, whose graphs write and read this memory
};

}  // namespace te_fl::nn::detail
