#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "te_fl/device.hpp"

// Streams by device and handle: handles of two devices may be equal and mean two streams.
namespace te_fl::core {

// A stream of one device that something holds: tensors, whose memory is freed on it, scopes,
// graphs. Of a stream that devices::create_stream made, the last holder destroys it, after
// destroy_stream. One that somebody else made has a record from its first use on while anything
// holds it.
struct StreamRecord {
  StreamRecord(const Device& d, void* h, bool m) noexcept : device(d), handle(h), made(m) {}
  StreamRecord(const StreamRecord&) = delete;
  StreamRecord& operator=(const StreamRecord&) = delete;
  ~StreamRecord();

  // The stream, or null, the default one, if it has been retired.
  void* get() const noexcept { return retired.load(std::memory_order_acquire) ? nullptr : handle; }

  const Device device;
  void* const handle;
  const bool made;                   // by devices::create_stream
  std::atomic<bool> retired{false};  // its owner destroys it: nothing is enqueued on it any more
  std::atomic<int> in_use{0};        // of StreamUse; retire_stream waits until it is 0
};
using StreamRef = std::shared_ptr<StreamRecord>;

// A stream on which memory is being freed: it does not go as long as this lives, whoever lets it
// go.
class StreamUse {
 public:
  explicit StreamUse(StreamRef record) noexcept;
  // Uses the stream of a handle that is kept without a record.
  StreamUse(const Device& device, void* handle);
  ~StreamUse();
  StreamUse(const StreamUse&) = delete;
  StreamUse& operator=(const StreamUse&) = delete;
  // The stream, or null, the default one, if it has been retired.
  void* get() const noexcept { return record_ != nullptr ? record_->handle : nullptr; }
  // True if somebody is letting the stream go, or has: who does frees what is kept for it
  // (g_stream_goes).
  bool goes() const noexcept { return goes_; }

 private:
  StreamRef record_;  // null: the default stream
  bool goes_ = false;
};

// The record of a device's stream, made if there is none. Null for the default stream.
StreamRef stream_record(const Device& device, void* handle);
// True if devices::create_stream made this stream on this device and it still exists.
bool is_own_stream(const Device& device, void* handle);
// INVALID_ARGUMENT if te-fl made `stream`, which is to be of `device`, on `other` instead.
Status check_side(const Device& device, void* stream, const Device& other);

// The stream that the calling thread allocates on: of its innermost StreamScope for `device`, else
// the default stream, whose record is null. FAILED_PRECONDITION where it has been retired, or where
// the scope does not say whose it is and more than one device may have it.
Result<StreamRef> current_stream(const Device& device);
// The calling thread's streams that are in force, the outermost scope first; those of a scope that
// names no device have none. To be opened again on another thread.
struct OpenStream {
  Device device;
  bool has_device;
  void* handle;
};
std::vector<OpenStream> open_streams();
// The last of them; none where no scope is open.
std::optional<OpenStream> innermost_stream();

// Called just before a stream that create_stream made is destroyed, and when another one is
// retired: memory that is kept for it can still be freed on it.
extern std::atomic<void (*)(const Device& device, void* stream)> g_stream_goes;

}  // namespace te_fl::core
