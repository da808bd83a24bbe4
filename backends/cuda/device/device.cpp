#include "device/device.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>

#include "common/value_checks.hpp"
#include "device/bandwidth.hpp"
#include "device/cuda_check.hpp"
#include "device/driver.hpp"
#include "device/side_streams.hpp"

namespace te_fl::cuda {
namespace {

int device_index(void* self) { return static_cast<const Device*>(self)->index; }
cudaStream_t to_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

// Runs f with the device current.
template <class F>
te_fl_status on_device(void* self, const te_fl_error_sink* errors, F&& f) noexcept {
  return backend::guard(errors, [&] {
    refuse_after_fork();
    const DeviceGuard guard(device_index(self));
    f();
  });
}

Memory& memory_of(void* self) { return *static_cast<const Device*>(self)->memory; }

void* allocate_pinned(size_t bytes) {
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, std::max<size_t>(bytes, 1), cudaHostAllocPortable);
  if (error == cudaSuccess) return data;
  throw_error(error, "cudaHostAlloc", "; requested " + std::to_string(bytes) + " bytes");
}

void* allocate_managed(size_t bytes) {
  void* data = nullptr;
  const cudaError_t error =
      cudaMallocManaged(&data, std::max<size_t>(bytes, 1), cudaMemAttachGlobal);
  if (error == cudaSuccess) return data;
  throw_error(error, "cudaMallocManaged", "; requested " + std::to_string(bytes) + " bytes");
}

te_fl_status allocate(void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* errors) {
  *out = nullptr;
  return on_device(self, errors, [&] {
    if (memory->alignment > 256) {
      backend::unsupported("memory of cuda:" + std::to_string(device_index(self)) +
                           " is aligned to 256 bytes, not " + std::to_string(memory->alignment));
    }
    switch (memory->kind) {
      case TE_FL_MEMORY_DEVICE:
        *out = memory_of(self).allocate(memory->bytes, to_stream(memory->stream));
        return;
      case TE_FL_MEMORY_PINNED:
        *out = allocate_pinned(memory->bytes);
        return;
      case TE_FL_MEMORY_MANAGED:
        *out = allocate_managed(memory->bytes);
        return;
      default:
        backend::unsupported("the CUDA plugin has no memory of kind " +
                             std::to_string(memory->kind));
    }
  });
}

te_fl_status free_memory(void* self, void* data, uint32_t kind, void* stream,
                         const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    if (kind == TE_FL_MEMORY_PINNED) {
      check(cudaFreeHost(data), "cudaFreeHost");
    } else if (kind == TE_FL_MEMORY_MANAGED) {
      check(cudaFree(data), "cudaFree");  // cudaFree() synchronises the device
    } else {
      memory_of(self).free(data, to_stream(stream));
    }
  });
}

te_fl_status copy(void* self, void* dst, const void* src, size_t bytes, uint32_t host_flags,
                  void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    if (bytes == 0) return;
    static constexpr cudaMemcpyKind kKinds[] = {cudaMemcpyDeviceToDevice, cudaMemcpyDeviceToHost,
                                                cudaMemcpyHostToDevice, cudaMemcpyHostToHost};
    check(cudaMemcpyAsync(dst, src, bytes, kKinds[host_flags & 3], to_stream(stream)),
          "cudaMemcpyAsync");
  });
}

te_fl_status fill(void* self, void* dst, uint8_t value, size_t bytes, void* stream,
                  const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    if (bytes == 0) return;
    refuse_foreign(device_index(self), to_stream(stream));
    check(cudaMemsetAsync(dst, value, bytes, to_stream(stream)), "cudaMemsetAsync");
  });
}

te_fl_status create_stream(void* self, void** stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    *stream = made;
  });
}
te_fl_status destroy_stream(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    forget_side_streams(device_index(self), to_stream(stream));
    memory_of(self).forget(to_stream(stream));
    check(cudaStreamDestroy(to_stream(stream)), "cudaStreamDestroy");
  });
}
te_fl_status synchronize(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    check(cudaStreamSynchronize(to_stream(stream)), "cudaStreamSynchronize");
    report_value_errors(device_index(self), to_stream(stream));
  });
}

te_fl_status create_event(void* self, uint32_t flags, void** event,
                          const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    cudaEvent_t made = nullptr;
    const bool timed = (flags & TE_FL_EVENT_TIMED) != 0;
    check(cudaEventCreateWithFlags(&made, timed ? cudaEventDefault : cudaEventDisableTiming),
          "cudaEventCreateWithFlags");
    *event = made;
  });
}
te_fl_status destroy_event(void* self, void* event, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    check(cudaEventDestroy(static_cast<cudaEvent_t>(event)), "cudaEventDestroy");
  });
}
te_fl_status record_event(void* self, void* event, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    check(cudaEventRecord(static_cast<cudaEvent_t>(event), to_stream(stream)), "cudaEventRecord");
  });
}
// The event may belong to another CUDA device: the driver orders the two streams.
te_fl_status wait_event(void* self, void* event, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    check(cudaStreamWaitEvent(to_stream(stream), static_cast<cudaEvent_t>(event), 0),
          "cudaStreamWaitEvent");
  });
}
te_fl_status synchronize_event(void* self, void* event, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
    report_value_errors(device_index(self));
  });
}

