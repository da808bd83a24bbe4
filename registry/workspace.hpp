#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "core/base/lock_level.hpp"
#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

namespace te_fl::registry {

inline constexpr size_t kWorkspaceAlignment = 256;

// Host scratch memory of one thread: one block per nesting depth of ops. A block grows as needed
// and is kept until the thread ends.
class HostArenas {
 public:
  // Returns `bytes` of memory, aligned to 256, valid until the next get() for this depth. Null if
  // there is no memory.
  void* get(uint32_t depth, size_t bytes) noexcept;

 private:
  struct Free {
    void operator()(void* p) const noexcept;
  };
  struct Block {
    std::unique_ptr<void, Free> data;
    size_t bytes = 0;
  };
  std::vector<Block> blocks_;
};

// Device memory for one device, stream and nesting depth of ops: either scratch memory, or the
// persistent state of one implementation (R27). An op holds the lock while it enqueues work that
// uses the memory: two ops on a stream may share scratch memory only if their work does not
// interleave.
struct DeviceArena {
  explicit DeviceArena(int order) : mutex(core::LockLevel::kServing, order) {}
  core::Mutex mutex;
  std::atomic<void*> data{nullptr};  // held() reads it without the lock
  size_t bytes = 0;
  // Another scratch arena, for an op that finds this one locked and must not wait. Once created, it
  // lives as long as this arena.
  std::unique_ptr<DeviceArena> spare;
};

// Scratch memory for one op, held from before run() until the op is enqueued. A captured op gets
// separate memory, which is freed during the capture; the graph keeps that memory for its launches
// (R19).
class DeviceScratch {
 public:
  DeviceScratch() = default;
  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;
  ~DeviceScratch() {
    if (captured_ != nullptr) devices::free(device_, captured_, stream_);
  }
  void* data() const noexcept { return data_; }

 private:
  friend class DeviceArenas;
  void* data_ = nullptr;
  std::unique_lock<core::Mutex> arena_;  // locked if the memory belongs to an arena
  Device device_;
  void* stream_ = nullptr;
  void* captured_ = nullptr;
};

class DeviceArenas {
 public:
  DeviceArenas() = default;
  ~DeviceArenas();
  // Puts at least `bytes` of scratch for (device, stream, depth) into `out`, which must be empty.
  // The memory is the stream's arena, which `out` keeps locked, or memory of the graph that is
  // being captured. `may_wait` true: the thread may block until the arena is unlocked, because it
  // holds no kServing mutex for which the arena's owner may be waiting. False: if the arena is
  // locked, a spare arena is used.
  Status acquire(const Device& device, void* stream, uint32_t depth, size_t bytes, bool capturing,
                 bool may_wait, DeviceScratch& out);
  // Puts the persistent state memory of an implementation (R27) for (device, stream, depth) into
  // `out`. The memory is zero at first; later it holds what the implementation's previous op on
  // this stream wrote. A captured op gets memory of the graph, which is zeroed at each launch.
  Status acquire_state(const Device& device, void* stream, uint32_t depth, uint64_t implementation,
                       size_t bytes, bool capturing, DeviceScratch& out);
  // Frees the state of an implementation that is being destroyed.
  void release_state(uint64_t implementation);
  // The number of memory blocks held on a device.
  int64_t held(const Device& device) const;
  // Frees the blocks held on a device before it is removed. No work may be running on the device.
  void release(const Device& device);
  // Frees the blocks held for a stream that is about to be destroyed, in stream order.
  void release(const Device& device, void* stream);
  // In a forked child: forgets all blocks, since the child cannot use the parent's device memory.
  void forget_after_fork();

 private:
  // Device, stream, depth, and the number of the implementation that owns the state; 0: scratch.
  using Key = std::tuple<int32_t, int32_t, uint32_t, void*, uint32_t, uint64_t>;
  // Finds or creates the arena of a key. Takes the mutex in workspace.cpp.
  DeviceArena* find_arena(const Key& key);
  // Locks `arena`, or else its first free spare, which is created if there is none. `arena` then
  // points to the locked one.
  static std::unique_lock<core::Mutex> lock_free(DeviceArena*& arena);
  // Frees the matching blocks. `on_default_stream` true: frees them on the default stream, because
  // the blocks' own streams may have been destroyed.
  template <class Matches>
  void release_if(Matches&& matches, bool on_default_stream);

  std::map<Key, std::unique_ptr<DeviceArena>> arenas_;
};

}  // namespace te_fl::registry
