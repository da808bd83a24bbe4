#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "core/op_table.hpp"

namespace te_fl::core {

struct FastOp;

// What a thread remembers of calls that were in order, so that a call like an earlier one is
// recognised by comparing metadata instead of checking every rule again. Exact: a call is
// recognised only if all that the rules read is equal, but for data addresses and scalars, which
// are looked at each time. Bounded: one call per slot, chosen by op and shape, replaced by the
// next. Tensors with quantisation data are not remembered.
class CheckMemo {
 public:
  static constexpr uint32_t kSlots = 64;
  static constexpr uint32_t kMaxTensors = 12;
  static constexpr uint32_t kMaxRank = 4;

  CheckMemo() : slots_(std::make_unique<Slot[]>(kSlots)) {}

  struct alignas(16) Tensor {
    int64_t shape[kMaxRank];
    uint64_t byte_offset;
    uint64_t quant;   // 0: these two as they lie in te_fl_tensor
    uint64_t head;    // struct_size and provider
    uint64_t kind;    // rank and dtype; kAbsent: no tensor
    uint64_t device;  // type and index
    uint64_t data;
    uint64_t below_alignment;
    uint32_t rank;
    bool has_strides;
    int64_t strides[kMaxRank];
  };
  static constexpr uint64_t kAbsent = ~uint64_t{0};

  struct Slot {
    uint64_t op = 0;     // FastOp::number; 0: empty
    uint64_t flags = 0;  // the bools that choose between forms of a shape rule
    Signature signature;
    std::array<Tensor, kMaxTensors> tensors;
  };

  Slot& slot(uint64_t hash) noexcept { return slots_[hash % kSlots]; }

 private:
  std::unique_ptr<Slot[]> slots_;
};

// Whether the memo knows the call. If not, `slot` is where it would be put, or null if it cannot
// be.
bool check_known(const FastOp& fast, const void* args, CheckMemo& memo, Signature& out,
                 CheckMemo::Slot*& slot) noexcept;
// Puts a call that fast_check() found in order.
void remember(const FastOp& fast, const void* args, const Signature& signature,
              CheckMemo::Slot& slot) noexcept;

}  // namespace te_fl::core
