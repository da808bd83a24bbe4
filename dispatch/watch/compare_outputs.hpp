#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/op/op_table.hpp"

// Compares the outputs of two implementations of one call, element by element. docs/numerics.md
// states the rule.
namespace te_fl::dispatch {

// One output, or one part of a quantised output, in which elements are further apart than the rule
// allows.
struct OutputDifference {
  std::string name;      // "d", "grads[2]", "y.scale_inv"
  int64_t elements = 0;  // compared
  int64_t wrong = 0;
  std::vector<int64_t> first;  // index of the first that is wrong
  double got = 0;              // at the worst, as is the rest
  double wanted = 0;
  double allowed = 0;  // difference
  bool codes = false;  // got and wanted are decoded FP8 or FP4
  bool left = false;   // the wrong ones are as they were before the call

  std::string text() const;
};

// The difference that the rule allows for a call, from its dtypes and extents.
struct Tolerance {
  double of_rms = 0;  // share of the output's root mean square
  double floor = 0;   // for outputs whose terms cancel
  static Tolerance of(const core::CompiledOp& op, const void* args);
  static double relative(int dtype);  // share of the element itself
};

// The call's other memory lies so many bytes behind that of the run that is right.
struct CallDistances {
  ptrdiff_t other = 0;   // the other run has written there
  ptrdiff_t before = 0;  // there lies what both runs began with
};

// `args` are the arguments of the run that is right, in host memory. All outputs that differ.
// `compared`: outputs and parts looked at.
std::vector<OutputDifference> compare_outputs(const core::CompiledOp& op, const void* args,
                                              const CallDistances& distances, int& compared);

}  // namespace te_fl::dispatch
