// Describes an error that the Finder found: the argument, its value, the allowed values, and a
// remedy.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "core/base/text.hpp"
#include "core/op/op_finder.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::core {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string dtype_list(uint64_t mask) {
  std::vector<std::string> names;
  for (int i = 0; i < TE_FL_DTYPE_COUNT; ++i) {
    if ((mask >> i & 1) != 0) names.emplace_back(name(static_cast<DType>(i)));
  }
  return join(names, "|");
}

std::string scaling_list(uint32_t mask) {
  std::vector<std::string> names;
  for (int i = 0; i < TE_FL_SCALING_COUNT; ++i) {
    if ((mask >> i & 1) != 0) names.emplace_back(name(static_cast<Scaling>(i)));
  }
  return join(names, "|");
}

class Words {
 public:
  Words(const CompiledOp::Impl& op, const Finder& finder)
      : op_(op), finder_(finder), f_(finder.finding()), t_(finder.tensor()) {}
  std::string text() const;

 private:
  const Arg& arg() const { return op_.args[static_cast<size_t>(f_.arg)]; }
  const te_fl_arg_desc& desc() const { return op_.descs[static_cast<size_t>(f_.arg)]; }
  std::string quoted(int i) const { return "'" + std::string(op_.name_of(i)) + "'"; }
  // The argument's name: "argument 'x'", or "argument 'xs'[3]" for a list element.
  std::string who() const {
    return "argument " + quoted(f_.arg) +
           (f_.index >= 0 ? "[" + std::to_string(f_.index) + "]" : "");
  }
  std::string dtype() const {
    const int index = dtype_index(t_->dl.dtype);
    return index == kInvalidDType ? "unknown" : std::string(name(static_cast<DType>(index)));
  }
  std::string size_rule(const char* what, uint32_t size, size_t minimum) const {
    return std::string(what) + " struct_size " + std::to_string(size) + ", must be at least " +
           std::to_string(minimum) + "; set it to sizeof the struct (rule R3)";
  }
  std::string strides() const {
    return core::shape_text({t_->dl.strides, static_cast<size_t>(t_->dl.ndim)});
  }
  std::string scalar_text() const;
  std::string list_text() const;
  std::string value_text(int arg) const;
  std::string value_text(const RuleOperand& operand) const;
  std::vector<std::string> values_of(const Condition& condition) const;
  std::string range_text(const Condition& condition) const;
  std::string rule_text() const;
  std::string tensor_text() const;
  std::string storage_text() const;
  std::string quant_text() const;
  std::string missing_quant() const;
  std::string pair_text() const;
  std::string memory_text() const;
  std::string shape_text() const;
  std::string chooser_text(const ShapeRule& rule) const;
  std::string expected_term(const Term& term, std::vector<int>& setters) const;
  std::string saved_text() const;
  std::string communicator_text() const;

  const CompiledOp::Impl& op_;
  const Finder& finder_;
  const Finding& f_;
  const te_fl_tensor* t_;
};

std::string Words::scalar_text() const {
  const double value = finder_.args().scalar(arg());
  const bool whole = arg().type != TE_FL_ARG_F32 && arg().type != TE_FL_ARG_F64;
  const std::string shown = arg().type == TE_FL_ARG_I64
                                ? std::to_string(finder_.args().read<int64_t>(arg().offset))
                                : number(value);
  const std::string is = who() + " is " + shown + ", must be ";
  switch (f_.problem) {
    case Problem::kBool:
      return is + "0 or 1";
    case Problem::kEnum:
      return is + "from 0 to " + std::to_string(arg().int_high) + " (" + desc().enum_names + ")";
    case Problem::kNan:
      return who() + " is NaN, must be a number";
    default:
      break;
  }
  if (whole)
    return is + "from " + std::to_string(arg().int_low) + " to " + std::to_string(arg().int_high);
  return is + "from " + number(arg().low) + " to " + number(arg().high);
}

