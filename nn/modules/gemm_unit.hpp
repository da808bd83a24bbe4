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

// INVALID_ARGUMENT if `into` shares memory with `read`. `into` is the caller's memory for the
// result `what`; the message calls `read` "the memory of `reader`".
Status check_apart(const Tensor& into, const Tensor& read, const char* what, const char* reader);

// One linear map with its weight, bias, FP8 state and cached weight copies. Linear, LayerNormLinear
// and the two halves of LayerNormMLP use it. It works on matrices [rows, features].
class GemmUnit {
 public:
  struct Spec {
    int64_t in = 0;
    int64_t out = 0;
    DType activation_dtype = DType::kF32;
    Device device;
    bool high_precision = false;
    bool adds_bias = true;  // false: the caller adds the bias
    bool is_fc2 = false;    // uses CustomScaling::fc2
    // `partial`: the result of the linear map is the sum of the GEMMs of several ranks, and the
    // rank with `first` adds the bias. backward() computes the bias gradient on all of these ranks;
    // with gradient_rows, from this rank's rows.
    bool partial = false, first = true;
    // The ranks over which the rows are sharded; null if they are not. input_rows: prepare_input()
    // gets this rank's rows of x, and the backward returns this rank's rows of dx. gradient_rows:
    // prepare_grad() gets this rank's rows of dy.
    std::shared_ptr<SequenceRanks> input_rows, gradient_rows;
  };

  // The decisions of one forward, and the tensors that it keeps.
  struct Use {
    Fp8Mode mode;
    bool training = false;
    bool wgrad = false;     // the weight's gradient is needed
    bool dgrad = true;      // the input's gradient is needed
    bool unscaled = false;  // the scales are the initial ones and may saturate
    Tensor input;           // quantised or in the activation dtype; only with wgrad
    Tensor part;            // this rank's rows of the input; a backward gathers again
    // Custom recipes and backward overrides, from prepare_input() to keep(): the operand that the
    // backward reads instead of column-wise data of the input.
    Tensor across;
    std::shared_ptr<RowGather> arriving = nullptr;  // gather of the input; product waits
    Tensor weight;                                  // as `input`; undefined: the parameter's value
    uint64_t version = 0;                           // of the parameter in the forward
    DType dx_dtype = DType::kF32;  // dtype of the original input, used for its gradient

    void visit_tensors(const Ctx::Visitor& visitor) {
      visitor(input);
      visitor(part);
    }
  };

  // A quantised weight. `across`: the operand of dgrad() under a custom recipe; undefined if
  // dgrad() reads column-wise data of `tensor`, or the parameter.
  struct Weight {
    Tensor tensor, across;
    Weight() = default;
    Weight(Tensor t) : tensor(std::move(t)) {}
    Weight(Tensor t, Tensor a) : tensor(std::move(t)), across(std::move(a)) {}
  };

  GemmUnit(const Spec& spec, std::shared_ptr<Parameter> weight, std::shared_ptr<Parameter> bias);

  const Spec& spec() const noexcept { return spec_; }
  const std::shared_ptr<Parameter>& weight() const noexcept { return weight_; }
  const std::shared_ptr<Parameter>& bias() const noexcept { return bias_; }
  const std::shared_ptr<Fp8State>& forward_state() const noexcept { return forward_; }
  const std::shared_ptr<Fp8State>& backward_state() const noexcept { return backward_; }
  const std::shared_ptr<DelayedWgrad>& delayed() const noexcept { return delayed_; }

  // Decides how to compute. `training`: a backward will follow.
  Result<Use> begin(bool training);
  // Allocates a tensor [rows, in] for the op that produces the GEMM's input: quantised if the
  // recipe is fused with such ops (Fp8Mode::fuses()), otherwise in high precision. Once it is
  // written, written_input() makes it the GEMM's input.
  Result<Tensor> input_buffer(const Use& use, int64_t rows);
  Result<Tensor> written_input(Use& use, const Tensor& buffer);
  // Prepares `x` [rows, in] as the GEMM's input: quantised or cast to the activation dtype, and
  // gathered if its rows are sharded over ranks. The input's gradient will have x's dtype. A
  // quantised x is used as it is; for training it must have memory for column-wise data.
  Result<Tensor> prepare_input(Use& use, const Tensor& x);
  // Computes input W^T + b (+ residual, [rows, out]) as [rows, out] in the activation dtype, or
  // writes it to `into`. `input` must come from input_buffer() or prepare_input().
  Result<Tensor> forward(Use& use, const Tensor& input, const ForwardOptions& options,
                         const Tensor* residual = nullptr, const Tensor* into = nullptr);

  // forward() followed by a reduce-scatter over Spec::gradient_rows; returns this rank's rows.
  Result<Tensor> forward_scattered(Use& use, const Tensor& input, const ForwardOptions& options);

  // forward() without residual, followed by GELU into `activated` [rows, out], quantised or not.
  // Uses a fused call if the backend of both reports that it costs no more, otherwise two calls.
  Result<Tensor> forward_gelu(Use& use, const Tensor& input, const ForwardOptions& options,
                              const Tensor& activated);

