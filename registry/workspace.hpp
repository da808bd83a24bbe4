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

// Host scratch of one thread, one block per nesting depth of ops. Grows, and is kept until the
// thread ends.
class HostArenas {
 public:
  // `bytes` aligned to 256, valid until the next get() of this depth. Null if there is no memory.
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

// Scratch of one device, stream and nesting depth, or an implementation's state there. Locked while
// an op enqueues with it: two ops on one stream may use one scratch only if their work does not
// interleave.
struct DeviceArena {
  explicit DeviceArena(int order) : mutex(core::LockLevel::kServing, order) {}
  core::Mutex mutex;
  std::atomic<void*> data{nullptr};  // held() looks at it without the lock
  size_t bytes = 0;
  // A second arena of scratch, for an op that finds this one locked and must not wait. Once there
  // is one, it stays as long as this.
  std::unique_ptr<DeviceArena> spare;
};

// Scratch for one op, from before run() until the op has been enqueued. That of a captured op is
// the graph's: it is freed in the capture, which keeps it for the graph's launches (R19).
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
  std::unique_lock<core::Mutex> arena_;  // if it is of an arena
  Device device_;
  void* stream_ = nullptr;
  void* captured_ = nullptr;
};

class DeviceArenas {
 public:
  DeviceArenas() = default;
  ~DeviceArenas();
  // At least `bytes` of scratch for (device, stream, depth) in `out`, which is empty: of the
  // stream's arena, which is locked, or memory of the graph that the stream is being captured into.
  // `may_wait`: the thread holds no mutex of kServing that another one may wait for with the arena
  // in its hands. Else it gets a spare arena where the stream's is locked.
  Status acquire(const Device& device, void* stream, uint32_t depth, size_t bytes, bool capturing,
                 bool may_wait, DeviceScratch& out);
  // The state of an implementation (R27) for (device, stream, depth), as its last op there left it,
  // and zero before the first. Of a captured op: memory of the graph, zero at each launch.
  Status acquire_state(const Device& device, void* stream, uint32_t depth, uint64_t implementation,
                       size_t bytes, bool capturing, DeviceScratch& out);
  // Frees the state of an implementation that goes.
  void release_state(uint64_t implementation);
  // Blocks of memory that are held on a device.
  int64_t held(const Device& device) const;
  // Frees what is held on a device, before it is removed. Nothing may be running on it.
  void release(const Device& device);
  // Frees what is held for a stream that is about to go, in the order of its work.
  void release(const Device& device, void* stream);
  // In a forked child the memory of devices is out of reach: forget it.
  void forget_after_fork();

 private:
  // Device, stream, depth, and the number of the implementation whose state it is; 0: scratch.
  using Key = std::tuple<int32_t, int32_t, uint32_t, void*, uint32_t, uint64_t>;
  // The arena of a key, made if there is none. `mutex` in workspace.cpp guards it.
  DeviceArena* arena_of(const Key& key);
  // Locks it, or the first of its spares that is free.
  static std::unique_lock<core::Mutex> lock_free(DeviceArena*& arena);
  // On the default stream where the blocks' own may be gone.
  template <class Matches>
  void release_if(Matches&& matches, bool on_default_stream);

  std::map<Key, std::unique_ptr<DeviceArena>> arenas_;
};

}  // namespace te_fl::registry