std::string Words::list_text() const {
  const std::string count = std::to_string(finder_.args().count(arg()));
  switch (f_.problem) {
    case Problem::kNegativeCount:
      return who() + " has count " + count + ", must not be negative";
    case Problem::kLongList:
      return who() + " has count " + count + ", must be at most " + std::to_string(kMaxListCount) +
             "; split the call";
    case Problem::kNullList:
      return who() + " is NULL but its count is " + count;
    case Problem::kNoIntegers:
      return who() + " has count 0, must have one integer at least";
    case Problem::kIntegerRange:
      return who() + " is " + std::to_string(finder_.args().integer(arg(), f_.index)) +
             ", must be from " + std::to_string(arg().int_low) + " to " +
             std::to_string(arg().int_high);
    default:
      break;
  }
  const Arg& other = op_.args[static_cast<size_t>(f_.other)];
  return who() + " has " + count + " tensors, must have as many as " + quoted(f_.other) + ": " +
         std::to_string(finder_.args().count(other));
}

// An argument and its value: "'x' is f32[2,3] cpu", "'gelu' is 0".
std::string Words::value_text(int i) const {
  const Arg& arg = op_.args[static_cast<size_t>(i)];
  const ArgsView& args = finder_.args();
  const std::string is = quoted(i) + " is ";
  switch (arg.type) {
    case TE_FL_ARG_TENSOR:
      return is +
             (args.tensor(arg) == nullptr ? "missing (NULL)" : te_fl::describe(args.tensor(arg)));
    case TE_FL_ARG_SAVED:
      return is + (args.is_neutral(arg) ? "missing (NULL)" : "given");
    case TE_FL_ARG_COMMUNICATOR: {
      const auto* c = args.has(arg) ? args.read<const te_fl_communicator*>(arg.offset) : nullptr;
      return is + (c == nullptr
                       ? "missing (NULL)"
                       : "of " + std::to_string(c->size) + (c->size == 1 ? " rank" : " ranks"));
    }
    case TE_FL_ARG_TENSOR_LIST:
    case TE_FL_ARG_I64_LIST:
      return is + "a list of " + std::to_string(args.count(arg));
    case TE_FL_ARG_ENUM: {
      std::string_view names = op_.descs[static_cast<size_t>(i)].enum_names;
      for (int64_t k = 0; k < static_cast<int64_t>(args.scalar(arg)); ++k) {
        names.remove_prefix(std::min(names.find(' ') + 1, names.size()));
      }
      return is + std::string(names.substr(0, names.find(' ')));
    }
    case TE_FL_ARG_I64:
      return is +
             (args.has(arg) ? std::to_string(args.read<int64_t>(arg.offset)) : number(arg.neutral));
    default:
      return is + number(args.scalar(arg));
  }
}

// A part of a comparison and its value: "'topk' is 9", "E is 8 (in 'logits')"; "" for a number.
std::string Words::value_text(const RuleOperand& operand) const {
  const ArgsView& args = finder_.args();
  switch (operand.kind) {
    case RuleOperand::kScalar:
      return value_text(operand.index);
    case RuleOperand::kExtent:
      return op_.symbols[operand.index] + " is " +
             std::to_string(finder_.frame().values[operand.index]) + " (in " +
             quoted(finder_.frame().setter[operand.index]) + ")";
    case RuleOperand::kSum:
      return "the sum of " + quoted(operand.index) + " is " +
             std::to_string(sum_of_list(op_.args[operand.index], args));
    default:
      return "";
  }
}

