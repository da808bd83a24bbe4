#include "nn/base/capture.hpp"

#include <atomic>

namespace te_fl::nn::detail {
namespace {

std::atomic<uint64_t> g_captures{0};
thread_local Capture* t_capture = nullptr;

}  // namespace

Capture::Capture() : id_(++g_captures), outer_(std::exchange(t_capture, this)) {}

void Capture::end() {
  if (std::exchange(open_, false)) t_capture = outer_;
}

Result<uint64_t> find_capture(const Device& device) {
  if (t_capture != nullptr) return t_capture->id();
  if (device.is_host()) return uint64_t{0};
  TE_FL_ASSIGN_OR_RETURN(const bool capturing,
                         devices::is_capturing(device, devices::current_stream(device)));
  return capturing ? kForeignCapture : uint64_t{0};
}

Result<bool> capturing(const Device& device) {
  if (device.is_host()) return false;
  TE_FL_ASSIGN_OR_RETURN(const uint64_t now, find_capture(device));
  return now != 0;
}

Result<bool> in_foreign_capture(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const uint64_t now, find_capture(device));
  return now == kForeignCapture;
}

void keep_for_graph(std::shared_ptr<const void> memory) {
  if (t_capture != nullptr) t_capture->kept_.push_back(std::move(memory));
}

}  // namespace te_fl::nn::detail
