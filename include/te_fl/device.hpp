#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

namespace te_fl {
namespace core {
struct StreamRecord;
}

// {DLPack device type, provider, index}. A plain value; Device() is the host.
struct Device {
  int32_t type = TE_FL_DEVICE_CPU;
  int32_t index = 0;
  uint32_t provider = 0;  // interned; 0 unless type is kDLExtDev

  bool is_host() const noexcept {
    return type == TE_FL_DEVICE_CPU || type == TE_FL_DEVICE_CUDA_HOST ||
           type == TE_FL_DEVICE_ROCM_HOST;
  }
  te_fl_device to_c() const noexcept { return {type, index}; }
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda:0", "opencl:1", "ext:acme:0". parse_device takes the same.
TE_FL_API std::string to_string(const Device& device);
TE_FL_API Result<Device> parse_device(std::string_view text);

// The devices that are there. The first look at one that is not loads plugins. Thread-safe.
namespace devices {

// All devices, the host first. Loads the plugins that wait for a look at their devices.
TE_FL_API std::vector<Device> list();
// The functions of a device; NOT_FOUND names the devices that exist. The pointer stays valid as
// long as the device is registered or any memory of it is alive.
TE_FL_API Result<const te_fl_device_desc*> find(const Device& device);
TE_FL_API Result<te_fl_device_props> properties(const Device& device);
// Registers a device (R18: ALREADY_EXISTS names the present provider). The descriptor must outlive
// the registration. `provider` ids are interned by name.
TE_FL_API Result<Device> add(const te_fl_device_desc* desc);
// Takes a device out of the list; returns when no thread is inside an op on it or a function of it.
// Calls on memory that somebody else has there are refused from then on. BUSY if memory or streams
// of it are alive, while a stream of it that worked with a plan of R26 is being captured, or from
// inside an op or a function of a device.
TE_FL_API Status remove(const Device& device);
// Live allocations (memory, streams, events) made through te-fl on a device.
TE_FL_API int64_t live_objects(const Device& device);
TE_FL_API uint32_t intern_provider(std::string_view name);
TE_FL_API std::string provider_name(uint32_t id);

TE_FL_API Result<void*> allocate(const Device& device, size_t bytes, void* stream = nullptr);
TE_FL_API void free(const Device& device, void* data, void* stream = nullptr) noexcept;
// Memory of any kind; to be freed by the function below, with the same kind. INVALID_ARGUMENT for a
// kind, an alignment or flags that there are not; UNSUPPORTED if the device has no such memory.
TE_FL_API Result<void*> allocate(const Device& device, const te_fl_memory_desc& memory);
TE_FL_API void free(const Device& device, void* data, te_fl_memory_kind kind,
                    void* stream = nullptr) noexcept;
// As allocate() and free(), for TE_FL_MEMORY_PINNED.
TE_FL_API Result<void*> allocate_pinned(const Device& device, size_t bytes);
TE_FL_API void free_pinned(const Device& device, void* data) noexcept;
// Host to device, device to host, within a device, host to host. Ordered on `stream`. A source in
// host memory that is not pinned has been read on return. FAILED_PRECONDITION between device and
// unpinned host memory while the stream is captured: each launch of the graph would use that memory
// again. Between two devices as copy_between(), `stream` being the destination's and the source's
// stream the calling thread's current one of the source's device.
TE_FL_API Status copy(const Device& dst_device, void* dst, const Device& src_device,
                      const void* src, size_t bytes, void* stream = nullptr);
// Between two devices, neither of them the host. Ordered on both streams: the copy comes after what
// was enqueued on either before, and before what is enqueued on either later. Where their plugin
// does not copy between the two, the calling thread waits for both streams and the bytes go by the
// host's memory. INVALID_ARGUMENT if dst_stream is one that te-fl made on the source's device;
// FAILED_PRECONDITION while either stream is captured.
TE_FL_API Status copy_between(const Device& dst_device, void* dst, void* dst_stream,
                              const Device& src_device, const void* src, void* src_stream,
                              size_t bytes);
TE_FL_API Status fill(const Device& device, void* dst, uint8_t value, size_t bytes,
                      void* stream = nullptr);
// Waits for the stream's work. FAILED_PRECONDITION while the stream is captured: nothing runs. An
// error may be that of any op enqueued before: DEVICE_LOST, or INVALID_ARGUMENT for values in the
// device's memory (an index out of range) that an op met; that is told once, to who waits first,
// and the device goes on.
TE_FL_API Status synchronize(const Device& device, void* stream = nullptr);

// Streams and events. UNSUPPORTED, naming the missing function, where the device's table has none
// (the host has events, which are done at once, and no streams). Each one made here counts as a
// live object until it is destroyed.
TE_FL_API Result<void*> create_stream(const Device& device);
// Work that is on the stream already is the device's to finish. The stream goes when the last
// tensor whose memory was allocated on it has gone. Null is the default stream: nothing happens.
TE_FL_API void destroy_stream(const Device& device, void* stream) noexcept;
// For a stream that te-fl did not make (a framework's, given to ops or to a StreamScope): to be
// called before its owner destroys it, while no other thread uses it. What te-fl and the device's
// plugin keep for it goes, in the order of its work: scratch memory of ops, freed memory. The
// stream may be busy. Only if tensors, graphs or scopes still hold it, its work is waited for; such
// tensors are then freed on the default stream, for whose order with other streams that used them
// the caller provides. Without this a stream that comes later with the same handle gets memory that
// work of the destroyed one may still be using. OK for a stream that te-fl never saw;
// INVALID_ARGUMENT for the default stream and for one that create_stream made; FAILED_PRECONDITION
// while it is captured.
TE_FL_API Status retire_stream(const Device& device, void* stream);
// `timed`: elapsed_time() will be asked of it; recording then costs some devices more.
TE_FL_API Result<void*> create_event(const Device& device, bool timed = false);
TE_FL_API void destroy_event(const Device& device, void* event) noexcept;
// The event marks what is on `stream` now. Recording again moves the mark.
TE_FL_API Status record_event(const Device& device, void* event, void* stream = nullptr);
// `stream` goes on only after the mark; the calling thread does not wait.
TE_FL_API Status wait_event(const Device& device, void* event, void* stream = nullptr);
// Waits for an event of another device of the same provider; INVALID_ARGUMENT for one of another
// provider's, whose marks mean nothing to this one's streams (rule R24).
TE_FL_API Status wait_event(const Device& device, const Device& event_device, void* event,
                            void* stream);
// True if the work before the mark is done, or if the event marks nothing yet. Never waits.
TE_FL_API Result<bool> query_event(const Device& device, void* event);
// Nanoseconds between the marks of two events, 0 if `end` came before `start`. INVALID_ARGUMENT
// unless both were made with `timed`, FAILED_PRECONDITION unless both have been recorded and are
// done.
TE_FL_API Result<uint64_t> elapsed_time(const Device& device, void* start, void* end);
// The calling thread waits for the mark. Errors as of synchronize(), of ops on any stream.
TE_FL_API Status synchronize_event(const Device& device, void* event);
// True if `stream` is being captured into a graph. False for a device that cannot capture.
TE_FL_API Result<bool> is_capturing(const Device& device, void* stream = nullptr);
// OK, or UNSUPPORTED naming the function that the device's table lacks.
TE_FL_API Status check_capture(const Device& device);
// The calling thread's stream of a device: that of its innermost StreamScope for the device, else
// null, the default stream.
TE_FL_API void* current_stream(const Device& device) noexcept;
// The stream of the calling thread's innermost StreamScope, whatever its device; null without one.
TE_FL_API void* current_stream() noexcept;

}  // namespace devices

class Event;

// Owns a stream of a device, which stays in the list meanwhile. Movable, not copyable; a moved-from
// or default-made Stream holds none and stands for the default stream of the host. Not for streams
// that a framework lends: those are plain pointers.
class Stream {
 public:
  TE_FL_API static Result<Stream> create(const Device& device);
  Stream() = default;
  TE_FL_API Stream(Stream&& other) noexcept;
  TE_FL_API Stream& operator=(Stream&& other) noexcept;
  TE_FL_API ~Stream();

