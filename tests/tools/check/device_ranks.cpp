// Two devices and a collective between them. Each stream belongs to one device, as on GPUs, so
// te-fl check must give each rank memory and streams of the rank's own device.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "meeting.hpp"
#include "te_fl/backend/plugin.hpp"

namespace {

namespace b = te_fl::backend;

struct Stream {
  int device;
};
int g_devices[] = {0, 1};

// Called by every function of a device: refuses a stream of another device.
te_fl_status check_stream(void* self, void* stream, const te_fl_error_sink* errors) {
  if (stream == nullptr || static_cast<Stream*>(stream)->device == *static_cast<int*>(self))
    return TE_FL_OK;
  b::report(errors, "the stream belongs to the other device");
  return TE_FL_INVALID_ARGUMENT;
}

te_fl_status allocate(void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* errors) {
  if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
  if (const te_fl_status s = check_stream(self, memory->stream, errors); s != TE_FL_OK) return s;
  *out = std::aligned_alloc(256, (memory->bytes + 255) / 256 * 256);
  return *out != nullptr ? TE_FL_OK : TE_FL_OUT_OF_MEMORY;
}
te_fl_status release(void*, void* data, uint32_t, void*, const te_fl_error_sink*) {
  std::free(data);
  return TE_FL_OK;
}
te_fl_status copy(void* self, void* to, const void* from, size_t bytes, uint32_t, void* stream,
                  const te_fl_error_sink* errors) {
  if (const te_fl_status s = check_stream(self, stream, errors); s != TE_FL_OK) return s;
  std::memmove(to, from, bytes);
  return TE_FL_OK;
}
te_fl_status fill(void* self, void* to, uint8_t value, size_t bytes, void* stream,
                  const te_fl_error_sink* errors) {
  if (const te_fl_status s = check_stream(self, stream, errors); s != TE_FL_OK) return s;
  std::memset(to, value, bytes);
  return TE_FL_OK;
}
te_fl_status synchronize(void* self, void* stream, const te_fl_error_sink* errors) {
  return check_stream(self, stream, errors);
}
te_fl_status create_stream(void* self, void** stream, const te_fl_error_sink*) {
  *stream = new Stream{*static_cast<int*>(self)};
  return TE_FL_OK;
}
te_fl_status properties(void*, te_fl_device_props* props, const te_fl_error_sink*) {
  std::strcpy(props->name, "one of two");
  return TE_FL_OK;
}
te_fl_status destroy_stream(void*, void* stream, const te_fl_error_sink*) {
  delete static_cast<Stream*>(stream);
  return TE_FL_OK;
}

constexpr te_fl_device_api kApi = {
    .allocate = allocate,
    .free = release,
    .copy = copy,
    .fill = fill,
    .create_stream = create_stream,
    .destroy_stream = destroy_stream,
    .synchronize = synchronize,
    .properties = properties,
};
const te_fl_device_desc kDevices[] = {
    {.device = {.type = TE_FL_DEVICE_EXT, .index = 0},
     .provider = "ranked",
     .self = &g_devices[0],
     .api = &kApi},
    {.device = {.type = TE_FL_DEVICE_EXT, .index = 1},
     .provider = "ranked",
     .self = &g_devices[1],
     .api = &kApi},
};

void broadcast(const te_fl_context& ctx, const te_fl_broadcast_args& a) {
  if (ctx.stream != nullptr && static_cast<Stream*>(ctx.stream)->device != a.data->dl.device.index)
    throw b::Error(TE_FL_INVALID_ARGUMENT, "the stream belongs to the other device");
  te_fl_test::broadcast_by_threads(a);
}

constexpr te_fl_comm_desc kComm = {
    .name = "ranked",
    .kind = TE_FL_KIND_VENDOR,
    .device_types = uint64_t{1} << TE_FL_DEVICE_EXT,
    .api = &te_fl_test::kApi,
};

struct Ranked : b::DeviceInstance {
  explicit Ranked(const te_fl_host_api&) {
    te_fl_op_desc op;
    op.op_name = "broadcast", op.impl_id = "vendor.ranked", op.kind = TE_FL_KIND_VENDOR;
    op.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_IN_PLACE_OK;
    op.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    op.run = b::run_thunk<te_fl_broadcast_args, broadcast>;
    op.supports =
        b::supports_thunk<te_fl_broadcast_args, b::check_collective<te_fl_broadcast_args>>;
    ops.push_back(op);
    devices = {&kDevices[0], &kDevices[1]};
  }
  std::vector<const te_fl_comm_desc*> comms = {&kComm};
};

constexpr te_fl_plugin_header kHeader = b::plugin_header<Ranked>("ranked", "ranked", "1.0.0");

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
