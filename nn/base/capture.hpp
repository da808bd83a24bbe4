#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

// Work that goes into a graph instead of running now.
namespace te_fl::nn::detail {

// Stands for the capture that nn has begun on this thread, from its construction on. Captures nest;
// each is ended on its thread, in reverse order.
class Capture {
 public:
  Capture();
  ~Capture() { end(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  void end();
  uint64_t id() const noexcept { return id_; }
  // The memory that keep_for_graph() was given, which is the caller's then.
  std::vector<std::shared_ptr<const void>> take_kept() { return std::move(kept_); }

 private:
  friend void keep_for_graph(std::shared_ptr<const void> memory);
  uint64_t id_;
  Capture* outer_;
  bool open_ = true;
  std::vector<std::shared_ptr<const void>> kept_;
};

// Stands for any capture that nn did not begin: those cannot be told apart, and are taken for one.
constexpr uint64_t kForeignCapture = UINT64_MAX;

// The capture that work on `device` would now go into; 0: there is none.
Result<uint64_t> capture_of(const Device& device);
// True if there is one.
Result<bool> capturing(const Device& device);
// True if there is one that nn did not begin.
Result<bool> in_foreign_capture(const Device& device);
// Keeps memory that the work uses and its owner may replace: it lives as long as the graph of the
// step that nn is capturing on this thread. Does nothing where there is no such capture.
void keep_for_graph(std::shared_ptr<const void> memory);

}  // namespace te_fl::nn::detail
