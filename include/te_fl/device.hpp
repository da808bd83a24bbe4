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

// A device: {DLPack device type, provider, index}. A plain value; Device() is the host.
struct Device {
  int32_t type = TE_FL_DEVICE_CPU;
  int32_t index = 0;
  uint32_t provider = 0;  // interned id of the provider; 0 unless type is kDLExtDev

  bool is_host() const noexcept {
    return type == TE_FL_DEVICE_CPU || type == TE_FL_DEVICE_CUDA_HOST ||
           type == TE_FL_DEVICE_ROCM_HOST;
  }
  te_fl_device to_c() const noexcept { return {type, index}; }
  friend bool operator==(const Device&, const Device&) = default;
};

// Converts between a Device and its name: "cpu", "cuda:0", "opencl:1", "ext:acme:0".
TE_FL_API std::string to_string(const Device& device);
TE_FL_API Result<Device> parse_device(std::string_view text);

// The registered devices and the functions on them. Looking up a device that is not registered
// first loads plugins that may provide it. Thread-safe.
namespace devices {

// All devices, the host first. Loads the plugins whose loading was deferred until their devices are
// looked up.
TE_FL_API std::vector<Device> list();
// The descriptor of a device, with its table of functions. NOT_FOUND names the devices that exist.
// The pointer stays valid as long as the device is registered or any memory of it is alive.
TE_FL_API Result<const te_fl_device_desc*> find(const Device& device);
TE_FL_API Result<te_fl_device_props> properties(const Device& device);
// Registers a device. The descriptor must outlive the registration. ALREADY_EXISTS names the
// provider that already has the device type (R18). The returned Device has the provider's interned
// id.
TE_FL_API Result<Device> add(const te_fl_device_desc* desc);
// Sets the function that te-fl calls when a device is looked up that no plugin has. It may add()
// the device, and then returns true. A framework's binding uses it to make te-fl devices of the
// framework's own. Called on any thread, also inside of ops, without a lock of te-fl's; null: none.
TE_FL_API void set_maker(bool (*make)(const Device& device) noexcept);
// Removes a device from the list. Returns when no thread is inside an op on the device or inside
// one of its functions. Later calls on its remaining memory are refused. BUSY if memory or streams
// of the device are alive, while one of its streams that used a plan with device memory (R26) is
// being captured, or if called from inside an op or a device function.
TE_FL_API Status remove(const Device& device);
// Number of live objects (memory, streams, events) that te-fl has made on a device.
TE_FL_API int64_t live_objects(const Device& device);
TE_FL_API uint32_t intern_provider(std::string_view name);
TE_FL_API std::string provider_name(uint32_t id);

TE_FL_API Result<void*> allocate(const Device& device, size_t bytes, void* stream = nullptr);
TE_FL_API void free(const Device& device, void* data, void* stream = nullptr) noexcept;
// Allocates memory of any kind. Pass the same kind to free(). INVALID_ARGUMENT
// for an unknown kind, alignment or flag; UNSUPPORTED if the device has no such memory.
TE_FL_API Result<void*> allocate(const Device& device, const te_fl_memory_desc& memory);
TE_FL_API void free(const Device& device, void* data, te_fl_memory_kind kind,
                    void* stream = nullptr) noexcept;
// Like allocate() and free(), for TE_FL_MEMORY_PINNED.
TE_FL_API Result<void*> allocate_pinned(const Device& device, size_t bytes);
TE_FL_API void free_pinned(const Device& device, void* data) noexcept;
// Copies from host to device, from device to host, within a device, or within the host. Ordered on
// `stream`. If the source is host memory that is not pinned, it has been read on return.
// FAILED_PRECONDITION for a copy between device and unpinned host memory while the stream is
// captured, because every launch of the graph would access that host memory again. Between two
// devices it behaves like copy_between(): `stream` is the stream of the destination, and the
// source's stream is the calling thread's current stream of the source's device.
TE_FL_API Status copy(const Device& dst_device, void* dst, const Device& src_device,
                      const void* src, size_t bytes, void* stream = nullptr);
// Copies between two devices, neither of which is the host. Ordered on both streams: the copy runs
// after all work enqueued earlier on either stream, and before all work enqueued later on either.
// If the devices' plugin cannot copy between them, the calling thread waits for both streams and
// copies through host memory. INVALID_ARGUMENT if te-fl made dst_stream on the source's device;
// FAILED_PRECONDITION while either stream is captured.
TE_FL_API Status copy_between(const Device& dst_device, void* dst, void* dst_stream,
                              const Device& src_device, const void* src, void* src_stream,
                              size_t bytes);
TE_FL_API Status fill(const Device& device, void* dst, uint8_t value, size_t bytes,
                      void* stream = nullptr);
// Waits for the stream's work. FAILED_PRECONDITION while the stream is captured, since nothing runs
// then. An error may stem from any op enqueued before: DEVICE_LOST, or INVALID_ARGUMENT if an op
// met an invalid value in device memory, such as an index out of range. INVALID_ARGUMENT is
// reported once, to the first caller that waits, and the device remains usable.
TE_FL_API Status synchronize(const Device& device, void* stream = nullptr);

// Streams and events. A function returns UNSUPPORTED, naming the missing function, if the device's
// table lacks it. The host has no streams; it has events, which are done as soon as they are
// recorded. Every stream or event made here counts as a live object until it is destroyed.
TE_FL_API Result<void*> create_stream(const Device& device);
// The device finishes work that is already on the stream. The stream itself is destroyed after the
// last tensor whose memory was allocated on it. Does nothing for null, the default stream.
TE_FL_API void destroy_stream(const Device& device, void* stream) noexcept;
// Call this for a stream that te-fl did not make, such as a framework's stream that was passed to
// ops or to a StreamScope, before its owner destroys it and while no other thread uses it. te-fl
// and the device's plugin release the scratch memory and the freed memory that they keep for the
// stream, in stream order. Without this call, a later stream with the same handle would get memory
// that work of the destroyed stream may still be using.
//
// The stream may be busy. The call waits for its work only if tensors, graphs or scopes still hold
// the stream; such tensors are later freed on the default stream, and the caller must order the
// default stream after other streams that used them. OK for a stream that te-fl has never seen;
// INVALID_ARGUMENT for the default stream and for a stream that create_stream made;
// FAILED_PRECONDITION while the stream is captured.
TE_FL_API Status retire_stream(const Device& device, void* stream);
// `timed`: the event may be passed to elapsed_time(), which makes recording slower on some devices.
TE_FL_API Result<void*> create_event(const Device& device, bool timed = false);
TE_FL_API void destroy_event(const Device& device, void* event) noexcept;
// The event marks the work that is on `stream` now. Recording again moves the mark.
TE_FL_API Status record_event(const Device& device, void* event, void* stream = nullptr);
// Later work on `stream` waits for the event's mark; the calling thread does not wait.
TE_FL_API Status wait_event(const Device& device, void* event, void* stream = nullptr);
// `stream` waits for an event of another device of the same provider. INVALID_ARGUMENT for an event
// of another provider (rule R24).
TE_FL_API Status wait_event(const Device& device, const Device& event_device, void* event,
                            void* stream);
// True if the work before the mark is done, or if the event was never recorded. Never waits.
TE_FL_API Result<bool> query_event(const Device& device, void* event);
// Nanoseconds between the marks of two events, 0 if `end` came before `start`. INVALID_ARGUMENT
// unless both were made with `timed`, FAILED_PRECONDITION unless both have been recorded and are
// done.
TE_FL_API Result<uint64_t> elapsed_time(const Device& device, void* start, void* end);
// The calling thread waits for the mark. Errors as for synchronize(); they may stem from ops on any
// stream.
TE_FL_API Status synchronize_event(const Device& device, void* event);
// True if `stream` is being captured into a graph. False for a device that cannot capture.
TE_FL_API Result<bool> is_capturing(const Device& device, void* stream = nullptr);
// OK if the device can capture. Otherwise UNSUPPORTED, which names the function that the device's
// table lacks.
TE_FL_API Status check_capture(const Device& device);
// The calling thread's current stream of a device: the stream of its innermost StreamScope for the
// device. Null, the default stream, without such a scope.
TE_FL_API void* current_stream(const Device& device) noexcept;
// The stream of the calling thread's innermost StreamScope, whatever its device; null without one.
TE_FL_API void* current_stream() noexcept;

}  // namespace devices

