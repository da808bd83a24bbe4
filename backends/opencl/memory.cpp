#include "memory.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cl_check.hpp"

namespace te_fl::opencl {
namespace {

constexpr size_t kAlignment = 256;  // larger than clSVMAlloc guarantees
constexpr size_t kLargestCached = size_t{64} << 20;

// Rounds sizes up to an eighth of their power of two, so that tensors of similar size can share
// blocks.
size_t rounded(size_t bytes) {
  bytes = std::max<size_t>(bytes, 1);
  const int top = std::bit_width(bytes - 1);
  const size_t step = size_t{1} << std::max(9, top - 3);
  return bytes > SIZE_MAX - step ? bytes : (bytes + step - 1) / step * step;
}

// Returns the entry whose memory contains the address `data`; NULL if there is none. `map`: from
// the begin address of a block to an object with the member `bytes`.
template <class Map>
auto containing(Map& map, const void* data) -> decltype(&*map.begin()) {
  auto* at = const_cast<char*>(static_cast<const char*>(data));
  auto after = map.upper_bound(at);
  if (after == map.begin()) return nullptr;
  auto& entry = *std::prev(after);
  return at < entry.first + entry.second.bytes ? &entry : nullptr;
}

}  // namespace

Memory::Memory(cl_context context, cl_device_id device, cl_command_queue default_queue,
               size_t cache_limit)
    : context_(context),
      device_(device),
      default_queue_(default_queue),
      cache_limit_(cache_limit) {}

Memory::~Memory() {
  trim();
  for (const auto& [data, block] : blocks_) clSVMFree(context_, block.base);
  while (!pinned_.empty()) free_pinned(pinned_.begin()->first);
}

void* Memory::allocate(size_t asked, cl_command_queue queue) {
  const size_t bytes = rounded(asked);
  const std::lock_guard lock(mutex_);
  if (const auto at = cache_.find({queue, bytes}); at != cache_.end() && !at->second.empty()) {
    const auto [data, block] = at->second.back();
    at->second.pop_back();
    cached_ -= bytes;
    blocks_[data] = block;
    return data;
  }
  const auto take = [&] { return clSVMAlloc(context_, CL_MEM_READ_WRITE, bytes + kAlignment, 0); };
  void* base = bytes > SIZE_MAX - kAlignment ? nullptr : take();
  if (base == nullptr && cached_ > 0) {
    for (const auto& [key, list] : cache_) {
      if (!list.empty()) check(clFinish(key.first), "clFinish");
    }
    trim();
    base = take();
  }
  if (base == nullptr) {
    cl_ulong largest = 0, total = 0;
    clGetDeviceInfo(device_, CL_DEVICE_MAX_MEM_ALLOC_SIZE, sizeof largest, &largest, nullptr);
    clGetDeviceInfo(device_, CL_DEVICE_GLOBAL_MEM_SIZE, sizeof total, &total, nullptr);
    throw backend::Error(
        TE_FL_OUT_OF_MEMORY,
        "clSVMAlloc returned no memory; requested " + std::to_string(asked) + " bytes, " +
            std::to_string(allocated_ >> 20) + " of " + std::to_string(total >> 20) +
            " MiB are taken, and one allocation may have " + std::to_string(largest >> 20));
  }
  allocated_ += bytes;
  const auto address = (reinterpret_cast<uintptr_t>(base) + kAlignment - 1) & ~(kAlignment - 1);
  auto* data = static_cast<char*>(base) + (address - reinterpret_cast<uintptr_t>(base));
  blocks_[data] = {base, bytes};
  return data;
}

void Memory::free(void* data, cl_command_queue queue) {
  const std::lock_guard lock(mutex_);
  const auto at = blocks_.find(static_cast<char*>(data));
  if (at == blocks_.end()) {
    throw backend::Error(TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN,
                         "this is no memory that allocate() returned, or it is freed twice");
  }
  const Block block = at->second;
  blocks_.erase(at);
  if (block.bytes <= kLargestCached && cached_ + block.bytes <= cache_limit_) {
    cache_[{queue, block.bytes}].emplace_back(static_cast<char*>(data), block);
    cached_ += block.bytes;
    return;
  }
  allocated_ -= block.bytes;
  void* base = block.base;
  check(clEnqueueSVMFree(queue, 1, &base, nullptr, nullptr, 0, nullptr, nullptr),
        "clEnqueueSVMFree");
  check(clFlush(queue), "clFlush");
}

// Frees all cached blocks. The device must be idle. The caller must hold the lock or be the only
// user.
void Memory::trim() {
  for (auto& [key, list] : cache_) {
    for (const auto& [data, block] : list) {
      clSVMFree(context_, block.base);
      allocated_ -= block.bytes;
    }
  }
  cache_.clear();
  cached_ = 0;
}

void Memory::forget(cl_command_queue queue) {
  const std::lock_guard lock(mutex_);
  std::erase_if(cache_, [&](const auto& entry) {
    if (entry.first.first != queue) return false;
    for (const auto& [data, block] : entry.second) {
      clSVMFree(context_, block.base);
      cached_ -= block.bytes;
      allocated_ -= block.bytes;
    }
    return true;
  });
}

// Allocates pinned host memory: a buffer that the driver keeps in host memory and that stays mapped
// until it is freed.
void* Memory::allocate_pinned(size_t asked) {
  const size_t bytes = std::max<size_t>(asked, 1);
  cl_int error = CL_SUCCESS;
  cl_mem buffer =
      clCreateBuffer(context_, CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, bytes, nullptr, &error);
  check(error, "clCreateBuffer");
  void* data = clEnqueueMapBuffer(default_queue_, buffer, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0,
                                  bytes, 0, nullptr, nullptr, &error);
  if (error != CL_SUCCESS) {
    clReleaseMemObject(buffer);
    throw_error(error, "clEnqueueMapBuffer");
  }
  const std::lock_guard lock(mutex_);
  pinned_[static_cast<char*>(data)] = {buffer, bytes};
  return data;
}

void Memory::free_pinned(void* data) {
  Pinned pinned{};
  {
    const std::lock_guard lock(mutex_);
    const auto at = pinned_.find(static_cast<char*>(data));
    if (at == pinned_.end()) {
      throw backend::Error(TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN,
                           "this is no pinned memory that allocate() returned");
    }
    pinned = at->second;
    pinned_.erase(at);
  }
  clEnqueueUnmapMemObject(default_queue_, pinned.buffer, data, 0, nullptr, nullptr);
  clFinish(default_queue_);
  clReleaseMemObject(pinned.buffer);
}

bool Memory::is_pinned(const void* data) const {
  const std::lock_guard lock(mutex_);
  return containing(pinned_, data) != nullptr;
}

std::string Memory::not_ours(const void* data, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* block = containing(blocks_, data);
  if (block == nullptr) {
    return containing(pinned_, data) != nullptr ? "it is pinned host memory"
                                                : "it is host memory, or no memory at all";
  }
  const size_t left =
      block->second.bytes - static_cast<size_t>(static_cast<const char*>(data) - block->first);
  if (bytes <= left) return "";
  return "its " + std::to_string(bytes) + " bytes end outside the allocation, which has " +
         std::to_string(left) + " from there";
}

size_t Memory::allocated() const {
  const std::lock_guard lock(mutex_);
  return allocated_;
}

}  // namespace te_fl::opencl
