#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/status.hpp"

// The compiled form of the shape rules of te_fl_arg_desc. The comment of te_fl_arg_desc in
// te_fl/plugin.h has the grammar.
namespace te_fl::core {

inline constexpr int kMaxSymbols = 24;
inline constexpr int kMaxTerms = 8;
inline constexpr int kMaxChoices = 2;  // per rule; allows three alternatives

struct Term {
  enum Kind : uint8_t {
    kConst,    // value
    kAny,      // any size
    kName,     // symbol
    kTimes,    // value * symbol
    kPlus,     // symbol + value
    kOneOr,    // 1 or symbol
    kProduct,  // product of the leading dimensions, divided by value and rounded up
    kCount     // length of the list that is argument `symbol`
  };
  Kind kind = kAny;
  uint8_t symbol = 0;  // kCount: an argument's index
  int64_t value = 0;
};

// The quotient of a kProduct term, rounded up.
constexpr int64_t rounded_up(int64_t product, int64_t divisor) noexcept {
  return product / divisor + (product % divisor != 0 ? 1 : 0);
}

struct Dims {
  bool leading = false;  // begins with "..."
  uint8_t count = 0;     // terms after it
  std::array<Term, kMaxTerms> terms{};
};

// A condition on one argument, written before " : " in a rule: the bool is 1, or the enum has this
// value.
struct Choice {
  uint8_t arg = 0;
  int32_t value = 1;
};

// dims[i] applies if choices[i] is the first choice that holds. The last dims apply if no choice
// holds.
struct ShapeRule {
  bool any = true;
  uint8_t choice_count = 0;
  std::array<Choice, kMaxChoices> choices{};
  std::array<Dims, kMaxChoices + 1> dims{};
  bool uses_leading() const noexcept;
  bool uses(Term::Kind kind) const noexcept;
  uint32_t symbols() const noexcept;  // a mask of the names that the rule binds
  // The dims that apply to a call. `symbol_value(index)` returns the value of a bool or enum
  // argument.
  template <class F>
  const Dims& chosen(F&& symbol_value) const noexcept {
    uint8_t i = 0;
    while (i < choice_count && symbol_value(choices[i].arg) != choices[i].value) ++i;
    return dims[i];
  }
};

// The names of an op's symbols, in the order of their first use.
using SymbolNames = std::vector<std::string>;

// Look-ups of the op's arguments by name, for the parser. Each function returns -1 if there is no
// match.
struct ShapeNames {
  std::function<int(std::string_view)> flag;         // a bool argument
  std::function<int(std::string_view)> enumeration;  // an enum argument
  std::function<int(int, std::string_view)> value;   // the value of an enum argument
  std::function<int(std::string_view)> list;         // a list of tensors
};

// Errors say which term is wrong and why.
Result<ShapeRule> parse_shape_rule(std::string_view text, SymbolNames& symbols,
                                   const ShapeNames& names);

}  // namespace te_fl::core
