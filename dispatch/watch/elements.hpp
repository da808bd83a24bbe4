#pragma once

#include <cstdint>

// The elements of an array, one by one, whatever their dtype (TE_FL_F32, ...). `base` is the
// array's first byte, `i` counts elements.
namespace te_fl::dispatch {

double element(int dtype, const char* base, int64_t i);
bool is_float(int dtype);
// FP8 or FP4.
bool is_code(int dtype);
// Bits of an element that is compared as it stands.
uint64_t raw(int dtype, const char* base, int64_t i);
// The place of a code among all values of its format in ascending order.
int rank_of(int dtype, const char* base, int64_t i);
// The steps of a format of codes: of a normal value relative to it, and the smallest there is.
struct Steps {
  double relative, least;
};
Steps steps_of(int dtype);
// The relative error that rounding into this dtype adds to a result, as Tolerance counts it.
double unit_of(int dtype);

}  // namespace te_fl::dispatch
