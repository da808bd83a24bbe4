#include "common/value_errors.hpp"

namespace te_fl::cuda {
namespace {

// The key of a stream. The default stream's key is 1, because NULL marks a free entry.
const void* stream_key(const void* stream) noexcept {
  return stream != nullptr ? stream : reinterpret_cast<const void*>(uintptr_t{1});
}

std::string describe_span(const ValueError& e) {
  return "sequence " + std::to_string(e.at) + " of cu_seqlens spans tokens " +
         std::to_string(e.value) + " to " + std::to_string(e.more);
}

}  // namespace

std::string value_error_text(const ValueError& e) {
  const std::string at = std::to_string(e.at), value = std::to_string(e.value);
  const std::string bound = std::to_string(e.bound);
  switch (e.rule) {
    case ValueRule::kIndex:
      return "indices[" + at + "] is " + value + "; it must lie in [0, " + bound +
             "), the rows of weight";
    case ValueRule::kTarget:
      return "targets[" + at + "] is " + value + "; it must lie in [0, " + bound +
             "), the classes, or be ignore_index";
    case ValueRule::kStart:
      return "start_positions[" + at + "] is " + value + ", expected 0 or more";
    case ValueRule::kSpan:
      return describe_span(e) + ", expected non-decreasing values from 0 to " + bound +
             " (the input's tokens times cp_size)";
    case ValueRule::kSpanMultiple:
      return describe_span(e) + ", expected multiples of cp_size, " + bound;
    case ValueRule::kOddLength:
      return "sequence " + at + " of cu_seqlens has " + value +
             " tokens on this rank, expected an even number: with cp_size > 1 a rank holds two "
             "chunks of equal length";
    case ValueRule::kPermutedRow:
      return "row_id_map[" + at + "] is " + value + "; it must lie in [-1, " + bound +
             "), -1 or a permuted row";
    case ValueRule::kRowTwice:
      return "row_id_map[" + at + "] is " + value +
             ", as another element is; a row belongs to one pair";
    case ValueRule::kExpert:
    case ValueRule::kChosenExpert:
      return (e.rule == ValueRule::kExpert ? "indices[" : "topk_indices[") + at + "] is " + value +
             "; it must lie in [" + std::to_string(e.more) + ", " + bound + "), the experts";
    case ValueRule::kSplit:
      return "splits[" + at + "] is " + value + ", expected 0 or more";
    case ValueRule::kChunkSize:
      return "split_sizes[" + at + "] is " + value + "; it is 0 or more, and the " + bound +
             " rows have " + std::to_string(e.more) + " left for it";
    case ValueRule::kChunk:
      return "sorted_index[" + at + "] is " + value + "; it must lie in [0, " + bound +
             "), the chunks";
    case ValueRule::kChunkTwice:
      return "sorted_index[" + at + "] is " + value +
             ", as another element is; each chunk is named once";
    case ValueRule::kPadOffset:
      return "pad_offsets[" + at + "] is " + value + ", expected " + std::to_string(e.more) +
             " or more: the rows left out before an expert, in all";
    case ValueRule::kMaskedRow:
      return "routing_map[" + at + "] has row " + value + ", but the output has " + bound +
             " rows; give it one for each pair and for what pad_offsets leaves out";
    default:
      return std::string(e.argument) + " has " + bound + " positions, but position " + value +
             " is needed (sequence " + at + ")";
  }
}

std::string late_value_error_text(const ValueError& e) {
  return std::string(e.op) + " by vendor.cuda: " + value_error_text(e) +
         ". That call has run, with NaN where the value counted, and without it in sums; "
         "TE_FL_VALIDATE=1 refuses such a call before it writes, and TE_FL_SYNC=1 finds it";
}

ValueErrorSlot* ValueErrorBoard::slot_of(const void* stream) noexcept {
  const void* const key = stream_key(stream);
  for (size_t i = 0; i < streams_.size(); ++i) {
    const void* owner = streams_[i].load(std::memory_order_acquire);
    if (owner == nullptr && streams_[i].compare_exchange_strong(owner, key)) owner = key;
    if (owner == key) return slots_ + i;
  }
  return slots_ + streams_.size();
}

std::optional<ValueError> ValueErrorBoard::take_from(ValueErrorSlot& slot) noexcept {
  const std::atomic_ref written(slot.written), reported(slot.reported);
  const auto pending = [&] {
    return written.load(std::memory_order_acquire) != reported.load(std::memory_order_acquire);
  };
  if (!pending()) return std::nullopt;
  const std::lock_guard lock(report_mutex_);
  if (!pending()) return std::nullopt;  // another thread has reported it
  const ValueError error = slot.error;
  reported.store(written.load(std::memory_order_relaxed), std::memory_order_release);
  return error;
}

std::optional<ValueError> ValueErrorBoard::take(const void* stream) noexcept {
  const void* const key = stream_key(stream);
  size_t i = 0;
  for (; i < streams_.size(); ++i) {
    const void* owner = streams_[i].load(std::memory_order_acquire);
    if (owner == nullptr) return std::nullopt;  // no checking kernel has run on this stream
    if (owner == key) break;
  }
  return take_from(slots_[i]);
}

std::optional<ValueError> ValueErrorBoard::take_any() noexcept {
  for (int i = 0; i < kSlots; ++i) {
    if (auto error = take_from(slots_[i])) return error;
  }
  return std::nullopt;
}

}  // namespace te_fl::cuda
