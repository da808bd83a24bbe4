// A plugin with its own versions of a shared library, a static library and spdlog. Its
// implementations of fault::scale multiply by the numbers that its own versions return.
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <sstream>

#include "fault_ops.hpp"

extern "C" int fault_shared_version();
extern "C" int fault_static_version();

namespace {

struct Instance {
  std::ostringstream lines;
  std::shared_ptr<spdlog::logger> logger;
};

// Registers a logger under a fixed name in spdlog's registry: if both plugins shared one spdlog,
// the second create() would throw.
te_fl_status create(const te_fl_host_api*, void** out, const te_fl_error_sink*) {
  auto* self = new Instance;
  auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(self->lines, true);
  self->logger = std::make_shared<spdlog::logger>("vendor", sink);
  self->logger->set_pattern("%v");
  spdlog::register_logger(self->logger);
  *out = self;
  return TE_FL_OK;
}

te_fl_status scale(void* raw, const te_fl_context*, const void* raw_args) {
  auto* self = static_cast<Instance*>(raw);
  const auto* args = static_cast<const fault::ScaleArgs*>(raw_args);
  self->lines.str("");
  spdlog::get("vendor")->info("{}", fault_static_version());
  const auto* in = static_cast<const float*>(args->input->dl.data);
  auto* out = static_cast<float*>(args->output->dl.data);
  // out[0] shows the shared library's number, out[1] the static library's, passed through spdlog.
  out[0] = in[0] * static_cast<float>(fault_shared_version());
  out[1] = in[1] * std::stof(self->lines.str());
  return TE_FL_OK;
}

te_fl_op_desc g_op;
const te_fl_op_desc* const g_ops[] = {&g_op};

te_fl_status ops(void* self, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink*) {
  g_op.op_name = "fault::scale";
  g_op.impl_id = "vendor." FAULT_NAME;
  g_op.kind = TE_FL_KIND_VENDOR;
  g_op.later_args = "bias";
  g_op.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  g_op.self = self;
  g_op.run = scale;
  g_op.schema = &fault::kScale;
  *count = 1;
  *list = g_ops;
  return TE_FL_OK;
}

void destroy(void* raw) {
  spdlog::drop("vendor");
  delete static_cast<Instance*>(raw);
}

constexpr te_fl_plugin_api make_api() {
  te_fl_plugin_api api{};
  api.struct_size = sizeof api;
  api.create = create;
  api.ops = ops;
  api.destroy = destroy;
  return api;
}
constexpr te_fl_plugin_api kApi = make_api();

constexpr te_fl_plugin_header make_header() {
  te_fl_plugin_header h{};
  h.magic = TE_FL_PLUGIN_MAGIC;
  h.struct_size = sizeof h;
  h.abi_major = TE_FL_ABI_MAJOR;
  h.abi_minor = TE_FL_ABI_MINOR;
  h.name = FAULT_NAME;
  h.vendor = FAULT_NAME;
  h.version = "1";
  h.api = &kApi;
  return h;
}
constexpr te_fl_plugin_header kHeader = make_header();

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
