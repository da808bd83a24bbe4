#include "core/recent_ops.hpp"

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

// One place of the ring. `turn` is odd while a writer is inside, and differs before and after for a
// reader that met one.
class Slot {
 public:
  void write(uint64_t turn, const Note& note) noexcept {
    turn_.store(2 * turn + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    type_.store(note.device.type, std::memory_order_relaxed);
    index_.store(note.device.index, std::memory_order_relaxed);
    provider_.store(note.device.provider, std::memory_order_relaxed);
    stream_.store(note.stream, std::memory_order_relaxed);
    op_.store(note.op, std::memory_order_relaxed);
    impl_.store(note.impl_id, std::memory_order_relaxed);
    turn_.store(2 * turn + 2, std::memory_order_release);
  }
  std::optional<Note> read(uint64_t turn) const noexcept {
    if (turn_.load(std::memory_order_acquire) != 2 * turn + 2) return {};
    const Note note{{type_.load(std::memory_order_relaxed), index_.load(std::memory_order_relaxed),
                     provider_.load(std::memory_order_relaxed)},
                    stream_.load(std::memory_order_relaxed),
                    op_.load(std::memory_order_relaxed),
                    impl_.load(std::memory_order_relaxed)};
    std::atomic_thread_fence(std::memory_order_acquire);
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
