#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "core/base/abi_struct.hpp"
#include "core/base/settings.hpp"
#include "core/op/call_words.hpp"
#include "core/op/op_table.hpp"
#include "te_fl/tensor.hpp"

// A per-thread memo of calls that passed the argument check. A later call whose metadata words
// (call_words.hpp) are equal skips the full check. This is exact: every value that the check reads
// is compared. A call that differs only in addresses or numbers is recognised too, after the rules
// about addresses and numbers have been checked again.
namespace te_fl::core {

struct CallRecord {
  uint64_t op = 0;  // CallLayout::number; 0: empty record
  uint64_t hash = 0;
  Signature signature;
  bool shares = false;  // an output may begin at another argument's address
  std::vector<uint64_t> words;
  uint32_t lists[CallLayout::kMaxLists] = {};  // where each list's elements begin in `words`
};

// Computes a call's hash. False if the call cannot be remembered or is malformed.
inline bool hash_call(const CallLayout& layout, const std::byte* args, uint64_t& hash) noexcept;

// The effect of the differences between a call and a record of an earlier call, if they differ only
// in addresses and numbers.
enum class Changes : uint8_t {
  kNone,    // the call is valid, and the record's plan fits it
  kPlan,    // the call is valid, but the record's plan may not fit it
  kUnclear  // only the full check can decide whether the call is valid
};

// Writes the call's new addresses and numbers into the record, after checking the rules about them.
// After kUnclear the record is empty.
Changes take_over(const CallLayout& layout, const void* args, CallRecord& record) noexcept;
// Fills the record with a call that passed the check. Returns false and leaves the record empty if
// there is no memory or the call is too long.
bool fill_record(const CallLayout& layout, const void* args, uint64_t hash,
                 const Signature& signature, CallRecord& record) noexcept;

// The call records of one thread: a four-way set-associative cache whose sets are allocated at
// first use. `Known` is dispatch's data about a remembered call; a default-constructed object is
// empty. Its member `filled` identifies the call that the data belongs to. The memo calls
// Known::forget_plan() when the plan may no longer fit, and Known::forget_answer() when an address
// or number changed.
template <class Known>
class CallMemo {
 public:
  static constexpr uint32_t kSets = 1024;
  static constexpr uint32_t kWays = 4;
  static constexpr size_t kMaxWords = 1 << 18;  // total over all records

  struct Slot : CallRecord {
    Known known;
    // The slot of the call that followed this one last time; never null for a used slot.
    Slot* next = nullptr;
  };

  CallMemo() { none_.next = &none_; }
  CallMemo(const CallMemo&) = delete;
  CallMemo& operator=(const CallMemo&) = delete;

  // Returns the slot of the call, which holds its signature; null if the call is unknown. In that
  // case `hash` is the key for put(), or 0 if the call cannot be remembered.
  TE_FL_INLINE Slot* find(const CallLayout& layout, const void* raw, uint64_t& hash) noexcept {
    hash = 0;
    const auto* args = static_cast<const std::byte*>(raw);
    if (load_as<uint32_t>(args) < layout.args_size) return nullptr;
    if (g_validate.load(std::memory_order_relaxed)) return nullptr;
    // Programs repeat their calls in the same order, so the call that followed the last one is
    // tried first, without computing a hash.
    Slot* const last = last_;
    Slot* const next = last->next;
    if (next->op == layout.number) [[likely]] {
      CompareSink sink{next->words.data()};
      if (walk_call(layout, args, sink) && sink.differs == 0) [[likely]] {
        if (sink.changed == 0 || takes_over(layout, raw, *next)) {
          last_ = next;
          return next;
        }
      }
    }
    Slot* const found = search(layout, raw, hash);
    if (found != nullptr) last_ = last->next = found;
    return found;
  }

  // Remembers a call that find() did not know and that passed the check. Null if it cannot be
  // remembered.
  Slot* put(const CallLayout& layout, const void* args, uint64_t hash,
            const Signature& signature) noexcept {
    Set* const made = hash == 0 ? nullptr : set_for(hash);
    if (made == nullptr) return nullptr;
    Set& set = *made;
    const uint32_t way = set.next;
    Slot& slot = set.slots[way];
    set.next = (way + 1) % kWays;
    words_ -= slot.words.capacity();
    const bool filled = fill_record(layout, args, hash, signature, slot);
    words_ += slot.words.capacity();
    set.hashes[way] = filled ? hash : 0;
    slot.known = {};
    slot.known.filled = new_number();
    if (words_ > kMaxWords) forget_others(slot);
    if (!filled) return nullptr;
    last_ = last_->next = &slot;
    return &slot;
  }

