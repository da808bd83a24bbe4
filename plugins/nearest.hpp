// Suggestions for misspelt names.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace te_fl::plugins {

// The edit distance of two words, ignoring case: insertions, deletions and replacements of one
// letter, and swaps of neighbours. Words longer than 256 letters are far from every word.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  constexpr std::size_t kLongest = 256;
  if (a.size() > kLongest || b.size() > kLongest) return kLongest;
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  std::vector<std::size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
          lower(a[i - 2]) == lower(b[j - 1])) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

// The candidate closest to `word`. Empty if even that one is too far: its distance exceeds two and
// a third of the longer word's length.
template <class Range>
std::string nearest_name(std::string_view word, const Range& candidates) {
  std::string best;
  std::size_t best_distance = 0;
  for (const std::string_view candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    if (best.empty() || distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  const std::size_t longest = std::max(word.size(), best.size());
  return best_distance <= std::max<std::size_t>(2, longest / 3) && best_distance < longest ? best
                                                                                           : "";
}

}  // namespace te_fl::plugins
