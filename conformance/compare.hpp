#pragma once

#include <string>

#include "conformance/case.hpp"

// Compares one output with its expectation.
//
// Unquantised outputs have these tolerances (docs/numerics.md), where v is the expected value: FP32
// 1e-6 + 5e-6 |v|, FP16 1e-5 + 1e-3 |v|, BF16 1e-5 + 1e-2 |v|. If an element results from an FP32
// sum of n terms, the case sets `extra` to sum_tolerance(n, sum |terms|): the error of FP32
// accumulation in any order grows like sqrt(n) roundings of the partial sums, which the sum of
// magnitudes bounds.
//
// Quantised results of fused ops: before quantisation the FP32 result may differ from the oracle's
// v by the FP32 tolerance t. A code is therefore correct if some value in [v - t, v + t] quantises
// to it; as quantisation is monotone, that is the interval between two codes. A computed scale is
// correct if some amax in the interval of possible amaxes gives it; the scale of current scaling
// must follow bit for bit from the amax that the op wrote. For the plain quantisation ops t is 0,
// and all bytes of the result are compared exactly.
namespace te_fl::conformance {

// The absolute error tolerance for an FP32 sum of n terms whose magnitudes sum to `magnitude`.
double sum_tolerance(double n, double magnitude);

// The absolute tolerance for element i of an output of this dtype.
double tolerance(const Expectation& expectation, int dtype, size_t i);

// Returns an empty text if the output is correct. Otherwise the first difference (part, index,
// value, expectation, tolerance) and the number of differences: "x[2,5]: got 1, expected 2 (off by
// 1, tolerance 1e-05); 3 of 231 elements are wrong".
std::string compare(const Expectation& expectation);

// Makes the expectation wrong in one place, for the self-check. False if it has nothing that could
// be changed.
bool mutate(Expectation& expectation);

// Changes the last bit of up to 16 codes of a quantised output, one at a time. `noticed` receives
// the fraction that the comparison detects. False if there are no codes.
bool corrupt_codes(const Expectation& expectation, double& noticed);

}  // namespace te_fl::conformance
