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

// The buffers of a problem, guards included, in a device's memory, and its tensors on them. On the
// host it is the problem's own memory, or copies that a page ends behind which nobody may touch.
class DeviceMirror {
 public:
  // Copies are enqueued on `stream` and waited for there. On the host, `guard_alignment` other than
  // 0 puts every buffer before a guard page (GuardedMemory), or behind one with `guard_start`. On a
  // device, `margins` that are not null lie around every buffer in place of its own guard bytes.
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
  // Copies every buffer of these tensors there, except those of tensors that stay `on_host`; errors
  // of the device.
  Status upload(const std::vector<std::unique_ptr<Tensor>>& tensors,
                const std::set<const Tensor*>& on_host = {});
  Status upload_words(const uint64_t*& words, size_t count);  // `words` then points to the copy
  // Copies every buffer back, guards included, when all work has finished.
  Status download();
  // After download(): "input: bytes outside ...", if any byte of the margins was written.
  const std::string& written_outside() const { return written_outside_; }
  const te_fl_tensor* of(const Tensor& tensor) const;

 private:
  struct OnDevice {
    te_fl_quant quant{};
    te_fl_tensor tensor{};
  };
  // `name` is that of the tensor or of its part.
  te_fl::Result<uint8_t*> copy_of(Buffer* buffer, const std::string& name);
  te_fl::Result<uint8_t*> guarded_copy_of(Buffer* buffer, const std::string& name);
  te_fl::Result<uint8_t*> surrounded_copy_of(Buffer* buffer, const std::string& name);
  Status download_surrounded();
  bool in_place() const { return device_.is_host() && guard_alignment_ == 0; }
  // The part of a buffer's whole memory that a guarded copy of it has: all but the bytes on the
  // guarded side.
  struct Kept {
    uint8_t* begin;
    size_t bytes;
  };
  Kept kept_of(Buffer& buffer) const;

  Device device_;
  void* stream_;
  size_t guard_alignment_;
  bool guard_start_;
  Margins* margins_;
  std::vector<GuardedMemory> guarded_;
  // A buffer's copy on the device with its margins, and the bytes that went there.
  struct Surrounded {
    std::string name;
    uint8_t* begin;
    std::vector<uint8_t> bytes;
  };
  std::map<Buffer*, Surrounded> surrounded_;
  std::string written_outside_;
  std::map<Buffer*, uint8_t*> buffers_;  // to the copy of whole()
  std::map<const Tensor*, std::unique_ptr<OnDevice>> tensors_;
  std::vector<void*> words_;
};

// True if an address lies in device memory that a mirror holds now. Async-signal-safe, so that a
// handler can say what a program that died had touched.
bool is_mirrored(const void* address) noexcept;

}  // namespace te_fl::conformance
