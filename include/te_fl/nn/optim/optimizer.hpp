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

// Scales the gradients so that their global norm is at most max_norm, and returns the norm before.
// Frozen parameters, and those without a gradient, are left out. Reads the norm on the host: a
// synchronisation point. FAILED_PRECONDITION if one was cleared by clear_grad() and not written
// since. `ranks`: those that hold the rest of divided parameters (Parameter::shard); the norm is
// that of the whole gradients, in which parameters that every rank has count once.
TE_FL_API Result<float> clip_grad_norm(const std::vector<NamedParameter>& parameters,
                                       float max_norm, const Comm* ranks = nullptr);

class LossScaler;

namespace detail {
class GradientBuckets;
struct Gradients;
struct OwnPart;
}  // namespace detail

// Says what an optimizer's state has of a parameter where ranks divide it (AdamOptions::zero): the
// elements [begin, end) of the flattened parameter.
struct StatePart {
  std::string name;  // the parameter's
  Shape shape;       // the whole's
  int64_t begin = 0, end = 0;
};

// Updates parameters from their F32 gradients through the multi_tensor ops. Parameters in BF16 or
// F16 get F32 master weights; where the parameter's version shows that somebody else wrote the
// value (load_state()), the next step begins with the master copied from it. All state (F32) is
// allocated by create(), to which no parameter may be given twice. A step passes over parameters
// that are frozen (Parameter::requires_grad) or have no gradient; for those that are frozen when
// create() is called there is no state, so a step that finds them trainable with a gradient is
// FAILED_PRECONDITION: create another optimizer then.
class TE_FL_API Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // One update. First makes the scale updates of the FP8 backwards that wrote the gradients, unless
  // backward_end() has. FAILED_PRECONDITION, and nothing changes, if a gradient was cleared by
  // clear_grad() and not written since. With max_grad_norm set, clips first: a synchronisation
  // point, unless capturable. Gradients whose norm is not finite leave everything as it is, with
  // FAILED_PRECONDITION; if capturable, on the device and without an error, and the step is counted
  // all the same. While the stream is captured into a graph (capturable only, else
  // FAILED_PRECONDITION) it counts nothing: advance() does, before each launch. FAILED_PRECONDITION
  // too if a GraphedStep captures it whose options do not name this optimizer, and for the first
  // step of an SGD with dampening, which differs from the others.
  Status step();
  // Steps with gradients of a loss that was multiplied by the scaler's scale, by which they are
  // divided first; clipping comes after. Nothing is read on the host (without max_grad_norm): if
  // one is not finite, the device leaves parameters and state as they are, without an error, and
  // the step is counted all the same. The scaler must outlive a graph that captures it.
  Status step(LossScaler& scaler);
  // Counts a step that a graph is about to make, and writes step count and learning rate where the
  // graph reads them, on the thread's current stream. GraphedStep calls it. FAILED_PRECONDITION
  // unless capturable.
  Status advance();
  bool capturable() const noexcept { return device_ != nullptr; }
  int64_t steps() const noexcept { return steps_; }
  void set_lr(float lr) noexcept { lr_ = lr; }
  float lr() const noexcept { return lr_; }
  // Clips by the norm of whole gradients from now on, as clip_grad_norm() with `ranks`; their
  // step() is a collective then. A LossScaler's step is left out by all of them if it is by one.
  // Null: this rank's parameters are whole.
  void set_norm_ranks(std::shared_ptr<const Comm> ranks) { norm_ranks_ = std::move(ranks); }
  // ParamGroup::lr_scale of the options' `group`-th from now on. INVALID_ARGUMENT if there is none,
  // or the scale is negative or not finite.
  Status set_lr_scale(size_t group, float scale);
  // Norm of the gradients found by the last step(), before clipping; 0 unless max_grad_norm is set
  // and capturable is not.
  float last_grad_norm() const noexcept { return last_grad_norm_; }
  // last_grad_norm() on the device, F32 [1], if capturable: item() reads it. Undefined otherwise.
  const Tensor& grad_norm() const noexcept;

  // Tensors of the state by name ("optimizer.exp_avg.NAME", ...), sharing storage: of the
  // parameter's shape or, where ranks divide the state, this rank's part, flat, and none where that
  // is empty.
  virtual std::vector<NamedTensor> state() const = 0;
  // With AdamOptions::zero, the part that state() has of each parameter that was not frozen, which
  // may be empty, and this rank among those that divide it; else none, and rank 0 of 1.
  std::vector<StatePart> state_parts() const;
  int state_rank() const noexcept;
  int state_ranks() const noexcept;
  // For loading, after the state's tensors, and the parameters, were written: `steps` goes with
  // them, and the master weights are taken for those of the present values.
  void set_steps(int64_t steps) noexcept;

 protected:
  // Holds what step() reads on the device instead of the host.
  struct OnDevice {
    Tensor step;             // I64 [1]
    std::vector<Tensor> lr;  // F32 [1]: the optimizer's own, then the groups'
    Tensor grad_norm;        // F32 [1]; undefined without clipping
  };

  Optimizer(std::vector<NamedParameter> parameters, float lr, float max_grad_norm);
  Status make_capturable();
  // Copies the value of parameters_[index] to its master weight, if it has one.
  virtual Status refresh_master(size_t index) = 0;
  const OnDevice* on_device() const noexcept { return device_.get(); }
  // I32 [1], what an update reads to leave everything as it is; undefined: nothing keeps it.
  const Tensor& noop() const noexcept { return noop_; }
  // The learning rate of group `index` - 1, or with 0 that of parameters of no group.
  float group_lr(size_t index) const noexcept { return lr_ * lr_scales_[index]; }
  // INVALID_ARGUMENT names the field that is wrong.
  Status set_groups(const char* optimizer, const std::vector<ParamGroup>& groups);
  // ZeRO: makes what follows be of this rank's parts. `zero` null: nothing happens.
  // INVALID_ARGUMENT if it does not divide gradients, or not those of these parameters.
  Status divide(const char* optimizer, std::shared_ptr<detail::GradientBuckets> zero);
  // `first`: nothing is there yet of what a step leaves to the next.
  virtual Status update(bool first) = 0;

  std::vector<NamedParameter> parameters_;
  std::shared_ptr<detail::GradientBuckets> zero_;  // null: this rank updates all
  // With zero_, what this rank updates of each parameter, null for frozen ones; else empty.
  std::vector<const detail::OwnPart*> parts_;
  float lr_ = 0;
  float max_grad_norm_ = 0;
  float last_grad_norm_ = 0;
  int64_t steps_ = 0;
  const char* uncapturable_ = nullptr;  // not null: why no graph can hold the step
  bool first_differs_ = false;          // no later step repeats the first
  std::vector<float> lr_scales_ = {1};  // as group_lr() counts

 private:
  Status check_capture() const;
  Status check_slots() const;  // that no parameter to be updated lacks its state
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
  Tensor flag_;                     // I32 [1]: not 0 leaves a step out
  Tensor noop_;                     // flag_ if the step under way looks for that, else undefined
  std::vector<uint64_t> versions_;  // of the parameters, that the master weights belong to
  std::vector<bool> stateless_;     // the parameters that were frozen when it was created
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
  // Step count, learning rate and clipping live on the device, so that step() can be captured into
  // a graph and never waits for the device.
  bool capturable = false;
  // step() also writes the FP8 copies of the weights whose module's last training forward quantised
  // them by delayed scaling: the op quantises what it has in registers, and the next forward does
  // not quantise it again. Training is the same bit by bit: the scale is the one that the next
  // forward would use (the autocast's exit updated it), and the amax goes where that forward would
  // record it. So call step() outside every autocast; inside one nothing is written, since its exit
  // is still to change the scales. A copy is left unused, and the forward quantises as ever, if the
  // weight or the scales change after it was written (another training forward, load_state()). One
  // trace remains: the new weight's amax stands in the history's running row from the step on, also
  // if no FP8 forward follows. Of modules that share a weight the first has the copy. No graph can
  // hold such a step, FAILED_PRECONDITION: which copies are fresh is known on the host only. Not
  // with `zero`.
  bool write_fp8_weights = false;
  // ZeRO-1: the ranks of this DataParallel, which was created with the same parameters and
  // DataParallelOptions::zero, divide the state and the update; step() is a collective then, and
  // must follow average_gradients(). Each element is computed as without; only the norm that clips
  // is summed up in another order. Read by create(); of one rank: as null.
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
  // Step count, learning rate and clipping live on the device, so that step() can be captured into
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
