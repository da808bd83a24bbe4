#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/optim/data_parallel.hpp"
#include "te_fl/nn/optim/param_group.hpp"

namespace te_fl::nn {

// Scales the gradients so that their global norm is at most max_norm, and returns the norm before
// scaling. Skips frozen parameters and parameters without a gradient. Reads the norm on the host,
// so it is a synchronisation point. FAILED_PRECONDITION if a gradient was cleared by clear_grad()
// and not written since. `ranks`: the ranks that hold the other shards of sharded parameters
// (Parameter::shard). The norm is then that of the full gradients; the gradient of a replicated
// parameter counts once.
TE_FL_API Result<float> clip_grad_norm(const std::vector<NamedParameter>& parameters,
                                       float max_norm, const Comm* ranks = nullptr);

class LossScaler;

namespace detail {
class GradientBuckets;
struct Gradients;
struct OwnPart;
}  // namespace detail

// The shard of a parameter's optimizer state that this rank holds under ZeRO (AdamOptions::zero):
// elements [begin, end) of the flattened parameter.
struct StatePart {
  std::string name;  // name of the parameter
  Shape shape;       // shape of the full parameter
  int64_t begin = 0, end = 0;
};

// Updates parameters from their F32 gradients by the multi_tensor ops. Parameters in BF16 or F16
// have F32 master weights. If Parameter::version shows that other code has written the value
// (load_state()), the next step first copies the value to the master weight. create() allocates all
// state, in F32; it must not be given a parameter twice. A step skips parameters that are frozen
// (Parameter::requires_grad) or have no gradient. Parameters that are frozen when create() is
// called get no state. If such a parameter later is trainable and has a gradient, a step returns
// FAILED_PRECONDITION: create another optimizer then.
class TE_FL_API Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Makes one update. First updates the FP8 scales of the backward passes that wrote the gradients,
  // unless backward_end() has done so. With max_grad_norm set, clips the gradients, which is a
  // synchronisation point unless the optimizer is capturable. Clipping detects gradients whose norm
  // is not finite. In this case the step changes nothing and returns FAILED_PRECONDITION; a
  // capturable optimizer instead skips the update on the device, without an error, and counts the
  // step. FAILED_PRECONDITION, with nothing changed, also if a gradient was cleared by clear_grad()
  // and not written since.
  //
  // In a capture (FAILED_PRECONDITION unless capturable) step() does not change the step count;
  // advance() counts before each launch. FAILED_PRECONDITION also if a GraphedStep is capturing
  // whose options do not name this optimizer, and for the first step of an SGD with dampening,
  // which differs from later steps.
  Status step();
  // A step for a loss that was multiplied by the scaler's scale: divides the gradients by the
  // scale, then clips and updates. Without max_grad_norm nothing is read on the host. If a gradient
  // is not finite, the device leaves parameters and state unchanged, without an error, and the step
  // is still counted. The scaler must outlive a graph that captures this call.
  Status step(LossScaler& scaler);
  // Counts a step that a graph is about to make, and writes step count and learning rate to the
  // memory that the graph reads, on the thread's current stream. GraphedStep calls it.
  // FAILED_PRECONDITION unless capturable.
  Status advance();
  bool capturable() const noexcept { return device_ != nullptr; }
  int64_t steps() const noexcept { return steps_; }
  void set_lr(float lr) noexcept { lr_ = lr; }
  float lr() const noexcept { return lr_; }
  // From now on clips by the norm of the full gradients of sharded parameters, like
  // clip_grad_norm() with `ranks`. step() is then a collective of these ranks. If a step with a
  // LossScaler is skipped on one rank, it is skipped on all. Null: the parameters are not sharded.
  void set_norm_ranks(std::shared_ptr<const Comm> ranks) { norm_ranks_ = std::move(ranks); }
  // Sets ParamGroup::lr_scale of group `group` in the options. INVALID_ARGUMENT if there is no such
  // group, or the scale is negative or not finite.
  Status set_lr_scale(size_t group, float scale);
  // Norm of the gradients in the last step(), before clipping. 0 if max_grad_norm is not set or the
  // optimizer is capturable.
  float last_grad_norm() const noexcept { return last_grad_norm_; }
  // For a capturable optimizer, last_grad_norm() on the device, F32 [1]; item() reads it. Undefined
  // otherwise.
  const Tensor& grad_norm() const noexcept;

