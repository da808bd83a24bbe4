#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

// The activations of the op catalogue. The gated ones, from kGeglu on, accept [a, b] of twice the
// width and return act(a) * b.
enum class Activation : uint8_t {
  kGelu,
  kQGelu,
  kRelu,
  kSRelu,
  kSilu,
  kGeglu,
  kQGeglu,
  kReglu,
  kSReglu,
  kSwiglu,
  kGlu,
  kClampedSwiglu,
};
TE_FL_API bool is_gated(Activation activation) noexcept;
TE_FL_API std::string_view name(Activation activation) noexcept;  // name of the op, "gelu"
TE_FL_API Result<Activation> parse_activation(std::string_view text);

struct ActivationOptions {
  Activation activation = Activation::kGelu;
  float clamp_limit = 7.0f;        // only for kClampedSwiglu
  float clamp_alpha = 1.702f;      // only for kClampedSwiglu
  float glu_linear_offset = 1.0f;  // only for kClampedSwiglu: added to the clamped linear half
};

// An activation as a module without parameters: x [..., n] -> [..., n], or [..., 2 n] -> [..., n]
// for gated ones, in x's dtype.
class TE_FL_API ActivationLayer : public Module {
 public:
  static Result<std::unique_ptr<ActivationLayer>> create(const ActivationOptions& options);
  // ctx null: nothing is saved and no backward follows.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx);
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  explicit ActivationLayer(const ActivationOptions& options) : options_(options) {}
  ActivationOptions options_;
};

}  // namespace te_fl::nn
