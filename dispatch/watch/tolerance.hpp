#pragma once

#include <string>

#include "core/op/compiled_op.hpp"
#include "core/op/op_error.hpp"

// By how much right results may differ (docs/numerics.md, "Tolerances while watching").
namespace te_fl::dispatch {

// The tolerance for one output of a call. It follows from how the op's formula rounds
// (core::ErrorKind), from the dtypes and from the extents.
struct Tolerance {
  core::ErrorKind kind = core::ErrorKind::kSum;
  double of_scale = 0;   // fraction of the typical magnitude of the output's elements
  double floor = 0;      // absolute; for outputs whose terms cancel
  double cancelled = 0;  // likewise for sums, but at most 2^-12 of the typical magnitude
  static Tolerance of(const core::CompiledOp& op, const void* args, const te_fl_arg_desc& output,
                      int dtype);
  double relative(int dtype) const;  // fraction of the element
  // The absolute part for elements of this typical magnitude.
  double off(double magnitude) const;
  // The largest share of the codes that may be a neighbouring code.
  double neighbour_share() const;
};
// The tolerance of an output as text for people: "sum, rounded once: ...".
std::string tolerance_text(core::ErrorKind kind);

}  // namespace te_fl::dispatch
