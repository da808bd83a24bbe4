#pragma once

#include <cstdint>
#include <span>
#include <string_view>

// Results of two right implementations of an op may differ. The op specification says how,
// for each output (the key `error` in ops/*.yaml), and TE_FL_VERIFY derives its tolerances from it.
namespace te_fl::core {

enum class ErrorKind : uint8_t {
  kCopy,       // values are copied, converted with one rounding or quantised: equal to the bit
  kElement,    // an element is computed in FP32 from a few inputs, and rounded once
  kSum,        // an element is an FP32 sum over an extent of an input, and rounded once
  kRoundedSum  // a sum of terms that may themselves have been rounded to the inputs' dtype
};

struct OutputError {
  const char *op, *argument;
  ErrorKind kind;
};

// The outputs of the catalogue's ops whose kind is not kSum, sorted by op and argument.
std::span<const OutputError> output_errors();

// The kind of an output. An op outside the catalogue has kRoundedSum, since its formula is unknown.
ErrorKind error_kind(std::string_view op, std::string_view argument);

// An argument of an op.
struct OpArgument {
  const char *op, *argument;
};
// The inputs that are gradients of another op's outputs, sorted. The op's results are linear in
// them.
std::span<const OpArgument> gradient_inputs();
bool is_gradient_input(std::string_view op, std::string_view argument);

// An op that chooses the columns with the largest keys in each row. Where two keys are nearly
// equal, right implementations may choose differently. The members are arguments' names; null if
// the op has none.
struct OutputChoice {
  const char* op;
  const char* keys;     // an output: the values that are compared, except for `bias`
  const char* bias;     // an input that is added to each row of the keys
  const char* values;   // an output: values of the chosen columns, 0 elsewhere
  const char* map;      // an output: 1 for the chosen columns
  const char* bits;     // an output: `map` with one bit per column
  const char* indices;  // an output: the chosen columns
};
std::span<const OutputChoice> output_choices();
const OutputChoice* choice_of(std::string_view op);  // null: the op chooses nothing

}  // namespace te_fl::core