te_fl_status query_event(void* self, void* event, int32_t* done, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
    *done = error == cudaSuccess ? 1 : 0;
    if (error != cudaErrorNotReady) check(error, "cudaEventQuery");
  });
}
te_fl_status elapsed_time(void* self, void* start, void* end, uint64_t* nanoseconds,
                          const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(start),
                               static_cast<cudaEvent_t>(end)),
          "cudaEventElapsedTime");
    *nanoseconds = milliseconds > 0 ? static_cast<uint64_t>(double{milliseconds} * 1e6) : 0;
  });
}

// The host calls this before every op, so it also refuses streams of other devices. A stream
// belongs to one device; the default stream belongs to the current device.
te_fl_status is_capturing(void* self, void* stream, int32_t* capturing,
                          const te_fl_error_sink* errors) {
  const auto ask = [&] {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(stream_capture_status(to_stream(stream), &status), "cudaStreamIsCapturing");
    *capturing = status != cudaStreamCaptureStatusNone ? 1 : 0;
    refuse_foreign(device_index(self), to_stream(stream), status);
  };
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return on_device(self, errors, ask);
  }
  return backend::guard(errors, [&] {
    refuse_after_fork();
    ask();
  });
}

// Thread-local capture mode: other threads may use other streams without invalidating the capture.
te_fl_status begin_capture(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    refuse_foreign(device_index(self), to_stream(stream));
    memory_of(self).open_capture();
    const cudaError_t error =
        cudaStreamBeginCapture(to_stream(stream), cudaStreamCaptureModeThreadLocal);
    if (error == cudaSuccess) return;
    memory_of(self).abandon_capture();
    throw_error(error, "cudaStreamBeginCapture");
  });
}

te_fl_status end_capture(void* self, void* stream, void** out, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    memory_of(self).close_capture(to_stream(stream));
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(to_stream(stream), &graph);
    if (error != cudaSuccess || graph == nullptr) {
      throw_error(error != cudaSuccess ? error : cudaErrorStreamCaptureInvalidated,
                  "cudaStreamEndCapture",
                  "; a call during the capture cannot be captured, or a stream that joined the "
                  "capture was not joined back to this stream");
    }
    cudaGraphExec_t executable = nullptr;
    const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);  // the executable graph keeps the resources
    check(made, "cudaGraphInstantiate");
    *out = executable;
  });
}

te_fl_status launch_graph(void* self, void* graph, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    refuse_foreign(device_index(self), to_stream(stream));
    check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), to_stream(stream)),
          "cudaGraphLaunch");
  });
}

te_fl_status destroy_graph(void* self, void* graph, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    check(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "cudaGraphExecDestroy");
  });
}

te_fl_status properties(void* self, te_fl_device_props* props, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    const int device = device_index(self);
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
      return static_cast<uint32_t>(value);
    };
    te_fl_device_props found{};
    found.arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                 attribute(cudaDevAttrComputeCapabilityMinor);
    found.compute_units = attribute(cudaDevAttrMultiProcessorCount);
    size_t available = 0, total = 0;
    check(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    found.free_memory = available;
    found.total_memory = total;
    found.copy_bandwidth = copy_bandwidth(device);
    cudaDeviceProp all{};
    check(cudaGetDeviceProperties(&all, device), "cudaGetDeviceProperties");
    std::snprintf(found.name, sizeof found.name, "%.*s", int{sizeof found.name} - 1, all.name);
    int driver = 0;
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    std::snprintf(found.driver, sizeof found.driver, "CUDA %d.%d", driver / 1000,
                  driver % 1000 / 10);
    found.struct_size = props->struct_size;
    std::memcpy(props, &found, std::min<size_t>(props->struct_size, sizeof found));
  });
}

// Returns why the pointer is not memory of this device; empty if it is.
std::string not_ours(int device, const void* data) {
  cudaPointerAttributes found{};
  const cudaError_t error = cudaPointerGetAttributes(&found, data);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return cuda_error_text(error, "cudaPointerGetAttributes");
  }
  switch (found.type) {
    case cudaMemoryTypeDevice:
      if (found.device == device) return "";
      return "it is memory of cuda:" + std::to_string(found.device);
    case cudaMemoryTypeManaged:
      return "";
    case cudaMemoryTypeHost:
      return found.devicePointer != nullptr ? "" : "it is pinned host memory without a mapping";
    default:
      return "it is pageable host memory, or no memory at all";
  }
}

