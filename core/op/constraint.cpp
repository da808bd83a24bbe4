#include "core/op/constraint.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
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

std::vector<std::string_view> words_of(std::string_view text) {
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
  explicit Parser(const std::vector<const te_fl_arg_desc*>& args) : args_(args) {}

  Result<Constraint> rule(std::string_view text) {
    rule_ = text;
    Constraint result;
    result.text = text;
    for (const auto& [word, kind] : {std::pair(" requires ", Constraint::kRequires),
                                     std::pair(" excludes ", Constraint::kExcludes)}) {
      const size_t at = text.find(word);
      if (at == std::string_view::npos) continue;
      result.kind = kind;
      TE_FL_ASSIGN_OR_RETURN(result.left, condition(text.substr(0, at)));
      const std::string_view right = text.substr(at + std::string_view(word).size());
      for (const std::string_view part : split(right, " or ")) {
        if (result.alternatives == kMaxAlternatives) return bad("has too many alternatives");
        TE_FL_ASSIGN_OR_RETURN(result.right[result.alternatives], condition(part));
        ++result.alternatives;
      }
      if (kind == Constraint::kExcludes && result.alternatives > 1)
        return bad("excludes takes one condition");
      return result;
    }
    TE_FL_ASSIGN_OR_RETURN(result.left, condition(text));
    if (result.left.kind == Condition::kGiven)
      return bad("must be 'A requires B', 'A excludes B', 'A is B' or a comparison");
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

  Result<Condition> condition(std::string_view text) const {
    const std::vector<std::string_view> words = words_of(text);
    const int arg = words.empty() ? -1 : find(words[0]);
    if (arg < 0) return bad("'" + std::string(text) + "' does not begin with an argument's name");
    Condition result;
    result.arg = static_cast<uint8_t>(arg);
    if (words.size() == 1) return result;
    const te_fl_arg_desc& desc = *args_[static_cast<size_t>(arg)];
    if (words[1] == "holds") return holds(desc, words, result);
    if (words.size() != 3) return bad("'" + std::string(text) + "' is not a condition");
    return words[1] == "is" ? is(desc, words[2], result) : compare(desc, words, result);
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
      return bad("must be 'A holds B' or 'A holds COMMUNICATOR times B'");
    if (words.size() == 5) {
      result.times = static_cast<int8_t>(find(words[2]));
      if (result.times < 0 ||
          args_[static_cast<size_t>(result.times)]->type != TE_FL_ARG_COMMUNICATOR)
        return bad("'" + std::string(words[2]) + "' is no communicator");
    }
    result.other = static_cast<int8_t>(find(words.back()));
    const bool tensors = desc.type == TE_FL_ARG_TENSOR && result.other >= 0 &&
                         args_[static_cast<size_t>(result.other)]->type == TE_FL_ARG_TENSOR;
    return tensors ? Result<Condition>(result) : bad("holds takes two tensors");
  }

  static bool add_value(const te_fl_arg_desc& desc, std::string_view word, Condition& to) {
    const std::vector<std::string_view> names = words_of(desc.enum_names);
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

  Result<Condition> compare(const te_fl_arg_desc& desc, const std::vector<std::string_view>& words,
                            Condition result) const {
    constexpr std::string_view kComparisons[] = {"<", "<=", ">", ">=", "==", "!=", "multiple_of"};
    result.kind = Condition::kCompare;
    const auto* const found = std::find(std::begin(kComparisons), std::end(kComparisons), words[1]);
    if (found == std::end(kComparisons))
      return bad("'" + std::string(words[1]) + "' is neither 'is' nor a comparison");
    result.comparison = static_cast<Condition::Comparison>(found - std::begin(kComparisons));
    result.other = static_cast<int8_t>(find(words[2]));
    bool whole = is_whole(static_cast<te_fl_arg_type>(desc.type));
    if (result.other < 0) {
      const std::string number(words[2]);
      char* end = nullptr;
      result.number = std::strtod(number.c_str(), &end);
      if (end == number.c_str() || *end != '\0' || !std::isfinite(result.number))
        return bad("'" + number + "' is neither an argument nor a number");
      whole = whole && result.number == std::trunc(result.number);
    } else {
      const te_fl_arg_desc& other = *args_[static_cast<size_t>(result.other)];
      if (!is_scalar(other)) return bad("'" + std::string(other.name) + "' is no number");
      whole = whole && is_whole(static_cast<te_fl_arg_type>(other.type));
    }
    if (!is_scalar(desc)) return bad("'" + std::string(desc.name) + "' is no number");
    if (result.comparison == Condition::kMultipleOf && !whole)
      return bad("multiple_of takes integers");
    return result;
  }

  const std::vector<const te_fl_arg_desc*>& args_;
  std::string_view rule_;
};

}  // namespace

Result<std::vector<Constraint>> parse_constraints(std::string_view text,
                                                  const std::vector<const te_fl_arg_desc*>& args) {
  std::vector<Constraint> result;
  Parser parser(args);
  for (const std::string_view rule : split(text, "; ")) {
    if (result.size() == kMaxRules)
      return invalid_argument("more than " + std::to_string(kMaxRules) + " rules");
    TE_FL_ASSIGN_OR_RETURN(Constraint made, parser.rule(rule));
    result.push_back(std::move(made));
  }
  return result;
}

}  // namespace te_fl::core
