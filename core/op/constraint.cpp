#include "core/op/constraint.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

#include "te_fl/dtype.hpp"

namespace te_fl::core {
namespace {

std::vector<std::string_view> split(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + separator.size();
  }
  return parts;
}

std::vector<std::string_view> split_words(std::string_view text) {
  std::vector<std::string_view> words;
  for (const std::string_view word : split(text, " ")) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

bool is_scalar(const te_fl_arg_desc& arg) {
  return arg.type >= TE_FL_ARG_BOOL && arg.type <= TE_FL_ARG_ENUM;
}

class Parser {
 public:
  Parser(const std::vector<const te_fl_arg_desc*>& args, const SymbolNames& symbols)
      : args_(args), symbols_(symbols) {}

  Result<Constraint> rule(std::string_view whole) {
    rule_ = whole;
    extents_ = 0;
    // An explanation in parentheses may follow the rule; messages quote both.
    const std::string_view text = whole.ends_with(')') ? whole.substr(0, whole.find(" (")) : whole;
    Constraint result;
    result.text = whole;
    std::string_view right = text;
    for (const auto& [word, kind] : {std::pair(" requires ", Constraint::kRequires),
                                     std::pair(" excludes ", Constraint::kExcludes)}) {
      const size_t at = text.find(word);
      if (at == std::string_view::npos) continue;
      result.kind = kind;
      TE_FL_ASSIGN_OR_RETURN(result.left, condition(text.substr(0, at)));
      right = text.substr(at + std::string_view(word).size());
      break;
    }
    std::vector<std::string_view> parts = split(right, " or ");
    if (result.kind == Constraint::kAlways) {
      TE_FL_ASSIGN_OR_RETURN(result.left, condition(parts[0]));
      if (parts.size() == 1 && result.left.kind == Condition::kGiven)
        return bad("must be 'A requires B', 'A excludes B', 'A or B', 'A is B' or a comparison");
      parts.erase(parts.begin());
    }
    for (const std::string_view part : parts) {
      if (result.alternatives == kMaxAlternatives) return bad("has too many alternatives");
      TE_FL_ASSIGN_OR_RETURN(result.right[result.alternatives], condition(part));
      ++result.alternatives;
    }
    if (result.kind == Constraint::kExcludes && result.alternatives > 1)
      return bad("excludes takes one condition");
    result.extents = extents_;
    return result;
  }

 private:
  Status bad(const std::string& why) const {
    return invalid_argument("rule \"" + std::string(rule_) + "\": " + why);
  }
  int find(std::string_view name) const {
    for (size_t i = 0; i < args_.size(); ++i) {
      if (name == args_[i]->name) return static_cast<int>(i);
    }
    return -1;
  }
  bool has_type(int arg, te_fl_arg_type type) const {
    return arg >= 0 && args_[static_cast<size_t>(arg)]->type == type;
  }

  Result<Condition> condition(std::string_view text) {
    const std::vector<std::string_view> words = split_words(text);
    for (size_t i = 1; i < words.size(); ++i) {
      const auto* const found =
          std::find(std::begin(kComparisons), std::end(kComparisons), words[i]);
      if (found == std::end(kComparisons)) continue;
      Condition result;
      result.comparison = static_cast<Condition::Comparison>(found - std::begin(kComparisons));
      return compare({words.data(), i}, {words.data() + i + 1, words.size() - i - 1}, result);
    }
    const int arg = words.empty() ? -1 : find(words[0]);
    if (arg < 0) return bad("'" + std::string(text) + "' does not begin with an argument's name");
    Condition result;
    result.arg = static_cast<uint8_t>(arg);
    if (words.size() == 1) return result;
    const te_fl_arg_desc& desc = *args_[static_cast<size_t>(arg)];
    if (words[1] == "holds") return holds(desc, words, result);
    if (words.size() != 3) return bad("'" + std::string(text) + "' is not a condition");
    if (words[1] == "is") return is(desc, words[2], result);
    if (words[1] == "fits") return fits(desc, words[2], result);
    return bad("'" + std::string(words[1]) + "' is neither 'is' nor a comparison");
  }

  Result<Condition> is(const te_fl_arg_desc& desc, std::string_view list, Condition result) const {
    result.kind = Condition::kIs;
    for (const std::string_view word : split(list, "|")) {
      const bool known = desc.type == TE_FL_ARG_ENUM     ? add_value(desc, word, result)
                         : desc.type == TE_FL_ARG_TENSOR ? add_part(word, result)
                                                         : false;
      if (!known) {
        return bad("'" + std::string(word) +
                   "' is neither a value of an enum nor a tensor's dtype or scaling mode");
      }
    }
    return result;
  }

  Result<Condition> holds(const te_fl_arg_desc& desc, const std::vector<std::string_view>& words,
                          Condition result) const {
    result.kind = Condition::kHolds;
    if (words.size() != 3 && (words.size() != 5 || words[3] != "times"))
      return bad("must be 'A holds B', 'A holds NUMBER' or 'A holds COMMUNICATOR times B'");
    if (words.size() == 5) {
      result.times = static_cast<int8_t>(find(words[2]));
      if (!has_type(result.times, TE_FL_ARG_COMMUNICATOR))
        return bad("'" + std::string(words[2]) + "' is no communicator");
    }
    result.other = static_cast<int8_t>(find(words.back()));
    const bool list = words.size() == 3 && has_type(result.other, TE_FL_ARG_TENSOR_LIST);
    const std::optional<double> number = number_of(words.back());
    const bool count = words.size() == 3 && number.has_value() && *number >= 0 &&
                       *number < 0x1p53 && *number == std::trunc(*number);
    if (count) result.count = static_cast<int64_t>(*number);
    const bool good = desc.type == TE_FL_ARG_TENSOR &&
                      (list || count || has_type(result.other, TE_FL_ARG_TENSOR));
    return good ? Result<Condition>(result)
                : bad("holds takes a tensor, and a tensor, a list of tensors or an integer");
  }

  Result<Condition> fits(const te_fl_arg_desc& desc, std::string_view tensor,
                         Condition result) const {
    result.kind = Condition::kFits;
    result.other = static_cast<int8_t>(find(tensor));
    const bool good = is_scalar(desc) && has_type(result.other, TE_FL_ARG_TENSOR);
    return good ? Result<Condition>(result) : bad("fits takes a number and a tensor");
  }

  static bool add_value(const te_fl_arg_desc& desc, std::string_view word, Condition& to) {
    const std::vector<std::string_view> names = split_words(desc.enum_names);
    for (size_t i = 0; i < std::min<size_t>(names.size(), 64); ++i) {
      if (names[i] != word) continue;
      to.values |= uint64_t{1} << i;
      return true;
    }
    return false;
  }

  static bool add_part(std::string_view word, Condition& to) {
    for (int i = 0; i < TE_FL_DTYPE_COUNT; ++i) {
      if (name(static_cast<DType>(i)) != word) continue;
      to.dtypes |= uint64_t{1} << i;
      return true;
    }
    for (int i = 0; i < TE_FL_SCALING_COUNT; ++i) {
      if (name(static_cast<Scaling>(i)) != word) continue;
      to.scalings |= uint64_t{1} << i;
      return true;
    }
    return false;
  }

  // Returns the number that a word denotes, if it denotes one.
  static std::optional<double> number_of(std::string_view word) {
    const std::string text(word);
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || *end != '\0' || !std::isfinite(number)) return std::nullopt;
    return number;
  }

  Result<RuleOperand> operand(std::string_view word) {
    RuleOperand result;
    if (word.starts_with("sum(") && word.ends_with(')')) {
      const int list = find(word.substr(4, word.size() - 5));
      if (!has_type(list, TE_FL_ARG_I64_LIST))
        return bad("'" + std::string(word) + "' is no sum of a list of integers");
      result.kind = RuleOperand::kSum;
      result.index = static_cast<uint8_t>(list);
      return result;
    }
    if (const int arg = find(word); arg >= 0) {
      if (!is_scalar(*args_[static_cast<size_t>(arg)]))
        return bad("'" + std::string(word) + "' is no number");
      result.kind = RuleOperand::kScalar;
      result.index = static_cast<uint8_t>(arg);
      return result;
    }
    const auto symbol = std::find(symbols_.begin(), symbols_.end(), word);
    if (symbol != symbols_.end()) {
      result.kind = RuleOperand::kExtent;
      result.index = static_cast<uint8_t>(symbol - symbols_.begin());
      extents_ |= uint32_t{1} << result.index;
      return result;
    }
    const std::optional<double> number = number_of(word);
    if (!number.has_value())
      return bad("'" + std::string(word) +
                 "' is neither an argument, a name of a shape rule nor a number");
    result.number = *number;
    return result;
  }

  // Compiles operands joined by + - *.
  Result<Expression> expression(std::span<const std::string_view> words) {
    constexpr std::string_view kJoins[] = {"+", "-", "*"};
    Expression result;
    for (size_t i = 0; i < words.size(); i += 2) {
      TE_FL_ASSIGN_OR_RETURN(RuleOperand next, operand(words[i]));
      if (i > 0) {
        const auto* const join = std::find(std::begin(kJoins), std::end(kJoins), words[i - 1]);
        if (join == std::end(kJoins))
          return bad("'" + std::string(words[i - 1]) + "' is neither + nor - nor *");
        next.join = static_cast<RuleOperand::Join>(join - std::begin(kJoins));
      }
      result.push_back(next);
    }
    if (words.size() % 2 == 0) return bad("a side of a comparison is incomplete");
    if (result.size() > kMaxOperands)
      return bad("a side of a comparison has more than " + std::to_string(kMaxOperands) + " parts");
    return result;
  }

  bool is_whole_operand(const RuleOperand& operand) const {
    if (operand.kind == RuleOperand::kScalar)
      return is_whole(static_cast<te_fl_arg_type>(args_[operand.index]->type));
    return operand.kind != RuleOperand::kNumber ||
           (operand.number == std::trunc(operand.number) && std::fabs(operand.number) < 0x1p53);
  }

  Result<Condition> compare(std::span<const std::string_view> left,
                            std::span<const std::string_view> right, Condition result) {
    if (left.size() == 1 && right.size() == 1) {
      const int a = find(left[0]), b = find(right[0]);
      if (has_type(a, TE_FL_ARG_I64_LIST) && has_type(b, TE_FL_ARG_I64_LIST)) {
        result.kind = Condition::kEach;
        result.arg = static_cast<uint8_t>(a);
        result.other = static_cast<int8_t>(b);
        return result;
      }
    }
    result.kind = Condition::kCompare;
    TE_FL_ASSIGN_OR_RETURN(result.left, expression(left));
    TE_FL_ASSIGN_OR_RETURN(result.right, expression(right));
    bool varies = false;
    for (const Expression* side : {&result.left, &result.right}) {
      for (const RuleOperand& part : *side) {
        result.whole = result.whole && is_whole_operand(part);
        varies = varies || part.kind != RuleOperand::kNumber;
      }
    }
    if (!varies) return bad("a comparison needs an argument or a name of a shape rule");
    if (result.comparison == Condition::kMultipleOf && !result.whole)
      return bad("multiple_of takes integers");
    if (!result.whole && (result.left.size() > 1 || result.right.size() > 1))
      return bad("+ - * take integers");
    return result;
  }

  static constexpr std::string_view kComparisons[] = {
      "<", "<=", ">", ">=", "==", "!=", "multiple_of"};
  const std::vector<const te_fl_arg_desc*>& args_;
  const SymbolNames& symbols_;
  std::string_view rule_;
  uint32_t extents_ = 0;  // the names that the rule uses
};

}  // namespace

Result<std::vector<Constraint>> parse_constraints(std::string_view text,
                                                  const std::vector<const te_fl_arg_desc*>& args,
                                                  const SymbolNames& symbols) {
  std::vector<Constraint> result;
  Parser parser(args, symbols);
  for (const std::string_view rule : split(text, "; ")) {
    if (result.size() == kMaxRules)
      return invalid_argument("more than " + std::to_string(kMaxRules) + " rules");
    TE_FL_ASSIGN_OR_RETURN(Constraint made, parser.rule(rule));
    result.push_back(std::move(made));
  }
  return result;
}

}  // namespace te_fl::core
