#include "nn/files/shard_places.hpp"

#include <algorithm>
#include <cstring>

#include "nn/files/place_text.hpp"

namespace te_fl::nn::detail {
namespace {

// The indices of the complete tensor's rows that the shard contains; empty if the shard does not
// fit the complete tensor.
std::vector<int64_t> rows_of(const Shard& shard, int64_t count) {
  std::vector<int64_t> rows;
  if (shard.begin[0] > shard.whole[0] - count) return rows;
  if (shard.rows.empty()) {
    for (int64_t i = 0; i < count; ++i) rows.push_back(shard.begin[0] + i);
  }
  for (const Shard::Rows& range : shard.rows) {
    if (range.count > count || range.begin > shard.whole[0] - range.count) return {};
    for (int64_t i = 0; i < range.count; ++i) rows.push_back(range.begin + i);
  }
  const bool inside = static_cast<int64_t>(rows.size()) == count &&
                      std::ranges::all_of(rows, [&](int64_t r) { return r < shard.whole[0]; });
  return inside ? rows : std::vector<int64_t>();
}

}  // namespace

std::string place_text(const Shard& shard) {
  Shape rows;
  for (const Shard::Rows& r : shard.rows) rows.insert(rows.end(), {r.begin, r.count});
  return list_text(shard.whole) + ";" + list_text(shard.begin) + ";" + list_text(rows);
}

bool parse_place(std::string_view text, Shard& shard) {
  const size_t first = text.find(';');
  const size_t second = first == text.npos ? text.npos : text.find(';', first + 1);
  if (second == text.npos) return false;
  Shape rows;
  if (!parse_list(text.substr(0, first), shard.whole) ||
      !parse_list(text.substr(first + 1, second - first - 1), shard.begin) ||
      !parse_list(text.substr(second + 1), rows) || rows.size() % 2 != 0) {
    return false;
  }
  for (size_t i = 0; i < rows.size(); i += 2) shard.rows.push_back({rows[i], rows[i + 1]});
  return true;
}

Shard place_of_whole(std::span<const int64_t> shape) {
  return {Shape(shape.begin(), shape.end()), Shape(shape.size(), 0)};
}

bool copy_part(const Tensor& whole, const Tensor& part, const Shard& shard, bool to_whole) {
  const auto rank = static_cast<size_t>(part.rank());
  if (rank < 1 || rank > 2 || shard.whole.size() != rank || shard.begin.size() != rank ||
      !std::ranges::equal(whole.shape(), shard.whole) || whole.dtype() != part.dtype()) {
    return false;
  }
  const std::vector<int64_t> rows = rows_of(shard, part.size(0));
  const int64_t columns = rank == 2 ? part.size(1) : 1, width = rank == 2 ? whole.size(1) : 1;
  const int64_t first = rank == 2 ? shard.begin[1] : 0;
  if (rows.empty() || first > width - columns) return false;
  const auto bytes = static_cast<size_t>(bytes_for(part.dtype(), columns));
  for (size_t i = 0; i < rows.size(); ++i) {
    char* const there = whole.data<char>() + bytes_for(whole.dtype(), rows[i] * width + first);
    char* const here =
        part.data<char>() + bytes_for(part.dtype(), static_cast<int64_t>(i) * columns);
    std::memcpy(to_whole ? there : here, to_whole ? here : there, bytes);
  }
  return true;
}

bool overlap(std::span<const int64_t> a_shape, const Shard& a, std::span<const int64_t> b_shape,
             const Shard& b) {
  std::vector<int64_t> rows = rows_of(a, a_shape[0]);
  std::ranges::sort(rows);
  const bool meet = std::ranges::any_of(
      rows_of(b, b_shape[0]), [&](int64_t row) { return std::ranges::binary_search(rows, row); });
  if (!meet || a_shape.size() == 1) return meet;
  // Compares differences, since sums of numbers from a file could overflow 64 bits.
  return a.begin[1] - b.begin[1] < b_shape[1] && b.begin[1] - a.begin[1] < a_shape[1];
}

}  // namespace te_fl::nn::detail
