#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

// Graph captures: work that is captured instead of executed.
namespace te_fl::nn::detail {

// Represents a capture that nn has begun on this thread. Captures nest; each is ended on its own
// thread, in reverse order.
class Capture {
 public:
  Capture();
  ~Capture() { end(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  void end();
  uint64_t id() const noexcept { return id_; }
  // Returns the memory that keep_for_graph() has collected, and passes its ownership to the caller.
  std::vector<std::shared_ptr<const void>> take_kept() { return std::move(kept_); }

 private:
  friend void keep_for_graph(std::shared_ptr<const void> memory);
  uint64_t id_;
  Capture* outer_;
  bool open_ = true;
  std::vector<std::shared_ptr<const void>> kept_;
};

// The id for any capture that nn did not begin. All such captures share it.
constexpr uint64_t kForeignCapture = UINT64_MAX;

// The id of the capture that receives work on `device` now; 0: none.
Result<uint64_t> find_capture(const Device& device);
// True if work on the device is captured now.
Result<bool> capturing(const Device& device);
// True if work on the device is captured now by a capture that nn did not begin.
Result<bool> in_foreign_capture(const Device& device);
// Keeps memory that captured work uses and that its owner may replace. The graph of the step that
// nn is capturing on this thread keeps it alive. Does nothing outside of such a capture.
void keep_for_graph(std::shared_ptr<const void> memory);

}  // namespace te_fl::nn::detail