  // The weight that the backward of `use` reads.
  const Tensor& weight_of(const Use& use) const {
    return use.weight.defined() ? use.weight : weight_->value;
  }
  // FAILED_PRECONDITION if the backward would read the parameter's own value and that was changed
  // since the forward. Call it at the beginning of a backward, before anything is written.
  Status check_unchanged(const Use& use) const;
  // INVALID_ARGUMENT with `what` if `into`, to which dgrad() will write, shares memory with the
  // tensors of `use` or with `dy`, which the GEMMs of the backward read.
  Status check_result(const Use& use, const Tensor& dy, const Tensor& into, const char* what) const;
  // True if the op that produces the output's gradient may write it quantised, into grad_buffer().
  static bool fuses_gradient(const Use& use) {
    return use.mode.quantises_gradients() && use.mode.fuses();
  }
  // Makes the operands of a backward from the tensors that the forward kept, for a recipe with a
  // backward override. Call it after check_unchanged().
  Status read_kept(Use& use) const;
  // Allocates a quantised tensor [rows, out] for the op that produces the output's gradient. Not
  // for custom recipes.
  Result<Tensor> grad_buffer(const Use& use, int64_t rows) {
    return grad_buffer(use, rows, wants_wgrad(use));
  }
  struct Gradient {
    Tensor tensor;           // quantised or in the activation dtype
    Tensor across;           // operand of wgrad() under a custom recipe; undefined: `tensor`
    bool bias_done = false;  // the bias gradient is accumulated or not needed
    std::shared_ptr<RowGather> arriving = nullptr;  // gather of `tensor`; complete after arrived()
  };
  // Prepares dy [rows, out] for the backward GEMMs, and gathers it if its rows are sharded over
  // ranks. A quantised dy is used as it is and must have memory for column-wise data. `may_arrive`:
  // the gather may overlap with dgrad(), which the caller calls next.
  Result<Gradient> prepare_grad(const Use& use, const Tensor& dy, bool may_arrive = false);
  static Status arrived(Gradient& grad);
  // Computes dy W as [rows, in] in Use::dx_dtype, or writes it to `into`. The gather of the
  // gradient is complete afterwards.
  Result<Tensor> dgrad(const Use& use, Gradient& grad, const Tensor* into = nullptr);
  // Computes gelu'(pre) * (dy W), the gradient before a GELU whose input was `pre` [rows, in].
  // Writes it to `into`, quantised or not, and the column sums to `sums` [in] unless that is
  // undefined. Uses one or two calls, like forward_gelu().
  Status dgrad_gelu(const Use& use, Gradient& grad, const Tensor& pre, const Tensor& into,
                    const Tensor& sums);
  // Accumulates dy^T x into the weight's gradient, and the bias gradient unless it is done. Does
  // nothing for frozen parameters. If weight gradients are delayed, passes the work to delayed().
  Status wgrad(const Use& use, const Gradient& grad) { return wgrad(use, grad, use.input); }
  // Runs dgrad and wgrad. If the input's rows are sharded over ranks, the gather of the input
  // overlaps with dgrad, and the reduce-scatter of dx with wgrad; the result is then this rank's
  // rows of dx. Without Use::dgrad, skips dgrad and its reduction and returns an undefined tensor.
  Result<Tensor> products(const Use& use, Gradient& grad, const Tensor* into = nullptr);
  // Runs prepare_grad and products: [rows, out] -> [rows, in].
  Result<Tensor> backward(Use& use, const Tensor& dy, const Tensor* into = nullptr);

  // The functions from here on are the steps of those above. GroupedGemm calls them for a group of
  // units whose GEMMs run in one op. The returned argument structs point to the passed tensors and
  // to the unit's tensors.
  Result<te_fl_generic_gemm_args> product(const Use& use, const Tensor& input,
                                          const ForwardOptions& options, Weight& weight);
  // Allocates the quantised input [rows, in]. Not for custom recipes.
  Result<Tensor> input_codes(const Use& use, int64_t rows);
  // The quantisers of this linear map.
  const LinearQuantisers& quantisers_of(const CustomScaling& custom) const {
    return spec_.is_fc2 && custom.fc2 != nullptr ? *custom.fc2 : custom.quantisers;
  }
  // prepare_input() of all rows.
  Result<Tensor> whole_input(Use& use, const Tensor& x);
  // Pairs of values and the quantised tensors that they are to be written to.
  using Pending = std::vector<std::pair<Tensor, Tensor>>;
  // While `pending` is not null, product() does not quantise weights but adds them to `pending`.
  // The caller quantises them before use, or calls forget_weights().
  void leave_quantising(Pending* pending) noexcept { pending_ = pending; }
  void forget_weights() noexcept { serving_ = cached_ = flagged_ = {}; }
  // Stores in `use` the tensors that the backward reads; of a quantised tensor only the column-wise
  // data.
  void keep(Use& use, const Tensor& input, const Weight& weight) const;
  // The arguments of dgrad() without D.
  te_fl_generic_gemm_args dgrad_product(const Use& use, const Tensor& grad) const;
  // The arguments of wgrad(); call wrote_wgrad() after the op. nullopt for a frozen weight; in that
  // case accumulates the bias gradient if it is needed.
  Result<std::optional<te_fl_generic_gemm_args>> wgrad_product(const Use& use, const Gradient& grad,
                                                               const Tensor& input);
  void wrote_wgrad(const te_fl_generic_gemm_args& product);
  // Called before delaying a weight gradient. Parameters that are frozen now get no gradient from
  // this backward, since its operands were prepared without it. Parameters that are frozen between
  // now and the delayed computation get none either.
  void settle(Use& use, Gradient& grad) const;
  // Appends to `counts` the counter (DelayedCount) of each parameter whose gradient a delay leaves
  // open. Called after settle().
  void count_left(const Use& use, const Gradient& grad, std::vector<DelayedCount>& counts) const;
  bool wants_wgrad(const Use& use) const { return use.wgrad && weight_->requires_grad; }
  bool wants_bias_grad() const {
    return bias_ != nullptr && spec_.adds_bias && bias_->requires_grad;
  }

