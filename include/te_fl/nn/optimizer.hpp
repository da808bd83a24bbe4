#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "te_fl/nn/module.hpp"

namespace te_fl::nn {

// Scales the gradients so that their global norm is at most max_norm, and returns the norm before.
// Reads the norm on the host: a synchronisation point.
TE_FL_API Result<float> clip_grad_norm(const std::vector<NamedParameter>& parameters,
                                       float max_norm);

// Which parameters weight decay applies to; null: all.
using DecayFilter = std::function<bool(std::string_view name, const Tensor& value)>;

// Updates parameters from their F32 gradients through the multi_tensor ops. Parameters in BF16 or
// F16 get F32 master weights. All state (F32) is allocated by create().
class TE_FL_API Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // One update. With max_grad_norm set, clips first (a synchronisation point).
  Status step();
  int64_t steps() const noexcept { return steps_; }
  void set_lr(float lr) noexcept { lr_ = lr; }
  float lr() const noexcept { return lr_; }
  // Norm of the gradients found by the last step(), before clipping; 0 unless max_grad_norm is set.
  float last_grad_norm() const noexcept { return last_grad_norm_; }

  // Tensors of the state by name ("optimizer.exp_avg.NAME", ...), sharing storage.
  virtual std::vector<NamedTensor> state() const = 0;
  // For loading; `steps` goes with the state.
  void set_steps(int64_t steps) noexcept { steps_ = steps; }

 protected:
  Optimizer(std::vector<NamedParameter> parameters, float lr, float max_grad_norm);
  virtual Status update() = 0;

  std::vector<NamedParameter> parameters_;
  float lr_ = 0;
  float max_grad_norm_ = 0;
  float last_grad_norm_ = 0;
  int64_t steps_ = 0;
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
  Status update() override;
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
  Status update() override;
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
