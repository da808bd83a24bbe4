// A plugin that provides a device, ext:owner:0, and no ops. Its memory is host memory, so that
// another plugin's ops (guest_plugin.cpp) can work on it. Every function first reports its name to
// the test (FAULT_EVENTS holds the address of the test's function), which may block or throw there.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "te_fl/plugin.h"

namespace {

using Listener = void (*)(const char*);
std::atomic<Listener> g_listener{nullptr};

void event(const char* text) {
  if (Listener tell = g_listener.load(std::memory_order_relaxed)) tell(text);
}

struct Owner {
  std::atomic<int64_t> blocks{0}, handles{0};  // memory blocks; streams, events and graphs
  te_fl_device_api api{};
  te_fl_device_desc desc{};
  const te_fl_device_desc* list[1] = {&desc};
};
Owner& of(void* self) { return *static_cast<Owner*>(self); }

te_fl_status give_handle(void* self, void** out) {
  *out = std::calloc(1, sizeof(uint64_t));
  of(self).handles.fetch_add(1);
  return TE_FL_OK;
}
te_fl_status take_handle(void* self, void* handle) {
  std::free(handle);
  of(self).handles.fetch_sub(1);
  return TE_FL_OK;
}
te_fl_status give_block(void* self, size_t bytes, void** out) {
  *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  of(self).blocks.fetch_add(1);
  return TE_FL_OK;
}
te_fl_status take_block(void* self, void* data) {
  std::free(data);
  of(self).blocks.fetch_sub(1);
  return TE_FL_OK;
}

using Errors = const te_fl_error_sink*;

void fill_api(te_fl_device_api& api) {
  api.struct_size = sizeof api;
  api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out, Errors) {
    event(memory->kind == TE_FL_MEMORY_PINNED ? "allocate_pinned" : "allocate");
    return give_block(self, memory->bytes, out);
  };
  api.free = [](void* self, void* data, uint32_t kind, void*, Errors) {
    take_block(self, data);
    event(kind == TE_FL_MEMORY_PINNED ? "free_pinned" : "free");
    return te_fl_status{TE_FL_OK};
  };
  api.copy = [](void*, void* dst, const void* src, size_t bytes, uint32_t, void*, Errors) {
    event("copy");
    std::memcpy(dst, src, bytes);
    return te_fl_status{TE_FL_OK};
  };
  api.fill = [](void*, void* dst, uint8_t value, size_t bytes, void*, Errors) {
    event("fill");
    std::memset(dst, value, bytes);
    return te_fl_status{TE_FL_OK};
  };
  api.create_stream = [](void* self, void** stream, Errors) {
    event("create_stream");
    return give_handle(self, stream);
  };
  api.destroy_stream = [](void* self, void* stream, Errors) {
    take_handle(self, stream);
    event("destroy_stream");
    return te_fl_status{TE_FL_OK};
  };
  api.synchronize = [](void*, void*, Errors) {
    event("synchronize");
    return te_fl_status{TE_FL_OK};
  };
  api.create_event = [](void* self, uint32_t, void** made, Errors) {
    event("create_event");
    return give_handle(self, made);
  };
  api.destroy_event = [](void* self, void* made, Errors) {
    take_handle(self, made);
    event("destroy_event");
    return te_fl_status{TE_FL_OK};
  };
  api.record_event = [](void*, void*, void*, Errors) {
    event("record_event");
    return te_fl_status{TE_FL_OK};
  };
  api.wait_event = [](void*, void*, void*, Errors) {
    event("wait_event");
    return te_fl_status{TE_FL_OK};
  };
  api.synchronize_event = [](void*, void*, Errors) {
    event("synchronize_event");
    return te_fl_status{TE_FL_OK};
  };
  api.is_capturing = [](void*, void*, int32_t* capturing, Errors) {
    *capturing = 0;
    event("is_capturing");
    return te_fl_status{TE_FL_OK};
  };
  api.properties = [](void*, te_fl_device_props* props, Errors) {
    event("properties");
    std::strcpy(props->name, "owner");
    return te_fl_status{TE_FL_OK};
  };
  // Graphs are empty.
  api.begin_capture = [](void*, void*, Errors) {
    event("begin_capture");
    return te_fl_status{TE_FL_OK};
  };
  api.end_capture = [](void* self, void*, void** graph, Errors) {
    event("end_capture");
    return give_handle(self, graph);
  };
  api.launch_graph = [](void*, void*, void*, Errors) {
    event("launch_graph");
    return te_fl_status{TE_FL_OK};
  };
  api.destroy_graph = [](void* self, void* graph, Errors) {
    take_handle(self, graph);
    event("destroy_graph");
    return te_fl_status{TE_FL_OK};
  };
  api.check_pointer = [](void*, const void*, size_t, Errors) {
    event("check_pointer");
    return te_fl_status{TE_FL_OK};
  };
  api.check_stream = [](void*, void*, Errors) {
    event("check_stream");
    return te_fl_status{TE_FL_OK};
  };
}

te_fl_status create(const te_fl_host_api*, void** instance, Errors) {
  const char* address = std::getenv("FAULT_EVENTS");
  g_listener = address == nullptr ? nullptr
                                  : reinterpret_cast<Listener>(std::strtoull(address, nullptr, 16));
  auto* self = new Owner;
  fill_api(self->api);
  self->desc.struct_size = sizeof self->desc;
  self->desc.device = {TE_FL_DEVICE_EXT, 0};
  self->desc.provider = "owner";
  self->desc.self = self;
  self->desc.api = &self->api;
  *instance = self;
  event("create");
  return TE_FL_OK;
}

te_fl_status devices(void* instance, uint32_t* count, const te_fl_device_desc* const** list,
                     Errors) {
  *count = 1;
  *list = of(instance).list;
  return TE_FL_OK;
}

te_fl_status quiesce(void*, Errors) {
  event("quiesce");
  return TE_FL_OK;
}

void destroy(void* instance) {
  Owner& self = of(instance);
  event(self.blocks.load() == 0 && self.handles.load() == 0 ? "destroy" : "destroy with objects");
  delete &self;
}

te_fl_plugin_api g_api{};
te_fl_plugin_header g_header{};

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  g_api.struct_size = sizeof g_api;
  g_api.create = create;
  g_api.devices = devices;
  g_api.quiesce = quiesce;
  g_api.destroy = destroy;
  g_header.magic = TE_FL_PLUGIN_MAGIC;
  g_header.struct_size = sizeof g_header;
  g_header.abi_major = TE_FL_ABI_MAJOR;
  g_header.abi_minor = TE_FL_ABI_MINOR;
  g_header.name = "owner";
  g_header.vendor = "fault";
  g_header.version = "1.0";
  g_header.api = &g_api;
  return &g_header;
}
