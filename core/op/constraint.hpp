#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/op/shape_rule.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

// The compiled form of the rules between an op's arguments (te_fl_op_schema.rules). The comment of
// te_fl_op_schema in te_fl/plugin.h has the grammar.
namespace te_fl::core {

inline constexpr size_t kMaxRules = 32;
inline constexpr size_t kMaxAlternatives = 4;
inline constexpr size_t kMaxOperands = 6;  // of one side of a comparison

// One factor of a sum of products.
struct RuleOperand {
  enum Kind : uint8_t {
    kNumber,  // `number`
    kScalar,  // the scalar argument `index`
    kExtent,  // the name `index` of the op's shape rules
    kSum      // the sum of argument `index`, a list of integers
  };
  enum Join : uint8_t { kPlus, kMinus, kTimes };
  Kind kind = kNumber;
  Join join = kPlus;  // joins the operand to those before it
  uint8_t index = 0;
  double number = 0;
};
using Expression = std::vector<RuleOperand>;

struct Condition {
  enum Kind : uint8_t {
    kGiven,    // `arg` is given
    kIs,       // `arg` has one of the values, dtypes or scaling modes
    kCompare,  // `left` compares to `right`
    kEach,     // each element of `arg` compares to that of `other`; both are lists of integers
    kHolds,    // tensor `arg` has as many elements as `other`, or `count` elements
    kFits      // the dtype of tensor `other` has the number `arg`
  };
  enum Comparison : uint8_t { kLess, kAtMost, kMore, kAtLeast, kEqual, kOther, kMultipleOf };
  Kind kind = kGiven;
  Comparison comparison = kEqual;
  uint8_t arg = 0;
  int8_t other = -1;  // kHolds: -1 for `count`
  int8_t times = -1;  // kHolds: the communicator whose size multiplies `other`; -1: none
  bool whole = true;  // kCompare: compares integers; false: one real number with another
  int64_t count = 0;
  Expression left, right;
  // For kIs, masks of the allowed values: `values` for an enum, `dtypes` and `scalings` for a
  // tensor.
  uint64_t values = 0, dtypes = 0, scalings = 0;
};

struct Constraint {
  enum Kind : uint8_t { kRequires, kExcludes, kAlways };
  Kind kind = kAlways;
  // Number of `right`. kRequires: one of them must hold; kExcludes: none may; kAlways: one of them
  // or `left` must hold.
  uint8_t alternatives = 0;
  Condition left;
  std::array<Condition, kMaxAlternatives> right{};
  uint32_t extents = 0;  // mask of the shape rules' names that the rule uses
  std::string text;
};
static_assert(kMaxSymbols <= 32, "Constraint::extents has a bit for each name");

// True if a scalar of this type is an integer.
inline bool is_whole(te_fl_arg_type type) noexcept {
  return type != TE_FL_ARG_F32 && type != TE_FL_ARG_F64;
}

// Compiles the rules of an op. `args` are the descriptions of its arguments, in order; `symbols`
// are the names of its shape rules. An error quotes the rule and says what is wrong with it.
Result<std::vector<Constraint>> parse_constraints(std::string_view text,
                                                  const std::vector<const te_fl_arg_desc*>& args,
                                                  const SymbolNames& symbols);

}  // namespace te_fl::core
