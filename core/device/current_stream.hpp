#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "te_fl/device.hpp"

// Streams, identified by device and handle. Equal handles of two devices are different streams.
namespace te_fl::core {

// A stream of one device with shared ownership. The holders are tensors, whose memory is freed on
// the stream, scopes and graphs. If devices::create_stream made the stream, the last holder after
// destroy_stream destroys it. A stream that other code made has a record from its first use until
// the last holder releases it.
struct StreamRecord {
  StreamRecord(const Device& d, void* h, bool m) noexcept : device(d), handle(h), made(m) {}
  StreamRecord(const StreamRecord&) = delete;
  StreamRecord& operator=(const StreamRecord&) = delete;
  ~StreamRecord();

  // The stream's handle; null (the default stream) after the stream has been retired.
  void* get() const noexcept { return retired.load(std::memory_order_acquire) ? nullptr : handle; }

  const Device device;
  void* const handle;
  const bool made;                   // true: devices::create_stream made the stream
  std::atomic<bool> retired{false};  // retire_stream was called: the owner will destroy it, no new
                                     // work
  std::atomic<int> in_use{0};        // number of StreamUse objects; retire_stream waits until it is
                                     // 0
};
using StreamRef = std::shared_ptr<StreamRecord>;

// Keeps a stream alive while memory is freed on it, even if another thread destroys or retires the
// stream meanwhile.
class StreamUse {
 public:
  explicit StreamUse(StreamRef record) noexcept;
  // Looks the stream up by its handle, for code that keeps no record.
  StreamUse(const Device& device, void* handle);
  ~StreamUse();
  StreamUse(const StreamUse&) = delete;
  StreamUse& operator=(const StreamUse&) = delete;
  // The stream's handle; null (the default stream) if the stream has been retired.
  void* get() const noexcept { return record_ != nullptr ? record_->handle : nullptr; }
  // True if another thread is destroying or retiring the stream. That thread frees the memory that
  // is kept for the stream (g_stream_goes), so the caller need not.
  bool goes() const noexcept { return goes_; }

 private:
  StreamRef record_;  // null: the default stream
  bool goes_ = false;
};

// Finds or creates the record of a stream. Null for the default stream.
StreamRef stream_record(const Device& device, void* handle);
// True if devices::create_stream made this stream on this device and it still exists.
bool is_own_stream(const Device& device, void* handle);
// INVALID_ARGUMENT if te-fl made `stream` on the device `other` instead of on `device`.
Status check_side(const Device& device, void* stream, const Device& other);

// The stream on which the calling thread allocates: that of its innermost StreamScope for `device`,
// else the default stream, whose record is null. FAILED_PRECONDITION if the stream has been
// retired, or if the scope names no device and more than one device may own the stream.
Result<StreamRef> current_stream(const Device& device);
// One of the calling thread's stream scopes, to be reopened on another thread. open_streams() lists
// the scopes that are in effect, the outermost first. `has_device` is false for a scope without one
// known device.
struct OpenStream {
  Device device;
  bool has_device;
  void* handle;
};
std::vector<OpenStream> open_streams();
// The innermost entry of open_streams(); nullopt if no scope is open.
std::optional<OpenStream> innermost_stream();

// Hook: called just before te-fl destroys a stream that create_stream made, and when a stream that
// te-fl did not make is retired. Memory that is kept for the stream can still be freed on it.
extern std::atomic<void (*)(const Device& device, void* stream)> g_stream_goes;

}  // namespace te_fl::core
