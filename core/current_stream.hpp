#pragma once

#include <atomic>
#include <memory>

#include "te_fl/device.hpp"

namespace te_fl::core {

// The calling thread's current stream, and what keeps it alive if te-fl made it (null: borrowed).
struct CurrentStream {
  void* handle = nullptr;
  std::shared_ptr<void> owner;
};
const CurrentStream& current_stream() noexcept;

// What keeps a stream alive that devices::create_stream made: the stream is destroyed when
// destroy_stream has been called and no owner is left. Null for others.
std::shared_ptr<void> stream_owner(void* handle);

// Whether a te_fl::Capture has begun on this very stream and not ended: its graph then keeps the
// stream. Not so for a stream that joined a capture, or whose capture somebody else began.
bool begun_by_capture(const Device& device, void* stream);

// Called just before such a stream is destroyed, so that memory kept for it can be freed on it.
extern std::atomic<void (*)(const Device& device, void* stream)> g_stream_goes;

}  // namespace te_fl::core
