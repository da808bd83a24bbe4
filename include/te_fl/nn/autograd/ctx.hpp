#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// The state that a module's forward saves for its backward; keeps activations alive. Give each
// forward its own Ctx, so that several microbatches can be in flight. A backward consumes the Ctx,
// and reset() drops its contents; afterwards another forward may use it. A forward returns
// FAILED_PRECONDITION for a Ctx that is not empty, because the gradients of that earlier forward
// would be lost. A copy shares the activations and has a backward of its own: one forward can have
// several backwards, as with a framework's retained graph.
class TE_FL_API Ctx {
 public:
  // A function that visit() calls for each tensor. `wants_masks`: it is also called for masks,
  // lengths, slopes and angles that belong to the program.
  class Visitor {
   public:
    template <class F>
    requires std::invocable<F&, Tensor&>
    // NOLINTNEXTLINE(google-explicit-constructor): a lambda may be passed as a Visitor
    Visitor(F each, bool wants_masks = false) : each_(std::move(each)), wants_masks_(wants_masks) {}
    void operator()(Tensor& tensor) const { each_(tensor); }
    void mask(Tensor& tensor) const {
      if (wants_masks_) each_(tensor);
    }

   private:
    std::function<void(Tensor&)> each_;
    bool wants_masks_;
  };
  struct TE_FL_API Record {
    virtual ~Record();
    // True from the start of a training forward until the forward has stored this record in a Ctx.
    bool unfinished = false;
    // Copies a record of this type. Null: the record cannot be copied, and a copy of the Ctx is
    // empty.
    std::unique_ptr<Record> (*copy)(const Record&) = nullptr;
    // Passes the activations of a record of this type to the visitor. Null: the record has none to
    // show.
    void (*visit)(Record&, const Visitor&) = nullptr;
  };
  Ctx();
  ~Ctx();
  Ctx(const Ctx& other);
  Ctx& operator=(const Ctx& other);
  Ctx(Ctx&&) noexcept;
  Ctx& operator=(Ctx&&) noexcept;
  bool empty() const noexcept { return record_ == nullptr; }
  void reset() noexcept;
  // Passes to the visitor each activation that the backward will read, defined or not: tensors that
  // the forward made or was given, including those of inner modules. Weights are left out; masks
  // are included if the visitor wants them. The visitor may replace a tensor by one of equal
  // contents. Must not run concurrently with a backward of this Ctx.
  void visit(const Visitor& visitor);
  // False: the gradient of the forward's input is not needed. Set it before the backward, which may
  // then skip this gradient and its collectives, and returns an undefined tensor. Linear skips the
  // gradient, and so do LayerNormLinear and LayerNormMLP if they have no norm or the norm is
  // frozen. Other modules need the input's gradient for their parameters' gradients.
  bool input_grad = true;

  // Functions for modules. A forward calls check_empty() first, before it computes anything, and
  // store() last; both return FAILED_PRECONDITION unless the Ctx is empty. A backward calls take(),
  // which returns the record that `owner` stored. take() returns FAILED_PRECONDITION if there is
  // none: the forward was not given this Ctx, a backward has already consumed it, or another module
  // filled it.
  Status check_empty(std::string_view module) const;
  Status store(const void* owner, std::unique_ptr<Record> record);
  Result<std::unique_ptr<Record>> take(const void* owner, std::string_view module);

 private:
  std::unique_ptr<Record> record_;
  const void* owner_ = nullptr;
};

struct ForwardOptions {
  // Controls the quantised copies (and the casts to the activation dtype) of the weights, which are
  // needed only once per step. true: compute and keep them. false: reuse the kept ones; if there
  // are none, compute and keep them. Unset: compute them for this call only.
  //
  // Unset in inference (ctx null): compute them once and keep them until Parameter::version, the
  // FP8 scales or the recipe changes, another stream is used, or a training forward runs. The kept
  // copies take 1 byte per weight under FP8, or the size of the activation dtype if the parameter
  // has another dtype. FP8-only parameters are dequantised for each call. In a capture the copies
  // are computed for this call, so that each launch reads the weights of its time.
  std::optional<bool> is_first_microbatch = {};
  // Decides like is_first_microbatch, but on the device when the work runs, so that one captured
  // graph works for every microbatch. F32 [1] on the modules' device. 0: quantise FP8 weights and
  // keep them; any other value: reuse what was kept. Outside of a capture, weights that the host
  // knows to be out of date (nothing kept yet, another recipe, an optimizer step) are quantised in
  // any case; in a capture only the value counts. Must not be combined with is_first_microbatch.
  // Without FP8, weights of another dtype are cast every time.
  Tensor reuse_weights = {};
};

}  // namespace te_fl::nn
