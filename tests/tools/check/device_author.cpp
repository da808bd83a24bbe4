// An example plugin as the author of a device writes it: it implements only what the ABI requires
// and fills every struct with designated initialisers. It must compile without a warning
// (check_author_warnings), and te-fl check certifies its device.
#include <cstdlib>
#include <cstring>

#include "te_fl/backend.hpp"
#include "te_fl/ops/activation.h"

namespace {

namespace b = te_fl::backend;

// ---- the device: executes work synchronously, and declares host memory to be device memory

te_fl_status allocate(void*, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* errors) {
  if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
  const size_t bytes = memory->bytes;
  *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*out != nullptr) return TE_FL_OK;
  b::report(errors, "the device is full");
  return TE_FL_OUT_OF_MEMORY;
}
te_fl_status release(void*, void* data, uint32_t, void*, const te_fl_error_sink*) {
  std::free(data);
  return TE_FL_OK;
}
te_fl_status copy(void*, void* to, const void* from, size_t bytes, uint32_t, void*,
                  const te_fl_error_sink*) {
  std::memmove(to, from, bytes);
  return TE_FL_OK;
}
te_fl_status fill(void*, void* to, uint8_t value, size_t bytes, void*, const te_fl_error_sink*) {
  std::memset(to, value, bytes);
  return TE_FL_OK;
}
te_fl_status synchronize(void*, void*, const te_fl_error_sink*) { return TE_FL_OK; }
te_fl_status properties(void*, te_fl_device_props* props, const te_fl_error_sink*) {
  std::strcpy(props->name, "author's");
  return TE_FL_OK;
}

constexpr te_fl_device_api kDeviceApi = {
    .allocate = allocate,
    .free = release,
    .copy = copy,
    .fill = fill,
    .synchronize = synchronize,
    .properties = properties,
};
constexpr te_fl_device_desc kDevice = {
    .device = {.type = TE_FL_DEVICE_EXT, .index = 0},
    .provider = "author",
    .api = &kDeviceApi,
};

// ---- one op of the catalogue and one op of the plugin's own

void relu(const te_fl_context&, const te_fl_relu_args& args) {
  const float* x = b::data<float>(*args.input);
  float* y = b::data<float>(*args.output);
  for (int64_t i = 0, n = b::numel(*args.input); i < n; ++i) y[i] = x[i] < 0 ? 0 : x[i];
}
void compact(const te_fl_context&, const te_fl_relu_args& args) {
  if (!b::is_contiguous(*args.input) || !b::is_contiguous(*args.output))
    b::unsupported("relu takes compact tensors only");
}
constexpr te_fl_op_desc kRelu = {
    .op_name = "relu",
    .impl_id = "vendor.author",
    .kind = TE_FL_KIND_VENDOR,
    .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK,
    .dtypes = TE_FL_BIT(TE_FL_F32),
    .scalings = TE_FL_BIT(TE_FL_SCALING_NONE),
    .device_types = uint64_t{1} << TE_FL_DEVICE_EXT,
    .run = b::run_thunk<te_fl_relu_args, relu>,
    .supports = b::supports_thunk<te_fl_relu_args, compact>,
};

struct ClearArgs {
  uint32_t struct_size = sizeof(ClearArgs);
  const te_fl_tensor* output = nullptr;
};
void clear(const te_fl_context&, const ClearArgs& args) {
  std::memset(b::data<float>(*args.output), 0,
              static_cast<size_t>(b::numel(*args.output)) * sizeof(float));
}
constexpr te_fl_arg_desc kOutput = {
    .type = TE_FL_ARG_TENSOR,
    .role = TE_FL_OUT,
    .offset = offsetof(ClearArgs, output),
    .dtypes = TE_FL_BIT(TE_FL_F32),
    .name = "output",
    .shape = "...",
};
constexpr const te_fl_arg_desc* kArgs[] = {&kOutput};
constexpr te_fl_op_schema kSchema = {
    .args_size = sizeof(ClearArgs),
    .least_args_size = sizeof(ClearArgs),
    .arg_count = 1,
    .args = kArgs,
    .name = "author::clear",
    .summary = "Fills a tensor with zeros.",
    .formula = "output = 0",
    .source = "tests",
};
constexpr te_fl_op_desc kClear = {
    .op_name = "author::clear",
    .impl_id = "vendor.author",
    .kind = TE_FL_KIND_VENDOR,
    .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT,
    .device_types = uint64_t{1} << TE_FL_DEVICE_EXT,
    .run = b::run_thunk<ClearArgs, clear>,
    .schema = &kSchema,
};

// ---- the plugin

te_fl_status create(const te_fl_host_api*, void** instance, const te_fl_error_sink*) {
  static char instance_of_nothing;
  *instance = &instance_of_nothing;
  return TE_FL_OK;
}
te_fl_status devices(void*, uint32_t* count, const te_fl_device_desc* const** list,
                     const te_fl_error_sink*) {
  static constexpr const te_fl_device_desc* kAll[] = {&kDevice};
  *count = 1, *list = kAll;
  return TE_FL_OK;
}
te_fl_status ops(void*, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink*) {
  static constexpr const te_fl_op_desc* kAll[] = {&kRelu, &kClear};
  *count = 2, *list = kAll;
  return TE_FL_OK;
}
te_fl_status diagnose(void*, const te_fl_finding_sink* sink, const te_fl_error_sink*) {
  const te_fl_finding found = {.subject = "driver", .state = "none is needed"};
  sink->write(sink->host, &found);
  return TE_FL_OK;
}

constexpr te_fl_plugin_api kApi = {
    .create = create,
    .devices = devices,
    .ops = ops,
    .destroy = [](void*) {},
    .diagnose = diagnose,
};
constexpr te_fl_plugin_header kHeader = {
    .name = "author",
    .vendor = "author",
    .version = "1.0.0",
    .api = &kApi,
};

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
