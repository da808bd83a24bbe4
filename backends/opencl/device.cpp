#include "device.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "cl_check.hpp"
#include "device_api.hpp"

namespace te_fl::opencl {
namespace {

Device& device_of(void* self) { return *static_cast<Device*>(self); }

// Runs f(device).
template <class F>
te_fl_status on_device(void* self, const te_fl_error_sink* errors, F&& f) noexcept {
  return backend::guard(errors, [&] {
    refuse_after_fork();
    f(device_of(self));
  });
}

te_fl_status allocate(void* self, size_t bytes, void* stream, void** out,
                      const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    *out = nullptr;
    *out = d.memory->allocate(bytes, d.queue_of(stream));
  });
}

te_fl_status free_memory(void* self, void* data, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) { d.memory->free(data, d.queue_of(stream)); });
}

te_fl_status allocate_pinned(void* self, size_t bytes, void** out, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    *out = nullptr;
    *out = d.memory->allocate_pinned(bytes);
  });
}

te_fl_status free_pinned(void* self, void* data, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) { d.memory->free_pinned(data); });
}

// Pageable memory is waited for in either direction: the driver may not touch it later.
te_fl_status copy(void* self, void* dst, const void* src, size_t bytes, uint32_t host_flags,
                  void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    if (bytes == 0 || dst == src) return;
    const bool pageable = ((host_flags & 1) != 0 && !d.memory->is_pinned(dst)) ||
                          ((host_flags & 2) != 0 && !d.memory->is_pinned(src));
    check(clEnqueueSVMMemcpy(d.queue_of(stream), pageable ? CL_TRUE : CL_FALSE, dst, src, bytes, 0,
                             nullptr, nullptr),
          "clEnqueueSVMMemcpy");
  });
}

te_fl_status fill(void* self, void* dst, uint8_t value, size_t bytes, void* stream,
                  const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    if (bytes == 0) return;
    check(clEnqueueSVMMemFill(d.queue_of(stream), dst, &value, 1, bytes, 0, nullptr, nullptr),
          "clEnqueueSVMMemFill");
  });
}

te_fl_status create_stream(void* self, void** stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    cl_int error = CL_SUCCESS;
    cl_command_queue made = clCreateCommandQueueWithProperties(d.context, d.id, nullptr, &error);
    check(error, "clCreateCommandQueueWithProperties");
    const std::lock_guard lock(d.streams_mutex);
    d.streams.insert(made);
    *stream = made;
  });
}

te_fl_status destroy_stream(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    if (stream == nullptr) return;
    const auto queue = static_cast<cl_command_queue>(stream);
    check(clFinish(queue), "clFinish");
    d.memory->forget(queue);
    {
      const std::lock_guard lock(d.streams_mutex);
      d.streams.erase(queue);
    }
    check(clReleaseCommandQueue(queue), "clReleaseCommandQueue");
  });
}

te_fl_status synchronize(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors,
                   [&](Device& d) { check(clFinish(d.queue_of(stream)), "clFinish"); });
}

// What was recorded last; empty until something was.
class Event {
 public:
  ~Event() { set(nullptr); }
  void set(cl_event event) {
    const std::lock_guard lock(mutex_);
    if (event_ != nullptr) clReleaseEvent(event_);
    event_ = event;
  }
  // The caller's to release; null if nothing was recorded.
  cl_event get() {
    const std::lock_guard lock(mutex_);
    if (event_ != nullptr) clRetainEvent(event_);
    return event_;
  }

 private:
  std::mutex mutex_;
  cl_event event_ = nullptr;
};

te_fl_status create_event(void* self, void** event, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device&) { *event = new Event; });
}

te_fl_status destroy_event(void*, void* event, const te_fl_error_sink*) {
  delete static_cast<Event*>(event);
  return TE_FL_OK;
}

te_fl_status record_event(void* self, void* event, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    cl_event made = nullptr;
    check(clEnqueueMarkerWithWaitList(d.queue_of(stream), 0, nullptr, &made),
          "clEnqueueMarkerWithWaitList");
    static_cast<Event*>(event)->set(made);
    check(clFlush(d.queue_of(stream)), "clFlush");  // or another queue could wait for ever
  });
}

