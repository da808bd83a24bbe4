#pragma once

#include <cstdint>

// Access to single elements of an array of any dtype (TE_FL_F32, ...). `base` is the array's first
// byte, `i` the element's index.
namespace te_fl::dispatch {

double element(int dtype, const char* base, int64_t i);
bool is_float(int dtype);
// True if the dtype is FP8 or FP4.
bool is_code(int dtype);
// The bits of an element, for an exact comparison.
uint64_t raw(int dtype, const char* base, int64_t i);
// The index of a code when all values of its format are sorted in ascending order.
int code_ordinal(int dtype, const char* base, int64_t i);
// The spacing of adjacent values in an FP8 or FP4 format: relative to a normal value, and the
// smallest absolute spacing.
struct Steps {
  double relative, least;
};
Steps steps_of(int dtype);
// The relative rounding error of this dtype, a fraction as in Tolerance.
double unit_of(int dtype);

}  // namespace te_fl::dispatch
