// Checks a quantised argument: the dtype must match the scaling mode, row-wise or column-wise data
// must be present, and the data that is present needs its scales.
#include <algorithm>

#include "core/op/op_finder.hpp"
#include "core/tensor/quant_parts.hpp"

namespace te_fl::core {
namespace {

constexpr uint32_t kQuantFlags = TE_FL_QUANT_COMPUTE_SCALE | TE_FL_QUANT_POW2_SCALE;

bool is_aligned(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Checks that the row-wise and the column-wise data each have the scales that they need, by the
// argument's role.
Problem inspect_parts(const CompiledOp::Impl& op, const Arg& arg, const ArgsView& args,
                      const te_fl_tensor& t, const te_fl_quant& q) noexcept {
  const bool row = t.dl.data != nullptr, column = q.columnwise_data != nullptr;
  const bool second_level = describe(static_cast<Scaling>(q.scaling)).second_level != 0;
  if (q.columnwise_amax != nullptr && !(second_level && column)) return Problem::kColumnwiseAmax;
  if (op.enquiry && !arg.writes()) return Problem::kNone;
  if (q.scaling == TE_FL_SCALING_TENSOR) {
    if (op.reads(arg, args) && q.scale_inv == nullptr) return Problem::kNoScaleInv;
    if (!arg.writes()) return Problem::kNone;
    if (q.scale == nullptr) return Problem::kNoScale;
    const bool derives = (q.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
    const bool inverse = q.scale_inv != nullptr || (!derives && q.columnwise_scale_inv != nullptr);
    if (!inverse) return Problem::kNoScaleInv;
    if (!derives) return Problem::kNone;
    return q.amax == nullptr ? Problem::kNoAmax : Problem::kNone;
  }
  if (row && q.scale_inv == nullptr) return Problem::kNoScaleInv;
  if (column && q.columnwise_scale_inv == nullptr) return Problem::kNoColumnwiseScaleInv;
  if (!second_level || q.amax != nullptr) return Problem::kNone;
  return row || q.columnwise_amax == nullptr ? Problem::kNoAmax : Problem::kNone;
}

}  // namespace

Problem inspect_quant(const CompiledOp::Impl& op, const Arg& arg, const ArgsView& args,
                      const te_fl_tensor& t) noexcept {
  const te_fl_quant& q = *quant_of(t);
  if (q.scaling >= TE_FL_SCALING_COUNT) return Problem::kUnknownScaling;
  if ((q.flags & ~kQuantFlags) != 0) return Problem::kUnknownFlags;
  if ((arg.scalings >> q.scaling & 1) == 0) return Problem::kScaling;
  const int dtype = dtype_index(t.dl.dtype);
  const te_fl_scaling_desc& mode = describe(static_cast<Scaling>(q.scaling));
  if ((mode.dtypes >> dtype & 1) == 0) return Problem::kQuantDType;
  if (arg.is(TE_FL_ARG_QUANT_ONLY)) {
    if (q.scaling == TE_FL_SCALING_TENSOR && q.scale == nullptr) return Problem::kNoScale;
  } else {
    const bool empty = numel_of(t) == 0;
    if (t.dl.data == nullptr && q.columnwise_data == nullptr && !empty &&
        !(op.enquiry && !arg.writes())) {
      return Problem::kNoCopy;
    }
    const Problem problem = inspect_parts(op, arg, args, t, q);
    if (problem != Problem::kNone) return problem;
  }
  for (const QuantPart& part : kQuantParts) {
    const DType element = part.dtype(static_cast<DType>(dtype), static_cast<Scaling>(q.scaling));
    const int width = std::max(bits(element) / 8, 1);
    if (!is_aligned(part.in(q), static_cast<uintptr_t>(width))) return Problem::kPartAlignment;
  }
  return Problem::kNone;
}

}  // namespace te_fl::core
