#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// Text helpers for parsers and messages.
namespace te_fl::core {

std::string lower(std::string_view text);
std::string_view trim(std::string_view text);
bool equal_ignoring_case(std::string_view a, std::string_view b);
// Joins texts: "a, b, c".
std::string join(const std::vector<std::string>& parts, std::string_view separator = ", ");
// A shape as text: "[2, 3]".
std::string shape_text(std::span<const int64_t> shape);
// A size as text: "512 bytes", "1.5 MiB", "3.2 GiB".
std::string bytes_text(size_t bytes);
// The suggestion "; did you mean 'x'?" with the closest choice; empty if none is close.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& choices);

}  // namespace te_fl::core
