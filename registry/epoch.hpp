#pragma once

#include <atomic>
#include <cstdint>

// Epoch-based reclamation. A thread publishes the epoch at which it entered an op in its own cache
// line; what was unpublished at epoch E is freed when every thread is outside or entered after E.
// Readers take no lock and write only their own line.
namespace te_fl::registry {

struct ThreadRecord;

// The counter that retire() advances.
struct alignas(64) EpochCounter {
  std::atomic<uint64_t> value{1};
  // True if the kernel orders readers for us (membarrier), so that entering needs no fence of its
  // own.
  std::atomic<bool> asymmetric{false};
};
extern EpochCounter g_epoch;

// A thread's published epoch; 0: outside.
struct alignas(64) EpochSlot {
  std::atomic<uint64_t> epoch{0};
  uint32_t depth = 0;  // nested ops; the thread's own
};

// Marks the thread as inside an op or a function of a device (core/inside.hpp). Entering again only
// counts.
[[gnu::always_inline]] inline void enter(EpochSlot& slot) noexcept {
  if (slot.depth++ != 0) return;
  const uint64_t now = g_epoch.value.load(std::memory_order_acquire);
  // A writer that sees this epoch and not the 0 before it comes after the op before, too.
  slot.epoch.store(now, std::memory_order_release);
  if (g_epoch.asymmetric.load(std::memory_order_relaxed)) {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the writer's membarrier does the rest
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the one of oldest_inside()
  }
}
[[gnu::always_inline]] inline void leave(EpochSlot& slot) noexcept {
  if (--slot.depth == 0) slot.epoch.store(0, std::memory_order_release);
}

class EpochGuard {
 public:
  explicit EpochGuard(EpochSlot& slot) noexcept : slot_(slot) { enter(slot_); }
  ~EpochGuard() { leave(slot_); }
  EpochGuard(const EpochGuard&) = delete;
  EpochGuard& operator=(const EpochGuard&) = delete;

 private:
  EpochSlot& slot_;
};

// True if the calling thread is inside.
bool inside_op() noexcept;
// Call after unpublishing something; returns the epoch at which it was retired.
uint64_t retire();
// The epoch below which retired objects can be seen by no thread, now and later: the least epoch at
// which a thread that is inside entered, but at most the epoch at the time of the call. So the
// answer may be kept while others retire and enter.
uint64_t oldest_inside();
// Waits until nobody can see what was retired at `epoch`. The caller must not be inside an op.
void wait_quiescent(uint64_t epoch);

}  // namespace te_fl::registry
