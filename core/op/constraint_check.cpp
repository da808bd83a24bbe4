// Evaluates the rules between an op's arguments on a call.

#include <cmath>

#include "core/op/compiled_op.hpp"
#include "core/op/op_finder.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::core {
namespace {

int64_t whole_of(const Arg& arg, const ArgsView& view) noexcept {
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

bool compare_holds(const CompiledOp::Impl& op, const Condition& c, const ArgsView& view) noexcept {
  const Arg& arg = op.args[c.arg];
  const Arg* const other = c.other < 0 ? nullptr : &op.args[static_cast<size_t>(c.other)];
  const bool whole = is_whole(arg.type) && (other != nullptr ? is_whole(other->type)
                                                             : c.number == std::trunc(c.number) &&
                                                                   std::fabs(c.number) < 0x1p53);
  if (!whole) {
    return compares(c.comparison, view.scalar(arg),
                    other != nullptr ? view.scalar(*other) : c.number);
  }
  const int64_t a = whole_of(arg, view);
  const int64_t b = other != nullptr ? whole_of(*other, view) : static_cast<int64_t>(c.number);
  // INT64_MIN % -1 overflows, so -1 is handled separately.
  if (c.comparison == Condition::kMultipleOf) return b == -1 || (b != 0 && a % b == 0);
  return compares(c.comparison, a, b);
}

// Evaluates a kHolds condition, which compares the element counts of two tensors. Requires that the
// tensors' sizes and the communicator have been checked.
bool elements_hold(const CompiledOp::Impl& op, const Condition& c, const ArgsView& view) noexcept {
  const te_fl_tensor* const all = view.tensor(op.args[c.arg]);
  const te_fl_tensor* const part = view.tensor(op.args[static_cast<size_t>(c.other)]);
  if (all == nullptr || part == nullptr) return true;
  const te_fl_communicator* ranks = nullptr;
  if (c.times >= 0) {
    const Arg& arg = op.args[static_cast<size_t>(c.times)];
    if (view.has(arg)) ranks = view.read<const te_fl_communicator*>(arg.offset);
  }
  int64_t product = 0;
  return !__builtin_mul_overflow(numel_of(*part), ranks == nullptr ? 1 : ranks->size, &product) &&
         numel_of(*all) == product;
}

bool is_holds(const Arg& arg, const Condition& c, const ArgsView& view) noexcept {
  if (arg.type == TE_FL_ARG_ENUM) {
    const auto value = static_cast<uint64_t>(whole_of(arg, view));
    return value < 64 && (c.values >> value & 1) != 0;
  }
  const te_fl_tensor* const t = view.tensor(arg);
  if (t == nullptr) return false;
  const int dtype = c.dtypes != 0 ? dtype_index(t->dl.dtype) : kInvalidDType;
  if (dtype != kInvalidDType && (c.dtypes >> dtype & 1) != 0) return true;
  const uint32_t scaling = t->quant == nullptr ? 0u : t->quant->scaling;
  return scaling < TE_FL_SCALING_COUNT && (c.scalings >> scaling & 1) != 0;
}

}  // namespace

bool holds(const CompiledOp::Impl& op, const Condition& c, const ArgsView& view) noexcept {
  const Arg& arg = op.args[c.arg];
  if (c.kind == Condition::kCompare) return compare_holds(op, c, view);
  if (c.kind == Condition::kIs) return is_holds(arg, c, view);
  if (c.kind == Condition::kHolds) return elements_hold(op, c, view);
  // A bool counts as given if it is 1, independent of its default.
  return arg.type == TE_FL_ARG_BOOL ? view.flag(arg) : !view.is_neutral(arg);
}

bool is_broken(const CompiledOp::Impl& op, const Constraint& rule, const ArgsView& view) noexcept {
  if (rule.kind == Constraint::kAlways) return !holds(op, rule.left, view);
  if (!holds(op, rule.left, view)) return false;
  bool any = false;
  for (uint8_t k = 0; k < rule.alternatives && !any; ++k) any = holds(op, rule.right[k], view);
  return any == (rule.kind == Constraint::kExcludes);
}

}  // namespace te_fl::core
