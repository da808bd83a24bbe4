#pragma once

#include <atomic>
#include <cstdint>

// Epoch-based reclamation. Each thread publishes, in a cache line of its own, the epoch at which it
// entered an op. An object that was unpublished at epoch E is freed when each thread is outside or
// entered after E. Readers take no lock and write only their own cache line.
namespace te_fl::registry {

struct ThreadRecord;

// The counter that retire() advances.
struct alignas(64) EpochCounter {
  std::atomic<uint64_t> value{1};
  // True if the writer's membarrier() orders the readers' accesses, so that enter() needs no fence.
  std::atomic<bool> asymmetric{false};
};
extern EpochCounter g_epoch;

// A thread's published epoch; 0: the thread is outside.
struct alignas(64) EpochSlot {
  std::atomic<uint64_t> epoch{0};
  uint32_t depth = 0;  // nested ops; used by the owning thread only
};

// Marks the thread as inside an op or a device function (core/device/inside.hpp). A nested enter()
// only increments `depth`.
[[gnu::always_inline]] inline void enter(EpochSlot& slot) noexcept {
  if (slot.depth++ != 0) return;
  const uint64_t now = g_epoch.value.load(std::memory_order_acquire);
  // Release: a writer that reads this epoch, rather than the 0 before it, also sees that the
  // thread's previous op has ended.
  slot.epoch.store(now, std::memory_order_release);
  if (g_epoch.asymmetric.load(std::memory_order_relaxed)) {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the writer calls membarrier
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence in oldest_inside()
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

// True if the calling thread is inside an op or a device function.
bool inside_op() noexcept;
// Call this after unpublishing an object. Returns the epoch of its retirement.
uint64_t retire();
// The oldest epoch that any thread inside an op has published, but at most the current epoch. No
// thread can see objects retired before that epoch, now or later, so the result stays valid while
// other threads retire objects and enter ops.
uint64_t oldest_inside();
// Waits until no thread can see objects retired at `epoch`. The caller must not be inside an op.
void wait_quiescent(uint64_t epoch);

}  // namespace te_fl::registry
