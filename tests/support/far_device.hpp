#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "support/device_queues.hpp"
#include "te_fl/plugin.h"

// A device with memory of its own and the late streams of DeviceQueues. Its addresses lie in a
// reserved range without access rights, so host code that touches a tensor's memory crashes. The
// bytes are in a second mapping, which only the device's functions use. Freed memory is overwritten
// when the stream reaches the free. FarDevices with different indices can copy to each other.
namespace te_fl::testing {

class FarDevice {
 public:
  struct Range {
    uintptr_t begin;
    size_t bytes;
    void* stream;
  };

  explicit FarDevice(int32_t index = 0, size_t capacity = size_t{1} << 32) : capacity_(capacity) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    shown_ = static_cast<char*>(mmap(nullptr, capacity, PROT_NONE, flags, -1, 0));
    real_ = static_cast<char*>(mmap(nullptr, capacity, PROT_READ | PROT_WRITE, flags, -1, 0));
    if (shown_ == MAP_FAILED || real_ == MAP_FAILED) std::abort();
    free_[0] = capacity;
    api.struct_size = sizeof api;
    queues.install<FarDevice>(api);
    api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* e) {
      if (memory->kind == TE_FL_MEMORY_PINNED) {
        return of(self).allocate_pinned(memory->bytes, out, e);
      }
      if (memory->kind == TE_FL_MEMORY_MANAGED || memory->alignment > 256) {
        return say(e, TE_FL_UNSUPPORTED, "the far device has no such memory");
      }
      return of(self).allocate(memory->bytes, memory->stream, out, e);
    };
    api.free = [](void* self, void* data, uint32_t kind, void* stream, const te_fl_error_sink*) {
      if (kind == TE_FL_MEMORY_PINNED) return of(self).free_pinned(data);
      return of(self).release(data, stream);
    };
    api.copy = [](void* self, void* dst, const void* src, size_t bytes, uint32_t host, void* stream,
                  const te_fl_error_sink* e) {
      return of(self).copy(dst, src, bytes, host, stream, e);
    };
    api.fill = [](void* self, void* dst, uint8_t value, size_t bytes, void* stream,
                  const te_fl_error_sink*) -> te_fl_status {
      FarDevice& d = of(self);
      d.enqueue(stream, [to = d.real(dst), value, bytes] { std::memset(to, value, bytes); });
      return TE_FL_OK;
    };
    api.copy_between = [](void* self, void* dst, void* dst_stream, void* src_self, const void* src,
                          void* src_stream, size_t bytes,
                          const te_fl_error_sink* e) -> te_fl_status {
      FarDevice &to = of(self), &from = of(src_self);
      if (const te_fl_status status = to.next_copy_between.load()) {
        return say(e, status, "there is no way between the two");
      }
      ++to.copies_between;
      auto work = [t = to.real(dst), f = from.real(src), bytes]() -> te_fl_status {
        std::memcpy(t, f, bytes);
        return TE_FL_OK;
      };
      DeviceQueues::enqueue_between(to.queues, dst_stream, from.queues, src_stream, work);
      return TE_FL_OK;
    };
    api.retire_stream = [](void* self, void* stream, const te_fl_error_sink*) -> te_fl_status {
      of(self).retired = stream;
      return TE_FL_OK;
    };
    is_captured_ = api.is_capturing;
    api.is_capturing = [](void* self, void* stream, int32_t* capturing,
                          const te_fl_error_sink* e) -> te_fl_status {
      const te_fl_status status = of(self).is_captured_(self, stream, capturing, e);
      if (of(self).capturing.load()) *capturing = 1;
      return status;
    };
    api.properties = [](void*, te_fl_device_props* props, const te_fl_error_sink*) -> te_fl_status {
      props->arch = 7;
      props->copy_bandwidth = 2.5e11;
      std::strcpy(props->name, "far");
      return TE_FL_OK;
    };
    desc.struct_size = sizeof desc;
    desc.device = {TE_FL_DEVICE_EXT, index};
    desc.provider = "far";
    desc.self = this;
    desc.api = &api;
  }
  ~FarDevice() {
    queues.drain();
    munmap(shown_, capacity_);
    munmap(real_, capacity_);
  }
  FarDevice(const FarDevice&) = delete;
  FarDevice& operator=(const FarDevice&) = delete;

  // Returns the host address of the bytes behind a device address, for functions that the device
  // runs.
  char* real(const void* shown) const {
    const char* at = static_cast<const char*>(shown);
    if (at < shown_ || at >= shown_ + capacity_) {
      std::fprintf(stderr, "far device: %p is not an address of its memory\n", shown);
      std::abort();
    }
    return real_ + (at - shown_);
  }
  bool owns(const void* p) const {
    return static_cast<const char*>(p) >= shown_ &&
           static_cast<const char*>(p) < shown_ + capacity_;
  }
  void enqueue(void* stream, std::function<void()> work) {
    queues.enqueue(stream, [work = std::move(work)]() -> te_fl_status {
      work();
      return TE_FL_OK;
    });
  }

  DeviceQueues queues;
  te_fl_device_api api{};
  te_fl_device_desc desc{};
  std::atomic<bool> capturing{false};             // reports every stream as capturing
  std::atomic<te_fl_status> next_copy{TE_FL_OK};  // status of the next copies
  std::atomic<te_fl_status> next_pinned{TE_FL_OK};
  // Status of the next copies from another device.
  std::atomic<te_fl_status> next_copy_between{TE_FL_OK};
  std::atomic<int64_t> copies_between{0};  // number of copies that were made
  std::atomic<void*> retired{nullptr};     // the stream of the last retire_stream() call
  std::atomic<int64_t> pinned{0};          // live pinned buffers
  // Ranges copied since forget(): read from the device, and written to it.
  std::vector<Range> reads() const {
    const std::lock_guard lock(mutex_);
    return reads_;
  }
  std::vector<Range> writes() const {
    const std::lock_guard lock(mutex_);
    return writes_;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    reads_.clear();
    writes_.clear();
  }
  // If false, reads() and writes() stay empty, because a training run makes many copies.
  bool keep_ranges = false;

 private:
  static FarDevice& of(void* self) { return *static_cast<FarDevice*>(self); }
  static te_fl_status say(const te_fl_error_sink* e, te_fl_status status, const char* text) {
    if (e != nullptr && e->write != nullptr) e->write(e->host, text);
    return status;
  }

  te_fl_status allocate(size_t bytes, void* stream, void** out, const te_fl_error_sink* e) {
    // Leaves an unused gap behind the block.
    const size_t wanted = (bytes + 2 * kAlignment) / kAlignment * kAlignment;
    // Before the device reports out of memory, it completes pending frees.
    if (!take(wanted, out)) {
      queues.drain();
      if (!take(wanted, out)) {
        return say(e, TE_FL_OUT_OF_MEMORY | TE_FL_CLEAN, "the far device is full");
      }
    }
    queues.allocated(stream, *out);
    return TE_FL_OK;
  }

  bool take(size_t wanted, void** out) {
    const std::lock_guard lock(mutex_);
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      if (at->second < wanted) continue;
      const auto [offset, size] = *at;
      free_.erase(at);
      if (size > wanted) free_[offset + wanted] = size - wanted;
      used_[offset] = wanted;
      *out = shown_ + offset;
      return true;
    }
    return false;
  }

  te_fl_status release(void* data, void* stream) {
    {
      const std::lock_guard lock(mutex_);
      if (used_.count(static_cast<size_t>(static_cast<char*>(data) - shown_)) == 0) std::abort();
    }
    queues.freed(stream, data, [this, data] { give_back(data); });
    return TE_FL_OK;
  }

  void give_back(void* data) {
    const std::lock_guard lock(mutex_);
    const auto at = used_.find(static_cast<size_t>(static_cast<char*>(data) - shown_));
    if (at == used_.end()) std::abort();  // a double free
    auto [offset, size] = *at;
    used_.erase(at);
    std::memset(real_ + offset, 0xdd, size < 4096 ? size : 4096);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + size == next->first) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    free_[offset] = size;
  }

  te_fl_status allocate_pinned(size_t bytes, void** out, const te_fl_error_sink* e) {
    if (const te_fl_status status = next_pinned.load()) return say(e, status, "no pinned memory");
    *out = std::malloc(bytes);
    if (*out == nullptr) return say(e, TE_FL_OUT_OF_MEMORY | TE_FL_CLEAN, "no host memory");
    const std::lock_guard lock(mutex_);
    pinned_[static_cast<char*>(*out)] = bytes;
    ++pinned;
    return TE_FL_OK;
  }

  te_fl_status free_pinned(void* data) {
    const std::lock_guard lock(mutex_);
    pinned_.erase(static_cast<char*>(data));
    --pinned;
    std::free(data);
    return TE_FL_OK;
  }

  bool is_pinned(const void* p) const {
    const auto* at = static_cast<const char*>(p);
    auto after = pinned_.upper_bound(const_cast<char*>(at));
    if (after == pinned_.begin()) return false;
    const auto& [begin, bytes] = *std::prev(after);
    return at < begin + bytes;
  }

  te_fl_status copy(void* dst, const void* src, size_t bytes, uint32_t host, void* stream,
                    const te_fl_error_sink* e) {
    if (const te_fl_status status = next_copy.load()) return say(e, status, "the bus is down");
    const bool to_host = (host & 1) != 0, from_host = (host & 2) != 0;
    char* to = to_host ? static_cast<char*>(dst) : real(dst);
    const char* from = from_host ? static_cast<const char*>(src) : real(src);
    bool pinned_source = false;
    {
      const std::lock_guard lock(mutex_);
      const auto note = [&](std::vector<Range>& list, const void* at) {
        if (keep_ranges) list.push_back({reinterpret_cast<uintptr_t>(at), bytes, stream});
      };
      if (to_host) note(reads_, src);
      if (from_host) note(writes_, dst);
      pinned_source = from_host && is_pinned(src);
    }
    if (from_host && !pinned_source) {  // pageable memory is read before the call returns
      auto read = std::make_shared<std::vector<char>>(from, from + bytes);
      enqueue(stream, [to, read] { std::memcpy(to, read->data(), read->size()); });
    } else {
      enqueue(stream, [to, from, bytes] { std::memmove(to, from, bytes); });
    }
    return TE_FL_OK;
  }

  static constexpr size_t kAlignment = 256;
  size_t capacity_;
  char* shown_;
  char* real_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_, used_;  // offset, bytes
  std::map<char*, size_t> pinned_;
  te_fl_status (*is_captured_)(void*, void*, int32_t*, const te_fl_error_sink*) = nullptr;
  std::vector<Range> reads_, writes_;
};

}  // namespace te_fl::testing
