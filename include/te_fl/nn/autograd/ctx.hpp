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

// Holds what a forward keeps for its backward. Give each forward its own, as many at once as
// microbatches are in flight. A backward consumes it, or reset() drops it; it may be reused for
// another forward then. A forward given one that is not empty is FAILED_PRECONDITION: that
// microbatch's gradients would be lost. Holds activations alive. A copy shares them and has a
// backward of its own, so that one forward can have several, as retained graphs of frameworks do.
class TE_FL_API Ctx {
 public:
  // Is called with tensors; with masks, lengths, slopes and angles of the program's if it says so.
  class Visitor {
   public:
    template <class F>
    requires std::invocable<F&, Tensor&>
    // NOLINTNEXTLINE(google-explicit-constructor): a function is a visitor of the others
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
    // True from the beginning of a forward that is to have a backward until a Ctx stores the
    // record.
    bool unfinished = false;
    // Makes a copy of a record of this type. Null: it has none, and a copy of the Ctx is empty.
    std::unique_ptr<Record> (*copy)(const Record&) = nullptr;
    // Gives the visitor the activations of a record of this type. Null: it shows none.
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
  // Gives the visitor each tensor, defined or not, that the backward reads of what the forward
  // made or was given, of the modules inside too: no weights, and masks as the visitor wants. It
  // may replace it by one of equal contents. Not beside a backward of this Ctx.
  void visit(const Visitor& visitor);
  // False: nobody wants the gradient of the forward's input. Set before the backward, which may
  // leave it out then, with the collectives that make it, and gives an undefined tensor. Linear
  // does, and LayerNormLinear and LayerNormMLP where they have no norm or it is frozen; elsewhere
  // parameters' gradients need it.
  bool input_grad = true;

  // For modules. check_empty() comes first in a forward, before it computes; store() last, and
  // is FAILED_PRECONDITION as well unless empty. take() returns the record that `owner` stored;
  // FAILED_PRECONDITION if there is none: the forward was not given this ctx, it was already
  // consumed, or another module filled it.
  Status check_empty(std::string_view module) const;
  Status store(const void* owner, std::unique_ptr<Record> record);
  Result<std::unique_ptr<Record>> take(const void* owner, std::string_view module);

 private:
  std::unique_ptr<Record> record_;
  const void* owner_ = nullptr;
};

struct ForwardOptions {
  // Weights are quantised (and cast to the activation dtype) once per step: true computes and keeps
  // them, false reuses what true kept, unset computes them for this call alone. false without an
  // earlier true computes and keeps.
  // Unset in inference (ctx null) computes them once per Parameter::version, FP8 scales and recipe,
  // and keeps them until one of these changes, another stream comes, or a training forward does:
  // 1 byte for each weight under FP8, or the activation dtype's size if the parameter has another
  // dtype; FP8-only parameters are dequantised for each call. In a capture they are computed for
  // this call, so that each launch reads the weights of its time.
  std::optional<bool> is_first_microbatch = {};
  // It is is_first_microbatch for FP8 weights, decided on the device when the work runs, so that
  // one captured graph serves every microbatch: F32 [1] on the modules' device; 0 quantises and
  // keeps, any other value reuses what was kept. What the host knows to be out of date (nothing
  // kept yet, another recipe, an optimizer's step) is quantised whatever it says, but in a capture
  // only the value counts. Not together with is_first_microbatch. Without FP8, weights of another
  // dtype are cast every time.
  Tensor reuse_weights = {};
};

}  // namespace te_fl::nn
