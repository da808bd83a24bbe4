#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/op/op_table.hpp"

// Compares the outputs of two implementations of one call, element by element. docs/numerics.md
// defines the tolerance.
namespace te_fl::dispatch {

// An output, or a part of a quantised output, with elements whose difference exceeds the tolerance.
struct OutputDifference {
  std::string name;      // "d", "grads[2]", "y.scale_inv"
  int64_t elements = 0;  // number of elements compared
  int64_t wrong = 0;
  std::vector<int64_t> first;  // index of the first wrong element
  double got = 0;              // value at the worst element, like `wanted` and `allowed`
  double wanted = 0;
  double allowed = 0;  // the largest allowed difference
  bool codes = false;  // got and wanted are decoded FP8 or FP4 values
  bool left = false;   // the wrong elements are unchanged from before the call

  std::string text() const;
};

// The tolerance for a call, computed from its dtypes and extents.
struct Tolerance {
  double of_rms = 0;  // fraction of the output's root mean square
  double floor = 0;   // absolute; for outputs whose terms cancel
  static Tolerance of(const core::CompiledOp& op, const void* args);
  static double relative(int dtype);  // fraction of the element
};

// Distances in bytes from the reference run's buffer to two other buffers with the same layout.
struct CallDistances {
  ptrdiff_t other = 0;   // to the results of the other run
  ptrdiff_t before = 0;  // to the initial contents of both runs
};

// Compares the reference run with the other run and returns all outputs that differ. `args`: the
// arguments of the reference run, in host memory. `compared` receives the number of arrays that
// were compared (outputs, and the arrays of quantised outputs).
std::vector<OutputDifference> compare_outputs(const core::CompiledOp& op, const void* args,
                                              const CallDistances& distances, int& compared);

}  // namespace te_fl::dispatch
