#include "te_fl/nn/fp8/recipe.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>

#include "te_fl/environment.hpp"

namespace te_fl::nn {
namespace {

Status check_epsilon(float epsilon, const char* recipe) {
  if (std::isfinite(epsilon) && epsilon >= 0) return {};
  return invalid_argument(std::string(recipe) + ": amax_epsilon is " + std::to_string(epsilon) +
                          "; it must be finite and at least 0");
}

Status check_format(Fp8Format format, const char* recipe) {
  if (format <= Fp8Format::kE4M3) return {};
  return invalid_argument(std::string(recipe) + ": format is " +
                          std::to_string(static_cast<int>(format)) +
                          "; it must be Fp8Format::kHybrid (0) or Fp8Format::kE4M3 (1)");
}

Status check_override(BackwardOverride value, const char* recipe) {
  if (value <= BackwardOverride::kDequantized) return {};
  return invalid_argument(std::string(recipe) + ": backward_override is " +
                          std::to_string(static_cast<int>(value)) +
                          "; it must be BackwardOverride::kNone (0), kHighPrecision (1) or "
                          "kDequantized (2)");
}

const char* override_text(BackwardOverride value) {
  switch (value) {
    case BackwardOverride::kHighPrecision:
      return ", backward in high precision";
    case BackwardOverride::kDequantized:
      return ", backward on dequantised values";
    default:
      return "";
  }
}

const char* format_text(Fp8Format format) {
  return format == Fp8Format::kHybrid ? "hybrid" : "e4m3";
}

Status check_quantisers(const LinearQuantisers& quantisers) {
  for (const auto& one : {quantisers.input, quantisers.weight, quantisers.gradient}) {
    if (one == nullptr || one->quantise != nullptr) continue;
    return invalid_argument("CustomScaling: the quantiser \"" + one->name +
                            "\" has no function; set quantise, or leave the quantiser null for "
                            "high precision");
  }
  return {};
}

std::string epsilon_text(bool pow2, float epsilon) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%s, epsilon %g)",
                pow2 ? "power-of-two scales" : "exact scales", static_cast<double>(epsilon));
  return buffer;
}

}  // namespace

Status validate(const Recipe& recipe) {
  if (const auto* delayed = std::get_if<DelayedScaling>(&recipe)) {
    TE_FL_RETURN_IF_ERROR(check_format(delayed->format, "DelayedScaling"));
    if (delayed->amax_compute_algo > AmaxAlgo::kMostRecent) {
      return invalid_argument("DelayedScaling: amax_compute_algo is " +
                              std::to_string(static_cast<int>(delayed->amax_compute_algo)) +
                              "; it must be AmaxAlgo::kMax (0) or AmaxAlgo::kMostRecent (1)");
    }
    const AmaxFunction* function = delayed->amax_function.get();
    if (function != nullptr && function->compute == nullptr) {
      return invalid_argument("DelayedScaling: amax_function \"" + function->name +
                              "\" has no function; set compute");
    }
    if (function != nullptr && delayed->amax_compute_algo != AmaxAlgo::kMax) {
      return invalid_argument(
          "DelayedScaling: amax_function and amax_compute_algo are both set; amax_compute_algo "
          "must "
          "stay AmaxAlgo::kMax (0) with a function");
    }
    if (delayed->amax_history_len < 1) {
      return invalid_argument("DelayedScaling: amax_history_len is " +
                              std::to_string(delayed->amax_history_len) +
                              "; it must be at least 1 (usual: 1024)");
    }
    if (delayed->margin < -64 || delayed->margin > 64) {
      return invalid_argument("DelayedScaling: margin is " + std::to_string(delayed->margin) +
                              "; it must be within [-64, 64] (usual: 0)");
    }
    return {};
  }
  if (const auto* current = std::get_if<Float8CurrentScaling>(&recipe)) {
    TE_FL_RETURN_IF_ERROR(check_format(current->format, "Float8CurrentScaling"));
    TE_FL_RETURN_IF_ERROR(check_override(current->backward_override, "Float8CurrentScaling"));
    return check_epsilon(current->amax_epsilon, "Float8CurrentScaling");
  }
  if (const auto* mx = std::get_if<MXFP8BlockScaling>(&recipe)) {
    TE_FL_RETURN_IF_ERROR(check_override(mx->backward_override, "MXFP8BlockScaling"));
    return check_format(mx->format, "MXFP8BlockScaling");
  }
  if (const auto* custom = std::get_if<CustomScaling>(&recipe)) {
    TE_FL_RETURN_IF_ERROR(check_quantisers(custom->quantisers));
    if (custom->fc2 != nullptr) TE_FL_RETURN_IF_ERROR(check_quantisers(*custom->fc2));
    return check_override(custom->backward_override, "CustomScaling");
  }
  const auto& block = std::get<Float8BlockScaling>(recipe);
  TE_FL_RETURN_IF_ERROR(check_format(block.format, "Float8BlockScaling"));
  TE_FL_RETURN_IF_ERROR(check_override(block.backward_override, "Float8BlockScaling"));
  return check_epsilon(block.amax_epsilon, "Float8BlockScaling");
}

