#include "te_fl/nn/modules/moe_options.hpp"

#include <array>
#include <string>

namespace te_fl::nn {
namespace {

constexpr std::array<std::string_view, 3> kScoreFunctions = {"sigmoid", "softmax", "sqrtsoftplus"};

}  // namespace

std::string_view name(ScoreFunction function) noexcept {
  return kScoreFunctions.at(static_cast<size_t>(function));
}

Result<ScoreFunction> parse_score_function(std::string_view text) {
  for (size_t i = 0; i < kScoreFunctions.size(); ++i) {
    if (kScoreFunctions[i] == text) return static_cast<ScoreFunction>(i);
  }
  return invalid_argument("\"" + std::string(text) +
                          "\" is no score function; it is sigmoid, softmax or sqrtsoftplus");
}

}  // namespace te_fl::nn
