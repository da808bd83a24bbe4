// Evaluates the rules between an op's arguments on a call.

#include <algorithm>
#include <cmath>

#include "core/op/op_finder.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::core {
namespace {

int64_t whole_value(const Arg& arg, const ArgsView& view) noexcept {
  if (arg.type == TE_FL_ARG_I64 && view.has(arg)) return view.read<int64_t>(arg.offset);
  return static_cast<int64_t>(view.scalar(arg));
}

template <class T>
bool compares(Condition::Comparison comparison, T a, T b) noexcept {
  switch (comparison) {
    case Condition::kLess:
      return a < b;
    case Condition::kAtMost:
      return a <= b;
    case Condition::kMore:
      return a > b;
    case Condition::kAtLeast:
      return a >= b;
    case Condition::kEqual:
      return a == b;
    default:
      return a != b;
  }
}

bool compares_whole(Condition::Comparison comparison, int64_t a, int64_t b) noexcept {
  // INT64_MIN % -1 overflows, so -1 is handled separately.
  if (comparison == Condition::kMultipleOf) return b == -1 || (b != 0 && a % b == 0);
  return compares(comparison, a, b);
}

// The sum and the product of two integers. If it overflows, the nearest integer.
int64_t plus(int64_t a, int64_t b) noexcept {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? (a < 0 ? INT64_MIN : INT64_MAX) : sum;
}
int64_t times(int64_t a, int64_t b) noexcept {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? ((a < 0) == (b < 0) ? INT64_MAX : INT64_MIN)
                                                : product;
}

int64_t value_of(const RuleOperand& operand, const RuleCall& call) noexcept {
  switch (operand.kind) {
    case RuleOperand::kScalar:
      return whole_value(call.op.args[operand.index], call.view);
    case RuleOperand::kExtent:
      return call.frame.values[operand.index];
    case RuleOperand::kSum:
      return sum_of_list(call.op.args[operand.index], call.view);
    default:
      return static_cast<int64_t>(operand.number);
  }
}

int64_t value_of(const Expression& expression, const RuleCall& call) noexcept {
  int64_t sum = 0, product = 0;
  for (const RuleOperand& operand : expression) {
    const int64_t value = value_of(operand, call);
    if (operand.join == RuleOperand::kTimes) {
      product = times(product, value);
      continue;
    }
    sum = plus(sum, product);
    product = operand.join == RuleOperand::kMinus ? times(value, -1) : value;
  }
  return plus(sum, product);
}

double real_value_of(const RuleOperand& operand, const RuleCall& call) noexcept {
  return operand.kind == RuleOperand::kScalar ? call.view.scalar(call.op.args[operand.index])
                                              : operand.number;
}

bool compare_holds(const Condition& c, const RuleCall& call) noexcept {
  if (!c.whole) {
    return compares(c.comparison, real_value_of(c.left[0], call), real_value_of(c.right[0], call));
  }
  return compares_whole(c.comparison, value_of(c.left, call), value_of(c.right, call));
}

bool each_holds(const Condition& c, const RuleCall& call) noexcept {
  const Arg& a = call.op.args[c.arg];
  const Arg& b = call.op.args[static_cast<size_t>(c.other)];
  const int64_t count = call.view.count(a);
  return count == call.view.count(b) && first_unlike(c, call) == count;
}

bool elements_hold(const Condition& c, const RuleCall& call) noexcept {
  const te_fl_tensor* const all = call.view.tensor(call.op.args[c.arg]);
  if (all == nullptr) return true;
  if (c.other < 0) return numel_of(*all) == c.count;
  const Arg& other = call.op.args[static_cast<size_t>(c.other)];
  if (other.is_list()) return numel_of(*all) == elements_of_list(other, call.view);
  const te_fl_tensor* const part = call.view.tensor(other);
  if (part == nullptr) return true;
  const te_fl_communicator* ranks = nullptr;
  if (c.times >= 0) {
    const Arg& arg = call.op.args[static_cast<size_t>(c.times)];
    if (call.view.has(arg)) ranks = call.view.read<const te_fl_communicator*>(arg.offset);
  }
  int64_t product = 0;
  return !__builtin_mul_overflow(numel_of(*part), ranks == nullptr ? 1 : ranks->size, &product) &&
         numel_of(*all) == product;
}

bool fits_holds(const Condition& c, const RuleCall& call) noexcept {
  const te_fl_tensor* const t = call.view.tensor(call.op.args[static_cast<size_t>(c.other)]);
  if (t == nullptr) return true;
  const IntegerRange range = integer_range(dtype_index(t->dl.dtype));
  const double whole = std::trunc(call.view.scalar(call.op.args[c.arg]));
  return !range.bounded || (whole >= range.low && whole < range.above_high);
}

bool is_holds(const Arg& arg, const Condition& c, const ArgsView& view) noexcept {
  if (arg.type == TE_FL_ARG_ENUM) {
    const auto value = static_cast<uint64_t>(whole_value(arg, view));
    return value < 64 && (c.values >> value & 1) != 0;
  }
  const te_fl_tensor* const t = view.tensor(arg);
  if (t == nullptr) return false;
  const int dtype = c.dtypes != 0 ? dtype_index(t->dl.dtype) : kInvalidDType;
  if (dtype != kInvalidDType && (c.dtypes >> dtype & 1) != 0) return true;
  const uint32_t scaling = t->quant == nullptr ? 0u : t->quant->scaling;
  return scaling < TE_FL_SCALING_COUNT && (c.scalings >> scaling & 1) != 0;
}

bool holds(const Condition& c, const RuleCall& call) noexcept {
  const Arg& arg = call.op.args[c.arg];
  switch (c.kind) {
    case Condition::kCompare:
      return compare_holds(c, call);
    case Condition::kEach:
      return each_holds(c, call);
    case Condition::kIs:
      return is_holds(arg, c, call.view);
    case Condition::kHolds:
      return elements_hold(c, call);
    case Condition::kFits:
      return fits_holds(c, call);
    default:
      // A bool counts as given if it is 1, independent of its default.
      return arg.type == TE_FL_ARG_BOOL ? call.view.flag(arg) : !call.view.is_neutral(arg);
  }
}

}  // namespace

