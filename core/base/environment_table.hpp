#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "te_fl/status.hpp"

// The table of environment variables, and the check of a value against its type. The values
// themselves are in environment.cpp.
namespace te_fl::core {

enum class VariableType { kBool, kInt, kEnum, kList, kPathList, kString, kPolicy, kFile };

struct VariableSpec {
  std::string_view name;
  std::string_view alias;  // empty if none
  VariableType type;
  std::string_view default_value;
  std::string_view choices;  // kEnum: words separated by spaces; kInt: "min max", or empty: no
                             // bounds
  std::string_view doc;
  bool privileged = false;  // ignored when the process runs with elevated privileges
};

std::span<const VariableSpec> variable_specs();
std::string_view type_name(VariableType type);
// The values that are accepted, in words: "0, 1, true, false, on, off, yes or no".
std::string accepted_values(const VariableSpec& spec);
// Returns the value in canonical form ("1" for "Yes"). The error names the variable, the value, the
// accepted values and the closest of these. `shown_name` is the name that the user wrote.
Result<std::string> check_value(const VariableSpec& spec, std::string_view shown_name,
                                std::string_view value);

}  // namespace te_fl::core
