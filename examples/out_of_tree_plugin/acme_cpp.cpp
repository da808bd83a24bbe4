// A vendor plugin in C++ with the helper headers: swiglu on host memory in FP32, and a custom op.
#include <cmath>
#include <cstddef>

#include "te_fl/backend.hpp"
#include "te_fl/backend/plugin.hpp"
#include "te_fl/ops/activation.h"

namespace {

namespace b = te_fl::backend;

void check_compact(const te_fl_context&, const te_fl_swiglu_args& args) {
  if (!b::is_contiguous(*args.input) || !b::is_contiguous(*args.output))
    b::unsupported("swiglu takes compact tensors only");
}

void swiglu(const te_fl_context&, const te_fl_swiglu_args& args) {
  const auto [rows, cols] = b::as_matrix(*args.output);
  const float* x = b::data<float>(*args.input);
  float* y = b::data<float>(*args.output);
  for (int64_t r = 0; r < rows; ++r, x += 2 * cols, y += cols) {
    for (int64_t c = 0; c < cols; ++c) y[c] = x[c] / (1 + std::exp(-x[c])) * x[cols + c];
  }
}

// acme::scale, an op outside the catalogue.
struct scale_args {
  uint32_t struct_size = sizeof(scale_args);
  const te_fl_tensor* x = nullptr;
  const te_fl_tensor* y = nullptr;
};
constexpr te_fl_arg_desc argument(const char* name, uint8_t role, uint32_t offset) {
  te_fl_arg_desc d{};
  d.struct_size = sizeof d;
  d.type = TE_FL_ARG_TENSOR;
  d.role = role;
  d.offset = offset;
  d.dtypes = TE_FL_BIT(TE_FL_F32);
  d.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
  d.name = name;
  d.shape = "...";
  return d;
}
constexpr te_fl_arg_desc kX = argument("x", TE_FL_IN, offsetof(scale_args, x));
constexpr te_fl_arg_desc kY = argument("y", TE_FL_OUT, offsetof(scale_args, y));
constexpr const te_fl_arg_desc* kArgs[] = {&kX, &kY};
constexpr te_fl_op_schema kSchema = {
    .args_size = sizeof(scale_args),
    .least_args_size = sizeof(scale_args),
    .arg_count = 2,
    .args = kArgs,
    .name = "acme::twice",
    .summary = "Doubles every element.",
    .formula = "y = 2 x",
    .source = "acme",
};

void twice(const te_fl_context&, const scale_args& args) {
  if (!b::is_contiguous(*args.x) || !b::is_contiguous(*args.y))
    b::unsupported("acme::twice takes compact tensors only");
  for (int64_t i = 0, n = b::numel(*args.x); i < n; ++i)
    b::data<float>(*args.y)[i] = 2 * b::data<float>(*args.x)[i];
}

constexpr uint64_t kHost = uint64_t{1} << TE_FL_DEVICE_CPU;
constexpr te_fl_op_desc kSwiglu = {
    .op_name = "swiglu",
    .impl_id = "vendor.acme_cpp",
    .kind = TE_FL_KIND_VENDOR,
    .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC,
    .dtypes = TE_FL_BIT(TE_FL_F32),
    .scalings = TE_FL_BIT(TE_FL_SCALING_NONE),
    .device_types = kHost,
    .run = b::run_thunk<te_fl_swiglu_args, swiglu>,
    .supports = b::supports_thunk<te_fl_swiglu_args, check_compact>,
};
constexpr te_fl_op_desc kTwice = {
    .op_name = "acme::twice",
    .impl_id = "vendor.acme_cpp",
    .kind = TE_FL_KIND_VENDOR,
    .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_STATIC_SUPPORT,
    .device_types = kHost,
    .run = b::run_thunk<scale_args, twice>,
    .schema = &kSchema,
};

struct Acme : b::Instance {
  explicit Acme(const te_fl_host_api&) { ops = {kSwiglu, kTwice}; }
};
constexpr te_fl_plugin_header kHeader = b::plugin_header<Acme>("acme_cpp", "acme", "1.0.0");

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
