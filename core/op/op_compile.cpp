// Compiles a schema into a CompiledOp::Impl. A schema may come from a plugin, so every member is
// validated.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/abi_struct.hpp"
#include "core/base/text.hpp"
#include "core/op/call_words.hpp"
#include "core/op/compiled_op.hpp"

namespace te_fl::core {
namespace {

constexpr size_t kMaxNameLength = 64;
constexpr uint32_t kKnownFlags = TE_FL_ARG_OPTIONAL | TE_FL_ARG_HOST | TE_FL_ARG_ANY_MEMORY |
                                 TE_FL_ARG_RAW_FP8 | TE_FL_ARG_QUANT_ONLY | TE_FL_ARG_SAME_DTYPE |
                                 TE_FL_ARG_ALLOW_OVERLAP | TE_FL_ARG_OPAQUE |
                                 TE_FL_ARG_STRIDED_CODES | TE_FL_ARG_LATER;

bool is_identifier(std::string_view text) {
  if (text.empty() || text.size() > kMaxNameLength) return false;
  if (text[0] >= '0' && text[0] <= '9') return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

// Accepts lower-case words joined by underscores, and "vendor::op".
bool is_op_name(std::string_view text) {
  const size_t colons = text.find("::");
  if (colons == std::string_view::npos) return is_identifier(text);
  return is_identifier(text.substr(0, colons)) && is_identifier(text.substr(colons + 2));
}

struct Layout {
  uint32_t size;
  uint32_t alignment;
};
Layout value_layout(te_fl_arg_type type) {
  switch (type) {
    case TE_FL_ARG_BOOL:
    case TE_FL_ARG_I32:
    case TE_FL_ARG_ENUM:
    case TE_FL_ARG_F32:
      return {4, 4};
    default:
      return {8, 8};
  }
}

Status refuse(const std::string& where, const std::string& why) {
  return invalid_argument("schema of " + where + ": " + why);
}

}  // namespace

std::vector<std::string> words(std::string_view text) {
  std::vector<std::string> result;
  size_t at = 0;
  while ((at = text.find_first_not_of(' ', at)) != std::string_view::npos) {
    const size_t end = std::min(text.find(' ', at), text.size());
    result.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return result;
}

int CompiledOp::Impl::find_arg(std::string_view name) const {
  for (size_t i = 0; i < descs.size(); ++i) {
    if (name == descs[i].name) return static_cast<int>(i);
  }
  return -1;
}

Status CompiledOp::Impl::copy_schema(const te_fl_op_schema& from) {
  if (!plausible_size(from.struct_size, kLeastSchema)) {
    return refuse("an op", "its schema has " + size_text(from.struct_size, kLeastSchema));
  }
  const auto keep = [this](const char* text) -> const char* {
    if (text == nullptr) return nullptr;
    return strings.emplace_back(text, strnlen(text, kMaxTextLength)).c_str();
  };
  schema = copy_struct<te_fl_op_schema>(&from);
  schema.name = keep(from.name);
  if (schema.name == nullptr || !is_op_name(schema.name)) {
    return refuse("an op", schema.name == nullptr
                               ? "its name is NULL"
                               : "'" + std::string(schema.name).substr(0, kMaxNameLength) +
                                     "' is not a name such as gelu or vendor::op");
  }
  schema.summary = keep(from.summary);
  schema.formula = keep(from.formula);
  for (const char** text : {&schema.source, &schema.rules, &schema.gradient, &schema.operations}) {
    *text = keep(*text);
  }
  const std::string op = schema.name;
  if (from.arg_count > kMaxArgs) {
    return refuse(op, std::to_string(from.arg_count) + " arguments are more than " +
                          std::to_string(kMaxArgs));
  }
  if (from.arg_count > 0 && from.args == nullptr) return refuse(op, "args is NULL");
  for (uint32_t i = 0; i < from.arg_count; ++i) {
    const te_fl_arg_desc* arg = from.args[i];
    const std::string where = op + ", argument " + std::to_string(i);
    if (arg == nullptr) return refuse(where, "its description is NULL");
    if (!plausible_size(arg->struct_size, kLeastArgDesc)) {
      return refuse(where, "its description has " + size_text(arg->struct_size, kLeastArgDesc));
    }
    te_fl_arg_desc& desc = descs.emplace_back(copy_struct<te_fl_arg_desc>(arg));
    for (const char** text : {&desc.name, &desc.shape, &desc.inout_if, &desc.aliases, &desc.same_as,
                              &desc.enum_names, &desc.extents}) {
      *text = keep(*text);
    }
    if (desc.name == nullptr || !is_identifier(desc.name)) {
      return refuse(where,
                    desc.name == nullptr ? "its name is NULL" : "its name is not an identifier");
    }
    if (find_arg(desc.name) != static_cast<int>(i)) {
      return refuse(op, "two arguments are named '" + std::string(desc.name) + "'");
    }
    desc_pointers.push_back(&desc);
  }
  schema.args = desc_pointers.data();
  return {};
}

Status CompiledOp::Impl::compile_scalar(const te_fl_arg_desc& desc, Arg& arg) {
  const auto bad = [&](const std::string& why) {
    return refuse(std::string(schema.name) + ", argument '" + desc.name + "'", why);
  };
  if (std::isnan(desc.neutral) || std::isnan(desc.min) || std::isnan(desc.max)) {
    return bad("neutral, min and max must not be NaN");
  }
  if (desc.min > desc.max) return bad("min is above max");
  arg.neutral = desc.neutral;
  const bool unbounded = desc.min == 0 && desc.max == 0;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  arg.low = unbounded ? -kInfinity : desc.min;
  arg.high = unbounded ? kInfinity : desc.max;
  const bool narrow = arg.type != TE_FL_ARG_I64 && !arg.is_integers();
  int64_t low = narrow ? INT32_MIN : INT64_MIN, high = narrow ? INT32_MAX : INT64_MAX;
  if (arg.type == TE_FL_ARG_BOOL) {
    low = 0, high = 1;
  } else if (arg.type == TE_FL_ARG_ENUM) {
    const auto names = words(desc.enum_names != nullptr ? desc.enum_names : "");
    if (names.empty() || names.size() > 256) return bad("an enum needs 1 to 256 enum_names");
    low = 0, high = static_cast<int64_t>(names.size()) - 1;
  } else if (!unbounded) {
    // Compares before the cast, since the cast of an out-of-range double is undefined. 2^63 is not
    // an int64.
    if (desc.min >= 0x1p63 || desc.max < -0x1p63) return bad("no value lies between min and max");
    if (desc.min > static_cast<double>(low)) low = static_cast<int64_t>(std::ceil(desc.min));
    if (desc.max < static_cast<double>(high)) high = static_cast<int64_t>(std::floor(desc.max));
  }
  if (low > high) return bad("no value lies between min and max");
  arg.int_low = low;
  arg.int_high = high;
  return {};
}

ShapeNames CompiledOp::Impl::shape_names() const {
  const auto find = [this](te_fl_arg_type type) {
    return [this, type](std::string_view name) {
      const int i = find_arg(name);
      return i >= 0 && descs[static_cast<size_t>(i)].type == type ? i : -1;
    };
  };
  const auto value = [this](int arg, std::string_view name) {
    const char* const all = descs[static_cast<size_t>(arg)].enum_names;
    const std::vector<std::string> names = words(all != nullptr ? all : "");
    const auto at = std::find(names.begin(), names.end(), name);
    return at == names.end() ? -1 : static_cast<int>(at - names.begin());
  };
  return {find(TE_FL_ARG_BOOL), find(TE_FL_ARG_ENUM), value, find(TE_FL_ARG_TENSOR_LIST)};
}

Status CompiledOp::Impl::compile_arg(uint32_t index) {
  const te_fl_arg_desc& desc = descs[index];
  const auto bad = [&](const std::string& why) {
    return refuse(std::string(schema.name) + ", argument '" + desc.name + "'", why);
  };
  if (desc.type > TE_FL_ARG_COMMUNICATOR)
    return bad("type " + std::to_string(desc.type) + " is unknown");
  if (desc.role > TE_FL_INOUT) return bad("role " + std::to_string(desc.role) + " is unknown");
  if ((desc.flags & ~kKnownFlags) != 0)
    return bad("flags has bits that this version does not know");
  Arg arg;
  if ((desc.flags & TE_FL_ARG_LATER) != 0) {
    if (later_count == kMaxLaterArgs) {
      return bad("it is one more later argument than the " + std::to_string(kMaxLaterArgs) +
                 " that an op may have (rule R23)");
    }
    arg.later = static_cast<uint16_t>(1u << later_count++);
  } else if (later_count != 0) {
    return bad(
        "it belongs to the op's first form and must come before its later arguments (rule R23)");
  }
  arg.type = static_cast<te_fl_arg_type>(desc.type);
  arg.role = static_cast<te_fl_arg_role>(desc.role);
  arg.flags = desc.flags;
  arg.offset = desc.offset;
  arg.count_offset = desc.count_offset;
  const Layout layout = value_layout(arg.type);
  arg.end = desc.offset + layout.size;  // check_layout() checks the offset, including overflow
  if (arg.is_list() || arg.is_integers()) arg.end = std::max(arg.end, desc.count_offset + 8u);
  const bool has_data = arg.is_tensor() || arg.is_list();
  if (has_data) {
    arg.dtypes = desc.dtypes;
    arg.scalings = desc.scalings;
    if (arg.dtypes == 0 || (arg.dtypes & ~TE_FL_MASK_ANY_DTYPE) != 0)
      return bad("dtypes is not a mask of dtypes");
    const uint32_t all = (1u << TE_FL_SCALING_COUNT) - 1;
    if (arg.scalings == 0 || (arg.scalings & ~all) != 0)
      return bad("scalings is not a mask of scaling modes");
    Result<ShapeRule> rule =
        parse_shape_rule(desc.shape != nullptr ? desc.shape : "any", symbols, shape_names());
    if (!rule) return bad(rule.status().message());
    arg.shape = *rule;
    if (arg.later != 0 && !arg.is(TE_FL_ARG_OPTIONAL)) {
      return bad(
          "a tensor that came later must be optional, or older callers could not be served "
          "(rule R23)");
    }
    (arg.is_tensor() ? tensors : lists).push_back(static_cast<uint8_t>(index));
  } else if (arg.type == TE_FL_ARG_SAVED) {
    if (saved >= 0) return bad("an op has one saved argument at most");
    saved = static_cast<int>(index);
  } else if (arg.type == TE_FL_ARG_COMMUNICATOR) {
    if (arg.role != TE_FL_IN) return bad("a communicator's role must be in");
    if (arg.later != 0 && !arg.is(TE_FL_ARG_OPTIONAL)) {
      return bad(
          "a communicator that came later must be optional, or older callers could not be served "
          "(rule R23)");
    }
    communicators.push_back(static_cast<uint8_t>(index));
  } else {
    if (arg.role != TE_FL_IN) return bad("a scalar's role must be in");
    TE_FL_RETURN_IF_ERROR(compile_scalar(desc, arg));
    if (arg.is_integers() && arg.later != 0 && !arg.is(TE_FL_ARG_OPTIONAL))
      return bad("a later list must be optional, or older callers could not be served");
    (arg.is_integers() ? integers : scalars).push_back(static_cast<uint8_t>(index));
  }
  args.push_back(arg);
  return {};
}

// Compiles references to other arguments by name: same_as, inout_if, aliases.
Status CompiledOp::Impl::compile_references(uint32_t index) {
  const te_fl_arg_desc& desc = descs[index];
  Arg& arg = args[index];
  const bool has_data = arg.is_tensor() || arg.is_list();
  const auto bad = [&](const std::string& why) {
    return refuse(std::string(schema.name) + ", argument '" + desc.name + "'", why);
  };
  if (arg.is(TE_FL_ARG_SAME_DTYPE)) {
    const int other = desc.same_as != nullptr ? find_arg(desc.same_as) : -1;
    const bool good = has_data && other >= 0 && other != static_cast<int>(index) &&
                      args[static_cast<size_t>(other)].type == arg.type;
    if (!good) return bad("same_as must name another tensor (for a list: list) of the op");
    arg.same_as = static_cast<int8_t>(other);
  }
  if (desc.inout_if != nullptr && desc.inout_if[0] != '\0') {
    const int other = find_arg(desc.inout_if);
    const uint8_t type = other >= 0 ? descs[static_cast<size_t>(other)].type : 0xff;
    const bool conditional =
        arg.role == TE_FL_INOUT && (type == TE_FL_ARG_BOOL || type == TE_FL_ARG_F32);
    const bool kept = arg.role == TE_FL_OUT && type == TE_FL_ARG_TENSOR;
    if (!conditional && !kept) {
      return bad(
          "inout_if needs role inout and the name of a bool or f32 argument, or role out and "
          "the name of a tensor");
    }
    arg.inout_if = static_cast<int8_t>(other);
  }
  if (desc.aliases == nullptr) return {};
  for (const std::string& name : words(desc.aliases)) {
    const int other = find_arg(name);
    const bool tensor = other >= 0 && (args[static_cast<size_t>(other)].is_tensor() ||
                                       args[static_cast<size_t>(other)].is_list());
    if (!has_data || !arg.writes() || !tensor || other == static_cast<int>(index)) {
      return bad("aliases: '" + name +
                 "' is not another tensor that this output may share memory with");
    }
    arg.may_alias |= uint64_t{1} << other;
    args[static_cast<size_t>(other)].may_alias |= uint64_t{1} << index;
  }
  return {};
}

// Checks that the members lie inside the struct and after struct_size, are aligned, and do not
// overlap.
Status CompiledOp::Impl::check_layout() const {
  const std::string op = schema.name;
  if (schema.args_size < 4 || schema.args_size > kMaxArgsSize) {
    return refuse(op, "args_size is " + std::to_string(schema.args_size) + ", must be from 4 to " +
                          std::to_string(kMaxArgsSize));
  }
  if (schema.least_args_size < 4 || schema.least_args_size > schema.args_size) {
    return refuse(op, "least_args_size is " + std::to_string(schema.least_args_size) +
                          ", must be from 4 to args_size, " + std::to_string(schema.args_size));
  }
  struct Member {
    uint32_t begin, end;
    const char* name;
  };
  std::vector<Member> members{{0, 4, "struct_size"}};
  for (size_t i = 0; i < args.size(); ++i) {
    const te_fl_arg_desc& desc = descs[i];
    const auto add = [&](uint32_t offset, Layout layout) -> Status {
      const bool inside = offset <= schema.args_size && layout.size <= schema.args_size - offset;
      if (inside && offset % layout.alignment == 0) {
        members.push_back({offset, offset + layout.size, desc.name});
        return {};
      }
      return refuse(op + ", argument '" + desc.name + "'",
                    "offset " + std::to_string(offset) + " must be a multiple of " +
                        std::to_string(layout.alignment) + " inside args_size " +
                        std::to_string(schema.args_size));
    };
    TE_FL_RETURN_IF_ERROR(add(desc.offset, value_layout(args[i].type)));
    if (args[i].is_list() || args[i].is_integers())
      TE_FL_RETURN_IF_ERROR(add(desc.count_offset, {8, 8}));
    if (args[i].later == 0 && args[i].end > schema.least_args_size) {
      return refuse(op + ", argument '" + desc.name + "'",
                    "it is of the op's first form but lies beyond least_args_size " +
                        std::to_string(schema.least_args_size));
    }
  }
  std::sort(members.begin(), members.end(),
            [](const Member& a, const Member& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < members.size(); ++i) {
    if (members[i].begin >= members[i - 1].end) continue;
    return refuse(op, "members '" + std::string(members[i - 1].name) + "' and '" + members[i].name +
                          "' overlap");
  }
  return {};
}

// Sorts the tensors for shape matching. Tensors that bind the leading dimensions precede those that
// only use their product; tensors that bind a name precede those that accept "1 or the name".
void CompiledOp::Impl::order_tensors() {
  const auto rank = [this](uint8_t i) {
    const ShapeRule& rule = args[i].shape;
    return (rule.uses(Term::kProduct) && !rule.uses_leading() ? 1 : 0) +
           (rule.uses(Term::kOneOr) ? 2 : 0);
  };
  for (auto* order : {&tensors, &lists}) {
    std::stable_sort(order->begin(), order->end(),
                     [&](uint8_t a, uint8_t b) { return rank(a) < rank(b); });
  }
}

Status CompiledOp::Impl::compile_rules() {
  if (schema.rules == nullptr || *schema.rules == '\0') return {};
  Result<std::vector<Constraint>> parsed = parse_constraints(schema.rules, desc_pointers, symbols);
  if (!parsed.ok()) return refuse(schema.name, parsed.status().message());
  rules = std::move(parsed).value();
  uint32_t bound = 0;  // the names that plain tensors bind
  for (const uint8_t i : tensors) bound |= args[i].shape.symbols();
  for (const Constraint& rule : rules) {
    rules_use_extents = rules_use_extents || rule.extents != 0;
    const uint32_t lists_only = rule.extents & ~bound;
    if (lists_only == 0) continue;
    return refuse(schema.name,
                  "rule \"" + rule.text + "\": '" +
                      symbols[static_cast<size_t>(__builtin_ctz(lists_only))] +
                      "' has a value for each element of a list, must be of a plain tensor");
  }
  return {};
}

Status CompiledOp::Impl::compile(const te_fl_op_schema& from) {
  TE_FL_RETURN_IF_ERROR(copy_schema(from));
  for (uint32_t i = 0; i < schema.arg_count; ++i) TE_FL_RETURN_IF_ERROR(compile_arg(i));
  TE_FL_RETURN_IF_ERROR(check_layout());
  for (uint32_t i = 0; i < schema.arg_count; ++i) TE_FL_RETURN_IF_ERROR(compile_references(i));
  if ((schema.flags & TE_FL_SCHEMA_ENQUIRY) != 0 && (schema.flags & TE_FL_SCHEMA_COLLECTIVE) != 0)
    return refuse(schema.name, "an op is an enquiry or a collective, not both");
  TE_FL_RETURN_IF_ERROR(compile_rules());
  enquiry = (schema.flags & TE_FL_SCHEMA_ENQUIRY) != 0;
  order_tensors();
  layout = make_layout(*this);
  return {};
}

}  // namespace te_fl::core
