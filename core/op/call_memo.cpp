#include "core/op/call_memo.hpp"

#include <algorithm>

#include "core/op/op_finder.hpp"

namespace te_fl::core {
namespace {

constexpr uint64_t kPlanAlignment = 256;  // the largest alignment that a plan's key records
constexpr uint64_t kMostAlignment = 8;    // the largest alignment of an element of any dtype

// A mask of the bits up to and including the lowest set bit of the address. It encodes the
// address's alignment, up to kPlanAlignment.
uint64_t alignment_mask(uint64_t address) noexcept {
  const uint64_t bits = address | kPlanAlignment;
  return bits ^ (bits - 1);
}

// Writes the addresses and numbers of a call into a record of the same layout, and records in which
// ways they differ from the old ones.
struct TakeOverSink {
  uint64_t* at;
  uint64_t begin = 0;     // the address of the tensor's data
  uint64_t less = 0;      // nonzero if an address is less aligned than before
  uint64_t other = 0;     // nonzero if an alignment changed
  uint64_t presence = 0;  // highest bit: an argument became absent or present
  uint64_t renumbered = 0;
  bool structure(uint64_t) noexcept {
    ++at;
    return true;
  }
  void same(uint64_t) noexcept { ++at; }
  void number(uint64_t now) noexcept {
    renumbered |= *at ^ now;
    *at++ = now;
  }
  TE_FL_INLINE void address(uint64_t now) noexcept {
    const uint64_t old = *at;
    *at++ = now;
    presence |= (old - 1) ^ (now - 1);  // user-space addresses have a zero highest bit
    const uint64_t was = alignment_mask(old);
    less |= now & (was >> 1) & (kMostAlignment - 1);
    other |= was ^ alignment_mask(now);
    if (begin == 0) begin = now;
  }
  bool is_bad() const noexcept { return less != 0 || presence >> 63 != 0; }
};

typedef uint32_t Lanes __attribute__((vector_size(4 * CallLayout::kLanes)));

bool any(const Lanes& lanes) noexcept {
  uint64_t words[2];
  std::memcpy(words, &lanes, sizeof words);
  return (words[0] | words[1]) != 0;
}

struct Sharing {
  bool forbidden = false;
  bool allowed = false;
};

// Finds whether an output begins at the address of another tensor. `begins` holds hashes of the
// addresses. A hash collision counts as sharing; the Finder then decides.
Sharing find_sharing(const CallLayout& layout, const uint32_t* begins) noexcept {
  Lanes forbidden{}, allowed{};
  for (const CallLayout::Output& output : layout.outputs) {
    const uint32_t begin = begins[output.tensor];
    for (size_t i = 0; i < layout.lanes; i += CallLayout::kLanes) {
      const auto hits = static_cast<Lanes>(load_as<Lanes>(begins + i) == begin);
      forbidden |= hits & load_as<Lanes>(output.forbidden + i);
      allowed |= hits & load_as<Lanes>(output.allowed + i);
    }
  }
  return {any(forbidden), any(allowed)};
}

// An absent argument has no address to hash. It gets a number that no other argument has instead:
// from 0 for tensors, from kAbsent for lists.
constexpr uint32_t kAbsent = 64;

uint32_t slot_index(uint64_t begin) noexcept {
  return static_cast<uint32_t>((begin * 0x9e3779b97f4a7c15u) >> 32);
}
void note_begin(uint32_t* begins, size_t i, uint64_t begin) noexcept {
  begins[i] = begin == 0 ? static_cast<uint32_t>(i) : slot_index(begin);
}

// Lists are processed in chunks of this many elements.
constexpr size_t kChunk = 64;

// Hashes of the start addresses of one chunk's elements, for each list.
struct Begins {
  alignas(16) uint32_t of[CallLayout::kMaxLists][kChunk];
};

typedef uint64_t Addresses __attribute__((vector_size(16)));

uint64_t either(const Addresses& addresses) noexcept { return addresses[0] | addresses[1]; }

// The earlier and the current start addresses of one chunk's list elements.
struct Places {
  alignas(16) uint64_t was[kChunk], is[kChunk];
};

// Compares the two addresses of each element as TakeOverSink::address() does. `count` is even.
void look_at(const Places& places, size_t count, TakeOverSink& sink) noexcept {
  Addresses presence{}, less{}, other{};
  for (size_t k = 0; k < count; k += 2) {
    const auto was = load_as<Addresses>(places.was + k), is = load_as<Addresses>(places.is + k);
    presence |= (was - 1) ^ (is - 1);
    const Addresses old = was | kPlanAlignment, now = is | kPlanAlignment;
    const Addresses mask = old ^ (old - 1);
    less |= is & mask >> 1;
    other |= mask ^ now ^ (now - 1);
  }
  sink.presence |= either(presence);
  sink.less |= either(less) & (kMostAlignment - 1);
  sink.other |= either(other);
}

// Writes the current start addresses of `count` list elements into the record. Returns the position
// behind their words.
uint64_t* replace_elements(const te_fl_tensor* const* items, size_t count, uint64_t* words,
                           TakeOverSink& sink, uint32_t* begins, uint32_t absent) noexcept {
  Places places;
  for (size_t k = 0; k < count; ++k) {
    const te_fl_tensor& t = *items[k];
    uint64_t now;
    if (words[kPresentWord] != 0) [[unlikely]] {
      sink.at = words;
      sink.begin = 0;
      walk_tensor(&t, sink);
      words = sink.at;
      now = places.was[k] = sink.begin;
    } else {
      places.was[k] = words[kAddressWord];
      now = t.dl.data == nullptr ? 0 : reinterpret_cast<uintptr_t>(t.dl.data) + t.dl.byte_offset;
      words[kAddressWord] = now;
      // The record's words contain the rank too, but reading it from there would stall on that
      // load.
      words += kExtentWord + t.dl.ndim;
    }
    places.is[k] = now;
    begins[k] = now == 0 ? absent : slot_index(now);
  }
  if (count % 2 != 0) places.was[count] = places.is[count] = 0;
  look_at(places, count + count % 2, sink);
  return words;
}

// True if the two arrays agree at any index. `count` is a multiple of kLanes.
bool meet(const uint32_t* a, const uint32_t* b, size_t count) noexcept {
  Lanes hits{};
  for (size_t k = 0; k < count; k += CallLayout::kLanes) {
    hits |= static_cast<Lanes>(load_as<Lanes>(a + k) == load_as<Lanes>(b + k));
  }
  return any(hits);
}
bool meet(const uint32_t* a, uint32_t b, size_t count) noexcept {
  Lanes hits{};
  for (size_t k = 0; k < count; k += CallLayout::kLanes) {
    hits |= static_cast<Lanes>(load_as<Lanes>(a + k) == b);
  }
  return any(hits);
}

// Adds to `sharing` how one chunk of a list shares memory with the op's tensors and with the
// preceding lists.
void share_list(const CallLayout& layout, size_t l, const uint32_t* tensors, const Begins& begins,
                size_t count, Sharing& sharing) noexcept {
  const CallLayout::List& list = layout.lists[l];
  const auto add = [&](size_t slot, bool met) {
    sharing.forbidden |= met && (list.forbidden >> slot & 1) != 0;
    sharing.allowed |= met && (list.allowed >> slot & 1) != 0;
  };
  const auto matters = [&](size_t slot) {
    return ((list.forbidden | list.allowed) >> slot & 1) != 0;
  };
  const size_t n = layout.tensors.size();
  for (size_t i = 0; i < n; ++i) {
    if (matters(i)) add(i, meet(begins.of[l], tensors[i], count));
  }
  for (size_t j = 0; j < l; ++j) {
    if (matters(n + j)) add(n + j, meet(begins.of[l], begins.of[j], count));
  }
}

// Writes the current start addresses of all list elements into the record. Compares each element
// with the op's tensors and with the elements of other lists at its index, as the full check does.
void replace_lists(const CallLayout& layout, const std::byte* args, CallRecord& record,
                   TakeOverSink& sink, const uint32_t* tensors, Sharing& sharing) noexcept {
  uint64_t* words[CallLayout::kMaxLists];
  size_t longest = 0;
  for (size_t l = 0; l < layout.lists.size(); ++l) {
    words[l] = record.words.data() + record.lists[l];
    longest = std::max(longest, static_cast<size_t>(list_items(layout.lists[l], args).count));
  }
  Begins begins;
  for (size_t first = 0; first < longest; first += kChunk) {
    const size_t count = std::min(kChunk, longest - first);
    const size_t lanes = (count + CallLayout::kLanes - 1) / CallLayout::kLanes * CallLayout::kLanes;
    for (size_t l = 0; l < layout.lists.size(); ++l) {
      const ListItems all = list_items(layout.lists[l], args);
      const auto absent = static_cast<uint32_t>(kAbsent + l);
      const size_t here = all.count == 0 ? 0 : count;  // 0: an omitted list
      words[l] = replace_elements(all.items + first, here, words[l], sink, begins.of[l], absent);
      std::fill(begins.of[l] + here, begins.of[l] + lanes, absent);
      share_list(layout, l, tensors, begins, lanes, sharing);
    }
  }
}

// Records at which word each list's elements begin, for a call that passed the check.
void note_lists(const CallLayout& layout, const std::byte* args, CallRecord& record) {
  CountSink sink;
  walk_tensors(layout, args, sink);
  walk_rest(layout, args, sink);
  walk_counts(layout, args, sink);
  for (size_t l = 0; l < std::min(layout.lists.size(), CallLayout::kMaxLists); ++l) {
    record.lists[l] = static_cast<uint32_t>(sink.words);
    walk_list(layout.lists[l], args, sink);
  }
}

bool store(const CallLayout& layout, const void* raw, CallRecord& record) noexcept {
  const auto* args = static_cast<const std::byte*>(raw);
  record.words.clear();
  try {
    CountSink count;
    walk_call(layout, args, count);
    record.words.reserve(count.words);
    StoreSink sink{record.words};
    walk_call(layout, args, sink);
    if (!layout.lists.empty()) note_lists(layout, args, record);
    return true;
  } catch (...) {  // out of memory
    record.words.clear();
    return false;
  }
}

// Writes the call's addresses and numbers into the record, and returns how its arguments share
// memory.
Sharing replace(const CallLayout& layout, const void* raw, CallRecord& record,
                TakeOverSink& sink) noexcept {
  const auto* args = static_cast<const std::byte*>(raw);
  alignas(16) uint32_t begins[CallLayout::kMaxTensors] = {};
  size_t i = 0;
  for (const uint32_t offset : layout.tensors) {
    sink.begin = 0;
    walk_tensor(load_as<const te_fl_tensor*>(args + offset), sink);
    note_begin(begins, i++, sink.begin);
  }
  walk_rest(layout, args, sink);
  Sharing sharing = find_sharing(layout, begins);
  if (!layout.lists.empty()) replace_lists(layout, args, record, sink, begins, sharing);
  // Set for forbidden sharing too, since empty tensors may share addresses that others may not.
  record.shares = sharing.allowed || sharing.forbidden;
  return sharing;
}

TakeOverSink make_sink(CallRecord& record) noexcept {
  return TakeOverSink{record.words.data() + 1};  // skips the word of the struct's size
}

}  // namespace

Changes take_over(const CallLayout& layout, const void* args, CallRecord& record) noexcept {
  const bool shared = record.shares;
  TakeOverSink sink = make_sink(record);
  bool in_order = layout.lanes != 0;
  if (in_order) {
    const Sharing sharing = replace(layout, args, record, sink);
    in_order = !sink.is_bad() && !sharing.forbidden;
  }
  if (in_order && sink.renumbered != 0) {
    Signature now;
    in_order = Finder(*layout.op, args).numbers(now) && now.later == record.signature.later;
  }
  if (!in_order) {
    record.op = 0;
    return Changes::kUnclear;
  }
  // If no number changed, an address did, since the caller found a difference.
  const bool plan = sink.renumbered != 0 || sink.other != 0 || shared || record.shares;
  return plan ? Changes::kPlan : Changes::kNone;
}

bool fill_record(const CallLayout& layout, const void* args, uint64_t hash,
                 const Signature& signature, CallRecord& record) noexcept {
  record.op = 0;
  if (!store(layout, args, record)) return false;
  record.hash = hash;
  record.signature = signature;
  record.shares = true;  // for an op without a layout, whose tensors replace() cannot compare
  TakeOverSink sink = make_sink(record);
  if (layout.lanes != 0) replace(layout, args, record, sink);
  record.op = layout.number;
  return true;
}

void ExactMemo::take(const CompiledOp& op, const void* args) noexcept {
  forget();
  const te_fl_op_schema& schema = op.schema();
  const ArgsView view(args);
  const uint32_t size = view.size();
  // Padding may have any value. A struct with padding is only recognised less often.
  if (size > kMaxArgs || size % 8 != 0) return;
  uint32_t count = 0;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    // The memo does not compare memory that other pointers point to.
    if (arg.type == TE_FL_ARG_TENSOR_LIST || arg.type == TE_FL_ARG_I64_LIST ||
        arg.type == TE_FL_ARG_SAVED || arg.type == TE_FL_ARG_COMMUNICATOR) {
      return;
    }
    if (arg.type != TE_FL_ARG_TENSOR || arg.offset + sizeof(void*) > size) continue;
    const auto* t = view.read<const te_fl_tensor*>(arg.offset);
    if (t == nullptr) continue;
    if (t->struct_size < sizeof(te_fl_tensor) || count == kMaxTensors) return;
    const te_fl_dltensor& dl = t->dl;
    const te_fl_quant* quant = t->quant;
    if (dl.strides != nullptr || dl.ndim > static_cast<int32_t>(kMaxRank)) return;
    if (quant != nullptr && quant->struct_size < sizeof *quant) return;
    One& one = tensors_[count++];
    std::memcpy(one.bytes, t, sizeof *t);
    one.tensor = t;
    one.shape = dl.shape;
    one.rank = static_cast<uint32_t>(dl.ndim);
    for (int32_t d = 0; d < dl.ndim; ++d) one.extents[d] = dl.shape[d];
    one.quant = quant;
    if (quant != nullptr) std::memcpy(one.parts, quant, sizeof *quant);
  }
  std::memcpy(args_, args, size);
  count_ = count;
  size_ = size;
}

}  // namespace te_fl::core
