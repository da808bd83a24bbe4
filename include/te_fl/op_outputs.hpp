// The extents and dtypes of an op's outputs, as the op's schema determines them from the inputs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "te_fl/dtype.hpp"
#include "te_fl/export.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {

// One extent of an output: factor * ceil((p - less) / divisor) + more, where p is the product of
// the extents first, first + 1, ..., first + count - 1 of argument number `arg`. If `arg` is
// negative, the extent is `more`.
struct OutputExtent {
  int arg = -1;
  int first = 0;
  int count = 1;
  int64_t less = 0;
  int64_t divisor = 1;
  int64_t factor = 1;
  int64_t more = 0;
};

struct OutputForm {
  int rank = -1;  // -1: the extents do not follow from the inputs
  std::array<OutputExtent, kMaxRank> extents;
  std::optional<DType> dtype;  // none: the dtype does not follow from the inputs
};

// The shape rules of one op, compiled. Immutable and thread-safe.
class TE_FL_API OutputRules {
 public:
  // Compiles a copy of the schema. Fails with the errors that registering an op with this schema
  // gives.
  static Result<std::unique_ptr<const OutputRules>> compile(const te_fl_op_schema& schema);
  ~OutputRules();

  // Describes the tensor that output number `output` may be in a call. `args` is the op's argument
  // struct; tensors that it lacks are null. Reads the ranks and dtypes of the other tensors, the
  // bools, the enums, and the lengths of lists. The dtype is the only one that the output may have;
  // else that of the argument which te_fl_arg_desc.same_as names; else that of the first plain
  // input of F32, F16 or BF16, if the output may have it.
  OutputForm form(const void* args, uint32_t output) const;
  // The value of an extent of form() for the tensors in `args`.
  int64_t value(const OutputExtent& extent, const void* args) const;

 private:
  struct Impl;
  explicit OutputRules(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl
