#pragma once

#include <string>
#include <string_view>
#include <vector>

// Small text helpers of the policy parsers and messages.
namespace te_fl::policy {

std::string_view trim(std::string_view s);
std::string lower(std::string_view s);
std::vector<std::string_view> split(std::string_view s, char separator);
std::string quoted(std::string_view s);
// "; did you mean "x"?" or nothing.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& choices);

}  // namespace te_fl::policy
