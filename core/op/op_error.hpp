#pragma once

#include <cstdint>
#include <span>
#include <string_view>

// How the results of two right implementations of an op may differ. The op specification says it
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

}  // namespace te_fl::core