class Event;

// Owns a stream of a device and keeps the device in the list. Movable, not copyable. A moved-from
// or default-constructed Stream owns nothing and denotes the default stream of the host. A
// stream that belongs to a framework is passed as a plain pointer instead.
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
  // Later work on this stream waits for the event's mark. The event may belong to another device of
  // the same provider; otherwise INVALID_ARGUMENT.
  TE_FL_API Status wait(const Event& event) const;

 private:
  Stream(const Device& device, void* handle) noexcept : device_(device), handle_(handle) {}
  Device device_;
  void* handle_ = nullptr;
};

// Owns an event of a device. Movable, not copyable. A moved-from or default-constructed Event owns
// nothing; recording it or waiting for it is INVALID_ARGUMENT.
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
  // See devices::query_event().
  TE_FL_API Result<bool> done() const;
  // Nanoseconds from the mark of `start` to the mark of this event; see devices::elapsed_time().
  // Both events must be of one device.
  TE_FL_API Result<uint64_t> elapsed_since(const Event& start) const;

 private:
  Event(const Device& device, void* handle) noexcept : device_(device), handle_(handle) {}
  Device device_;
  void* handle_ = nullptr;
};

// Makes `stream` the calling thread's current stream of `device` until the scope is destroyed. The
// current streams of other devices do not change. Scopes nest; destroy them in reverse order. A
// stream that te-fl did not make is borrowed: it must outlive the tensors made in the scope, or be
// retired first (devices::retire_stream).
//
// Memory of tensors made in the scope (Tensor::empty, zeros, to, ...) is allocated on the stream
// and later freed on it. Tensors used on this stream alone need no further synchronisation. If
// other streams use a tensor too, the tensor's own stream must wait for their work (Event,
// Stream::wait) before the last copy of the tensor is destroyed.
class [[nodiscard]] StreamScope {
 public:
  TE_FL_API StreamScope(const Device& device, void* stream);
  TE_FL_API explicit StreamScope(const Stream& stream)
      : StreamScope(stream.device(), stream.get()) {}
  // Sets `stream` without naming its device. te-fl determines the device: the device on which te-fl
  // made the stream; otherwise the only registered device; otherwise, if all devices belong to one
  // plugin, the device whose check_stream does not refuse the stream. If several devices remain, as
  // when two plugins have devices and te-fl did not make the stream, allocations in the scope fail
  // with FAILED_PRECONDITION. The scope does not load plugins whose loading is deferred until a
  // device is named ("load_for" in a manifest). Null: the default stream of every device.
  TE_FL_API explicit StreamScope(void* stream);
  TE_FL_API ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