// The values that a condition reads, in order.
std::vector<std::string> Words::values_of(const Condition& condition) const {
  std::vector<std::string> values;
  const ArgsView& args = finder_.args();
  switch (condition.kind) {
    case Condition::kCompare:
      for (const Expression* side : {&condition.left, &condition.right}) {
        for (const RuleOperand& operand : *side) values.push_back(value_text(operand));
      }
      return values;
    case Condition::kEach: {
      const int64_t at = first_unlike(condition, {op_, args, finder_.frame()});
      const Arg& a = op_.args[condition.arg];
      const Arg& b = op_.args[static_cast<size_t>(condition.other)];
      if (args.count(a) != args.count(b)) break;
      for (const int i : {static_cast<int>(condition.arg), static_cast<int>(condition.other)}) {
        values.push_back(quoted(i) + "[" + std::to_string(at) + "] is " +
                         std::to_string(args.integer(op_.args[static_cast<size_t>(i)], at)));
      }
      return values;
    }
    default:
      break;
  }
  values.push_back(value_text(condition.arg));
  if (condition.other >= 0) values.push_back(value_text(condition.other));
  if (condition.times >= 0) values.push_back(value_text(condition.times));
  if (condition.kind == Condition::kHolds && condition.other >= 0) {
    const Arg& list = op_.args[static_cast<size_t>(condition.other)];
    if (list.is_list())
      values.back() += " with " + std::to_string(elements_of_list(list, args)) + " elements in all";
  }
  return values;
}

// Names the arguments that violate the rule, the rule itself, and the change that would satisfy it.
std::string Words::rule_text() const {
  const Constraint& rule = op_.rules[static_cast<size_t>(f_.dim)];
  std::vector<std::string> values;
  const auto add = [&](const Condition& condition) {
    for (std::string& value : values_of(condition)) {
      const bool known = std::find(values.begin(), values.end(), value) != values.end();
      if (!value.empty() && !known) values.push_back(std::move(value));
    }
  };
  add(rule.left);
  for (uint8_t i = 0; i < rule.alternatives; ++i) add(rule.right[i]);
  std::string text = values[0].starts_with("'") ? "argument " : "";
  text += join(values) + ", which breaks the rule \"" + rule.text + "\"";
  if (rule.kind == Constraint::kExcludes) return text + "; leave one of them out";
  if (rule.kind == Constraint::kAlways)
    return text + (rule.alternatives > 0 ? "; give one of them" : "") + range_text(rule.left);
  text += "; give what it requires";
  return rule.left.kind == Condition::kGiven ? text + ", or leave " + quoted(rule.left.arg) + " out"
                                             : text;
}

// The numbers that a condition kFits allows: "; u8 takes numbers from 0 to below 256".
std::string Words::range_text(const Condition& condition) const {
  if (condition.kind != Condition::kFits) return "";
  const te_fl_tensor& t = *finder_.args().tensor(op_.args[static_cast<size_t>(condition.other)]);
  const int dtype = dtype_index(t.dl.dtype);
  const IntegerRange range = integer_range(dtype);
  char text[64];
  std::snprintf(text, sizeof text, " takes numbers from %.0f to below %.0f", range.low,
                range.above_high);
  return "; " + std::string(name(static_cast<DType>(dtype))) + text;
}

std::string Words::tensor_text() const {
  switch (f_.problem) {
    case Problem::kMissing:
      return who() + " is missing (NULL), must be a tensor " + dtype_list(arg().dtypes) +
             " of shape rule \"" + (desc().shape != nullptr ? desc().shape : "any") + "\"";
    case Problem::kTensorSize:
      return who() + " has " + size_rule("te_fl_tensor", t_->struct_size, kLeastTensor);
    case Problem::kRank:
      return who() + " has rank " + std::to_string(t_->dl.ndim) + ", must be from 0 to " +
             std::to_string(kMaxRank) + "; merge dimensions";
    case Problem::kNullShape:
      return who() + " has rank " + std::to_string(t_->dl.ndim) + " but its shape is NULL";
    case Problem::kNegativeExtent:
      return who() + " is " + te_fl::describe(t_) + ": extents must not be negative";
    case Problem::kTooLarge:
      return who() + " is " + te_fl::describe(t_) + ": its size does not fit 63 bits";
    case Problem::kDType:
      return who() + " is " + te_fl::describe(t_) + ", its dtype must be " +
             dtype_list(arg().dtypes) + "; convert it first";
    default:
      return storage_text();
  }
}