  // A value for Known::filled; each value is used only once.
  uint64_t new_number() noexcept { return ++fills_; }

 private:
  struct Set {
    std::array<uint64_t, kWays> hashes{};
    uint32_t next = 0;
    std::array<Slot, kWays> slots;
  };

  // Finds or creates the set of a hash; null if there is no memory.
  Set* set_for(uint64_t hash) noexcept {
    std::unique_ptr<Set>& set = sets_[hash % kSets];
    if (set == nullptr) {
      set.reset(new (std::nothrow) Set);
      if (set == nullptr) return nullptr;
      for (Slot& slot : set->slots) slot.next = &none_;
    }
    return set.get();
  }

  // Tests a call whose words equal the slot's except for addresses and numbers. If the call is
  // valid, returns true and stores its addresses and numbers in the slot.
  bool takes_over(const CallLayout& layout, const void* raw, Slot& slot) noexcept {
    const Changes changes = take_over(layout, raw, slot);
    slot.known.forget_answer();
    if (changes != Changes::kNone) {
      // The new number keeps an enclosing call, to which the slot may have belonged, from storing
      // its plan here.
      slot.known.forget_plan();
      slot.known.filled = new_number();
    }
    return changes != Changes::kUnclear;
  }

  // Finds the slot of the call by its hash; computes `hash`.
  [[gnu::noinline]] Slot* search(const CallLayout& layout, const void* raw,
                                 uint64_t& hash) noexcept {
    const auto* args = static_cast<const std::byte*>(raw);
    if (!hash_call(layout, args, hash)) {
      hash = 0;
      return nullptr;
    }
    Set* const made = sets_[hash % kSets].get();
    if (made == nullptr) return nullptr;
    Set& set = *made;
    for (uint32_t way = 0; way < kWays; ++way) {
      if (set.hashes[way] != hash) continue;
      Slot& slot = set.slots[way];
      if (slot.op != layout.number) continue;
      CompareSink sink{slot.words.data()};
      if (!walk_call(layout, args, sink) || sink.differs != 0) continue;
      if (sink.changed == 0 || takes_over(layout, raw, slot)) return &slot;
      set.next = way;  // only the full check can decide; put() reuses this slot
      return nullptr;
    }
    return nullptr;
  }

  // Long lists take much memory. Drops all records except `kept` if the limit is exceeded.
  void forget_others(const Slot& kept) noexcept {
    words_ = 0;
    for (const std::unique_ptr<Set>& set : sets_) {
      for (uint32_t way = 0; set != nullptr && way < kWays; ++way) {
        Slot& slot = set->slots[way];
        if (&slot == &kept) continue;
        slot.op = 0;
        slot.known = {};
        set->hashes[way] = 0;
        std::vector<uint64_t>().swap(slot.words);
      }
    }
    words_ = kept.words.capacity();
  }

  std::array<std::unique_ptr<Set>, kSets> sets_;
  Slot none_;            // belongs to no call
  Slot* last_ = &none_;  // the slot of the last call
  size_t words_ = 0;
  uint64_t fills_ = 0;
};

// Remembers one call byte by byte: its argument struct, the structs that it points to, and their
// extents. For callers that repeat one call with the same tensor objects, such as prepared handles.
// Pointers are compared before they are followed; no other member is interpreted.
class ExactMemo {
 public:
  static constexpr uint32_t kMaxArgs = 256;  // size limit of the argument struct
  static constexpr uint32_t kMaxTensors = 12;
  static constexpr uint32_t kMaxRank = 4;

