#pragma once

#include <string>

#include "conformance/case.hpp"

// Comparison of one output with its expectation.
//
// Values. FP32 1e-6 + 5e-6 |v|, FP16 1e-5 + 1e-3 |v|, BF16 1e-5 + 1e-2 |v| (docs/numerics.md).
// Where an FP32 sum of n terms stands behind a value, the case adds `extra` = sum_slack(n, sum
// |terms|): the error of FP32 accumulation in any order grows like sqrt(n) roundings of the partial
// sums, which the sum of magnitudes bounds.
//
// Quantised results of fused ops. Before quantisation the FP32 result may differ from the oracle's
// v by the FP32 tolerance t, so a code is right if it is what some value in [v - t, v + t]
// quantises to: casting is monotone, so that is the interval between two codes. A derived scale is
// right if some amax in the interval of possible amaxes gives it; current scaling's scale must
// follow from the amax that was written bit for bit. With t = 0 (the plain quantisation ops) this
// degenerates, and there the whole image is compared bit by bit instead.
namespace te_fl::conformance {

// Slack for an FP32 sum of n terms whose magnitudes add up to `magnitude`.
double sum_slack(double n, double magnitude);

// Absolute tolerance of element i of an output of this dtype.
double tolerance(const Expectation& expectation, int dtype, size_t i);

// Empty if the output is right, else the first difference (part, index, got, expected, tolerance)
// and how many elements differ: "x[2,5]: got 1, expected 2 (off by 1, tolerance 1e-05); 3 of 231
// elements are wrong".
std::string compare(const Expectation& expectation);

// Makes the expectation wrong in one place (for the self-check); false if it has nothing to be
// wrong about.
bool mutate(Expectation& expectation);

// Changes the last bit of up to 16 codes of a quantised output, one at a time; `noticed` is the
// share that comparison finds. False if there are no codes.
bool corrupt_codes(const Expectation& expectation, double& noticed);

}  // namespace te_fl::conformance
