#include "registry/workspace.hpp"

#include <atomic>
#include <cstdlib>
#include <string>

#include "core/base/fork.hpp"
#include "core/device/allocations.hpp"
#include "core/device/current_stream.hpp"
#include "core/device/device_list.hpp"

namespace te_fl::registry {
namespace {

// Guards the maps of all DeviceArenas. No device function is called while it is held.
constinit core::ForkMutex scratch_mutex(core::LockLevel::kScratch);
const core::ForkMutex::Registration scratch_registration(scratch_mutex);

// Advances when any arena is destroyed. Arena pointers that threads cached before are then stale.
std::atomic<uint64_t> g_generation{1};

size_t round_up(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

}  // namespace

void HostArenas::Free::operator()(void* p) const noexcept { std::free(p); }

void* HostArenas::get(uint32_t depth, size_t bytes) noexcept {
  try {
    if (blocks_.size() <= depth) blocks_.resize(depth + 1);
  } catch (...) {
    return nullptr;
  }
  Block& block = blocks_[depth];
  if (block.bytes >= bytes) return block.data.get();
  if (bytes > SIZE_MAX - kWorkspaceAlignment) return nullptr;
  block.data.reset();
  block.bytes = 0;
  block.data.reset(std::aligned_alloc(kWorkspaceAlignment, round_up(bytes)));
  if (block.data != nullptr) block.bytes = round_up(bytes);
  return block.data.get();
}

DeviceArenas::~DeviceArenas() {
  g_generation.fetch_add(1, std::memory_order_release);
  for (const Device& device : core::present_devices()) release(device);
}

// A thread usually asks for the same arena again, so the last one is found without the lock.
DeviceArena* DeviceArenas::find_arena(const Key& key) {
  struct Last {
    const DeviceArenas* owner = nullptr;
    uint64_t generation = 0;
    Key key;
    DeviceArena* arena = nullptr;
  };
  constinit static thread_local Last lasts[2]{};  // for scratch and for state
  Last& last = lasts[std::get<5>(key) == 0 ? 0 : 1];
  const uint64_t generation = g_generation.load(std::memory_order_acquire);
  if (last.owner == this && last.generation == generation && last.key == key) return last.arena;
  std::lock_guard lock(scratch_mutex);
  auto& slot = arenas_[key];
  if (slot == nullptr) {
    const bool scratch = std::get<5>(key) == 0;
    slot = std::make_unique<DeviceArena>(core::serving_order(
        std::get<4>(key), scratch ? core::Serving::kScratch : core::Serving::kState));
  }
  // `generation` was read before the lock was taken. If an arena is destroyed meanwhile, the cached
  // entry is stale.
  last = {this, generation, key, slot.get()};
  return slot.get();
}

namespace {

Status allocate_block(const Device& device, void* stream, size_t bytes, const char* use,
                      void*& data) {
  const core::AllocationUse in_use(use);
  Result<void*> made = devices::allocate(device, round_up(bytes), stream);
  if (!made.ok()) {
    return std::move(made.status()
                         .wrap(std::string(use) + " of " + std::to_string(bytes) + " bytes")
                         .set_clean());
  }
  data = *made;
  return {};
}

}  // namespace

std::unique_lock<core::Mutex> DeviceArenas::lock_free(DeviceArena*& arena) {
  for (;;) {
    if (std::unique_lock<core::Mutex> held(arena->mutex, std::try_to_lock); held) return held;
    const std::lock_guard lock(scratch_mutex);
    if (arena->spare == nullptr) {
      arena->spare = std::make_unique<DeviceArena>(arena->mutex.rank().order);
    }
    arena = arena->spare.get();
  }
}

Status DeviceArenas::acquire(const Device& device, void* stream, uint32_t depth, size_t bytes,
                             bool capturing, bool may_wait, DeviceScratch& out) {
  if (capturing) {
    out.device_ = device;
    out.stream_ = stream;
    TE_FL_RETURN_IF_ERROR(allocate_block(device, stream, bytes, "workspace", out.captured_));
    out.data_ = out.captured_;
    return {};
  }
  DeviceArena* arena =
      find_arena(Key(device.type, device.index, device.provider, stream, depth, 0));
  std::unique_lock<core::Mutex> held =
      may_wait ? std::unique_lock<core::Mutex>(arena->mutex) : lock_free(arena);
  if (arena->bytes < bytes) {
    void* grown = nullptr;
    TE_FL_RETURN_IF_ERROR(allocate_block(device, stream, bytes, "workspace", grown));
    devices::free(device, arena->data, stream);  // ordered after the stream's work so far
    arena->data = grown;
    arena->bytes = round_up(bytes);
  }
  out.data_ = arena->data;
  out.arena_ = std::move(held);
  return {};
}

Status DeviceArenas::acquire_state(const Device& device, void* stream, uint32_t depth,
                                   uint64_t implementation, size_t bytes, bool capturing,
                                   DeviceScratch& out) {
  const auto make = [&](auto& data) -> Status {
    void* block = nullptr;
    TE_FL_RETURN_IF_ERROR(allocate_block(device, stream, bytes, "stream state", block));
    Status zeroed = devices::fill(device, block, 0, round_up(bytes), stream);
    if (zeroed.ok()) {
      data = block;
    } else {
      devices::free(device, block, stream);
    }
    return zeroed;
  };
  if (capturing) {
    out.device_ = device;
    out.stream_ = stream;
    TE_FL_RETURN_IF_ERROR(make(out.captured_));
    out.data_ = out.captured_;
    return {};
  }
  DeviceArena* arena =
      find_arena(Key(device.type, device.index, device.provider, stream, depth, implementation));
  std::unique_lock<core::Mutex> held(arena->mutex);
  if (arena->data == nullptr) TE_FL_RETURN_IF_ERROR(make(arena->data));
  out.data_ = arena->data;
  out.arena_ = std::move(held);
  return {};
}

template <class Matches>
void DeviceArenas::release_if(Matches&& matches, bool on_default_stream) {
  struct Block {
    Device device;
    void* stream;
    void* data;
  };
  std::vector<Block> blocks;
  {
    std::lock_guard lock(scratch_mutex);
    g_generation.fetch_add(1, std::memory_order_release);
    std::erase_if(arenas_, [&](const auto& entry) {
      const auto& [type, index, provider, stream, depth, implementation] = entry.first;
      const Device device{type, index, provider};
      if (!matches(device, stream, implementation)) return false;
      for (const DeviceArena* a = entry.second.get(); a != nullptr; a = a->spare.get()) {
        blocks.push_back({device, stream, a->data});
      }
      return true;
    });
  }
  for (const Block& block : blocks) {
    devices::free(block.device, block.data, on_default_stream ? nullptr : block.stream);
  }
}

int64_t DeviceArenas::held(const Device& device) const {
  const std::lock_guard lock(scratch_mutex);
  int64_t count = 0;
  for (const auto& [key, arena] : arenas_) {
    if (Device{std::get<0>(key), std::get<1>(key), std::get<2>(key)} != device) continue;
    for (const DeviceArena* a = arena.get(); a != nullptr; a = a->spare.get()) {
      if (a->data.load(std::memory_order_relaxed) != nullptr) ++count;
    }
  }
  return count;
}

void DeviceArenas::release(const Device& device) {
  release_if([&](const Device& d, void*, uint64_t) { return d == device; }, true);
}

void DeviceArenas::release(const Device& device, void* stream) {
  release_if([&](const Device& d, void* s, uint64_t) { return d == device && s == stream; }, false);
}

void DeviceArenas::release_state(uint64_t implementation) {
  std::vector<std::pair<Device, void*>> streams;
  {
    std::lock_guard lock(scratch_mutex);
    for (const auto& [key, arena] : arenas_) {
      const auto& [type, index, provider, stream, depth, owner] = key;
      if (owner == implementation) streams.push_back({Device{type, index, provider}, stream});
    }
  }
  // Another thread may destroy one of these streams at the same time. StreamUse is therefore
  // created, and checked, before any block is removed from the map: the thread that destroys the
  // stream frees the blocks that are still in the map.
  for (const std::pair<Device, void*>& at : streams) {
    const core::StreamUse use(at.first, at.second);
    if (use.goes()) continue;
    const auto matches = [&](const Device& d, void* s, uint64_t i) {
      return i == implementation && d == at.first && s == at.second;
    };
    release_if(matches, false);
  }
}

void DeviceArenas::forget_after_fork() {
  for (auto& [key, arena] : arenas_) arena.release();  // NOLINT: its mutex may have no living owner
  g_generation.fetch_add(1, std::memory_order_release);
  arenas_.clear();
}

}  // namespace te_fl::registry