std::string Words::storage_text() const {
  const std::string is = who() + " is " + te_fl::describe(t_);
  switch (f_.problem) {
    case Problem::kNullData:
      return is + " with a NULL data pointer, must point to its elements";
    case Problem::kAlignment: {
      const std::string bytes = std::to_string(std::max(t_->dl.dtype.bits / 8, 1));
      return is + " whose data + byte_offset is not a multiple of the element's " + bytes +
             " bytes; copy it into aligned memory";
    }
    case Problem::kNotHost:
      return is + ", must be in host memory; copy it to the host";
    case Problem::kSelfOverlap:
      return is + ", an output with strides " + strides() +
             " whose elements overlap in memory; give it memory of its own";
    case Problem::kBroadcast:
      return is + " with a stride of 0 over an extent above 1: " + op_.schema.name +
             " does not take broadcast inputs here; expand it with strided_copy first";
    case Problem::kPackedStrided:
      return is + " with strides " + strides() +
             ": 4-bit elements are packed and must be contiguous";
    default:
      return quant_text();
  }
}

std::string Words::missing_quant() const {
  const bool four_bit = dtype_index(t_->dl.dtype) == TE_FL_F4E2M1;
  const std::string is = who() + " is " + te_fl::describe(t_) + " without quantisation data: its ";
  if (arg().writes() && !finder_.reads(arg())) {
    return is + "scale is missing; make it with Tensor::empty_quantized or set te_fl_tensor.quant";
  }
  return is + (four_bit ? "scale_inv and amax are" : "scale_inv is") +
         " missing; make it with quantize or set te_fl_tensor.quant";
}

