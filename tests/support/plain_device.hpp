#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "te_fl/plugin.h"

namespace te_fl::testing {

// A device for tests with threads: host memory under another name. Its functions share no state and
// take no lock, so that they add no ordering between threads that would hide races from the thread
// sanitizer. Work completes in the call that enqueues it.
struct PlainDevice {
  te_fl_device_api api{};
  te_fl_device_desc desc{};

  explicit PlainDevice(const char* provider, int32_t index = 0) {
    api.struct_size = sizeof api;
    api.allocate = [](void*, const te_fl_memory_desc* memory, void** out, const te_fl_error_sink*) {
      if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
      *out = std::aligned_alloc(256, (memory->bytes + 256) / 256 * 256);
      return te_fl_status{TE_FL_OK};
    };
    api.free = [](void*, void* data, uint32_t, void*, const te_fl_error_sink*) {
      std::free(data);
      return te_fl_status{TE_FL_OK};
    };
    api.copy = [](void*, void* to, const void* from, size_t bytes, uint32_t, void*,
                  const te_fl_error_sink*) {
      std::memmove(to, from, bytes);
      return te_fl_status{TE_FL_OK};
    };
    api.fill = [](void*, void* to, uint8_t value, size_t bytes, void*, const te_fl_error_sink*) {
      std::memset(to, value, bytes);
      return te_fl_status{TE_FL_OK};
    };
    api.synchronize = [](void*, void*, const te_fl_error_sink*) { return te_fl_status{TE_FL_OK}; };
    api.properties = [](void*, te_fl_device_props* props, const te_fl_error_sink*) {
      props->arch = 7;
      return te_fl_status{TE_FL_OK};
    };
    api.create_stream = [](void*, void** out, const te_fl_error_sink*) {
      *out = new char;
      return te_fl_status{TE_FL_OK};
    };
    api.destroy_stream = [](void*, void* stream, const te_fl_error_sink*) {
      delete static_cast<char*>(stream);
      return te_fl_status{TE_FL_OK};
    };
    api.create_event = [](void*, uint32_t, void** out, const te_fl_error_sink*) {
      *out = new char;
      return te_fl_status{TE_FL_OK};
    };
    api.destroy_event = [](void*, void* event, const te_fl_error_sink*) {
      delete static_cast<char*>(event);
      return te_fl_status{TE_FL_OK};
    };
    api.record_event = [](void*, void*, void*, const te_fl_error_sink*) {
      return te_fl_status{TE_FL_OK};
    };
    api.synchronize_event = [](void*, void*, const te_fl_error_sink*) {
      return te_fl_status{TE_FL_OK};
    };
    api.query_event = [](void*, void*, int32_t* done, const te_fl_error_sink*) {
      *done = 1;
      return te_fl_status{TE_FL_OK};
    };
    api.elapsed_time = [](void*, void*, void*, uint64_t* nanoseconds, const te_fl_error_sink*) {
      *nanoseconds = 1000;
      return te_fl_status{TE_FL_OK};
    };
    desc.struct_size = sizeof desc;
    desc.device = {TE_FL_DEVICE_EXT, index};
    desc.provider = provider;
    desc.self = this;
    desc.api = &api;
  }
  PlainDevice(const PlainDevice&) = delete;
  PlainDevice& operator=(const PlainDevice&) = delete;
};

}  // namespace te_fl::testing
