#include "dispatch/watch/tolerance.hpp"

#include <algorithm>
#include <cmath>

#include "dispatch/watch/elements.hpp"
#include "dispatch/watch/output_walk.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/watch.hpp"

namespace te_fl::dispatch {

double Tolerance::relative(int dtype) const {
  if (kind == core::ErrorKind::kCopy) return 0;
  switch (dtype) {  // two steps of the 16-bit formats
    case TE_FL_F16:
      return 2e-3;
    case TE_FL_BF16:
      return 0x1p-6;
    default:
      return 1e-5;
  }
}

double Tolerance::neighbour_share() const {
  switch (kind) {
    case core::ErrorKind::kCopy:
      return 0;
    case core::ErrorKind::kElement:
      return 0x1p-4;
    case core::ErrorKind::kSum:
      return 0x1p-2;
    default:
      return 0x1p-1;
  }
}

Tolerance Tolerance::of(const core::CompiledOp& op, const void* args, const te_fl_arg_desc& output,
                        int dtype) {
  Tolerance t;
  t.kind = core::error_kind(op.schema().name, output.name);
  if (t.kind == core::ErrorKind::kCopy) return t;
  double coarsest = 0x1p-24;
  bool codes = false;
  int64_t length = 1;
  double largest = 0, second = 0;  // root mean squares of the inputs that are no gradients
  double gradient = 0;
  bool backward = false;
  for_each_tensor(
      op, args, [&](const te_fl_arg_desc& arg, const std::string&, const te_fl_tensor& tensor) {
        const int type = dtype_index(tensor.dl.dtype);
        if (type != kInvalidDType && is_float(type)) coarsest = std::max(coarsest, unit_of(type));
        const std::span<const int64_t> shape(tensor.dl.shape, static_cast<size_t>(tensor.dl.ndim));
        const auto [m, k] = core::logical_matrix(shape);
        length = std::max({length, m, k});
        codes = codes || (arg.role != TE_FL_OUT && is_code(type));
        if (arg.role == TE_FL_OUT || type > TE_FL_BF16 || tensor.dl.data == nullptr) return;
        const char* base = static_cast<const char*>(tensor.dl.data) + tensor.dl.byte_offset;
        const double size =
            rms(plan_walk(tensor), base, huge_from(type),
                [&](const char* at, int64_t, int64_t i) { return element(type, at, i); });
        if (core::is_gradient_input(op.schema().name, arg.name)) {
          backward = true;
          gradient = std::max(gradient, size);
          return;
        }
        second = std::max(second, std::min(largest, size));
        largest = std::max(largest, size);
      });
  // Results are linear in the gradients, so the error of terms that cancel is a fraction of these.
  if (!backward) gradient = 1;
  t.floor = 0x1p-20 * gradient;
  if (!backward) t.floor *= std::min(largest, 1.0);
  if (!backward && t.kind == core::ErrorKind::kSum && second > 0) t.floor *= std::min(second, 1.0);
  const double sum = 0x1p-21 * std::sqrt(static_cast<double>(length));
  const bool narrow = dtype == TE_FL_F16 || dtype == TE_FL_BF16;
  if (t.kind == core::ErrorKind::kElement) t.of_scale = 0x1p-17;
  // The sum of terms that cancel has the error of the terms, whose size the inputs tell.
  if (t.kind != core::ErrorKind::kElement)
    t.cancelled = 2 * sum * gradient * largest * std::max(largest, 1.0) * std::max(second, 1.0);
  if (t.kind == core::ErrorKind::kSum)
    // Tensor cores keep 14 bits of the sums of FP8 products, whose largest terms may cancel.
    t.of_scale = sum + (narrow ? unit_of(dtype) : 0) + (codes ? 0x1p-6 : 0);
  if (t.kind == core::ErrorKind::kRoundedSum) {
    t.of_scale = sum + (coarsest > 0x1p-8 ? 2 : 8) * coarsest;
    t.floor *= 4 * std::clamp(largest, 1.0, 8.0);
  }
  return t;
}

double Tolerance::off(double magnitude) const {
  return of_scale * magnitude + floor + std::min(cancelled, 0x1p-12 * magnitude);
}

std::string tolerance_text(core::ErrorKind kind) {
  switch (kind) {
    case core::ErrorKind::kCopy:
      return "copied or quantised, equal to the bit";
    case core::ErrorKind::kElement:
      return "computed by element in FP32 and rounded once: 2 steps of F16 and BF16, 1e-5 of F32; "
             "1 in 16 codes may be a neighbour";
    case core::ErrorKind::kSum:
      return "an FP32 sum, rounded once: 2 steps of F16 and BF16, 1e-5 of F32, and 2^-21 sqrt(L) "
             "of the typical element for the sum's length L; 1 in 4 codes may be a neighbour";
    default:
      return "a sum of terms in the inputs' dtype: as a sum, and 8 rounding errors of that dtype "
             "(2 "
             "of FP8), of the typical element; 1 in 2 codes may be a neighbour";
  }
}

}  // namespace te_fl::dispatch

namespace te_fl {

Result<std::vector<std::string>> verify_tolerances(const std::string& op) {
  OpManager::instance();  // loads the built-in backends and the plugins
  TE_FL_ASSIGN_OR_RETURN(const OpId id, OpRegistry::instance().find(op));
  const te_fl_op_schema& schema = *OpRegistry::instance().schema(id);
  std::vector<std::string> out;
  if (core::class_of(schema) != core::OpClass::kCompute) return out;
  for (uint32_t a = 0; a < schema.arg_count; ++a) {
    const te_fl_arg_desc& arg = *schema.args[a];
    const bool tensor = arg.type == TE_FL_ARG_TENSOR || arg.type == TE_FL_ARG_TENSOR_LIST;
    if (!tensor || arg.role == TE_FL_IN || (arg.flags & TE_FL_ARG_OPAQUE) != 0) continue;
    constexpr uint64_t kFloats = TE_FL_BIT(TE_FL_F8E8M0 + 1) - 1;
    const bool counted = arg.dtypes != 0 && (arg.dtypes & kFloats) == 0;
    out.push_back(std::string(arg.name) + ": " +
                  (counted ? std::string("integers, equal")
                           : dispatch::tolerance_text(core::error_kind(schema.name, arg.name))));
  }
  return out;
}

}  // namespace te_fl
