#include "core/device/in_flight.hpp"

#include <atomic>
#include <string>
#include <utility>

#include "te_fl/log.hpp"

namespace te_fl::core {
namespace {

// Memory that is never freed. The list keeps it reachable for leak checkers.
struct Kept {
  std::shared_ptr<void> memory;
  Kept* next;
};
constinit std::atomic<Kept*> g_kept{nullptr};

}  // namespace

Status wait_for_copies(const Device& device, void* stream, std::shared_ptr<void> memory) {
  Status first = devices::synchronize(device, stream);
  // A lost device does not run any more work, so the memory may be freed.
  if (first.ok() || memory == nullptr || first.code() == StatusCode::kDeviceLost) return first;
  if (devices::synchronize(device, stream).ok()) return first;
  auto* kept = new Kept{std::move(memory), g_kept.load(std::memory_order_relaxed)};
  while (!g_kept.compare_exchange_weak(kept->next, kept, std::memory_order_acq_rel)) {
  }
  const std::string name = to_string(device);
  log::once(log::Level::kWarning, "copies " + name,
            "copies on " + name + " could not be waited for (" + first.message() +
                "); the host memory that they may be using is kept until the process ends");
  return first;
}

}  // namespace te_fl::core
