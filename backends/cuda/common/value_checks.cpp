#include "common/value_checks.hpp"

#include <array>
#include <atomic>
#include <mutex>
#include <new>

#include "device/cuda_check.hpp"
#include "device/outside_capture.hpp"

namespace te_fl::cuda {
namespace {

// Returns the pointer to a device's ValueErrorBoard; NULL until a call first needs the board. A
// board is never freed, because captured graphs contain its address.
std::atomic<ValueErrorBoard*>& board_for(int device) {
  static std::array<std::atomic<ValueErrorBoard*>, 64> boards{};
  return boards.at(static_cast<size_t>(device));
}

ValueErrorBoard& make_board(int device) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::atomic<ValueErrorBoard*>& board = board_for(device);
  if (ValueErrorBoard* made = board.load(std::memory_order_relaxed)) return *made;
  const OutsideCapture outside;
  void* memory = nullptr;
  constexpr size_t kBytes = ValueErrorBoard::kSlots * sizeof(ValueErrorSlot);
  check(cudaHostAlloc(&memory, kBytes, cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  auto* slots = static_cast<ValueErrorSlot*>(memory);
  for (int i = 0; i < ValueErrorBoard::kSlots; ++i) new (slots + i) ValueErrorSlot;
  auto* made = new ValueErrorBoard(slots);
  board.store(made, std::memory_order_release);
  return *made;
}

void tell(const std::optional<ValueError>& error) {
  if (error) throw backend::Error(TE_FL_INVALID_ARGUMENT, late_value_error_text(*error));
}

}  // namespace

ValueErrorSink open_value_errors(const te_fl_context& ctx, const char* op) {
  ValueErrorBoard* board = board_for(ctx.device.index).load(std::memory_order_acquire);
  if (board == nullptr) board = &make_board(ctx.device.index);
  if ((ctx.flags & TE_FL_CALL_CAPTURING) == 0) {
    if (const auto error = board->take(ctx.stream)) {
      backend::invalid("an earlier call on this stream: " + late_value_error_text(*error));
    }
  }
  return {board->slot_of(ctx.stream), op};
}

void refuse_noted(const te_fl_context& ctx) {
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(ctx.stream)), "cudaStreamSynchronize");
  ValueErrorBoard* board = board_for(ctx.device.index).load(std::memory_order_acquire);
  if (const auto error = board->take(ctx.stream)) backend::invalid(value_error_text(*error));
}

void report_value_errors(int device, cudaStream_t stream) {
  ValueErrorBoard* board = board_for(device).load(std::memory_order_acquire);
  if (board != nullptr) tell(board->take(stream));
}

void report_value_errors(int device) {
  ValueErrorBoard* board = board_for(device).load(std::memory_order_acquire);
  if (board != nullptr) tell(board->take_any());
}

}  // namespace te_fl::cuda