 private:
  static constexpr int64_t kInputSlot = 0, kWeightSlot = 1;  // slots of the forward state
  // Computes the GEMM rank by rank: first for this rank's rows of `rows`, then for the other ranks'
  // rows when they have arrived. Sets A, D and `residual` of `args` for each step.
  Status product_in_chunks(const te_fl_generic_gemm_args& args, RowGather& rows, const Tensor& d,
                           const Tensor* residual = nullptr) const;
  // forward_scattered() in several ranges of output rows. The reduce-scatter of one range overlaps
  // with the GEMM of the next.
  Result<Tensor> forward_in_pieces(Use& use, const Tensor& input, const ForwardOptions& options);
  // Implementations of prepare_input() and prepare_grad(). whole_grad() gets all rows; functions
  // that begin with gathered_ get this rank's rows.
  Result<Gradient> whole_grad(const Use& use, const Tensor& dy, bool with_bias);
  Result<Tensor> gathered_input(Use& use, const Tensor& x);
  Result<Gradient> gathered_grad(const Use& use, const Tensor& dy, bool may_arrive);
  // Quantises this rank's rows of x for the gather; see gathers_codes().
  Result<Tensor> part_of_input(const Use& use, const Tensor& x);
  Result<Tensor> grad_buffer(const Use& use, int64_t rows, bool columnwise);
  // wgrad() with a complete input, and with one that is being gathered.
  Status wgrad(const Use& use, const Gradient& grad, const Tensor& input);
  Status gathered_wgrad(const Use& use, const Gradient& grad, RowGather& input);
  Status run_wgrad(const Use& use, const Gradient& grad, const Tensor& input);
  // Computes the bias gradient from this rank's rows of dy, for a frozen weight.
  Status sum_bias_grad(const Tensor& dy);
  // Quantises dy and computes the bias gradient.
  Status quantise_with_bias(const Tensor& dy, const Tensor& codes);
  Result<Weight> gemm_weight(const Use& use, const ForwardOptions& options);
  Result<Weight> make_weight(const Use& use, bool columnwise);
  // Quantises the weight into new memory.
  Result<Weight> quantised_weight(const Use& use, bool columnwise);
  // The weight for inference without ForwardOptions about microbatches; cached.
  Result<Weight> inference_weight(const Use& use);
  // The FP8 data of an FP8-only weight. The first training forward adds the column-wise data.
  Result<Weight> own_codes(const Use& use);
  // In the second run of an activation recomputation: the weight that the first run read.
  Result<Weight> repeated_weight(const Use& use);
  // The quantised weight for ForwardOptions::reuse_weights, cached in flagged_.
  Result<Weight> flagged_weight(const Use& use, const Tensor& flag);
  // The optimizer's FP8 copy if it equals a quantisation of the current weight; otherwise
  // undefined.
  Result<Tensor> written_copy(const Use& use) const;

  Spec spec_;
  std::shared_ptr<Parameter> weight_;
  std::shared_ptr<Parameter> bias_;
  std::shared_ptr<Fp8State> forward_;   // slots: input, weight
  std::shared_ptr<Fp8State> backward_;  // slot: output gradient
  std::shared_ptr<WeightCopy>
      copy_;  // FP8 copy written by an optimizer; null in high precision and for FP8-only weights
  std::shared_ptr<DelayedWgrad> delayed_ = std::make_shared<DelayedWgrad>();
  Pending* pending_ = nullptr;
  struct Kept {
    Weight weight;
    uint64_t version = 0;  // of the parameter
    bool fp8 = false;
    std::shared_ptr<const Recipe> recipe;
    uint64_t capture = 0;     // the capture that made it; 0: none
    uint64_t generation = 0;  // of the scales; for serving_ only
    void* stream = nullptr;   // stream that made it; for serving_ only
    bool fits(const Use& use) const;
  };
  Kept serving_;  // cached by inference
  Kept cached_;   // cached by is_first_microbatch = true
  Kept flagged_;  // cached by reuse_weights; graphs use this memory
};

}  // namespace te_fl::nn::detail
