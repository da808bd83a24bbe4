// The Finder's matching of shapes with the shape rules.
#include "core/op/op_finder.hpp"

namespace te_fl::core {

bool Finder::match_shape(int i, int64_t index, const te_fl_tensor& t) noexcept {
  const ShapeRule& rule = op_.args[static_cast<size_t>(i)].shape;
  if (rule.any) return true;
  const Dims& dims = op_.rule_dims(rule, args_);
  const int leading = t.dl.ndim - dims.count;
  if (leading < 0 || (!dims.leading && leading > 0)) return fail(Problem::kShapeRank, i, index);
  if (dims.leading && !match_leading(i, t, leading, index)) return false;
  for (int d = 0; d < dims.count; ++d) {
    if (!match_term(i, dims.terms[static_cast<size_t>(d)], t.dl.shape[leading + d])) {
      return fail(Problem::kShape, i, index, -1, leading + d);
    }
  }
  return true;
}

bool Finder::match_leading(int i, const te_fl_tensor& t, int count, int64_t index) noexcept {
  if (frame_.leading_count < 0) {
    int64_t product = 1;
    for (int d = 0; d < count; ++d) product *= t.dl.shape[d];
    // The product may be bound already, since names bound by plain tensors also apply inside lists.
    if (frame_.product >= 0 && product != frame_.product)
      return fail(Problem::kShape, i, index, -1, 0);
    frame_.leading = t.dl.shape;
    frame_.leading_count = count;
    frame_.leading_setter = static_cast<int8_t>(i);
    frame_.product = product;
    if (frame_.product_setter < 0) frame_.product_setter = static_cast<int8_t>(i);
    return true;
  }
  if (count != frame_.leading_count) return fail(Problem::kShapeRank, i, index);
  for (int d = 0; d < count; ++d) {
    if (t.dl.shape[d] != frame_.leading[d]) return fail(Problem::kShape, i, index, -1, d);
  }
  return true;
}

bool Finder::match_term(int i, const Term& term, int64_t extent) noexcept {
  int64_t& value = frame_.values[term.symbol];
  int8_t& setter = frame_.setter[term.symbol];
  const auto bind_or_compare = [&](int64_t v) {
    if (setter >= 0) return value == v;
    value = v;
    setter = static_cast<int8_t>(i);
    return true;
  };
  switch (term.kind) {
    case Term::kAny:
      return true;
    case Term::kConst:
      return extent == term.value;
    case Term::kName:
      return bind_or_compare(extent);
    case Term::kTimes:
      return extent % term.value == 0 && bind_or_compare(extent / term.value);
    case Term::kPlus:
      return extent >= term.value && bind_or_compare(extent - term.value);
    case Term::kOneOr:
      return extent == 1 || bind_or_compare(extent);
    case Term::kProduct:
      if (frame_.product < 0) {
        if (term.value != 1) return true;  // the quotient does not determine the product
        frame_.product = extent;
        frame_.product_setter = static_cast<int8_t>(i);
      }
      return rounded_up(frame_.product, term.value) == extent;
    case Term::kCount:
      return extent == args_.count(op_.args[term.symbol]);
  }
  return false;
}

}  // namespace te_fl::core
