#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/op/compiled_op.hpp"
#include "core/tensor/quant_parts.hpp"

// Walks a call's metadata as a sequence of 64-bit words. This is the only code that enumerates the
// members of the caller's structs. The memo of calls and the keys of plans are built from these
// words, so a new member of a tensor is added here only.
namespace te_fl::core {

// The code below runs on every call.
#define TE_FL_INLINE [[gnu::always_inline]] inline

template <class T>
TE_FL_INLINE T load_as(const void* p) noexcept {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// The offsets of an op's arguments, computed once.
struct CallLayout {
  struct List {
    uint32_t offset, count_offset;
    // One bit for each argument with which the list's elements must not share memory if either is
    // written, and for each with which they may. The bits of `tensors` come first, then those of
    // `lists`.
    uint64_t forbidden = 0, allowed = 0;
  };
  struct Saved {
    uint32_t offset = 0;  // 0: the op has no saved record
    bool read = false;  // true: the op reads the record; false: its contents are of an earlier call
  };
  // A scalar argument, read as 4 or 8 bytes. `structure` is true for bools and enums, whose value
  // decides which rules apply: a call with another value does not match a record of an earlier
  // call. Other numbers may differ between calls that match one record.
  struct Scalar {
    uint32_t offset;
    bool wide;
    bool structure;
  };
  // For each output: the tensors with which it must not share memory, and those with which it may.
  // A mask has ~0 for each such tensor.
  static constexpr size_t kMaxTensors = 32;
  static constexpr size_t kLanes = 4;
  struct Output {
    alignas(16) uint32_t forbidden[kMaxTensors];
    alignas(16) uint32_t allowed[kMaxTensors];
    uint32_t tensor;  // its index in `tensors`
  };

  static constexpr size_t kMaxHashed = 2;
  static constexpr size_t kMaxLists =
      8;  // if an op has more lists, new addresses cause the full check

  const CompiledOp::Impl* op = nullptr;
  uint64_t number = 0;  // unique in the process, never reused
  uint32_t args_size = 0;
  Saved saved;
  std::vector<uint32_t> tensors;
  std::vector<List> lists;
  std::vector<List> integers;
  std::vector<uint32_t> communicators;
  std::vector<Scalar> scalars;
  std::vector<uint32_t> hashed;  // required inputs whose extents go into the hash
  std::vector<Output> outputs;
  size_t lanes = 0;  // number of tensors, rounded up to kLanes; 0: too many for vector code
};

std::unique_ptr<const CallLayout> make_layout(const CompiledOp::Impl& op);

// The positions of words in a tensor without strides and quantisation data, from its first word:
// the flag of absent strides and data, the address, and the first extent.
inline constexpr size_t kPresentWord = 2, kAddressWord = 4, kExtentWord = 5;

// Feeds a tensor's words to a sink, in order. The sink has four functions. structure() receives a
// word that must match before more may be read, and returns whether it matches. same() receives a
// word that must match, address() the start of memory (0: none), and number() a scalar that may
// change.
template <class Sink>
TE_FL_INLINE bool walk_tensor(const te_fl_tensor* t, Sink& sink) {
  if (t == nullptr) return sink.structure(0);
  const auto size = load_as<uint64_t>(t);  // struct_size and provider
  if (size == 0) [[unlikely]]
    return false;  // invalid; must not look like an absent tensor
  if (!sink.structure(size)) return false;
  const te_fl_dltensor& dl = t->dl;
  static_assert(offsetof(te_fl_dltensor, dtype) == offsetof(te_fl_dltensor, ndim) + 4);
  if (!sink.structure(load_as<uint64_t>(&dl.ndim))) return false;  // ndim and dtype
  const int64_t* const shape = dl.shape;
  const int64_t* const strides = dl.strides;
  const te_fl_quant* const quant = t->quant;
  const int present = (strides != nullptr) | (quant != nullptr) << 1;
  if (!sink.structure(static_cast<uint64_t>(present))) return false;
  sink.same(load_as<uint64_t>(&dl.device));
  sink.address(dl.data == nullptr ? 0 : reinterpret_cast<uintptr_t>(dl.data) + dl.byte_offset);
  const int32_t rank = dl.ndim;
  if (shape == nullptr && rank != 0) [[unlikely]]
    return false;
  if (rank == 2) [[likely]] {
    sink.same(static_cast<uint64_t>(shape[0]));
    sink.same(static_cast<uint64_t>(shape[1]));
  } else {
    for (int32_t d = 0; d < rank; ++d) sink.same(static_cast<uint64_t>(shape[d]));
  }
  if (strides != nullptr) [[unlikely]] {
    for (int32_t d = 0; d < rank; ++d) sink.same(static_cast<uint64_t>(strides[d]));
  }
  if (quant == nullptr) [[likely]]
    return true;
  static_assert(offsetof(te_fl_quant, scaling) == 4 && offsetof(te_fl_quant, amax_epsilon) == 12);
  if (!sink.structure(load_as<uint64_t>(quant))) return false;  // struct_size and scaling
  sink.same(load_as<uint64_t>(&quant->flags));                  // flags and amax_epsilon
#pragma GCC unroll 8
  for (const QuantPart& part : kQuantParts) {
    sink.address(reinterpret_cast<uintptr_t>(part.in(*quant)));
  }
  return true;
}

// Feeds a communicator's words to a sink. The id identifies the communicator's contents (R29).
template <class Sink>
TE_FL_INLINE bool walk_communicator(const te_fl_communicator* c, Sink& sink) {
  if (!sink.structure(c != nullptr)) return false;
  if (c == nullptr) return true;
  static_assert(offsetof(te_fl_communicator, device_provider) == 4);
  static_assert(offsetof(te_fl_communicator, size) == offsetof(te_fl_communicator, rank) + 4);
  if (!sink.structure(load_as<uint64_t>(c))) return false;  // struct_size and provider
  sink.same(load_as<uint64_t>(&c->device));
  sink.same(load_as<uint64_t>(&c->rank));  // rank and size
  sink.same(c->id);
  return c->maker != nullptr && c->maker[0] != '\0';
}

// Feeds the words of a te_fl_saved record to a sink: all contents if the op reads the record, only
// the storage if the op writes the record.
template <class Sink>
TE_FL_INLINE bool walk_record(const te_fl_saved* record, bool read, Sink& sink) {
  if (!sink.structure(record != nullptr)) return false;
  if (record == nullptr) return true;
  if (!sink.structure(load_as<uint32_t>(record))) return false;  // struct_size
  if (!walk_tensor(record->storage, sink)) return false;
  if (!read) return true;
  const char* const producer = record->producer;
  const size_t length = producer == nullptr ? 0 : std::strlen(producer);
  if (!sink.structure(uint64_t{record->opaque != 0} | uint64_t{producer != nullptr} << 1 |
                      uint64_t{length} << 2)) {
    return false;
  }
  for (size_t at = 0; at < length; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, producer + at, std::min(sizeof word, length - at));
    sink.same(word);
  }
  return true;
}

// The elements of a list. An omitted list has none.
struct ListItems {
  const te_fl_tensor* const* items;
  int64_t count;
};
TE_FL_INLINE ListItems list_items(const CallLayout::List& list, const std::byte* args) noexcept {
  const auto* items = load_as<const te_fl_tensor* const*>(args + list.offset);
  return {items, items == nullptr ? 0 : load_as<int64_t>(args + list.count_offset)};
}

// Feeds the lengths of all tensor lists to a sink.
template <class Sink>
TE_FL_INLINE bool walk_counts(const CallLayout& layout, const std::byte* args, Sink& sink) {
  for (const CallLayout::List& list : layout.lists) {
    if (!sink.structure(load_as<uint64_t>(args + list.count_offset))) return false;
    if (!sink.structure(load_as<const void*>(args + list.offset) != nullptr)) return false;
  }
  return true;
}

template <class Sink>
TE_FL_INLINE bool walk_list(const CallLayout::List& list, const std::byte* args, Sink& sink) {
  const ListItems all = list_items(list, args);
  for (int64_t k = 0; k < all.count; ++k) {
    if (!walk_tensor(all.items[k], sink)) return false;
  }
  return true;
}
// Feeds the elements of all lists to a sink, one list after the other.
template <class Sink>
TE_FL_INLINE bool walk_lists(const CallLayout& layout, const std::byte* args, Sink& sink) {
  if (!walk_counts(layout, args, sink)) return false;
  for (const CallLayout::List& list : layout.lists) {
    if (!walk_list(list, args, sink)) return false;
  }
  return true;
}

// Feeds the arguments that are neither tensors nor lists of tensors to a sink.
template <class Sink>
TE_FL_INLINE bool walk_rest(const CallLayout& layout, const std::byte* args, Sink& sink) {
  for (const CallLayout::Scalar& scalar : layout.scalars) {
    const std::byte* at = args + scalar.offset;
    const uint64_t word = scalar.wide ? load_as<uint64_t>(at) : load_as<uint32_t>(at);
    if (scalar.structure) {
      sink.same(word);
    } else {
      sink.number(word);
    }
  }
  for (const CallLayout::List& list : layout.integers) {
    const auto* values = load_as<const int64_t*>(args + list.offset);
    const auto count = load_as<int64_t>(args + list.count_offset);
    if (!sink.structure(static_cast<uint64_t>(count))) return false;
    if (!sink.structure(values != nullptr)) return false;
    for (int64_t k = 0; values != nullptr && k < count; ++k) {
      sink.same(static_cast<uint64_t>(values[k]));
    }
  }
  for (const uint32_t offset : layout.communicators) {
    if (!walk_communicator(load_as<const te_fl_communicator*>(args + offset), sink)) return false;
  }
  if (layout.saved.offset == 0) return true;
  return walk_record(load_as<const te_fl_saved*>(args + layout.saved.offset), layout.saved.read,
                     sink);
}

template <class Sink>
TE_FL_INLINE bool walk_tensors(const CallLayout& layout, const std::byte* args, Sink& sink) {
  if (!sink.structure(load_as<uint32_t>(args))) return false;  // struct_size
  for (const uint32_t offset : layout.tensors) {
    if (!walk_tensor(load_as<const te_fl_tensor*>(args + offset), sink)) return false;
  }
  return true;
}

// Feeds all arguments to a sink. The argument struct must have the op's full size.
template <class Sink>
TE_FL_INLINE bool walk_call(const CallLayout& layout, const std::byte* args, Sink& sink) {
  if (!walk_tensors(layout, args, sink) || !walk_rest(layout, args, sink)) return false;
  return layout.lists.empty() || walk_lists(layout, args, sink);
}

// A sink that stores the words of a valid call.
struct StoreSink {
  std::vector<uint64_t>& words;
  bool structure(uint64_t word) {
    words.push_back(word);
    return true;
  }
  void same(uint64_t word) { words.push_back(word); }
  void address(uint64_t word) { words.push_back(word); }
  void number(uint64_t word) { words.push_back(word); }
};

// A sink that counts the words of a call.
struct CountSink {
  size_t words = 0;
  bool structure(uint64_t) noexcept { return ++words != 0; }
  void same(uint64_t) noexcept { ++words; }
  void address(uint64_t) noexcept { ++words; }
  void number(uint64_t) noexcept { ++words; }
};

// A sink that compares a call with the stored words of a valid call.
struct CompareSink {
  const uint64_t* at;
  uint64_t differs = 0;
  uint64_t changed = 0;  // nonzero if an address or number differs, which is allowed
  TE_FL_INLINE bool structure(uint64_t word) noexcept { return *at++ == word; }
  TE_FL_INLINE void same(uint64_t word) noexcept { differs |= *at++ ^ word; }
  TE_FL_INLINE void address(uint64_t word) noexcept { changed |= *at++ ^ word; }
  TE_FL_INLINE void number(uint64_t word) noexcept { changed |= *at++ ^ word; }
};

}  // namespace te_fl::core
