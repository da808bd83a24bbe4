#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>

#include "te_fl/dtype.hpp"
#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// FP8 types. kHybrid: E4M3 for inputs and weights, E5M2 for gradients. kE4M3: E4M3 for all. (There
// is no all-E5M2 format, since it cannot train.)
enum class Fp8Format : uint8_t { kHybrid, kE4M3 };

enum class AmaxAlgo : uint8_t { kMax, kMostRecent };

// A custom function that computes the amax of each tensor from the amax history of a module's FP8
// state; replaces an AmaxAlgo. `history` is F32 [length, tensors]: row 0 has the amaxes of
// this step; the following rows have older ones, with the newest last. The function writes `amax`,
// F32 [tensors]. Both are on the module's device: the function enqueues its work on the thread's
// current stream, where a capture of the step records it. It can read the tensors on the host
// (Tensor::to) only outside of a capture. Both are valid during the call only. The end of the
// autocast or backward_end() returns its error.
struct AmaxFunction {
  std::string name;  // for messages
  std::function<Status(const Tensor& history, const Tensor& amax)> compute;
  // If set, replaces the formula fp8_max * 2^-margin / amax: overwrites the current scales,
  // `scale`, F32 [tensors], with the new ones. fp8_max is the largest finite value of the tensors'
  // FP8 type. Devices, streams and errors are as for compute.
  std::function<Status(const Tensor& amax, const Tensor& scale, float fp8_max)> compute_scale =
      nullptr;
};

// The operands of the backward GEMMs under a recipe. kNone: quantised by the recipe.
// kHighPrecision: the forward's original operands, which are kept instead of quantised ones.
// kDequantized: the forward's quantised operands, dequantised. With the last two, gradients are not
// quantised, and the GEMMs read all operands in the activation dtype.
enum class BackwardOverride : uint8_t { kNone, kHighPrecision, kDequantized };

// Per-tensor scales from the amaxes of earlier steps: scale = fp8_max * 2^-margin / amax(history).
struct DelayedScaling {
  int margin = 0;
  Fp8Format format = Fp8Format::kHybrid;
  int64_t amax_history_len = 1024;  // at least 1
  AmaxAlgo amax_compute_algo = AmaxAlgo::kMax;
  // Also compute attention in FP8: Q, K, V, O in E4M3, their gradients in E5M2 (with kE4M3 in
  // E4M3).
  bool fp8_dpa = false;
  // If not null, replaces amax_compute_algo, which must then be kMax. Recipes are equal only if
  // they share the same object.
  std::shared_ptr<const AmaxFunction> amax_function = nullptr;
  friend bool operator==(const DelayedScaling&, const DelayedScaling&) = default;
};

// Per-tensor scales from the amax of the tensor that is quantised.
struct Float8CurrentScaling {
  Fp8Format format = Fp8Format::kHybrid;
  bool pow2_scale = false;  // truncate scales to powers of two
  float amax_epsilon = 0;   // lower bound of the amax
  BackwardOverride backward_override = BackwardOverride::kNone;
  friend bool operator==(const Float8CurrentScaling&, const Float8CurrentScaling&) = default;
};

// One scale per block: 1x128 for inputs and gradients, 128x128 for weights.
struct Float8BlockScaling {
  bool pow2_scale = true;
  float amax_epsilon = 0;
  Fp8Format format = Fp8Format::kE4M3;
  BackwardOverride backward_override = BackwardOverride::kNone;
  friend bool operator==(const Float8BlockScaling&, const Float8BlockScaling&) = default;
};

// One power-of-two scale per 32 elements: of a row for GEMMs that sum over columns, of a column for
// GEMMs that sum over rows. Both are quantised from the unquantised values. Sizes need not be
// multiples of 32.
struct MXFP8BlockScaling {
  Fp8Format format = Fp8Format::kE4M3;
  BackwardOverride backward_override = BackwardOverride::kNone;
  friend bool operator==(const MXFP8BlockScaling&, const MXFP8BlockScaling&) = default;
};

// The two operands that are made from a matrix [rows, columns]: `rowwise` for GEMMs that sum over
// its columns, `columnwise` for GEMMs that sum over its rows. Each is a quantised tensor, or a
// high-precision tensor with the values of codes. `columnwise` may have more rows than the matrix;
// both operands of a weight's gradient then have the same number.
struct QuantisedOperand {
  Tensor rowwise, columnwise;
};

// A function that quantises one kind of tensor under CustomScaling. It runs in the module's forward
// or backward, enqueues its work on the thread's current stream of the tensor's device, and returns
// the operands that are asked for; the others stay undefined. The call into the module returns its
// error.
struct TensorQuantiser {
  std::string name;  // for messages
  std::function<Result<QuantisedOperand>(const Tensor& values, bool rowwise, bool columnwise)>
      quantise;
};

// The quantisers of a linear map. A null quantiser leaves its tensors in the activation dtype.
struct LinearQuantisers {
  std::shared_ptr<const TensorQuantiser> input, weight, gradient;
  friend bool operator==(const LinearQuantisers&, const LinearQuantisers&) = default;
};

// User-defined quantisation. Recipes are equal only if they share the same quantisers.
struct CustomScaling {
  std::string name = "custom";  // for messages
  LinearQuantisers quantisers;
  // For the second linear map of LayerNormMLP; null: `quantisers`.
  std::shared_ptr<const LinearQuantisers> fc2 = nullptr;
  BackwardOverride backward_override = BackwardOverride::kNone;
  friend bool operator==(const CustomScaling&, const CustomScaling&) = default;
};

using Recipe = std::variant<DelayedScaling, Float8CurrentScaling, Float8BlockScaling,
                            MXFP8BlockScaling, CustomScaling>;

// INVALID_ARGUMENT names the invalid field, its value and its range.
TE_FL_API Status validate(const Recipe& recipe);
// The recipe in words: "delayed scaling (hybrid, margin 0, history 1024, max)".
TE_FL_API std::string describe(const Recipe& recipe);
// The recipe's backward_override; kNone for delayed scaling.
TE_FL_API BackwardOverride backward_override(const Recipe& recipe) noexcept;
// Returns the recipe "delayed", "current", "block" or "mxfp8" with default values. Any other word
// is an error that names the nearest.
TE_FL_API Result<Recipe> parse_recipe(std::string_view text);

}  // namespace te_fl::nn