std::string describe(const Recipe& recipe) {
  if (const auto* delayed = std::get_if<DelayedScaling>(&recipe)) {
    return std::string("delayed scaling (") + format_text(delayed->format) + ", margin " +
           std::to_string(delayed->margin) + ", history " +
           std::to_string(delayed->amax_history_len) +
           (delayed->amax_function != nullptr ? ", function " + delayed->amax_function->name
            : delayed->amax_compute_algo == AmaxAlgo::kMax ? ", max"
                                                           : ", most recent") +
           (delayed->fp8_dpa ? ", FP8 attention)" : ")");
  }
  if (const auto* current = std::get_if<Float8CurrentScaling>(&recipe)) {
    return std::string("current scaling (") + format_text(current->format) + ", " +
           epsilon_text(current->pow2_scale, current->amax_epsilon) +
           override_text(current->backward_override);
  }
  if (const auto* mx = std::get_if<MXFP8BlockScaling>(&recipe)) {
    return std::string("MXFP8 (") + format_text(mx->format) + ")" +
           override_text(mx->backward_override);
  }
  if (const auto* custom = std::get_if<CustomScaling>(&recipe)) {
    const auto text = [](const std::shared_ptr<const TensorQuantiser>& quantiser) {
      return quantiser == nullptr ? std::string("high precision") : quantiser->name;
    };
    const LinearQuantisers& of = custom->quantisers;
    return custom->name + " scaling (inputs " + text(of.input) + ", weights " + text(of.weight) +
           ", gradients " + text(of.gradient) + ")" + override_text(custom->backward_override);
  }
  const auto& block = std::get<Float8BlockScaling>(recipe);
  return std::string("block scaling (") + format_text(block.format) + ", 1x128 and 128x128, " +
         epsilon_text(block.pow2_scale, block.amax_epsilon) +
         override_text(block.backward_override);
}

BackwardOverride backward_override(const Recipe& recipe) noexcept {
  return std::visit(
      [](const auto& one) {
        if constexpr (requires { one.backward_override; }) {
          return one.backward_override;
        } else {
          return BackwardOverride::kNone;
        }
      },
      recipe);
}

Result<Recipe> parse_recipe(std::string_view text) {
  std::string word(text);
  std::transform(word.begin(), word.end(), word.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (word == "delayed") return Recipe(DelayedScaling{});
  if (word == "current") return Recipe(Float8CurrentScaling{});
  if (word == "block") return Recipe(Float8BlockScaling{});
  if (word == "mxfp8") return Recipe(MXFP8BlockScaling{});
  std::string message = "\"" + std::string(text) + "\" is no FP8 recipe; ";
  std::string near = environment::nearest(word, {"delayed", "current", "block", "mxfp8"});
  if (!near.empty()) message += "did you mean " + near + "? ";
  return invalid_argument(message + "Recipes: delayed, current, block, mxfp8");
}

}  // namespace te_fl::nn
