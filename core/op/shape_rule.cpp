#include "core/op/shape_rule.hpp"

#include <algorithm>
#include <charconv>

namespace te_fl::core {
namespace {

constexpr int64_t kMaxConstant = int64_t{1} << 31;
constexpr std::string_view kProductWord = "@...";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_'; }

bool is_name(std::string_view text) {
  if (text.empty() || text.size() > 32 || !is_letter(text[0]) || text == "_") return false;
  return std::all_of(text.begin(), text.end(), [](char c) { return is_letter(c) || is_digit(c); });
}

Status bad_term(std::string_view term, const std::string& why) {
  return invalid_argument("term '" + std::string(term) + "' of the shape rule: " + why);
}

Result<int64_t> parse_constant(std::string_view term, std::string_view digits) {
  int64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc() || stop != end || value < 0 || value > kMaxConstant) {
    return bad_term(term, "'" + std::string(digits) + "' is not a number from 0 to " +
                              std::to_string(kMaxConstant));
  }
  return value;
}

Result<uint8_t> find_symbol(std::string_view term, std::string_view name, SymbolNames& symbols) {
  if (!is_name(name)) return bad_term(term, "'" + std::string(name) + "' is not a name");
  const auto at = std::find(symbols.begin(), symbols.end(), name);
  if (at != symbols.end()) return static_cast<uint8_t>(at - symbols.begin());
  if (symbols.size() == kMaxSymbols) {
    return bad_term(term, "an op has at most " + std::to_string(kMaxSymbols) + " names");
  }
  symbols.emplace_back(name);
  return static_cast<uint8_t>(symbols.size() - 1);
}

// Parses "@..." and "@.../INT".
Result<Term> parse_product(std::string_view text) {
  Term term{Term::kProduct, 0, 1};
  if (text == kProductWord) return term;
  TE_FL_ASSIGN_OR_RETURN(term.value, parse_constant(text, text.substr(kProductWord.size() + 1)));
  if (term.value == 0) return bad_term(text, "the divisor must not be 0");
  return term;
}

// Parses "#LIST".
Result<Term> parse_count(std::string_view text, const ShapeNames& names) {
  const int list = names.list(text.substr(1));
  if (list < 0) {
    return bad_term(text, "'" + std::string(text.substr(1)) + "' is no list of tensors of the op");
  }
  return Term{Term::kCount, static_cast<uint8_t>(list), 0};
}

Result<Term> parse_term(std::string_view text, SymbolNames& symbols, const ShapeNames& names) {
  Term term;
  if (text == "_") return term;
  if (text == kProductWord || text.starts_with("@.../")) return parse_product(text);
  if (text[0] == '#') return parse_count(text, names);
  if (text == "...") return bad_term(text, "it may only stand first");
  if (text[0] == '?') {
    term.kind = Term::kOneOr;
    TE_FL_ASSIGN_OR_RETURN(term.symbol, find_symbol(text, text.substr(1), symbols));
    return term;
  }
  const size_t star = text.find('*'), plus = text.find('+');
  if (star != std::string_view::npos) {
    term.kind = Term::kTimes;
    TE_FL_ASSIGN_OR_RETURN(term.value, parse_constant(text, text.substr(0, star)));
    if (term.value == 0) return bad_term(text, "the factor must not be 0");
    TE_FL_ASSIGN_OR_RETURN(term.symbol, find_symbol(text, text.substr(star + 1), symbols));
    return term;
  }
  if (plus != std::string_view::npos) {
    term.kind = Term::kPlus;
    TE_FL_ASSIGN_OR_RETURN(term.symbol, find_symbol(text, text.substr(0, plus), symbols));
    TE_FL_ASSIGN_OR_RETURN(term.value, parse_constant(text, text.substr(plus + 1)));
    return term;
  }
  if (is_digit(text[0])) {
    term.kind = Term::kConst;
    TE_FL_ASSIGN_OR_RETURN(term.value, parse_constant(text, text));
    return term;
  }
  term.kind = Term::kName;
  TE_FL_ASSIGN_OR_RETURN(term.symbol, find_symbol(text, text, symbols));
  return term;
}

// Removes and returns the next word; empty at the end.
std::string_view next_word(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  const std::string_view word = text.substr(0, text.find(' '));
  text.remove_prefix(word.size());
  return word;
}

Result<Dims> parse_dims(std::string_view text, SymbolNames& symbols, const ShapeNames& names) {
  Dims dims;
  for (bool first = true;; first = false) {
    const std::string_view word = next_word(text);
    if (word.empty()) return dims;
    if (first && word == "...") {
      dims.leading = true;
      continue;
    }
    if (dims.count == kMaxTerms) {
      return bad_term(word, "a tensor has at most " + std::to_string(kMaxTerms) + " dimensions");
    }
    TE_FL_ASSIGN_OR_RETURN(dims.terms[dims.count], parse_term(word, symbols, names));
    ++dims.count;
  }
}

// Parses "FLAG" or "NAME is VALUE".
Result<Choice> parse_choice(std::string_view text, const ShapeNames& names) {
  const size_t is = text.find(" is ");
  const std::string_view name = text.substr(0, is);
  const int arg = is == std::string_view::npos ? names.flag(name) : names.enumeration(name);
  if (arg < 0) {
    return invalid_argument("the shape rule's '" + std::string(name) + "' is not " +
                            (is == std::string_view::npos ? "a bool" : "an enum") +
                            " argument of the op");
  }
  Choice choice{static_cast<uint8_t>(arg), 1};
  if (is == std::string_view::npos) return choice;
  choice.value = names.value(arg, text.substr(is + 4));
  if (choice.value >= 0) return choice;
  return invalid_argument("the shape rule's '" + std::string(text.substr(is + 4)) +
                          "' is not a value of '" + std::string(name) + "'");
}

}  // namespace

