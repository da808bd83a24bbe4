#include "device.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "cl_check.hpp"
#include "device_api.hpp"

namespace te_fl::opencl {
namespace {

Device& device_of(void* self) { return *static_cast<Device*>(self); }

// Runs f(device) with the checks that every entry point makes.
template <class F>
te_fl_status on_device(void* self, const te_fl_error_sink* errors, F&& f) noexcept {
  return backend::guard(errors, [&] {
    refuse_after_fork();
    f(device_of(self));
  });
}

te_fl_status allocate(void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* errors) {
  *out = nullptr;
  return on_device(self, errors, [&](Device& d) {
    if (memory->alignment > 256) {
      backend::unsupported("memory of OpenCL devices is aligned to 256 bytes, not " +
                           std::to_string(memory->alignment));
    }
    if (memory->kind == TE_FL_MEMORY_PINNED) {
      *out = d.memory->allocate_pinned(memory->bytes);
    } else if (memory->kind == TE_FL_MEMORY_DEVICE) {
      *out = d.memory->allocate(memory->bytes, d.queue_of(memory->stream));
    } else {
      backend::unsupported("the OpenCL plugin has no memory of kind " +
                           std::to_string(memory->kind));
    }
  });
}

te_fl_status free_memory(void* self, void* data, uint32_t kind, void* stream,
                         const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    if (kind == TE_FL_MEMORY_PINNED) {
      d.memory->free_pinned(data);
    } else {
      d.memory->free(data, d.queue_of(stream));
    }
  });
}

// Copies memory. A copy from or to pageable host memory blocks until it is complete, because the
// driver may access that memory only during this call.
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

// The time at which an OpenCL marker completed. A driver thread sets it, possibly shortly after the
// marker's status is "complete", so readers wait until it is set.
class EventTime {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    at_ = std::chrono::steady_clock::now();
    at_set_.notify_all();
  }
  std::chrono::steady_clock::time_point get() {
    std::unique_lock lock(mutex_);
    at_set_.wait(lock, [&] { return at_.has_value(); });
    return *at_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable at_set_;
  std::optional<std::chrono::steady_clock::time_point> at_;
};

// An owned cl_event; may be NULL.
using OwnEvent = std::unique_ptr<std::remove_pointer_t<cl_event>, decltype(&clReleaseEvent)>;

// The object behind the device API's event handle. Holds the cl_event of the most recent record;
// empty before the first.
class Event {
 public:
  explicit Event(bool timed) : timed_(timed) {}
  ~Event() { set(nullptr, nullptr); }
  bool timed() const { return timed_; }
  void set(cl_event event, std::shared_ptr<EventTime> moment) {
    const std::lock_guard lock(mutex_);
    if (event_ != nullptr) clReleaseEvent(event_);
    event_ = event;
    moment_ = std::move(moment);
  }
  OwnEvent get() {
    const std::lock_guard lock(mutex_);
    if (event_ != nullptr) clRetainEvent(event_);
    return {event_, &clReleaseEvent};
  }
  std::shared_ptr<EventTime> moment() {
    const std::lock_guard lock(mutex_);
    return moment_;
  }

 private:
  const bool timed_;
  std::mutex mutex_;
  cl_event event_ = nullptr;
  std::shared_ptr<EventTime> moment_;
};

Event& event_of(void* event) { return *static_cast<Event*>(event); }

te_fl_status create_event(void* self, uint32_t flags, void** event,
                          const te_fl_error_sink* errors) {
  return on_device(self, errors,
                   [&](Device&) { *event = new Event((flags & TE_FL_EVENT_TIMED) != 0); });
}

te_fl_status destroy_event(void*, void* event, const te_fl_error_sink*) {
  delete static_cast<Event*>(event);
  return TE_FL_OK;
}

// Returns an object to which a driver callback writes the time when `event` completes. A callback
// is used because queues with profiling enabled slow every kernel.
std::shared_ptr<EventTime> make_moment(cl_event event) {
  auto moment = std::make_shared<EventTime>();
  auto* const callback_time = new std::shared_ptr<EventTime>(moment);
  const cl_int error = clSetEventCallback(
      event, CL_COMPLETE,
      [](cl_event, cl_int, void* data) {
        const std::unique_ptr<std::shared_ptr<EventTime>> mine(
            static_cast<std::shared_ptr<EventTime>*>(data));
        (*mine)->set();
      },
      callback_time);
  if (error != CL_SUCCESS) delete callback_time;
  check(error, "clSetEventCallback");
  return moment;
}

