#include "core/base/text.hpp"

#include <algorithm>
#include <cstdio>

#include "te_fl/environment.hpp"

namespace te_fl::core {
namespace {

// ASCII only, independent of the locale: names and values are ASCII.
char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }
bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Edit distance with transpositions of neighbours (optimal string alignment), ignoring case.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
                           lower(a[i - 2]) == lower(b[j - 1]);
      if (swapped) now[j] = std::min(now[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(now);
  }
  return last[b.size()];
}

}  // namespace

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = lower(c);
  return result;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return lower(x) == lower(y); });
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += separator;
    text += parts[i];
  }
  return text;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& choices) {
  const std::string best = environment::nearest(word, choices);
  return best.empty() ? "" : "; did you mean '" + best + "'?";
}

std::string bytes_text(size_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " bytes";
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.1f %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

}  // namespace te_fl::core

namespace te_fl::environment {

std::string nearest(std::string_view word, const std::vector<std::string>& choices) {
  // A very long word has no suggestion; this also bounds the quadratic cost.
  if (word.size() > 256) return {};
  size_t best = SIZE_MAX;
  std::string found;
  for (const std::string& choice : choices) {
    const size_t longest = std::max(word.size(), choice.size());
    const size_t limit = std::max<size_t>(1, longest / 3);
    const size_t gap = longest - std::min(word.size(), choice.size());
    if (gap > limit || gap >= best) continue;
    const size_t distance = core::edit_distance(word, choice);
    if (distance <= limit && distance < best && distance < longest) {
      best = distance;
      found = choice;
    }
  }
  return found;
}

}  // namespace te_fl::environment
