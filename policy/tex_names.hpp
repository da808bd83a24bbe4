// The second form of an op: a Python function with the arguments and results that Transformer
// Engine's extension module transformer_engine_torch gives the op. In a registry it is the op
// "tex::NAME"; in policies NAME governs both forms.
#pragma once

#include <string_view>

namespace te_fl::policy {

constexpr std::string_view kTexPrefix = "tex::";
// The impl_id of te-fl's own functions of this form. They call the typed op under the same policy,
// so a policy's list that does not name them still permits them, after all that it names.
constexpr std::string_view kTexOwn = "default.te_fl";

// True for the names that have this form only. Names of the catalogue may have both forms.
bool is_tex_name(std::string_view op) noexcept;

// The name under which policies have lists for an op: NAME for "tex::NAME", else the op's own name.
std::string_view governing_name(std::string_view op) noexcept;

}  // namespace te_fl::policy