  void* get() const noexcept { return handle_; }
  const Device& device() const noexcept { return device_; }
  TE_FL_API Status synchronize() const;
  // Goes on only after the event's mark, which may be on another device of the same provider.
  // INVALID_ARGUMENT if it is of another provider's device.
  TE_FL_API Status wait(const Event& event) const;

 private:
  Stream(const Device& device, void* handle) noexcept : device_(device), handle_(handle) {}
  Device device_;
  void* handle_ = nullptr;
};

// Owns an event of a device. Movable, not copyable; a moved-from or default-made Event holds none
// and can be neither recorded nor waited for (INVALID_ARGUMENT).
class Event {
 public:
  TE_FL_API static Result<Event> create(const Device& device, bool timed = false);
  Event() = default;
  TE_FL_API Event(Event&& other) noexcept;
  TE_FL_API Event& operator=(Event&& other) noexcept;
  TE_FL_API ~Event();

  void* get() const noexcept { return handle_; }
  const Device& device() const noexcept { return device_; }
  TE_FL_API Status record(void* stream = nullptr);
  TE_FL_API Status synchronize() const;
  // As devices::query_event().
  TE_FL_API Result<bool> done() const;
  // Nanoseconds from the other event's mark to this one's; as devices::elapsed_time(). Both must be
  // of one device.
  TE_FL_API Result<uint64_t> elapsed_since(const Event& start) const;

