#include "core/device/recent_ops.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

namespace te_fl::core {
namespace {

struct Note {
  Device device;
  void* stream = nullptr;
  const char* op = nullptr;
  const char* impl_id = nullptr;
};

// One slot of the ring, protected as a seqlock. `turn_` is odd while a writer is inside; a reader
// that sees it change discards what it read. A writer that finds another writer inside discards its
// own record.
class Slot {
 public:
  void write(uint64_t turn, const Note& note) noexcept {
    uint64_t before = turn_.load(std::memory_order_relaxed);
    if (before % 2 != 0 || before > 2 * turn) return;
    if (!turn_.compare_exchange_strong(before, 2 * turn + 1, std::memory_order_acq_rel)) return;
    constexpr auto kOrder = std::memory_order_release;  // ordered after the store of turn_
    type_.store(note.device.type, kOrder);
    index_.store(note.device.index, kOrder);
    provider_.store(note.device.provider, kOrder);
    stream_.store(note.stream, kOrder);
    op_.store(note.op, kOrder);
    impl_.store(note.impl_id, kOrder);
    turn_.store(2 * turn + 2, kOrder);
  }
  std::optional<Note> read(uint64_t turn) const noexcept {
    constexpr auto kOrder = std::memory_order_acquire;  // ordered before the second load of turn_
    if (turn_.load(kOrder) != 2 * turn + 2) return {};
    const Note note{{type_.load(kOrder), index_.load(kOrder), provider_.load(kOrder)},
                    stream_.load(kOrder),
                    op_.load(kOrder),
                    impl_.load(kOrder)};
    if (turn_.load(std::memory_order_relaxed) != 2 * turn + 2) return {};
    return note;
  }

 private:
  std::atomic<uint64_t> turn_{0};
  std::atomic<int32_t> type_{0}, index_{0};
  std::atomic<uint32_t> provider_{0};
  std::atomic<void*> stream_{nullptr};
  std::atomic<const char*> op_{nullptr}, impl_{nullptr};
};

constexpr uint64_t kSlots = 64;
constinit std::array<Slot, kSlots> ring;
constinit std::atomic<uint64_t> next{0};

}  // namespace

void note_op(const Device& device, void* stream, const char* op, const char* impl_id) noexcept {
  const uint64_t turn = next.fetch_add(1, std::memory_order_relaxed);
  ring[turn % kSlots].write(turn, {device, stream, op, impl_id});
}

std::string recent_ops(const Device& device, void* stream, int count) {
  std::vector<Note> same, other;
  const uint64_t end = next.load(std::memory_order_acquire);
  for (uint64_t back = 1; back <= std::min(end, kSlots); ++back) {
    const uint64_t turn = end - back;
    const std::optional<Note> note = ring[turn % kSlots].read(turn);
    if (!note || !(note->device == device)) continue;
    (note->stream == stream ? same : other).push_back(*note);
  }
  std::string text;
  const auto list = [&](const std::vector<Note>& notes, const char* where) {
    for (const Note& note : notes) {
      if (count-- <= 0) return;
      text += (text.empty() ? "'" : ", '") + std::string(note.op) + "' by " + note.impl_id + where;
    }
  };
  list(same, "");
  list(other, " (another stream)");
  return text;
}

}  // namespace te_fl::core
