#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

// The compiled form of the rules between an op's arguments (te_fl_op_schema.rules). The comment of
// te_fl_op_schema in te_fl/plugin.h has the grammar.
namespace te_fl::core {

inline constexpr size_t kMaxRules = 32;
inline constexpr size_t kMaxAlternatives = 4;

struct Condition {
  enum Kind : uint8_t { kGiven, kIs, kCompare, kHolds };
  enum Comparison : uint8_t { kLess, kAtMost, kMore, kAtLeast, kEqual, kOther, kMultipleOf };
  Kind kind = kGiven;
  Comparison comparison = kEqual;
  uint8_t arg = 0;
  int8_t other = -1;  // kCompare, kHolds: the argument to compare with; -1: `number`
  int8_t times = -1;  // kHolds: the communicator whose size multiplies `other`; -1: none
  double number = 0;
  // For kIs, masks of the allowed values: `values` for an enum, `dtypes` and `scalings` for a
  // tensor.
  uint64_t values = 0, dtypes = 0, scalings = 0;
};

struct Constraint {
  enum Kind : uint8_t { kRequires, kExcludes, kAlways };
  Kind kind = kAlways;
  uint8_t alternatives = 0;  // number of `right`; one must hold (kExcludes: none may)
  Condition left;            // kAlways: the condition that must hold
  std::array<Condition, kMaxAlternatives> right{};
  std::string text;
};

// True if a scalar of this type is an integer.
inline bool is_whole(te_fl_arg_type type) noexcept {
  return type != TE_FL_ARG_F32 && type != TE_FL_ARG_F64;
}

// Compiles the rules of an op. `args` are the descriptions of its arguments, in order. An error
// quotes the rule and says what is wrong with it.
Result<std::vector<Constraint>> parse_constraints(std::string_view text,
                                                  const std::vector<const te_fl_arg_desc*>& args);

}  // namespace te_fl::core