  struct Frame;  // used by the library only

 private:
  std::unique_ptr<Frame> frame_;
};

// Owns a captured graph: work that every launch enqueues again as a whole. Movable, not copyable.
// All memory that the captured work uses must be alive at every launch. The graph keeps the memory
// that was allocated or freed during the capture, including scratch of ops. The caller keeps
// tensors from before the capture alive. Destroy the graph before its device is removed.
class Graph {
 public:
  Graph() = default;
  TE_FL_API Graph(Graph&& other) noexcept;
  TE_FL_API Graph& operator=(Graph&& other) noexcept;
  TE_FL_API ~Graph();

  void* get() const noexcept { return handle_; }
  const Device& device() const noexcept { return device_; }
  // The stream that the graph was captured on.
  void* stream() const noexcept { return stream_; }
  // Enqueues the work once, on `stream` or, without an argument, on the stream of the capture. The
  // graph has its own scratch memory, so other graphs and other work may run at the same time.
  // Launches of the same graph must run one after the other. FAILED_PRECONDITION for an empty
  // Graph, and, without an argument, if the stream of the capture has been retired.
  TE_FL_API Status launch() const;
  TE_FL_API Status launch(void* stream) const;

 private:
  friend class Capture;
  Device device_;
  void* handle_ = nullptr;
  void* stream_ = nullptr;
  std::shared_ptr<core::StreamRecord> stream_owner_;
};

// Records the work that is enqueued on a stream, instead of running it, from begin() to end(). One
// thread makes both calls. Ops that cannot be captured are refused with the reason. Run the same
// work once before the capture, so that plans exist.
class Capture {
 public:
  // Begins a capture. INVALID_ARGUMENT for the default stream; UNSUPPORTED if the device cannot
  // capture.
  TE_FL_API static Result<Capture> begin(const Device& device, void* stream);
  TE_FL_API Capture(Capture&& other) noexcept;
  Capture& operator=(Capture&&) = delete;
  // Ends the capture and discards the recorded work, unless end() has been called.
  TE_FL_API ~Capture();
  // FAILED_PRECONDITION if called a second time.
  TE_FL_API Result<Graph> end();

 private:
  Capture() = default;
  Device device_;
  void* stream_ = nullptr;  // null after end()
  std::shared_ptr<core::StreamRecord> stream_owner_;
};

}  // namespace te_fl