 private:
  Event(const Device& device, void* handle) noexcept : device_(device), handle_(handle) {}
  Device device_;
  void* handle_ = nullptr;
};

// Makes `stream` the calling thread's current stream of `device` until destroyed; its streams of
// other devices stay. A stream that te-fl did not make is borrowed: it must outlive the tensors
// made in the scope, or be retired (devices::retire_stream). Scopes nest; destroy in reverse order.
// Memory of tensors made inside (Tensor::empty, zeros, to, ...) is allocated and later freed on
// that stream, so tensors used on it alone need no further order. A tensor that other streams use
// too is the user's to order: before its last copy goes, its own stream must wait for their work
// (Event, Stream::wait).
class [[nodiscard]] StreamScope {
 public:
  TE_FL_API StreamScope(const Device& device, void* stream);
  TE_FL_API explicit StreamScope(const Stream& stream)
      : StreamScope(stream.device(), stream.get()) {}
  // Sets `stream` without naming its device: it is that on which te-fl made the stream, or the only
  // one that is there, or, of devices of one plugin, the one that the plugin does not deny it. If
  // that leaves several, as it does where two plugins have devices and te-fl did not make the
  // stream, memory cannot be allocated in the scope (FAILED_PRECONDITION). A plugin that waits for
  // a device of its kind to be named (a manifest's "load_for") goes on waiting. Null: the default
  // stream of every device.
  TE_FL_API explicit StreamScope(void* stream);
  TE_FL_API ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

  struct Frame;  // the library's own

 private:
  std::unique_ptr<Frame> frame_;
};

// Owns a captured graph: work that is enqueued again as a whole by every launch. Movable, not
// copyable. The memory that the captured work uses must be alive at every launch: tensors from
// before the capture are the user's to keep; what was allocated or freed during it, scratch of ops
// included, the graph keeps. Destroy it before its device goes.
class Graph {
 public:
  Graph() = default;
  TE_FL_API Graph(Graph&& other) noexcept;
  TE_FL_API Graph& operator=(Graph&& other) noexcept;
  TE_FL_API ~Graph();

  void* get() const noexcept { return handle_; }
  const Device& device() const noexcept { return device_; }
  // The stream it was captured on.
  void* stream() const noexcept { return stream_; }
  // Enqueues the work once, on `stream`, or on the stream it was captured on. Its scratch memory is
  // its own, so other graphs and other work may run beside it; its own launches are to come one
  // after the other. FAILED_PRECONDITION for an empty Graph, or without an argument if the stream
  // has been retired.
  TE_FL_API Status launch() const;
  TE_FL_API Status launch(void* stream) const;

 private:
  friend class Capture;
  Device device_;
  void* handle_ = nullptr;
  void* stream_ = nullptr;
  std::shared_ptr<core::StreamRecord> stream_owner_;
};

// Records what is enqueued on a stream instead of running it, from begin() to end(), which are
// called on one thread. Ops that cannot be captured are refused meanwhile with the reason. Run the
// same work once before, so that plans exist.
class Capture {
 public:
  // INVALID_ARGUMENT for the default stream; UNSUPPORTED if the device cannot capture.
  TE_FL_API static Result<Capture> begin(const Device& device, void* stream);
  TE_FL_API Capture(Capture&& other) noexcept;
  Capture& operator=(Capture&&) = delete;
  // Ends the capture and throws away what was recorded, unless end() has been called.
  TE_FL_API ~Capture();
  // FAILED_PRECONDITION the second time.
  TE_FL_API Result<Graph> end();

 private:
  Capture() = default;
  Device device_;
  void* stream_ = nullptr;  // null: ended
  std::shared_ptr<core::StreamRecord> stream_owner_;
};

}  // namespace te_fl
