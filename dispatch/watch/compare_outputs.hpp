#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/op/op_table.hpp"

// Compares the outputs of two implementations of one call, element by element. docs/numerics.md
// defines the tolerance.
namespace te_fl::dispatch {

// An output, or a part of a quantised output, that does not agree.
struct OutputDifference {
  enum class Kind {
    kTooFar,     // elements whose difference exceeds the tolerance
    kUnchanged,  // the wrong elements are as before the call
    kOneStep,    // too large a share of the codes lies on a neighbouring code
    kLeaning     // the elements that differ do so in one direction
  };
  Kind kind = Kind::kTooFar;
  std::string name;            // "d", "grads[2]", "y.scale_inv"
  int64_t elements = 0;        // number of elements compared
  int64_t wrong = 0;           // kLeaning: the larger of the two directions' numbers
  int64_t allowed_count = 0;   // kOneStep, kLeaning
  std::vector<int64_t> first;  // index of the first wrong element
  double got = 0;              // value at the worst element, like `wanted` and `allowed`
  double wanted = 0;
  double allowed = 0;    // the largest allowed difference
  bool codes = false;    // got and wanted are decoded FP8 or FP4 values
  bool to_zero = false;  // kLeaning: towards zero

  std::string text() const;
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
