#pragma once

#include <cstdint>

// Access to single elements of an array of any dtype (TE_FL_F32, ...). `base` is the array's first
// byte, `i` the element's index.
namespace te_fl::dispatch {

double element(int dtype, const char* base, int64_t i);
bool is_float(int dtype);
// True for FP8 and FP4.
bool is_code(int dtype);
// The bits of an element, for an exact comparison.
uint64_t raw(int dtype, const char* base, int64_t i);
// The rank of a code among all values of its format, in ascending order.
int code_ordinal(int dtype, const char* base, int64_t i);
// The spacing of a code format: relative to a normal value, and the smallest absolute one.
struct Steps {
  double relative, least;
};
Steps steps_of(int dtype);
// The relative rounding error of this dtype, in the units of Tolerance.
double unit_of(int dtype);

}  // namespace te_fl::dispatch
