#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/status.hpp"

// The shape rules of te_fl_arg_desc, compiled. The grammar stands at te_fl_arg_desc in
// te_fl/plugin.h.
namespace te_fl::core {

inline constexpr int kMaxSymbols = 24;
inline constexpr int kMaxTerms = 8;

struct Term {
  enum Kind : uint8_t {
    kConst,    // value
    kAny,      // any size
    kName,     // symbol
    kTimes,    // value * symbol
    kPlus,     // symbol + value
    kOneOr,    // 1 or symbol
    kProduct,  // product of the leading dimensions
  };
  Kind kind = kAny;
  uint8_t symbol = 0;
  int64_t value = 0;
};

struct Dims {
  bool leading = false;  // begins with "..."
  uint8_t count = 0;     // terms after it
  std::array<Term, kMaxTerms> terms{};
};

struct ShapeRule {
  bool any = true;
  int8_t flag = -1;  // argument that chooses: dims[0] if it is 1, else dims[1]; -1: dims[0] always
  std::array<Dims, 2> dims{};
  bool uses_leading() const noexcept;
  bool uses(Term::Kind kind) const noexcept;
};

// Names of an op's symbols, in order of appearance.
using SymbolNames = std::vector<std::string>;

// `find_flag` gives the index of a bool argument or -1. Errors say which term is wrong and why.
Result<ShapeRule> parse_shape_rule(std::string_view text, SymbolNames& symbols,
                                   const std::function<int(std::string_view)>& find_flag);

}  // namespace te_fl::core