  // True if this is the remembered call; it then needs no other check.
  bool is(const void* raw) const noexcept {
    if (size_ == 0 || raw == nullptr || g_validate.load(std::memory_order_relaxed)) return false;
    const auto* args = static_cast<const char*>(raw);
    if (load_as<uint32_t>(args) != size_) return false;
    uint64_t other = 0;
    const uint64_t* expected = args_;
    for (const char *at = args, *end = args + size_; at != end; at += 8) {
      other |= load_as<uint64_t>(at) ^ *expected++;
    }
    if (other != 0) return false;  // the remembered pointers may be dangling if the structs differ
    Words differs{};
    for (const One* one = tensors_; one != tensors_ + count_; ++one) {
      const auto* t = reinterpret_cast<const char*>(one->tensor);
      // Checks the struct's size, its rank and its shape pointer before following that pointer.
      if (load_as<uint64_t>(t) != one->bytes[0]) return false;
      if (load_as<uint64_t>(t + kRankOffset) != one->bytes[kRankOffset / 8]) return false;
      if (load_as<const int64_t*>(t + kShapeOffset) != one->shape) return false;
      for (uint32_t at = 0; at < sizeof(te_fl_tensor); at += 16) {
        differs |= load_as<Words>(t + at) ^ load_as<Words>(one->bytes + at / 8);
      }
      if (one->rank == 2) {
        differs |= load_as<Words>(one->shape) ^ load_as<Words>(one->extents);
      } else {
        for (uint32_t d = 0; d < one->rank; ++d) {
          differs[0] |= static_cast<uint64_t>(one->shape[d] ^ one->extents[d]);
        }
      }
      if (one->quant == nullptr) [[likely]]
        continue;
      if (load_as<const void*>(t + offsetof(te_fl_tensor, quant)) != one->quant) return false;
      if (load_as<uint64_t>(one->quant) != one->parts[0]) return false;
      const auto* q = reinterpret_cast<const char*>(one->quant);
      for (uint32_t at = 8; at < sizeof(te_fl_quant); at += 8) {
        differs[1] |= load_as<uint64_t>(q + at) ^ one->parts[at / 8];
      }
    }
    return (differs[0] | differs[1]) == 0;
  }
  void forget() noexcept { size_ = 0; }
  // Remembers a call that passed check(), or becomes empty if calls of this kind are not supported.
  void take(const CompiledOp& op, const void* args) noexcept;

 private:
  typedef uint64_t Words __attribute__((vector_size(16)));
  static constexpr size_t kShapeOffset =
      offsetof(te_fl_tensor, dl) + offsetof(te_fl_dltensor, shape);
  static constexpr size_t kRankOffset = offsetof(te_fl_tensor, dl) + offsetof(te_fl_dltensor, ndim);
  static_assert(kRankOffset % 8 == 0);
  struct alignas(16) One {
    uint64_t bytes[sizeof(te_fl_tensor) / 8];
    int64_t extents[kMaxRank];
    uint64_t parts[sizeof(te_fl_quant) / 8];
    const te_fl_tensor* tensor;
    const int64_t* shape;
    const te_fl_quant* quant;
    uint32_t rank;
  };
  static_assert(sizeof(te_fl_tensor) % 16 == 0 && sizeof(te_fl_quant) % 8 == 0);

  uint32_t size_ = 0;  // size of the argument struct; 0: empty
  uint32_t count_ = 0;
  uint64_t args_[kMaxArgs / 8];
  One tensors_[kMaxTensors];
};

// One odd factor for each extent in a hash, so that the multiplications are independent.
inline constexpr auto kHashFactors = [] {
  std::array<uint64_t, CallLayout::kMaxHashed * kMaxRank + 1> factors{};
  uint64_t state = 0;
  for (uint64_t& factor : factors) {
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    factor = (z ^ z >> 31) | 1;
  }
  return factors;
}();

TE_FL_INLINE bool hash_call(const CallLayout& layout, const std::byte* args,
                            uint64_t& hash) noexcept {
  uint64_t sum = layout.number * 0x9e3779b97f4a7c15u;
  const uint64_t* factor = kHashFactors.data();
  const auto add = [&](const te_fl_tensor* t) __attribute__((always_inline)) {
    if (t == nullptr || load_as<uint32_t>(t) < kLeastTensor) return false;
    const te_fl_dltensor& dl = t->dl;
    const auto rank = static_cast<uint32_t>(dl.ndim);
    const int64_t* const shape = dl.shape;
    if (rank > kMaxRank || shape == nullptr) return rank == 0;
    if (rank == 2) [[likely]] {
      sum +=
          static_cast<uint64_t>(shape[0]) * factor[0] + static_cast<uint64_t>(shape[1]) * factor[1];
    } else {
      for (uint32_t d = 0; d < rank; ++d) sum += static_cast<uint64_t>(shape[d]) * factor[d];
    }
    factor += kMaxRank;
    return true;
  };
  for (const uint32_t offset : layout.hashed) {
    if (!add(load_as<const te_fl_tensor*>(args + offset))) return false;
  }
  if (layout.hashed.empty() && !layout.lists.empty()) {
    const CallLayout::List& list = layout.lists.front();
    const auto* items = load_as<const te_fl_tensor* const*>(args + list.offset);
    const auto count = load_as<int64_t>(args + list.count_offset);
    sum += static_cast<uint64_t>(count) * *factor++;
    if (items != nullptr && count > 0 && !add(items[0])) return false;
  }
  hash = sum ^ sum >> 29 ^ sum >> 47;
  if (hash == 0) hash = 1;
  return true;
}

}  // namespace te_fl::core
