// A gelu for F32 on the host in which one element in 64 is 0.1 % too large; a training run does not
// reveal it. For tests only; never installed.
#include <cmath>

#include "te_fl/backend.hpp"
#include "te_fl/ops/activation.h"

namespace {

namespace b = te_fl::backend;

void compact_only(const te_fl_context&, const te_fl_gelu_args& args) {
  if (!b::is_contiguous(*args.input) || !b::is_contiguous(*args.output))
    b::unsupported("gelu takes compact tensors only");
}

void gelu(const te_fl_context&, const te_fl_gelu_args& args) {
  const float* x = b::data<float>(*args.input);
  float* y = b::data<float>(*args.output);
  for (int64_t i = 0, n = b::numel(*args.input); i < n; ++i) {
    const double v = x[i];
    const double right = 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
    y[i] = static_cast<float>(i % 64 == 17 ? right * 1.001 : right);
  }
}

const te_fl_op_desc kGelu = {
    .op_name = "gelu",
    .impl_id = "vendor.slightly_wrong",
    .kind = TE_FL_KIND_VENDOR,
    .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK,
    .dtypes = TE_FL_BIT(TE_FL_F32),
    .scalings = TE_FL_BIT(TE_FL_SCALING_NONE),
    .device_types = uint64_t{1} << TE_FL_DEVICE_CPU,
    .run = b::run_thunk<te_fl_gelu_args, gelu>,
    .supports = b::supports_thunk<te_fl_gelu_args, compact_only>,
};
const te_fl_op_desc* const kOps[] = {&kGelu};

te_fl_status create(const te_fl_host_api*, void** instance, const te_fl_error_sink*) {
  static char none;
  *instance = &none;
  return TE_FL_OK;
}
te_fl_status ops(void*, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink*) {
  *count = 1;
  *list = kOps;
  return TE_FL_OK;
}
te_fl_status quiesce(void*, const te_fl_error_sink*) { return TE_FL_OK; }
void destroy(void*) {}

constexpr te_fl_plugin_api kApi = {
    .struct_size = sizeof(te_fl_plugin_api),
    .reserved = 0,
    .create = create,
    .devices = nullptr,
    .ops = ops,
    .quiesce = quiesce,
    .destroy = destroy,
};
constexpr te_fl_plugin_header kHeader = {
    .magic = TE_FL_PLUGIN_MAGIC,
    .struct_size = sizeof(te_fl_plugin_header),
    .abi_major = TE_FL_ABI_MAJOR,
    .abi_minor = TE_FL_ABI_MINOR,
    .min_host_minor = 0,
    .features = 0,
    .name = FAULT_NAME,
    .vendor = "fault",
    .version = "1.2.3",
    .build_id = nullptr,
    .api = &kApi,
    .reserved = {},
};

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
