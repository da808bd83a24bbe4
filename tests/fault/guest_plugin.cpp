// A plugin that only adds ops to another plugin's device, ext:owner:0 (owner_plugin.cpp): relu as
// vendor.guest, with plans and scratch, and as vendor.guest_plain, without either. It reports each
// call to the test, which may block there.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "te_fl/ops/activation.h"
#include "te_fl/plugin.h"

namespace {

using Listener = void (*)(const char*);
std::atomic<Listener> g_listener{nullptr};

void event(const char* text) {
  if (Listener tell = g_listener.load(std::memory_order_relaxed)) tell(text);
}

int64_t elements(const te_fl_tensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.dl.ndim; ++i) n *= t.dl.shape[i];
  return n;
}
float* data(const te_fl_tensor& t) {
  return reinterpret_cast<float*>(static_cast<char*>(t.dl.data) + t.dl.byte_offset);
}

void relu(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] > 0 ? in[i] : 0;
}

te_fl_status plain(void*, const te_fl_context*, const void* raw) {
  event("guest runs");
  const auto& args = *static_cast<const te_fl_relu_args*>(raw);
  relu(data(*args.input), data(*args.output), elements(*args.input));
  event("guest ran");
  return TE_FL_OK;
}

te_fl_status planned(void*, const te_fl_context* ctx, const void* raw) {
  const auto& args = *static_cast<const te_fl_relu_args*>(raw);
  const int64_t n = elements(*args.input);
  if (*static_cast<int64_t*>(ctx->plan) != n) return TE_FL_INTERNAL;
  auto* scratch = static_cast<float*>(ctx->workspace);
  std::memcpy(scratch, data(*args.input), static_cast<size_t>(n) * sizeof(float));
  event("guest runs");
  relu(scratch, data(*args.output), n);
  event("guest ran");
  return TE_FL_OK;
}

te_fl_status workspace(void*, const te_fl_context* ctx, const void*, size_t* bytes) {
  *bytes = static_cast<size_t>(*static_cast<int64_t*>(ctx->plan)) * sizeof(float);
  return TE_FL_OK;
}
te_fl_status prepare(void*, const te_fl_context*, const void* raw, void** plan) {
  event("guest plans");
  *plan = new int64_t(elements(*static_cast<const te_fl_relu_args*>(raw)->input));
  return TE_FL_OK;
}
void destroy_plan(void*, void* plan) {
  event("guest drops a plan");
  delete static_cast<int64_t*>(plan);
}

te_fl_op_desc g_ops[2];
const te_fl_op_desc* const g_list[] = {&g_ops[0], &g_ops[1]};

te_fl_status create(const te_fl_host_api*, void** instance, const te_fl_error_sink*) {
  const char* address = std::getenv("FAULT_EVENTS");
  g_listener = address == nullptr ? nullptr
                                  : reinterpret_cast<Listener>(std::strtoull(address, nullptr, 16));
  for (te_fl_op_desc& op : g_ops) {
    op = te_fl_op_desc{};
    op.op_name = "relu";
    op.kind = TE_FL_KIND_VENDOR;
    op.flags =
        TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT | TE_FL_OP_IN_PLACE_OK | TE_FL_OP_GRAPH_SAFE;
    op.dtypes = TE_FL_BIT(TE_FL_F32);
    op.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
    op.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    op.provider = "owner";
  }
  g_ops[0].impl_id = "vendor.guest";
  g_ops[0].run = planned;
  g_ops[0].workspace = workspace;
  g_ops[0].prepare = prepare;
  g_ops[0].destroy_plan = destroy_plan;
  g_ops[1].impl_id = "vendor.guest_plain";
  g_ops[1].run = plain;
  g_ops[1].priority = 90;
  *instance = g_ops;
  event("guest created");
  return TE_FL_OK;
}

te_fl_status ops(void*, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink*) {
  *count = 2;
  *list = g_list;
  return TE_FL_OK;
}

te_fl_status quiesce(void*, const te_fl_error_sink*) {
  event("guest quiesces");
  return TE_FL_OK;
}

void destroy(void*) { event("guest destroyed"); }

te_fl_plugin_api g_api{};
te_fl_plugin_header g_header{};

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  g_api.struct_size = sizeof g_api;
  g_api.create = create;
  g_api.ops = ops;
  g_api.quiesce = quiesce;
  g_api.destroy = destroy;
  g_header.magic = TE_FL_PLUGIN_MAGIC;
  g_header.struct_size = sizeof g_header;
  g_header.abi_major = TE_FL_ABI_MAJOR;
  g_header.abi_minor = TE_FL_ABI_MINOR;
  g_header.name = "guest";
  g_header.vendor = "fault";
  g_header.version = "1.0";
  g_header.api = &g_api;
  return &g_header;
}
