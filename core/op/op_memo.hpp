#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/base/settings.hpp"
#include "core/op/op_table.hpp"

namespace te_fl::core {

struct FastOp;

// What a thread remembers of calls that were in order, so that a call like an earlier one is
// recognised by comparing metadata instead of checking every rule again. Exact: a call is
// recognised only if all that the rules read is equal, but for data addresses and the bounds of
// scalars, which are looked at each time. Bounded: one call per slot, chosen by op and shape,
// replaced by the next. Tensors with quantisation data are not remembered.
class CheckMemo {
 public:
  static constexpr uint32_t kSlots = 32;
  static constexpr uint32_t kMaxTensors = 12;
  static constexpr uint32_t kMaxRank = 4;
  static constexpr uint32_t kMaxWords = 12;

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
    uint64_t op = 0;  // FastOp::number; 0: empty
    Signature signature;
    std::array<Tensor, kMaxTensors> tensors;
    std::array<uint32_t, kMaxWords> words;  // the scalars that shape rules and rules read
  };

  Slot& slot(uint64_t hash) noexcept { return slots_[hash % kSlots]; }

 private:
  std::unique_ptr<Slot[]> slots_;
};

// One call, byte for byte: its argument struct, the tensors that it points to and their extents.
// For callers that make the same call with the same tensor objects again and again, as those of a
// prepared handle do. Only calls whose tensors have no strides and no quantisation data are
// remembered.
class ExactMemo {
 public:
  static constexpr uint32_t kMaxArgs = 128;  // bytes of the argument struct
  static constexpr uint32_t kMaxTensors = 8;
  static constexpr uint32_t kMaxRank = 4;

  // Whether this is the call. Nothing else needs to be checked then.
  bool is(const void* raw) const noexcept {
    if (size_ == 0 || raw == nullptr || g_validate.load(std::memory_order_relaxed)) return false;
    const auto* args = static_cast<const char*>(raw);
    if (load<uint32_t>(args) != size_) return false;
    uint64_t other = 0;
    const uint64_t* expected = args_;
    for (const char *at = args, *end = args + size_; at != end; at += 8) {
      other |= load<uint64_t>(at) ^ *expected++;
    }
    if (other != 0) return false;  // the pointers below are the caller's own
    Words differs{};
    for (const One* one = tensors_; one != tensors_ + count_; ++one) {
      const auto* t = reinterpret_cast<const char*>(one->tensor);
      // The struct is as long, and the extents are where they were.
      if (load<uint64_t>(t) != one->bytes[0]) return false;
      if (load<const int64_t*>(t + offsetof(te_fl_tensor, dl) + offsetof(te_fl_dltensor, shape)) !=
          one->shape) {
        return false;
      }
      for (uint32_t at = 0; at < sizeof(te_fl_tensor); at += 16) {
        differs |= load<Words>(t + at) ^ load<Words>(one->bytes + at / 8);
      }
      if (one->rank == 2) {
        differs |= load<Words>(one->shape) ^ load<Words>(one->extents);
      } else {
        for (uint32_t d = 0; d < one->rank; ++d) {
          differs[0] |= static_cast<uint64_t>(one->shape[d] ^ one->extents[d]);
        }
      }
    }
    return (differs[0] | differs[1]) == 0;
  }
  void forget() noexcept { size_ = 0; }

 private:
  friend void remember_exactly(const CompiledOp& op, const void* args, ExactMemo& memo) noexcept;
  typedef uint64_t Words __attribute__((vector_size(16)));
  template <class T>
  static T load(const void* p) noexcept {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
  struct alignas(16) One {
    uint64_t bytes[sizeof(te_fl_tensor) / 8];
    int64_t extents[kMaxRank];
    const te_fl_tensor* tensor;
    const int64_t* shape;
    uint32_t rank;
  };
  static_assert(sizeof(te_fl_tensor) % 16 == 0);

  uint32_t size_ = 0;  // of the argument struct; 0: empty
  uint32_t count_ = 0;
  uint64_t args_[kMaxArgs / 8];
  One tensors_[kMaxTensors];
};

// Puts a call that check() found in order into the memo, or empties it if it is not of the kind.
void remember_exactly(const CompiledOp& op, const void* args, ExactMemo& memo) noexcept;

// Whether the memo knows the call. If not, `slot` is where it would be put, or null if it cannot
// be.
bool check_known(const FastOp& fast, const void* args, CheckMemo& memo, Signature& out,
                 CheckMemo::Slot*& slot) noexcept;
// Puts a call that fast_check() found in order.
void remember(const FastOp& fast, const void* args, const Signature& signature,
              CheckMemo::Slot& slot) noexcept;

}  // namespace te_fl::core