std::string Words::quant_text() const {
  if (f_.problem == Problem::kMissingQuant) return missing_quant();
  const te_fl_quant* q = quant_of(*t_);
  if (f_.problem == Problem::kQuantSize) {
    return who() + " has " + size_rule("te_fl_quant", t_->quant->struct_size, kLeastQuant);
  }
  const std::string is = who() + " is " + te_fl::describe(t_);
  const std::string allowed = scaling_list(arg().scalings);
  switch (f_.problem) {
    case Problem::kUnknownScaling:
      return is + ": scaling mode " + std::to_string(q->scaling) + " is unknown, must be " +
             allowed;
    case Problem::kUnknownFlags:
      return is + ": quantisation flags " + std::to_string(q->flags) +
             " hold bits that this te-fl does not know, must be made of TE_FL_QUANT_* alone";
    case Problem::kScaling:
      return is + (q == nullptr ? ", not quantised" : "") + ": its scaling mode must be " +
             allowed + (q == nullptr ? "; make it with quantize" : "");
    case Problem::kQuantDType:
      return is + ": scaling " + std::string(name(static_cast<Scaling>(q->scaling))) +
             " needs dtype " +
             (describe(static_cast<Scaling>(q->scaling)).dtypes == TE_FL_MASK_FP8 ? "f8e4m3|f8e5m2"
                                                                                  : "f4e2m1");
    case Problem::kQuantStrided:
      return is + " with strides " + strides() + ": quantised tensors must be contiguous" +
             (arg().is(TE_FL_ARG_STRIDED_CODES)
                  ? ", unless they are scaled by tensor and have no column-wise copy"
                  : "");
    case Problem::kNoCopy:
      return is +
             " without row-wise data (dl.data) and without columnwise_data, must have one of them";
    case Problem::kNoScaleInv:
      return is + ": its scale_inv is missing (NULL)" +
             (finder_.reads(arg()) ? "; make it with quantize"
              : q->scale == nullptr || (q->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0
                  ? ", where the scale that the op derives is written"
                  : ", where the reciprocal of its scale is written; provide one FP32 element");
    case Problem::kNoColumnwiseScaleInv:
      return is + " with column-wise data: its columnwise_scale_inv is missing (NULL)";
    case Problem::kNoScale:
      return is + ": its scale is missing (NULL)" +
             (arg().is(TE_FL_ARG_QUANT_ONLY) || (q->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0
                  ? ""
                  : "; set te_fl_quant.scale (delayed scaling) or TE_FL_QUANT_COMPUTE_SCALE "
                    "(current scaling)");
    case Problem::kNoAmax:
      return is + ": its amax is missing (NULL)";
    case Problem::kColumnwiseAmax:
      return is + ": it has a columnwise_amax, which requires column-wise data of a scaling mode " +
             "with a second level only, as nvfp4 (rule R30)";
    case Problem::kPartAlignment:
      return is + ": scale_inv, columnwise_scale_inv, amax, columnwise_amax and scale must be " +
             "aligned to their elements";
    default:
      return is + ": refused";
  }
}

std::string Words::pair_text() const {
  const std::string other = quoted(f_.other);
  switch (f_.problem) {
    case Problem::kSameDType:
      return who() + " is " + te_fl::describe(t_) + ", must have the dtype of " + other + ": " +
             std::string(te_fl::describe(finder_.other_tensor()));
    case Problem::kDevice:
      return who() + " is on " +
             to_string(Device{t_->dl.device.type, t_->dl.device.index, t_->provider}) +
             ", must be on " + to_string(finder_.device()) + " as " + other +
             " is; copy it there first";
    case Problem::kAlias:
      return who() + " has the same memory as " + other +
             ", which this op does not allow; give the output memory of its own";
    default:
      return who() + " overlaps the memory of " + other +
             ((arg().may_alias >> f_.other & 1) != 0 ? " without beginning where it begins" : "") +
             "; give the output memory of its own";
  }
}

std::string Words::memory_text() const {
  return who() + " is " + te_fl::describe(t_) + ", and its " + finder_.part() +
         " is not memory of " + to_string(finder_.device()) + ": " + finder_.detail() +
         "; copy it there with Tensor::to, or name the device that it is on";
}

// The text of the extent that a term requires with the names bound so far. Adds the arguments that
// bound them to `setters`.
std::string Words::expected_term(const Term& term, std::vector<int>& setters) const {
  const Frame& frame = finder_.frame();
  if (term.kind == Term::kAny) return "_";
  if (term.kind == Term::kConst) return std::to_string(term.value);
  if (term.kind == Term::kProduct) {
    if (frame.product_setter < 0 || frame.product_setter == f_.arg) return "@...";
    setters.push_back(frame.product_setter);
    return std::to_string(rounded_up(frame.product, term.value));
  }
  if (term.kind == Term::kCount) {
    setters.push_back(term.symbol);
    return std::to_string(finder_.args().count(op_.args[term.symbol]));
  }
  const std::string& symbol = op_.symbols[term.symbol];
  const int setter = frame.setter[term.symbol];
  const bool bound = setter >= 0;
  // A tensor that uses a name twice may itself have bound the name. The value is shown in that case
  // too.
  const int64_t value = bound ? frame.values[term.symbol] : 0;
  if (bound && setter != f_.arg) setters.push_back(setter);
  const std::string shown = bound ? std::to_string(value) : symbol;
  switch (term.kind) {
    case Term::kTimes:
      return bound ? std::to_string(term.value * value) : std::to_string(term.value) + "*" + symbol;
    case Term::kPlus:
      return bound ? std::to_string(value + term.value) : symbol + "+" + std::to_string(term.value);
    case Term::kOneOr:
      return value == 1 ? "1" : "1 or " + shown;
    default:
      return shown;
  }
}

// The arguments that select among the rule's extents: ", trans_a is 0".
std::string Words::chooser_text(const ShapeRule& rule) const {
  std::string text;
  for (uint8_t i = 0; i < rule.choice_count; ++i) {
    const uint8_t chooser = rule.choices[i].arg;
    if (i > 0 && chooser == rule.choices[i - 1].arg) continue;
    const auto value = static_cast<size_t>(finder_.args().scalar(op_.args[chooser]));
    const bool named = op_.args[chooser].type == TE_FL_ARG_ENUM;
    text += ", " + std::string(op_.name_of(chooser)) + " is " +
            (named ? words(op_.descs[chooser].enum_names)[value] : std::to_string(value));
  }
  return text;
}

std::string Words::shape_text() const {
  const ShapeRule& rule = arg().shape;
  const Dims& dims = op_.rule_dims(rule, finder_.args());
  const Frame& frame = finder_.frame();
  std::vector<std::string> extents;
  std::vector<int> setters;
  if (dims.leading && frame.leading_count >= 0 && frame.leading_setter != f_.arg) {
    setters.push_back(frame.leading_setter);
    for (int i = 0; i < frame.leading_count; ++i)
      extents.push_back(std::to_string(frame.leading[i]));
  } else if (dims.leading) {
    extents.emplace_back("...");
  }
  for (int i = 0; i < dims.count; ++i) {
    extents.push_back(expected_term(dims.terms[static_cast<size_t>(i)], setters));
  }
  std::string text = who() + " has shape " +
                     core::shape_text({t_->dl.shape, static_cast<size_t>(t_->dl.ndim)}) +
                     ", must be [" + join(extents) + "] (rule \"" + desc().shape + "\"";
  std::sort(setters.begin(), setters.end());
  setters.erase(std::unique(setters.begin(), setters.end()), setters.end());
  std::vector<std::string> names;
  for (const int i : setters) names.push_back(quoted(i));
  if (!names.empty()) text += ", set by " + join(names, " and ");
  return text + chooser_text(rule) + ")";
}

std::string Words::saved_text() const {
  switch (f_.problem) {
    case Problem::kMissingSaved:
      return who() + " is missing (NULL), must be a te_fl_saved";
    case Problem::kSavedSize:
      return who() + " has a te_fl_saved whose struct_size is too small, must be at least " +
             std::to_string(kLeastSaved) + " (rule R3)";
    case Problem::kDevice:
      return who() + " has its storage on another device than " + quoted(f_.other) +
             ", must be on " + to_string(finder_.device());
    default:
      return who() + " has a storage that is not a contiguous u8 tensor of rank 1";
  }
}

std::string Words::communicator_text() const {
  const Arg& arg = op_.args[static_cast<size_t>(f_.arg)];
  const auto* c = finder_.args().read<const te_fl_communicator*>(arg.offset);
  switch (f_.problem) {
    case Problem::kMissingCommunicator:
      return who() + " is missing (NULL), must be a te_fl_communicator";
    case Problem::kCommunicatorSize:
      return who() + " has struct_size " + std::to_string(c->struct_size) + ", must be at least " +
             std::to_string(kLeastCommunicator) + " (rule R3)";
    case Problem::kCommunicatorRank:
      return who() + " is rank " + std::to_string(c->rank) + " of " + std::to_string(c->size) +
             ", must be one of 0 to size - 1";
    case Problem::kCommunicatorMaker:
      return who() + " has id " + std::to_string(c->id) + " and names " +
             (c->maker == nullptr || *c->maker == '\0' ? std::string("no maker")
                                                       : "maker '" + std::string(c->maker) + "'") +
             ", must have both (rule R29)";
    default:
      return who() + " is of " +
             to_string(Device{c->device.type, c->device.index, c->device_provider}) +
             ", must be of the call's device " + to_string(finder_.device()) + " (rule R29)";
  }
}

std::string Words::text() const {
  switch (f_.problem) {
    case Problem::kNone:
      return "no mistake";
    case Problem::kNullArgs:
      return "the argument struct is NULL";
    case Problem::kArgsSize:
      return "the argument struct has " +
             size_rule("", finder_.args().size(), op_.schema.least_args_size).substr(1);
    case Problem::kSameDType:
    case Problem::kAlias:
    case Problem::kPartialOverlap:
      return pair_text();
    case Problem::kNotItsMemory:
      return memory_text();
    case Problem::kDevice:
      return t_ != nullptr ? pair_text() : saved_text();
    case Problem::kShape:
    case Problem::kShapeRank:
      return shape_text();
    default:
      break;
  }
  if (f_.problem >= Problem::kMissingCommunicator) return communicator_text();
  if (f_.problem >= Problem::kMissingSaved) return saved_text();
  if (f_.problem == Problem::kRule) return rule_text();
  if (f_.problem >= Problem::kNegativeCount) return list_text();
  if (f_.problem <= Problem::kNan) return scalar_text();
  return tensor_text();
}

}  // namespace

std::string describe_finding(const CompiledOp::Impl& op, const Finder& finder) {
  return Words(op, finder).text();
}

}  // namespace te_fl::core