te_fl_status record_event(void* self, void* event, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    cl_event raw = nullptr;
    check(clEnqueueMarkerWithWaitList(d.queue_of(stream), 0, nullptr, &raw),
          "clEnqueueMarkerWithWaitList");
    OwnEvent made(raw, &clReleaseEvent);
    auto moment = event_of(event).timed() ? make_moment(raw) : nullptr;
    event_of(event).set(made.release(), std::move(moment));
    check(clFlush(d.queue_of(stream)), "clFlush");  // otherwise another queue might wait for ever
  });
}

// A queue can wait only for events of its own context. For another device's event, this creates a
// user event that a callback completes.
OwnEvent event_here(Device& d, OwnEvent recorded) {
  cl_context context = nullptr;
  check(clGetEventInfo(recorded.get(), CL_EVENT_CONTEXT, sizeof context, &context, nullptr),
        "clGetEventInfo");
  if (context == d.context) return recorded;
  cl_int error = CL_SUCCESS;
  OwnEvent own(clCreateUserEvent(d.context, &error), &clReleaseEvent);
  check(error, "clCreateUserEvent");
  clRetainEvent(own.get());  // this reference is for the callback
  error = clSetEventCallback(
      recorded.get(), CL_COMPLETE,
      [](cl_event, cl_int status, void* ours) {
        clSetUserEventStatus(static_cast<cl_event>(ours), status < 0 ? status : CL_COMPLETE);
        clReleaseEvent(static_cast<cl_event>(ours));
      },
      own.get());
  if (error != CL_SUCCESS) clReleaseEvent(own.get());
  check(error, "clSetEventCallback");
  return own;
}

te_fl_status wait_event(void* self, void* event, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device& d) {
    OwnEvent recorded = event_of(event).get();
    if (recorded == nullptr) return;
    const OwnEvent here = event_here(d, std::move(recorded));
    const cl_event waited = here.get();
    check(clEnqueueBarrierWithWaitList(d.queue_of(stream), 1, &waited, nullptr),
          "clEnqueueBarrierWithWaitList");
  });
}

te_fl_status synchronize_event(void* self, void* event, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device&) {
    const OwnEvent recorded = event_of(event).get();
    const cl_event waited = recorded.get();
    if (waited != nullptr) check(clWaitForEvents(1, &waited), "clWaitForEvents");
  });
}

te_fl_status query_event(void* self, void* event, int32_t* done, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device&) {
    *done = 1;
    const OwnEvent recorded = event_of(event).get();
    if (recorded == nullptr) return;
    cl_int status = CL_COMPLETE;
    check(clGetEventInfo(recorded.get(), CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status,
                         nullptr),
          "clGetEventInfo");
    if (status < 0) check(status, "the work before the event");
    *done = status == CL_COMPLETE ? 1 : 0;
  });
}

te_fl_status elapsed_time(void* self, void* start, void* end, uint64_t* nanoseconds,
                          const te_fl_error_sink* errors) {
  return on_device(self, errors, [&](Device&) {
    const auto from = event_of(start).moment(), to = event_of(end).moment();
    if (from == nullptr || to == nullptr) {
      backend::invalid(
          "an event without TE_FL_EVENT_TIMED, or one that was never recorded, has no "
          "time");
    }
    const auto between = to->get() - from->get();
    const auto count = std::chrono::duration_cast<std::chrono::nanoseconds>(between).count();
    *nanoseconds = count > 0 ? static_cast<uint64_t>(count) : 0;
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
    // OpenCL does not report the memory that other processes use.
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
    if (error != CL_SUCCESS) backend::invalid(cl_error_text(error, "clGetCommandQueueInfo"));
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
    .copy_between = nullptr,  // each device has its own context, and SVM is not shared between
                              // contexts
    .retire_stream = retire_stream,
    .query_event = query_event,
    .elapsed_time = elapsed_time,
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