  // State tensors by name ("optimizer.exp_avg.NAME", ...), which share storage with the optimizer.
  // They have the parameter's shape. With AdamOptions::zero they are this rank's shards, flat; an
  // empty shard has no tensor.
  virtual std::vector<NamedTensor> state() const = 0;
  // state_parts(): with AdamOptions::zero, this rank's shard of the state of each parameter that
  // was not frozen at create(); a shard may be empty. Otherwise empty. state_rank() and
  // state_ranks(): this rank's position among the ranks that share the state, and their number.
  // Otherwise 0 and 1.
  std::vector<StatePart> state_parts() const;
  int state_rank() const noexcept;
  int state_ranks() const noexcept;
  // For loading: call this after the state tensors and the parameters have been written. Sets the
  // step count, and marks the master weights as up to date with the current values.
  void set_steps(int64_t steps) noexcept;

 protected:
  // Device tensors that step() reads instead of host values.
  struct OnDevice {
    Tensor step;  // I64 [1]
    // F32 [1] each: the optimizer's learning rate, then those of the groups.
    std::vector<Tensor> lr;
    Tensor grad_norm;  // F32 [1]; undefined without clipping
  };

  Optimizer(std::vector<NamedParameter> parameters, float lr, float max_grad_norm);
  Status make_capturable();
  // Copies the value of parameters_[index] to its master weight, if there is one.
  virtual Status refresh_master(size_t index) = 0;
  const OnDevice* on_device() const noexcept { return device_.get(); }
  // Flag for the update ops, I32 [1]: if its value is not 0, the update changes nothing. Undefined:
  // no update is skipped.
  const Tensor& noop() const noexcept { return noop_; }
  // The learning rate of group `index` - 1. Index 0: the learning rate of parameters in no group.
  float group_lr(size_t index) const noexcept { return lr_ * lr_scales_[index]; }
  // Checks and sets the groups. INVALID_ARGUMENT names the invalid field.
  Status set_groups(const char* optimizer, const std::vector<ParamGroup>& groups);
  // ZeRO: restricts the optimizer to this rank's shards. Does nothing if `zero` is null.
  // INVALID_ARGUMENT if `zero` was created without ZeRO or for other parameters.
  Status divide(const char* optimizer, std::shared_ptr<detail::GradientBuckets> zero);
  // Updates the parameters. `first`: true if no earlier step has written any optimizer state.
  virtual Status update(bool first) = 0;

  std::vector<NamedParameter> parameters_;
  std::shared_ptr<detail::GradientBuckets>
      zero_;  // null: no ZeRO; this rank updates all parameters
  // With zero_: the part of each parameter that this rank updates, null for frozen parameters.
  // Otherwise empty.
  std::vector<const detail::OwnPart*> parts_;
  float lr_ = 0;
  float max_grad_norm_ = 0;
  float last_grad_norm_ = 0;
  int64_t steps_ = 0;
  const char* uncapturable_ = nullptr;  // reason why the step cannot be captured; null if it can
  bool first_differs_ = false;          // the first step computes differently from all later ones
  std::vector<float> lr_scales_ = {1};  // indexed like group_lr()

 private:
  Status check_capture() const;
  Status check_slots() const;  // checks that every parameter to be updated has state
  Status step(LossScaler* scaler);
  Status unscale(LossScaler& scaler);
  Status clip(const LossScaler* scaler);
  detail::Gradients gradients() const;
  Status clip_on_device(const Tensor& noop);
  Status write_state();
  Status refresh_masters();
  Device home() const;

