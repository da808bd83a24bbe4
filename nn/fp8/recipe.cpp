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
    return check_epsilon(current->amax_epsilon, "Float8CurrentScaling");
  }
  const auto& block = std::get<Float8BlockScaling>(recipe);
  TE_FL_RETURN_IF_ERROR(check_format(block.format, "Float8BlockScaling"));
  return check_epsilon(block.amax_epsilon, "Float8BlockScaling");
}

std::string describe(const Recipe& recipe) {
  auto format = [](Fp8Format f) { return f == Fp8Format::kHybrid ? "hybrid" : "e4m3"; };
  if (const auto* delayed = std::get_if<DelayedScaling>(&recipe)) {
    return std::string("delayed scaling (") + format(delayed->format) + ", margin " +
           std::to_string(delayed->margin) + ", history " +
           std::to_string(delayed->amax_history_len) +
           (delayed->amax_function != nullptr ? ", function " + delayed->amax_function->name
            : delayed->amax_compute_algo == AmaxAlgo::kMax ? ", max"
                                                           : ", most recent") +
           (delayed->fp8_dpa ? ", FP8 attention)" : ")");
  }
  if (const auto* current = std::get_if<Float8CurrentScaling>(&recipe)) {
    return std::string("current scaling (") + format(current->format) + ", " +
           epsilon_text(current->pow2_scale, current->amax_epsilon);
  }
  const auto& block = std::get<Float8BlockScaling>(recipe);
  return std::string("block scaling (") + format(block.format) + ", 1x128 and 128x128, " +
         epsilon_text(block.pow2_scale, block.amax_epsilon);
}

Result<Recipe> parse_recipe(std::string_view text) {
  std::string word(text);
  std::transform(word.begin(), word.end(), word.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (word == "delayed") return Recipe(DelayedScaling{});
  if (word == "current") return Recipe(Float8CurrentScaling{});
  if (word == "block") return Recipe(Float8BlockScaling{});
  std::string message = "\"" + std::string(text) + "\" is no FP8 recipe; ";
  std::string near = environment::nearest(word, {"delayed", "current", "block"});
  if (!near.empty()) message += "did you mean " + near + "? ";
  return invalid_argument(message + "Recipes: delayed, current, block");
}

}  // namespace te_fl::nn
