#include "cases.hpp"

#include <algorithm>
#include <charconv>

namespace te_fl_tool {

using te_fl::Device;
using te_fl::Result;
using te_fl::bench::CaseSpec;
using te_fl::bench::Shape;

std::string shape_text(const Shape& extents) {
  std::string text;
  for (const int64_t e : extents) text += (text.empty() ? "" : "x") + std::to_string(e);
  return text;
}

std::vector<std::string> split_words(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char c : text) {
    if (c == ' ' || c == ',') {
      if (!words.back().empty()) words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  return words;
}

namespace {

bool has_dtype(const CaseSpec& spec, const std::string& dtype) {
  const auto words = split_words(spec.variant);
  const auto has = [&](const char* word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  if (has("fp8") || has("e4m3")) return dtype == "f8e4m3" || dtype == "fp8";
  return has(dtype.c_str());
}

std::string list_variants(const std::string& op) {
  std::string text;
  for (const CaseSpec& spec : te_fl::bench::all_cases()) {
    if (spec.op == op) text += (text.empty() ? "'" : ", '") + spec.variant + "'";
  }
  return text;
}

}  // namespace

Result<std::vector<const CaseSpec*>> find_cases(const std::string& op, const std::string& dtype,
                                                const std::string& variant) {
  std::vector<const CaseSpec*> found;
  std::vector<std::string> names;
  for (const CaseSpec& spec : te_fl::bench::all_cases()) {
    names.push_back(spec.op);
    if (spec.op != op) continue;
    if (!dtype.empty() && !has_dtype(spec, dtype)) continue;
    if (spec.variant.find(variant) == std::string::npos) continue;
    found.push_back(&spec);
  }
  if (!found.empty()) return found;
  if (std::find(names.begin(), names.end(), op) == names.end()) {
    const std::string near = te_fl::environment::nearest(op, names);
    return te_fl::not_found("there is no benchmark of '" + op + "'" +
                            (near.empty() ? "" : "; did you mean '" + near + "'?") +
                            (near.empty() ? ";" : "") + " `te-fl bench --list` shows all");
  }
  return te_fl::not_found(
      "no case of " + op + " matches" + (dtype.empty() ? "" : " --dtype '" + dtype + "'") +
      (variant.empty() ? "" : " --case '" + variant + "'") + "; there are " + list_variants(op));
}

namespace {

// Returns an error for extents whose tensors are larger than any memory, because their byte counts
// would overflow.
te_fl::Status check_size(const Shape& extents, const std::string& shape) {
  constexpr int64_t kMost = int64_t{1} << 59;
  int64_t all = 1;
  for (const int64_t e : extents) {
    if (e > kMost / all) {
      return te_fl::invalid_argument("--shape " + shape +
                                     ": the extents' product is above 2^59; give smaller ones");
    }
    all *= e;
  }
  return {};
}

}  // namespace

Result<Shape> parse_extents(const CaseSpec& spec, const std::string& shape, const Device& device) {
  const Shape& usual = device.is_host() ? spec.extents : spec.large;
  if (shape.empty()) return usual;
  if (spec.axes.empty()) {
    return te_fl::invalid_argument("--shape: the size of " + spec.op + " '" + spec.variant +
                                   "' is fixed; leave it out");
  }
  Shape extents;
  const char* at = shape.data();
  const char* const end = at + shape.size();
  for (;;) {
    int64_t extent = 0;
    const auto [stop, error] = std::from_chars(at, end, extent);
    if (error != std::errc() || extent < 1) break;
    extents.push_back(extent);
    if (stop == end && extents.size() == usual.size()) {
      TE_FL_RETURN_IF_ERROR(check_size(extents, shape));
      return extents;
    }
    if (stop == end || *stop != 'x') break;
    at = stop + 1;
  }
  return te_fl::invalid_argument("--shape " + shape + ": " + spec.op + " takes " +
                                 std::to_string(usual.size()) + " extents, " + spec.axes +
                                 ", for example " + shape_text(usual));
}

}  // namespace te_fl_tool