  std::unique_ptr<OnDevice> device_;
  std::shared_ptr<const Comm> norm_ranks_;
  Tensor flag_;  // I32 [1]: a value other than 0 skips the step
  Tensor noop_;  // flag_ if the current step checks it, else undefined
  std::vector<uint64_t>
      versions_;  // Parameter::version of the values that the master weights correspond to
  std::vector<bool> stateless_;  // parameters that were frozen in create()
};

struct AdamOptions {
  float lr = 1e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float epsilon = 1e-8f;
  float weight_decay = 0;
  bool adamw = true;  // decoupled weight decay; false: L2, added to the gradient
  bool bias_correction = true;
  float max_grad_norm = 0;  // 0: no clipping
  DecayFilter decay = nullptr;
  std::vector<ParamGroup> groups = {};
  // Keep step count, learning rate and clipping on the device, so that step() can be captured into
  // a graph and never waits for the device.
  bool capturable = false;
  // step() also writes FP8 copies of weights whose module's last training forward quantised them by
  // delayed scaling. The op quantises the new weight while it is in registers, which saves the next
  // forward a quantisation. Training is bitwise the same: the scale is the one that the next
  // forward would use (the autocast's exit has updated it), and the amax is recorded where that
  // forward would record it.
  //
  // Call step() outside of every autocast; inside of one no copies are written, since its exit will
  // still change the scales. If the weight or the scales change after a copy was written (another
  // training forward, load_state()), the copy is ignored and the forward quantises as usual. One
  // side effect remains: the new weight's amax is in the running row of the history after the step,
  // even if no FP8 forward follows. If modules share a weight, the first of them gets the copy.
  // Such a step cannot be captured (FAILED_PRECONDITION), because the host tracks which copies are
  // valid. Not allowed with `zero`.
  bool write_fp8_weights = false;
  // ZeRO-1: the optimizer state and the update are sharded among the ranks of this DataParallel. It
  // must have been created with the same parameters and DataParallelOptions::zero. step() is then a
  // collective and must follow average_gradients(). Each element is computed as without ZeRO,
  // except that the norm for clipping is summed in another order. create() reads this member; a
  // DataParallel of one rank counts as null.
  const DataParallel* zero = nullptr;
};

class TE_FL_API Adam : public Optimizer {
 public:
  static Result<std::unique_ptr<Adam>> create(std::vector<NamedParameter> parameters,
                                              const AdamOptions& options);
  ~Adam() override;
  std::vector<NamedTensor> state() const override;

 private:
  struct Impl;
  Adam(std::vector<NamedParameter> parameters, const AdamOptions& options);
  Status update(bool first) override;
  Status refresh_master(size_t index) override;
  Status update_some(size_t group, bool decays, bool mastered, bool copied);
  std::unique_ptr<Impl> impl_;
};

struct SGDOptions {
  float lr = 1e-2f;
  float momentum = 0;
  float dampening = 0;
  float weight_decay = 0;
  bool nesterov = false;
  float max_grad_norm = 0;  // 0: no clipping
  DecayFilter decay = nullptr;
  std::vector<ParamGroup> groups = {};
  // Keep step count, learning rate and clipping on the device, so that step() can be captured into
  // a graph and never waits for the device.
  bool capturable = false;
};

class TE_FL_API SGD : public Optimizer {
 public:
  static Result<std::unique_ptr<SGD>> create(std::vector<NamedParameter> parameters,
                                             const SGDOptions& options);
  ~SGD() override;
  std::vector<NamedTensor> state() const override;

 private:
  struct Impl;
  SGD(std::vector<NamedParameter> parameters, const SGDOptions& options);
  Status update(bool first) override;
  Status refresh_master(size_t index) override;
  Status update_some(size_t group, bool decays, bool mastered, bool first);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
