#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "conformance/case.hpp"
#include "conformance/guarded.hpp"
#include "conformance/margins.hpp"
#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

namespace te_fl::conformance {

// Copies of a problem's buffers, guard bytes included, in a device's memory, and its tensors with
// pointers to the copies. On the host it uses the problem's own memory, or copies next to an
// inaccessible page.
class DeviceMirror {
 public:
  // Copies are enqueued on `stream`, which is also waited for. On the host, a `guard_alignment`
  // other than 0 places each buffer before a guard page (GuardedMemory), or after one with
  // `guard_start`. On a device, non-null `margins` replace each buffer's guard bytes.
  explicit DeviceMirror(Device device, void* stream = nullptr, size_t guard_alignment = 0,
                        bool guard_start = false, Margins* margins = nullptr)
      : device_(device),
        stream_(stream),
        guard_alignment_(guard_alignment),
        guard_start_(guard_start),
        margins_(device.is_host() ? nullptr : margins) {}
  ~DeviceMirror();
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  Device device() const { return device_; }
  // Copies the buffers of all tensors that are not `on_host`. Returns errors of the device.
  Status upload(const std::vector<std::unique_ptr<Tensor>>& tensors,
                const std::set<const Tensor*>& on_host = {});
  Status upload_words(const uint64_t*& words, size_t count);  // `words` then points to the copy
  // Waits for all work and copies each buffer back, guard bytes included.
  Status download();
  // After download(): "input: bytes outside ..." if a byte of the margins was written; otherwise
  // empty.
  const std::string& written_outside() const { return written_outside_; }
  const te_fl_tensor* of(const Tensor& tensor) const;

 private:
  struct OnDevice {
    te_fl_quant quant{};
    te_fl_tensor tensor{};
  };
  // `name` is the name of the tensor or of its part.
  te_fl::Result<uint8_t*> copy_buffer(Buffer* buffer, const std::string& name);
  te_fl::Result<uint8_t*> copy_guarded(Buffer* buffer, const std::string& name);
  te_fl::Result<uint8_t*> copy_surrounded(Buffer* buffer, const std::string& name);
  Status download_surrounded();
  bool in_place() const { return device_.is_host() && guard_alignment_ == 0; }
  // The memory of a buffer that a guarded copy contains: the contents, and the guard bytes on the
  // side without a guard page.
  struct Kept {
    uint8_t* begin;
    size_t bytes;
  };
  Kept keep_buffer(Buffer& buffer) const;

  Device device_;
  void* stream_;
  size_t guard_alignment_;
  bool guard_start_;
  Margins* margins_;
  std::vector<GuardedMemory> guarded_;
  // The device copy of a buffer's contents with the margins around it, and the bytes that were
  // copied there.
  struct Surrounded {
    std::string name;
    uint8_t* begin;
    std::vector<uint8_t> bytes;
  };
  std::map<Buffer*, Surrounded> surrounded_;
  std::string written_outside_;
  std::map<Buffer*, uint8_t*> buffers_;  // maps a buffer to the copy of whole()
  std::map<const Tensor*, std::unique_ptr<OnDevice>> tensors_;
  std::vector<void*> words_;
};

// True if an address is in device memory that a mirror currently uses. Async-signal-safe, so that a
// signal handler can describe the access that crashed a program.
bool is_mirrored(const void* address) noexcept;

}  // namespace te_fl::conformance
