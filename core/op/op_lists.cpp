// The Finder's checks over several tensors: shared memory of arguments, and lists.
#include <algorithm>

#include "core/base/settings.hpp"
#include "core/op/op_finder.hpp"

namespace te_fl::core {

// ---- checks of aliasing

bool Finder::check_pair(int i, const te_fl_tensor& a, int j, const te_fl_tensor& b,
                        int64_t index) noexcept {
  const bool allowed = (op_.args[static_cast<size_t>(i)].may_alias >> j & 1) != 0;
  const char* const p = first_byte(a);
  const char* const q = first_byte(b);
  if (p == nullptr || q == nullptr) return true;
  if (p == q && !allowed) return fail(Problem::kAlias, i, index, j);
  if (!g_validate.load(std::memory_order_relaxed)) return true;
  // In an in-place collective, a rank's part of the data may lie anywhere inside the full tensor.
  if (allowed && (op_.schema.flags & TE_FL_SCHEMA_COLLECTIVE) != 0) return true;
  return overlap_partly(a, b, allowed) ? fail(Problem::kPartialOverlap, i, index, j) : true;
}

// Checks an output against every other tensor. Checks an element of an output list also against the
// elements of other lists at its index.
bool Finder::check_aliases(int i, int64_t index, const te_fl_tensor& t) noexcept {
  for (const uint8_t j : op_.tensors) {
    const te_fl_tensor* other = args_.tensor(op_.args[j]);
    if (j != i && other != nullptr && !check_pair(i, t, j, *other, index)) return false;
  }
  if (index < 0) return true;
  for (const uint8_t j : op_.lists) {
    if (j == i || index >= args_.count(op_.args[j])) continue;
    if (!check_pair(i, t, j, *args_.element(op_.args[j], index), index)) return false;
  }
  return g_validate.load(std::memory_order_relaxed) ? check_other_elements(i, index, t) : true;
}

// Checks a list element against the elements at other indices, with which it must not share memory.
// The cost is quadratic in the list's length, so this runs under TE_FL_VALIDATE only.
bool Finder::check_other_elements(int i, int64_t index, const te_fl_tensor& t) noexcept {
  for (const uint8_t j : op_.lists) {
    const int64_t count = args_.count(op_.args[j]);
    for (int64_t k = 0; k < count; ++k) {
      if (k != index && overlap_partly(t, *args_.element(op_.args[j], k), false)) {
        return fail(Problem::kPartialOverlap, i, index, j);
      }
    }
  }
  return true;
}

// ---- checks of lists

bool Finder::check_list_counts() noexcept {
  int first = -1;
  for (const uint8_t i : op_.lists) {
    const Arg& arg = op_.args[i];
    const int64_t count = args_.count(arg);
    if (count < 0) return fail(Problem::kNegativeCount, i);
    if (count > kMaxListCount) return fail(Problem::kLongList, i);
    if (count == 0 && arg.is(TE_FL_ARG_OPTIONAL)) continue;
    if (count > 0 && args_.read<const void*>(arg.offset) == nullptr)
      return fail(Problem::kNullList, i);
    if (first < 0) {
      first = i;
      list_count_ = count;
    }
    if (count != list_count_) return fail(Problem::kListCounts, i, -1, first);
  }
  return true;
}

bool Finder::check_list_elements(int64_t index, const Frame& base) noexcept {
  frame_ = base;
  for (const uint8_t i : op_.lists) {
    if (args_.count(op_.args[i]) == 0) continue;
    if (!check_tensor(i, index, args_.element(op_.args[i], index))) return false;
  }
  return true;
}

bool Finder::check_lists() noexcept {
  if (op_.lists.empty()) return true;
  if (!check_list_counts()) return false;
  const Frame base = frame_;
  for (int64_t index = 0; index < list_count_; ++index) {
    if (!check_list_elements(index, base)) return false;
  }
  frame_ = base;  // rules between arguments use the extents of plain tensors
  for (const uint8_t i : op_.lists) {
    if (!op_.args[i].writes()) {
      continue;
    }
    for (int64_t index = 0; index < args_.count(op_.args[i]); ++index) {
      if (!check_aliases(i, index, *args_.element(op_.args[i], index))) return false;
    }
  }
  // A plain output must not share memory with an element of an input list either.
  for (const uint8_t i : op_.tensors) {
    const te_fl_tensor* t = args_.tensor(op_.args[i]);
    if (t == nullptr || !op_.args[i].writes()) continue;
    for (const uint8_t j : op_.lists) {
      for (int64_t k = 0; k < args_.count(op_.args[j]); ++k) {
        if (!check_pair(i, *t, j, *args_.element(op_.args[j], k), -1)) return false;
      }
    }
  }
  return true;
}

}  // namespace te_fl::core
