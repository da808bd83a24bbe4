// Invalid input values that only the device reads, such as indices, targets and positions. A kernel
// that finds one records an error in mapped host memory and continues. The next wait for the stream
// reports the error, so a call itself never synchronises. This header does not need CUDA, so tests
// run without a GPU.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace te_fl::cuda {

enum class ValueRule : int32_t {
  kIndex,   // indices[at] is `value`, not in [0, bound)
  kTarget,  // targets[at] is `value`, neither in [0, bound) nor ignore_index
  kStart,   // start_positions[at] is `value`, less than 0
  kSpan,    // sequence `at` of cu_seqlens runs from `value` to `more`: it decreases or leaves [0,
            // bound]
  kSpanMultiple,  // `value` or `more` of sequence `at` is not a multiple of cp_size, which is
                  // `bound`
  kOddLength,     // sequence `at` has `value` tokens on this rank, which must be two equal chunks
  kPermutedRow,   // row_id_map[at] is `value`, not in [-1, bound)
  kRowTwice,      // row_id_map[at] is `value`, which another element also is
  kExpert,        // indices[at] is `value`, not in [more, bound), the experts
  kChosenExpert,  // topk_indices[at] is `value`, not in [more, bound), the experts
  kSplit,         // splits[at] is `value`, less than 0
  kChunkSize,     // split_sizes[at] is `value`: less than 0, or more than the `more` rows left
  kChunk,         // sorted_index[at] is `value`, not in [0, bound), the chunks
  kChunkTwice,    // sorted_index[at] is `value`, which another element also is
  kPadOffset,     // pad_offsets[at] is `value`, less than `more`
  kMaskedRow,     // the pair routing_map[at] has row `value`, not in [0, bound)
  kPosition       // `argument` has `bound` positions, but sequence `at` needs position `value`
};

// An invalid input value, as a kernel records it. The strings are owned by the plugin.
struct ValueError {
  const char* op = nullptr;
  // Argument name for kPosition. The host passes it as a kernel parameter, because a string literal
  // in a kernel would be in device memory.
  const char* argument = nullptr;
  ValueRule rule = ValueRule::kIndex;
  int64_t at = 0, value = 0, more = 0, bound = 0;
};
// Returns the error's message, for example "indices[3] is 99; it must lie in [0, 11), the rows of
// weight".
std::string value_error_text(const ValueError& error);
// Returns the message of an error that is reported after its call has returned. It contains the
// op's name and the settings that help to find the call.
std::string late_value_error_text(const ValueError& error);

// Holds one recorded error. Kernels write `claimed`, `written` and `error`; the host writes only
// `reported`. A kernel thread that records an error sets `claimed` to reported + 1, writes `error`,
// and then sets `written` to reported + 1. When the host reports the error, it sets `reported` to
// `written`.
struct alignas(64) ValueErrorSlot {
  uint32_t claimed = 0, written = 0, reported = 0;
  ValueError error;
};

// The parameter of a kernel that records errors.
struct ValueErrorSink {
  ValueErrorSlot* slot = nullptr;
  const char* op = nullptr;
};

// The slots of one device. Each stream has its own slot, but all streams from the 64th on share the
// last slot. A slot belongs to the stream's handle: a new stream with the same handle gets the
// unreported error, too. Thread-safe; takes no lock while there is nothing to report.
class ValueErrorBoard {
 public:
  static constexpr int kSlots = 64;
  // `slots` must be kSlots zeroed slots that stay valid.
  explicit ValueErrorBoard(ValueErrorSlot* slots) : slots_(slots) {}

  // The slot in which kernels on `stream` record an error.
  ValueErrorSlot* slot_of(const void* stream) noexcept;
  // Returns the unreported error of a stream and marks it as reported. Call it after waiting for
  // the stream.
  std::optional<ValueError> take(const void* stream) noexcept;
  // Returns an unreported error of any stream and marks it as reported.
  std::optional<ValueError> take_any() noexcept;

 private:
  std::optional<ValueError> take_from(ValueErrorSlot& slot) noexcept;

  ValueErrorSlot* slots_;
  std::mutex report_mutex_;
  std::array<std::atomic<const void*>, kSlots - 1> streams_{};  // NULL: the entry is free
};

}  // namespace te_fl::cuda
