// Mistakes in values that only the device sees: indices, targets, positions. The kernel that meets
// one notes it in host memory and goes on; who waits for the stream next is told. Nothing is waited
// for on a call's way. What is here needs no CUDA, so that it can be tested where there is no GPU.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace te_fl::cuda {

enum class ValueRule : int32_t {
  kIndex,   // indices[at] is `value`, which is not in [0, bound)
  kTarget,  // targets[at] likewise, and is not ignore_index
  kStart,   // start_positions[at] is `value`, less than 0
  kSpan,    // sequence `at` of cu_seqlens goes from `value` to `more`: down, or out of [0, bound]
  kSpanMultiple,  // one of these is no multiple of cp_size, `bound`
  kOddLength,     // sequence `at` has `value` tokens on this rank, two equal chunks
  kPermutedRow,   // row_id_map[at] is `value`, which is not in [-1, bound)
  kRowTwice,      // row_id_map[at] is `value`, as another element is
  kExpert,        // indices[at] is `value`, which is not in [more, bound), the experts
  kChosenExpert,  // topk_indices[at] likewise
  kSplit,         // splits[at] is `value`, less than 0
  kChunkSize,     // split_sizes[at] is `value`: less than 0, or more than the `more` rows left
  kChunk,         // sorted_index[at] is `value`, which is not in [0, bound), the chunks
  kChunkTwice,    // sorted_index[at] is `value`, as another element is
  kPadOffset,     // pad_offsets[at] is `value`, less than `more`
  kMaskedRow,     // routing_map[at] has row `value`, which is not in [0, bound)
  kPosition       // `argument` has `bound` positions, sequence `at` needs position `value`
};

// Written by kernels, which only hand the texts on: they belong to the plugin.
struct ValueError {
  const char* op = nullptr;
  // The argument of kPosition. It is a kernel's parameter: a text of its own lies in the device.
  const char* argument = nullptr;
  ValueRule rule = ValueRule::kIndex;
  int64_t at = 0, value = 0, more = 0, bound = 0;
};
// "indices[3] is 99; it must lie in [0, 11), the rows of weight"
std::string text_of(const ValueError& error);
// Words for one that shows after its call: with the op, and the settings that find the call.
std::string late_text_of(const ValueError& error);

// A place in which kernels note one error. Counters: `claimed` is one more than `told` from when a
// thread has noted an error until somebody is told; `written` follows `claimed` when the error is
// complete. Kernels write claimed, written and the error, the host writes `told` alone.
struct alignas(64) ValueErrorSlot {
  uint32_t claimed = 0, written = 0, told = 0;
  ValueError error;
};

// The parameter of a kernel that notes errors.
struct ValueErrorSink {
  ValueErrorSlot* slot = nullptr;
  const char* op = nullptr;
};

// The slots of one device. Each stream has one of its own, but from the 64th on they share the
// last. A slot stays with the stream's handle: a stream that gets the handle again also gets what
// was noted and not told. Thread-safe; without a lock
// while there is nothing to tell.
class ValueErrorBoard {
 public:
  static constexpr int kSlots = 64;
  // `slots` are kSlots, zeroed, and stay valid.
  explicit ValueErrorBoard(ValueErrorSlot* slots) : slots_(slots) {}

  // The place in which kernels on `stream` note what they meet.
  ValueErrorSlot* slot_of(const void* stream) noexcept;
  // Gives what was noted there to the first who asks. Call it when the stream has been waited for.
  std::optional<ValueError> take(const void* stream) noexcept;
  // Gives what was noted on any stream.
  std::optional<ValueError> take_any() noexcept;

 private:
  std::optional<ValueError> take_from(ValueErrorSlot& slot) noexcept;

  ValueErrorSlot* slots_;
  std::mutex telling_;
  std::array<std::atomic<const void*>, kSlots - 1> streams_{};  // null: free
};

}  // namespace te_fl::cuda