// An event that orders two streams once. It may be destroyed while a stream still waits for it.
class PassingEvent {
 public:
  PassingEvent() {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  ~PassingEvent() { cudaEventDestroy(event_); }
  PassingEvent(const PassingEvent&) = delete;
  PassingEvent& operator=(const PassingEvent&) = delete;
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void hold(cudaStream_t stream) {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Enqueues the copy on the destination's stream. The driver selects the path between the two GPUs.
te_fl_status copy_between(void* self, void* dst, void* dst_stream, void* src_self, const void* src,
                          void* src_stream, size_t bytes, const te_fl_error_sink* errors) {
  return backend::guard(errors, [&] {
    refuse_after_fork();
    if (bytes == 0) return;
    const int to = device_index(self), from = device_index(src_self);
    const DeviceGuard source(from);
    refuse_foreign(from, to_stream(src_stream));
    PassingEvent written;
    written.record(to_stream(src_stream));
    std::optional<PassingEvent> read;
    {
      const DeviceGuard destination(to);
      refuse_foreign(to, to_stream(dst_stream));
      written.hold(to_stream(dst_stream));
      check(cudaMemcpyPeerAsync(dst, to, src, from, bytes, to_stream(dst_stream)),
            "cudaMemcpyPeerAsync");
      read.emplace();
      read->record(to_stream(dst_stream));
    }
    read->hold(to_stream(src_stream));
  });
}

te_fl_status retire_stream(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    forget_side_streams(device_index(self), to_stream(stream));
    memory_of(self).forget(to_stream(stream));
  });
}

te_fl_status check_pointer(void* self, const void* data, size_t bytes,
                           const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    if (bytes == 0) return;
    const int device = device_index(self);
    if (const std::string what = not_ours(device, data); !what.empty()) backend::invalid(what);
    const void* last = static_cast<const char*>(data) + bytes - 1;
    if (const std::string what = not_ours(device, last); !what.empty()) {
      backend::invalid("its " + std::to_string(bytes) +
                       " bytes end outside the allocation: " + what);
    }
  });
}

te_fl_status check_stream(void* self, void* stream, const te_fl_error_sink* errors) {
  return on_device(self, errors, [&] {
    const auto s = to_stream(stream);
    cudaStreamCaptureStatus status{};
    // This query fails for a destroyed stream. It may also fail for the default stream while
    // another stream is being captured.
    if (const cudaError_t error = stream_capture_status(s, &status); error != cudaSuccess) {
      (void)cudaGetLastError();
      if (to_status(error) == TE_FL_INVALID_ARGUMENT) {
        backend::invalid(cuda_error_text(error, "cudaStreamIsCapturing"));
      }
      return;
    }
    if (status != cudaStreamCaptureStatusNone) return;
    const int whose = device_of_stream(s, device_index(self));
    if (whose >= 0 && whose != device_index(self)) {
      backend::invalid("it belongs to cuda:" + std::to_string(whose));
    }
  });
}

constexpr te_fl_device_api kApi = {
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
    .is_capturing = is_capturing,
    .properties = properties,
    .begin_capture = begin_capture,
    .end_capture = end_capture,
    .launch_graph = launch_graph,
    .destroy_graph = destroy_graph,
    .check_pointer = check_pointer,
    .check_stream = check_stream,
    .copy_between = copy_between,
    .retire_stream = retire_stream,
    .query_event = query_event,
    .elapsed_time = elapsed_time,
};

std::array<std::atomic<int>, 64> g_architectures;

int read_architecture(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

// Makes the device's default memory pool keep freed memory for later allocations, such as the next
// training step.
void keep_freed_memory(int device) {
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
  uint64_t threshold = UINT64_MAX;
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
        "cudaMemPoolSetAttribute");
}

}  // namespace

std::vector<int> gpu_architectures() {
  int count = 0;
  std::vector<int> found;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  (void)cudaGetLastError();
  for (int i = 0; i < count; ++i) found.push_back(read_architecture(i));
  return found;
}

void enumerate(size_t cache_bytes, std::vector<Device>& devices, std::string& why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    why = error != cudaSuccess ? cudaGetErrorString(error) : "the driver shows no GPU";
    return;
  }
  devices.resize(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    keep_freed_memory(i);
    g_architectures.at(static_cast<size_t>(i)).store(read_architecture(i));
    Device& d = devices[static_cast<size_t>(i)];
    d.index = i;
    d.memory = std::make_unique<Memory>(cache_bytes);
    d.desc.struct_size = sizeof(te_fl_device_desc);
    d.desc.device = {TE_FL_DEVICE_CUDA, i};
    d.desc.provider = "cuda";
    d.desc.self = &d;
    d.desc.api = &kApi;
  }
}

int architecture(int index) noexcept {
  const bool known = index >= 0 && index < static_cast<int>(g_architectures.size());
  return known ? g_architectures[static_cast<size_t>(index)].load(std::memory_order_relaxed) : 0;
}

void give_back_memory(Device& device) noexcept {
  const te_fl_status status = backend::guard(nullptr, [&] {
    refuse_after_fork();
    const DeviceGuard guard(device.index);
    device.memory.reset();
  });
  // After a failure, such as in a forked child, the memory cannot be freed and the mutex may be
  // locked, so the Memory object is leaked.
  if (status != TE_FL_OK) (void)device.memory.release();
}

te_fl_status synchronize_device(int index, const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [&] {
    refuse_after_fork();
    const DeviceGuard guard(index);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
}

}  // namespace te_fl::cuda