te_fl_status wait_event(void* self, void* event, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    cl_event recorded = static_cast<Event*>(event)->get();
    if (recorded == nullptr) return;
    const cl_int error = clEnqueueBarrierWithWaitList(d.queue_of(stream), 1, &recorded, nullptr);
    clReleaseEvent(recorded);
    check(error, "clEnqueueBarrierWithWaitList");
  });
}

te_fl_status synchronize_event(void* self, void* event, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device&) {
    cl_event recorded = static_cast<Event*>(event)->get();
    if (recorded == nullptr) return;
    const cl_int error = clWaitForEvents(1, &recorded);
    clReleaseEvent(recorded);
    check(error, "clWaitForEvents");
  });
}

te_fl_status properties(void* self, te_fl_device_props* props, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    te_fl_device_props found{};
    cl_uint units = 0;
    cl_ulong total = 0;
    check(clGetDeviceInfo(d.id, CL_DEVICE_MAX_COMPUTE_UNITS, sizeof units, &units, nullptr),
          "clGetDeviceInfo");
    check(clGetDeviceInfo(d.id, CL_DEVICE_GLOBAL_MEM_SIZE, sizeof total, &total, nullptr),
          "clGetDeviceInfo");
    found.compute_units = units;
    found.total_memory = total;
    // What other processes have of it OpenCL does not tell.
    found.free_memory = total - std::min<uint64_t>(total, d.memory->allocated());
    std::snprintf(found.name, sizeof found.name, "%s", d.name.c_str());
    found.struct_size = props->struct_size;
    std::memcpy(props, &found, std::min<size_t>(props->struct_size, sizeof found));
  });
}

te_fl_status check_pointer(void* self, const void* data, size_t bytes,
                           const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    if (bytes == 0) return;
    if (const std::string what = d.memory->not_ours(data, bytes); !what.empty()) {
      backend::invalid(what);
    }
  });
}

te_fl_status check_stream(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    if (stream == nullptr) return;
    cl_context context = nullptr;
    const cl_int error = clGetCommandQueueInfo(static_cast<cl_command_queue>(stream),
                                               CL_QUEUE_CONTEXT, sizeof context, &context, nullptr);
    if (error != CL_SUCCESS) backend::invalid(text_of(error, "clGetCommandQueueInfo"));
    if (context != d.context) backend::invalid("it is a command queue of another OpenCL context");
  });
}

te_fl_status retire_stream(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    check(clFinish(d.queue_of(stream)), "clFinish");
    d.memory->forget(d.queue_of(stream));
  });
}

}  // namespace

constexpr te_fl_device_api kDeviceApi = {
    .struct_size = sizeof(te_fl_device_api),
    .reserved = 0,
    .allocate = allocate,
    .free = free_memory,
    .allocate_pinned = allocate_pinned,
    .free_pinned = free_pinned,
    .copy = copy,
    .fill = fill,
    .create_stream = create_stream,
    .destroy_stream = destroy_stream,
    .synchronize = synchronize,
    .create_event = create_event,
    .destroy_event = destroy_event,
    .record_event = record_event,
    .wait_event = wait_event,
    .synchronize_event = synchronize_event,
    .is_capturing = nullptr,
    .properties = properties,
    .begin_capture = nullptr,
    .end_capture = nullptr,
    .launch_graph = nullptr,
    .destroy_graph = nullptr,
    .check_pointer = check_pointer,
    .check_stream = check_stream,
    .copy_between = nullptr,  // each device has its own context, and shared memory does not cross
    .retire_stream = retire_stream,
};

te_fl_status synchronize_device(Device& device, const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [&] {
    refuse_after_fork();
    check(clFinish(device.queue), "clFinish");
    const std::lock_guard lock(device.streams_mutex);
    for (const cl_command_queue queue : device.streams) check(clFinish(queue), "clFinish");
  });
}

}  // namespace te_fl::opencl
