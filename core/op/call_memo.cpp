#include "core/op/call_memo.hpp"

#include <algorithm>

#include "core/op/op_finder.hpp"

namespace te_fl::core {
namespace {

constexpr uint64_t kPlanAlignment = 256;  // as far as a plan's key tells alignments apart
constexpr uint64_t kMostAlignment = 8;    // of an element of any dtype

uint64_t lowest_bit(uint64_t word) noexcept { return word & (~word + 1); }

// Puts a call's addresses and numbers in the place of a record's, and looks at what they are.
struct TakeOverSink {
  uint64_t* at;
  uint64_t begin = 0;  // where the tensor's memory begins
  bool bad = false;    // less aligned, or absent where it was present
  bool other = false;  // aligned otherwise
  uint64_t moved = 0, renumbered = 0;
  bool structure(uint64_t) noexcept {
    ++at;
    return true;
  }
  void same(uint64_t) noexcept { ++at; }
  void number(uint64_t now) noexcept {
    renumbered |= *at ^ now;
    *at++ = now;
  }
  void address(uint64_t now) noexcept {
    const uint64_t old = *at;
    *at++ = now;
    moved |= old ^ now;
    const uint64_t alignment = lowest_bit(old | kPlanAlignment);
    bad |= (old == 0) != (now == 0) || (now & (std::min(alignment, kMostAlignment) - 1)) != 0;
    other |= alignment != lowest_bit(now | kPlanAlignment);
    if (begin == 0) begin = now;
  }
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

// Tells if an output begins where another tensor begins. `begins` are hashes of the addresses: two
// tensors that agree in them by chance are left to the Finder.
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

void note_begin(uint32_t* begins, size_t i, uint64_t begin) noexcept {
  // No tensor, and most likely no tensor's hash.
  begins[i] = begin == 0 ? static_cast<uint32_t>(i)
                         : static_cast<uint32_t>((begin * 0x9e3779b97f4a7c15u) >> 32);
}

bool store(const CallLayout& layout, const void* args, std::vector<uint64_t>& words) noexcept {
  try {
    words.clear();
    StoreSink sink{words};
    walk_call(layout, static_cast<const std::byte*>(args), sink);
    return true;
  } catch (...) {  // out of memory
    words.clear();
    return false;
  }
}

// Takes the call's addresses and numbers over, and says how the memory is shared.
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
  const Sharing sharing = find_sharing(layout, begins);
  // Empty tensors may share what others may not.
  record.shares = sharing.allowed || sharing.forbidden;
  return sharing;
}

TakeOverSink sink_of(CallRecord& record) noexcept {
  return TakeOverSink{record.words.data() + 1};  // behind the struct's size
}

}  // namespace

Changes take_over(const CallLayout& layout, const void* args, CallRecord& record) noexcept {
  const bool shared = record.shares;
  TakeOverSink sink = sink_of(record);
  bool in_order = layout.lanes != 0;
  if (in_order) {
    const Sharing sharing = replace(layout, args, record, sink);
    in_order = !sink.bad && !sharing.forbidden;
  }
  // Lists would have to be compared with each other.
  if (sink.moved != 0 && !layout.lists.empty()) in_order = false;
  if (in_order && sink.renumbered != 0) {
    Signature now;
    in_order = Finder(*layout.op, args).numbers(now) && now.later == record.signature.later;
  }
  if (!in_order) {
    record.op = 0;
    return Changes::kUnclear;
  }
  const bool plan =
      sink.renumbered != 0 || sink.other || (sink.moved != 0 && (shared || record.shares));
  return plan ? Changes::kPlan : Changes::kNone;
}

bool fill_record(const CallLayout& layout, const void* args, uint64_t hash,
                 const Signature& signature, CallRecord& record) noexcept {
  record.op = 0;
  if (!store(layout, args, record.words)) return false;
  record.hash = hash;
  record.signature = signature;
  record.shares = true;  // where nobody looks
  TakeOverSink sink = sink_of(record);
  if (layout.lanes != 0) replace(layout, args, record, sink);
  record.op = layout.number;
  return true;
}

void ExactMemo::take(const CompiledOp& op, const void* args) noexcept {
  forget();
  const te_fl_op_schema& schema = op.schema();
  const ArgsView view(args);
  const uint32_t size = view.size();
  // Padding may hold anything; such structs are merely recognised less often.
  if (size > kMaxArgs || size % 8 != 0) return;
  uint32_t count = 0;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    // The memo does not compare what lies behind other pointers.
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