bool ShapeRule::uses_leading() const noexcept {
  for (int d = 0; !any && d <= choice_count; ++d) {
    if (dims[d].leading) return true;
  }
  return false;
}

bool ShapeRule::uses(Term::Kind kind) const noexcept {
  for (int d = 0; !any && d <= choice_count; ++d) {
    for (int i = 0; i < dims[d].count; ++i) {
      if (dims[d].terms[i].kind == kind) return true;
    }
  }
  return false;
}

uint32_t ShapeRule::symbols() const noexcept {
  uint32_t mask = 0;
  for (int d = 0; !any && d <= choice_count; ++d) {
    for (int i = 0; i < dims[d].count; ++i) {
      const Term& term = dims[d].terms[i];
      const bool named = term.kind == Term::kName || term.kind == Term::kTimes ||
                         term.kind == Term::kPlus || term.kind == Term::kOneOr;
      if (named) mask |= uint32_t{1} << term.symbol;
    }
  }
  return mask;
}

Result<ShapeRule> parse_shape_rule(std::string_view text, SymbolNames& symbols,
                                   const ShapeNames& names) {
  ShapeRule rule;
  if (text == "any") return rule;
  rule.any = false;
  for (;;) {
    const size_t question = text.find(" ? ");
    if (question == std::string_view::npos) break;
    if (rule.choice_count == kMaxChoices) {
      return invalid_argument("a shape rule has at most " + std::to_string(kMaxChoices) + " '?'");
    }
    TE_FL_ASSIGN_OR_RETURN(const Choice choice, parse_choice(text.substr(0, question), names));
    text.remove_prefix(question + 3);
    const size_t colon = text.find(" : ");
    if (colon == std::string_view::npos) {
      return invalid_argument("the shape rule's '?' has no ' : '");
    }
    TE_FL_ASSIGN_OR_RETURN(rule.dims[rule.choice_count],
                           parse_dims(text.substr(0, colon), symbols, names));
    rule.choices[rule.choice_count++] = choice;
    text.remove_prefix(colon + 3);
  }
  TE_FL_ASSIGN_OR_RETURN(rule.dims[rule.choice_count], parse_dims(text, symbols, names));
  return rule;
}

}  // namespace te_fl::core
