#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

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

// Scratch of one device, stream and nesting depth. Locked while an op enqueues with it: two ops on
// one stream may use one scratch only if their work does not interleave.
struct DeviceArena {
  std::mutex mutex;
  void* data = nullptr;
  size_t bytes = 0;
  bool captured = false;  // a captured graph holds its address: never freed while the stream lives
  bool outlives = false;  // that graph does not keep the stream: freed when the device goes
};

class DeviceArenas {
 public:
  DeviceArenas() = default;
  ~DeviceArenas();
  // Locks the arena of (device, stream, depth), at least `bytes` large. Growing is refused while
  // the stream is being captured: the op has to run once before.
  Result<std::unique_lock<std::mutex>> acquire(const Device& device, void* stream, uint32_t depth,
                                               size_t bytes, bool capturing, void** data);
  // Frees what is held on a device, before it is removed. Nothing may be running on it.
  void release(const Device& device);
  // Frees what is held for a stream that is about to be destroyed. A graph that was captured on it
  // keeps it alive, so none refers to the memory any more. Graphs whose captures the stream only
  // joined, or that somebody else captured, do not: what they hold stays until the device goes.
  void release(const Device& device, void* stream);
  // In a forked child the memory of devices is out of reach: forget it.
  void forget_after_fork();

 private:
  using Key = std::tuple<int32_t, int32_t, uint32_t, void*, uint32_t>;
  // Held by a captured graph, and no arena any more: outgrown, or its stream has gone (then NULL).
  struct Outgrown {
    Device device;
    void* stream;
    void* data;
  };
  // The arena of a key, made if there is none. `mutex` in workspace.cpp guards it.
  DeviceArena* arena_of(const Key& key);
  // On the default stream where the blocks' own may be gone.
  template <class Matches>
  void release_if(Matches&& matches, bool on_default_stream);

  std::map<Key, std::unique_ptr<DeviceArena>> arenas_;
  std::vector<Outgrown> captured_;
};

}  // namespace te_fl::registry