int64_t first_unlike(const Condition& c, const RuleCall& call) noexcept {
  const Arg& a = call.op.args[c.arg];
  const Arg& b = call.op.args[static_cast<size_t>(c.other)];
  const int64_t count = std::min(call.view.count(a), call.view.count(b));
  int64_t i = 0;
  while (i < count &&
         compares_whole(c.comparison, call.view.integer(a, i), call.view.integer(b, i))) {
    ++i;
  }
  return i;
}

int64_t elements_of_list(const Arg& list, const ArgsView& view) noexcept {
  int64_t sum = 0;
  for (int64_t i = 0, count = view.count(list); i < count; ++i) {
    sum = plus(sum, numel_of(*view.element(list, i)));
  }
  return sum;
}

int64_t sum_of_list(const Arg& integers, const ArgsView& view) noexcept {
  int64_t sum = 0;
  for (int64_t i = 0, count = view.count(integers); i < count; ++i) {
    sum = plus(sum, view.integer(integers, i));
  }
  return sum;
}

IntegerRange integer_range(int dtype) noexcept {
  switch (dtype) {
    case TE_FL_BOOL:
      return {true, 0, 2};
    case TE_FL_I8:
    case TE_FL_I16:
    case TE_FL_I32:
    case TE_FL_I64: {
      const double above = std::ldexp(1.0, bits(static_cast<DType>(dtype)) - 1);
      return {true, -above, above};
    }
    case TE_FL_U8:
    case TE_FL_U16:
    case TE_FL_U32:
    case TE_FL_U64:
      return {true, 0, std::ldexp(1.0, bits(static_cast<DType>(dtype)))};
    default:
      return {};
  }
}

bool is_broken(const Constraint& rule, const RuleCall& call) noexcept {
  for (uint32_t names = rule.extents; names != 0; names &= names - 1) {
    if (call.frame.setter[__builtin_ctz(names)] < 0) return false;
  }
  const bool left = holds(rule.left, call);
  if (rule.kind == Constraint::kAlways ? left : !left) return false;
  bool any = false;
  for (uint8_t k = 0; k < rule.alternatives && !any; ++k) any = holds(rule.right[k], call);
  return any == (rule.kind == Constraint::kExcludes);
}

}  // namespace te_fl::core
