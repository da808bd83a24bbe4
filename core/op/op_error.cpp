#include "core/op/op_error.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace te_fl::core {

ErrorKind error_kind(std::string_view op, std::string_view argument) {
  if (op.find("::") != std::string_view::npos) return ErrorKind::kRoundedSum;
  const auto key = [](const OutputError& e) {
    return std::pair(std::string_view(e.op), std::string_view(e.argument));
  };
  const std::span<const OutputError> all = output_errors();
  const auto at = std::lower_bound(all.begin(), all.end(), std::pair(op, argument),
                                   [&](const OutputError& e, const auto& k) { return key(e) < k; });
  return at != all.end() && key(*at) == std::pair(op, argument) ? at->kind : ErrorKind::kSum;
}

bool is_gradient_input(std::string_view op, std::string_view argument) {
  const std::span<const OpArgument> all = gradient_inputs();
  return std::any_of(all.begin(), all.end(),
                     [&](const OpArgument& a) { return a.op == op && a.argument == argument; });
}

const OutputChoice* choice_of(std::string_view op) {
  const std::span<const OutputChoice> all = output_choices();
  const auto at =
      std::find_if(all.begin(), all.end(), [&](const OutputChoice& c) { return c.op == op; });
  return at == all.end() ? nullptr : &*at;
}

}  // namespace te_fl::core
