#include "core/op/op_fast.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>

#include "core/base/settings.hpp"
#include "core/op/op_finder.hpp"
#include "core/op/op_memo.hpp"
#include "core/tensor/tensor_access.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::core {
namespace {

// A DLPack dtype as one word (code, bits, lanes in memory order), the bit of its index, and its
// alignment less one.
constexpr uint64_t kNoDType = TE_FL_BIT(63);  // in no dtype mask
struct DTypeRow {
  uint32_t word = 0;
  uint64_t bit = kNoDType;  // of an empty row
  uintptr_t below_alignment = 0;
};

// A hash table without collisions for the dtypes that te-fl knows: one multiplication finds the
// row, one comparison tells whether it is right.
constexpr uint32_t kTableBits = 6;
struct DTypeTable {
  uint32_t factor = 0;
  std::array<DTypeRow, 1u << kTableBits> rows{};

  bool fill() {
    rows = {};
    for (uint32_t code = 0; code < 32; ++code) {
      for (uint32_t bits = 4; bits <= 64; bits *= 2) {
        const int index = dtype_index({static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1});
        if (index == kInvalidDType) continue;
        // In the byte order of the machine, as a load of the struct gives it.
        const bool little = std::endian::native == std::endian::little;
        const uint32_t word = little ? code | bits << 8 | 1u << 16 : code << 24 | bits << 16 | 1u;
        DTypeRow& row = rows[word * factor >> (32 - kTableBits)];
        if (row.bit != kNoDType) return false;
        row = {word, TE_FL_BIT(index), (bits - 1) / 8};
      }
    }
    return true;
  }
};

DTypeTable make_dtype_table() {
  DTypeTable table;
  for (table.factor = 0x9e3779b1u; !table.fill(); table.factor += 2) {
  }
  return table;
}
const DTypeTable kDTypes = make_dtype_table();

// How many bits all extents of a tensor of this rank may have for its bytes to be countable.
constexpr uint8_t kExtentBits[kMaxRank + 1] = {59, 59, 29, 19, 14, 11, 9, 8, 7};

template <class T>
T load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Everything below answers "in order" or "not sure" (false). Each comparison is a branch of its
// own: taken never, they cost less than gathering bits would.
#define TE_FL_INLINE [[gnu::always_inline]] inline

struct State {
  uint64_t extents = 0;  // or of all extents
  int32_t max_rank = 0;
  int64_t product = -1;  // of the leading dimensions; below 0: not set
  int32_t leading_count = -1;
  const int64_t* leading = nullptr;
  int64_t values[kMaxSymbols];  // of the names; below 0: not set
};

TE_FL_INLINE void note_extent(State& s, int64_t extent) {
  s.extents |= static_cast<uint64_t>(extent);
}

TE_FL_INLINE bool match_product(State& s, int64_t extent) {
  if (s.product >= 0) return s.product == extent;
  s.product = extent;
  return true;
}

TE_FL_INLINE bool match_name(State& s, uint8_t symbol, int64_t extent) {
  const int64_t value = s.values[symbol];
  if (value >= 0) return value == extent;
  s.values[symbol] = extent;
  return true;
}

// The first tensor with "..." sets the leading extents; the others are compared.
TE_FL_INLINE bool match_leading(State& s, const int64_t* shape, int32_t count, bool uses_product) {
  if (s.leading_count >= 0) {
    if (count != s.leading_count) return false;
    for (int32_t d = 0; d < count; ++d) {
      if (shape[d] != s.leading[d]) return false;
    }
    return true;
  }
  s.leading_count = count;
  s.leading = shape;
  // Overflow is harmless: extents that make it happen are refused by the test at the end.
  uint64_t product = 1;
  for (int32_t d = 0; d < count; ++d) {
    note_extent(s, shape[d]);
    product *= static_cast<uint64_t>(shape[d]);
  }
  return !uses_product || match_product(s, static_cast<int64_t>(product));
}

// A 64-bit division costs as much as the rest of a tensor's checks: compare by a product where the
// name is set, and divide in 32 bits where it is not.
TE_FL_INLINE bool match_times(State& s, const FastTerm& term, int64_t extent) {
  const int64_t value = s.values[term.symbol];
  const auto factor = static_cast<uint32_t>(term.value);
  if (extent >> 32 != 0) return false;
  if (value >= 0) {
    return value >> 31 == 0 &&
           static_cast<uint64_t>(value) * factor == static_cast<uint64_t>(extent);
  }
  const auto narrow = static_cast<uint32_t>(extent);
  s.values[term.symbol] = narrow / factor;
  return narrow % factor == 0;
}

TE_FL_INLINE bool match_term(State& s, const FastTerm& term, int64_t extent) {
  switch (term.kind) {
    case Term::kName:
      return match_name(s, term.symbol, extent);
    case Term::kConst:
      return extent == term.value;
    case Term::kAny:
      return true;
    case Term::kTimes:
      return match_times(s, term, extent);
    case Term::kPlus:
      return extent >= term.value && match_name(s, term.symbol, extent - term.value);
    case Term::kOneOr:
      return extent == 1 || match_name(s, term.symbol, extent);
    case Term::kProduct:
      return match_product(s, extent);
  }
  return false;
}

TE_FL_INLINE bool match_terms(const FastOp& op, const FastTensor& f, const std::byte* args,
                              State& s, const int64_t* shape, int32_t rank) {
  const bool second = f.flag_offset != 0 && load<int32_t>(args + f.flag_offset) == 0;
  const FastDims& dims = f.dims[second ? 1 : 0];
  const int32_t leading = rank - dims.count;
  if (leading < 0 || (leading > 0 && !dims.leading)) return false;
  if (dims.leading && !match_leading(s, shape, leading, op.uses_product)) return false;
  const FastTerm* term = op.terms.data() + dims.first;
  for (int32_t d = leading; d < rank; ++d, ++term) {
    note_extent(s, shape[d]);
    if (!match_term(s, *term, shape[d])) return false;
  }
  return true;
}

TE_FL_INLINE bool match_same(const te_fl_dltensor& other, const int64_t* shape, int32_t rank) {
  if (rank != other.ndim) return false;
  for (int32_t d = 0; d < rank; ++d) {
    if (shape[d] != other.shape[d]) return false;
  }
  return true;
}

TE_FL_INLINE bool match_shape(const FastOp& op, const FastTensor& f, const std::byte* args,
                              State& s, const te_fl_dltensor& dl) {
  const int64_t* shape = dl.shape;
  const int32_t rank = dl.ndim;
  if (f.shape == FastShape::kSame) {
    return match_same(load<const te_fl_tensor*>(args + f.same_offset)->dl, shape, rank);
  }
  s.max_rank = rank > s.max_rank ? rank : s.max_rank;
  if (rank > 0) {
    const int64_t last = shape[rank - 1];
    switch (f.shape) {
      case FastShape::kLeadingName:
        note_extent(s, last);
        return match_leading(s, shape, rank - 1, op.uses_product) && match_name(s, f.symbol, last);
      case FastShape::kName:
        note_extent(s, last);
        return rank == 1 && match_name(s, f.symbol, last);
      case FastShape::kProduct:
        note_extent(s, last);
        return rank == 1 && match_product(s, last);
      default:
        break;
    }
  }
  if (f.shape == FastShape::kLeading) return match_leading(s, shape, rank, op.uses_product);
  if (f.shape == FastShape::kTerms) return match_terms(op, f, args, s, shape, rank);
  for (int32_t d = 0; d < rank; ++d) note_extent(s, shape[d]);
  return f.shape == FastShape::kAny;
}

typedef uint64_t Words __attribute__((vector_size(16)));
static_assert(offsetof(te_fl_tensor, quant) ==
              offsetof(te_fl_tensor, dl) + offsetof(te_fl_dltensor, byte_offset) + 8);

typedef uint32_t Lanes __attribute__((vector_size(4 * kLanes)));

// Whether an output begins where a tensor begins that it may not share memory with. `begins` are
// hashes of the addresses: two tensors that agree in them by chance are left to the Finder.
TE_FL_INLINE bool may_alias(const FastOp& op, const uint32_t* begins) {
  Lanes hits{};
  const auto low = load<Lanes>(begins), high = load<Lanes>(begins + kLanes);
  for (const FastOutput& output : op.outputs) {
    const uint32_t begin = begins[output.tensor];
    hits |= static_cast<Lanes>(low == begin) & load<Lanes>(output.forbidden);
    hits |= static_cast<Lanes>(high == begin) & load<Lanes>(output.forbidden + kLanes);
    for (size_t i = 2 * kLanes; i < op.lanes; i += kLanes) {
      const auto there = load<Lanes>(begins + i);
      hits |= static_cast<Lanes>(there == begin) & load<Lanes>(output.forbidden + i);
    }
  }
  uint64_t words[2];
  std::memcpy(words, &hits, sizeof words);
  return (words[0] | words[1]) != 0;
}

// Strides that neither overlap nor reach far. Packed tensors have to be compact, which the Finder
// finds out.
[[gnu::noinline]] bool strides_in_order(const FastTensor& f, const te_fl_dltensor& dl) {
  if (dl.dtype.bits < 8) return false;
  for (int32_t d = 0; d < dl.ndim; ++d) {
    const int64_t extent = dl.shape[d], stride = dl.strides[d];
    if (stride == 0 && extent > 1 && !f.allows_overlap) return false;
    if (extent < 0 || extent >= int64_t{1} << 30) return false;
    if (stride < 0 || stride >= int64_t{1} << 24) return false;
  }
  return true;
}

[[gnu::noinline]] bool quant_in_order(const FastOp& op, const FastTensor& f, const void* args,
                                      const te_fl_tensor& t) {
  const Arg& arg = op.op->args[f.arg];
  if (t.quant->struct_size < kLeastQuant) return false;
  if (t.dl.strides != nullptr && !(arg.is(TE_FL_ARG_STRIDED_CODES) && may_be_strided(*t.quant))) {
    return false;
  }
  if (t.quant->scaling == TE_FL_SCALING_NONE) return false;
  uint64_t extents = 0;
  for (int32_t d = 0; d < t.dl.ndim; ++d) extents |= static_cast<uint64_t>(t.dl.shape[d]);
  if (extents >> kExtentBits[t.dl.ndim] != 0) return false;  // its elements could not be counted
  return inspect_quant(*op.op, arg, ArgsView(args), t) == Problem::kNone;
}

TE_FL_INLINE bool scalars_in_order(const FastOp& op, const std::byte* args) {
  for (const FastScalar& f : op.scalars) {
    const std::byte* at = args + f.offset;
    if (f.is_float) {
      const double value = f.wide ? load<double>(at) : double{load<float>(at)};
      if (!(value >= f.float_low && value <= f.float_high)) return false;  // NaN too
    } else {
      const int64_t value = f.wide ? load<int64_t>(at) : load<int32_t>(at);
      if (static_cast<uint64_t>(value) - static_cast<uint64_t>(f.low) > f.span) return false;
    }
  }
  return true;
}

// The later arguments that say something. They stand last.
[[gnu::noinline]] uint32_t later_in_use(const FastOp& op, const void* raw) {
  const ArgsView view(raw);
  uint32_t later = 0;
  const std::vector<Arg>& args = op.op->args;
  for (auto arg = args.end() - op.op->later_count; arg != args.end(); ++arg) {
    if (!view.is_neutral(*arg)) later |= arg->later;
  }
  return later;
}

const DTypeRow& row_of(uint32_t word) {
  return kDTypes.rows[word * kDTypes.factor >> (32 - kTableBits)];
}

template <class T>
uint64_t bits_of(T value) {
  return static_cast<uint64_t>(value);
}

inline uint64_t memo_hash(uint64_t op, uint64_t rank, int64_t first, int64_t last) {
  const uint64_t h = (op << 3 | rank) * 0x9e3779b97f4a7c15u ^ bits_of(first) * 0xc2b2ae3d27d4eb4fu ^
                     bits_of(last) * 0x165667b19e3779f9u;
  return h >> 58 ^ h >> 40;
}

// The addresses of a call that the memo knows but for them. They are remembered if they are good.
[[gnu::noinline]] bool addresses_in_order(const FastOp& op, const std::byte* args,
                                          CheckMemo::Slot& slot) {
  alignas(16) uint32_t begins[kMaxFastTensors];
  uint64_t data[CheckMemo::kMaxTensors];
  uint64_t bad = 0;
  const size_t count = op.tensors.size();
  for (size_t i = 0; i < count; ++i) {
    const auto* t = load<const te_fl_tensor*>(args + op.tensors[i].offset);
    begins[i] = static_cast<uint32_t>(i);
    data[i] = 0;
    if (t == nullptr) continue;
    data[i] = reinterpret_cast<uintptr_t>(t->dl.data);
    const uint64_t at = data[i] + t->dl.byte_offset;
    bad |= (at & slot.tensors[i].below_alignment) | bits_of(data[i] == 0);
    begins[i] = static_cast<uint32_t>(at >> 3);
  }
  for (size_t i = count; i < op.lanes; ++i) begins[i] = 0;
  if (bad != 0 || may_alias(op, begins)) return false;
  for (size_t i = 0; i < count; ++i) slot.tensors[i].data = data[i];
  return true;
}

FastDims add_dims(FastOp& fast, const Dims& dims) {
  FastDims result{static_cast<uint16_t>(fast.terms.size()), dims.count, dims.leading};
  for (int i = 0; i < dims.count; ++i) {
    const Term& term = dims.terms[static_cast<size_t>(i)];
    fast.terms.push_back({term.kind, term.symbol, static_cast<int32_t>(term.value)});
  }
  return result;
}

bool fits_int32(const Dims& dims) {
  for (int i = 0; i < dims.count; ++i) {
    if (dims.terms[static_cast<size_t>(i)].value > INT32_MAX) return false;
  }
  return true;
}

}  // namespace

CompiledOp::Impl::Impl() = default;
CompiledOp::Impl::~Impl() = default;

bool fast_check(const FastOp& op, const void* raw, Signature& out) noexcept {
  const auto* args = static_cast<const std::byte*>(raw);
  if (raw == nullptr || load<uint32_t>(raw) < op.args_size) return false;
  if (g_validate.load(std::memory_order_relaxed)) return false;
  const auto* anchor = load<const te_fl_tensor*>(args + op.anchor_offset);
  if (anchor == nullptr || anchor->struct_size < kLeastTensor) return false;
  const auto device = load<uint64_t>(&anchor->dl.device);
  const auto head = load<uint64_t>(anchor);  // struct_size and provider

  State s;
  for (uint32_t i = 0; i < op.symbol_count; ++i) s.values[i] = -1;
  uint64_t dtypes = 0;
  uint32_t scalings = 0;
  alignas(16) uint32_t begins[kMaxFastTensors];
  uint64_t dtype[kMaxFastTensors];
  const Lanes nothing[2] = {};
  std::memcpy(begins, nothing, sizeof nothing);  // lanes without a tensor
  static constexpr DTypeRow kNone;               // of a dtype that no argument allows
  const DTypeRow* row = &kNone;
  const FastTensor* const end = op.tensors.data() + op.tensors.size();
  size_t i = 0;
  for (const FastTensor* f = op.tensors.data(); f != end; ++f, ++i) {
    const auto* t = load<const te_fl_tensor*>(args + f->offset);
    if (t == nullptr) {
      if (!f->optional) return false;
      begins[i] = static_cast<uint32_t>(i);  // no tensor, and most likely no tensor's hash
      dtype[i] = 0;
      continue;
    }
    const te_fl_dltensor& dl = t->dl;
    const auto rank = static_cast<uint32_t>(dl.ndim);
    if (load<uint64_t>(t) != head || rank > kMaxRank || dl.shape == nullptr) return false;
    const auto word = load<uint32_t>(&dl.dtype);
    if (word != row->word) {  // else as the tensor before
      row = &kDTypes.rows[word * kDTypes.factor >> (32 - kTableBits)];
      if (word != row->word) return false;
      dtypes |= row->bit;
    }
    dtype[i] = row->bit;
    if (t->quant == nullptr) [[likely]] {
      if ((row->bit & f->refused_dtypes) != 0) return false;
      scalings |= TE_FL_BIT(TE_FL_SCALING_NONE);
    } else {
      if ((row->bit & f->quant_dtypes) == 0 || !quant_in_order(op, *f, raw, *t)) return false;
      scalings |= 1u << t->quant->scaling;
    }
    const uintptr_t at = reinterpret_cast<uintptr_t>(dl.data) + dl.byte_offset;
    if (dl.data == nullptr || (at & row->below_alignment) != 0) return false;
    begins[i] = static_cast<uint32_t>((at * 0x9e3779b97f4a7c15u) >> 32);
    if (((load<uint64_t>(&dl.device) ^ device) & f->place_mask) != 0) return false;
    if (dl.strides != nullptr && !strides_in_order(*f, dl)) return false;
    if (!match_shape(op, *f, args, s, dl)) return false;
  }
  if (s.extents >> kExtentBits[s.max_rank] != 0) return false;
  for (i = std::max(i, 2 * kLanes); i < op.lanes; ++i) begins[i] = 0;
  if (may_alias(op, begins) || !scalars_in_order(op, args)) return false;
  for (const FastPair& p : op.same_dtype) {
    if (dtype[p.a] != dtype[p.b] && dtype[p.b] != 0 && dtype[p.a] != 0) return false;
  }
  for (const uint32_t offset : op.host_offsets) {
    const auto* t = load<const te_fl_tensor*>(args + offset);
    if (t != nullptr && t->dl.device.type != TE_FL_DEVICE_CPU) return false;
  }
  if (op.saved_offset != 0 && load<const void*>(args + op.saved_offset) != nullptr) return false;
  out.dtypes = dtypes;
  out.scalings = scalings;
  out.later = 0;
  out.device = {anchor->dl.device.type, anchor->dl.device.index, anchor->provider};
  if (out.device.is_host()) out.device = Device{};
  if (op.op->later_count != 0) [[unlikely]] {
    out.later = later_in_use(op, raw);
  }
  return true;
}

bool check_known(const FastOp& op, const void* raw, CheckMemo& memo, Signature& out,
                 CheckMemo::Slot*& where) noexcept {
  const auto* args = static_cast<const std::byte*>(raw);
  if (raw == nullptr || load<uint32_t>(raw) < op.args_size) return false;
  if (g_validate.load(std::memory_order_relaxed)) return false;
  if (!op.memorable) return false;
  const auto* anchor = load<const te_fl_tensor*>(args + op.anchor_offset);
  if (anchor == nullptr || anchor->struct_size < kLeastTensor) return false;
  const auto anchor_rank = static_cast<uint32_t>(anchor->dl.ndim);
  const int64_t* anchor_shape = anchor->dl.shape;
  if (anchor_rank - 1 >= CheckMemo::kMaxRank || anchor_shape == nullptr) return false;
  CheckMemo::Slot& slot =
      memo.slot(memo_hash(op.number, anchor_rank, anchor_shape[0], anchor_shape[anchor_rank - 1]));
  where = &slot;
  if (slot.op != op.number) return false;
  uint64_t moved = 0, differs = 0;
  Words wide{};
  const FastTensor* f = op.tensors.data();
  const FastTensor* const end = f + op.tensors.size();
  const CheckMemo::Tensor* m = slot.tensors.data();
  for (; f != end; ++f, ++m) {
    const auto* t = load<const te_fl_tensor*>(args + f->offset);
    if (t == nullptr) [[unlikely]] {
      if (m->kind != CheckMemo::kAbsent) return false;
      continue;
    }
    const te_fl_dltensor& dl = t->dl;
    const int64_t* shape = dl.shape;
    // Before anything is read through the pointers: the struct is as long and the rank the same.
    if (load<uint64_t>(t) != m->head || load<uint64_t>(&dl.ndim) != m->kind || shape == nullptr) {
      return false;
    }
    differs |= load<uint64_t>(&dl.device) ^ m->device;
    wide |= load<Words>(&dl.byte_offset) ^ load<Words>(&m->byte_offset);
    if (m->rank == 2) [[likely]] {
      wide |= load<Words>(shape) ^ load<Words>(m->shape);
    } else {
      for (uint32_t d = 0; d < m->rank; ++d) differs |= bits_of(shape[d] ^ m->shape[d]);
    }
    // Where there were strides, none are as good: compact.
    if (dl.strides != nullptr) [[unlikely]] {
      if (!m->has_strides) return false;
      for (uint32_t d = 0; d < m->rank; ++d) differs |= bits_of(dl.strides[d] ^ m->strides[d]);
    }
    moved |= reinterpret_cast<uintptr_t>(dl.data) ^ m->data;
  }
  differs |= wide[0] | wide[1];
  uint64_t flags = 0;
  for (const uint32_t offset : op.flag_offsets) {
    flags = flags << 1 | (load<int32_t>(args + offset) != 0);
  }
  differs |= flags ^ slot.flags;
  if (differs != 0) return false;
  if (moved != 0 && !addresses_in_order(op, args, slot)) return false;
  if (!scalars_in_order(op, args)) return false;
  if (op.saved_offset != 0 && load<const void*>(args + op.saved_offset) != nullptr) return false;
  out = slot.signature;
  if (op.op->later_count != 0) [[unlikely]] {
    out.later = later_in_use(op, raw);
  }
  return true;
}

void remember(const FastOp& op, const void* raw, const Signature& signature,
              CheckMemo::Slot& slot) noexcept {
  const auto* args = static_cast<const std::byte*>(raw);
  slot.op = 0;
  for (size_t i = 0; i < op.tensors.size(); ++i) {
    const auto* t = load<const te_fl_tensor*>(args + op.tensors[i].offset);
    CheckMemo::Tensor& m = slot.tensors[i];
    if (t == nullptr) {
      m.kind = CheckMemo::kAbsent;
      continue;
    }
    const te_fl_dltensor& dl = t->dl;
    if (t->quant != nullptr || dl.ndim > static_cast<int32_t>(CheckMemo::kMaxRank)) return;
    m.head = load<uint64_t>(t);
    m.device = load<uint64_t>(&dl.device);
    m.kind = load<uint64_t>(&dl.ndim);
    m.byte_offset = dl.byte_offset;
    m.quant = 0;
    m.data = reinterpret_cast<uintptr_t>(dl.data);
    m.below_alignment = row_of(load<uint32_t>(&dl.dtype)).below_alignment;
    m.rank = static_cast<uint32_t>(dl.ndim);
    m.has_strides = dl.strides != nullptr;
    for (int32_t d = 0; d < dl.ndim; ++d) {
      m.shape[d] = dl.shape[d];
      if (m.has_strides) m.strides[d] = dl.strides[d];
    }
  }
  slot.flags = 0;
  for (const uint32_t offset : op.flag_offsets) {
    slot.flags = slot.flags << 1 | (load<int32_t>(args + offset) != 0);
  }
  slot.signature = signature;
  slot.op = op.number;
}

namespace {

std::atomic<uint64_t> g_numbers{1};

// A rule that an earlier required tensor has word for word gives the same extents, if every term
// has a value.
void choose_shape(FastOp& fast, const CompiledOp::Impl& op, FastTensor& f) {
  const ShapeRule& rule = op.args[f.arg].shape;
  f.shape = rule.any ? FastShape::kAny : FastShape::kTerms;
  if (rule.any || rule.uses(Term::kAny) || rule.uses(Term::kOneOr)) return;
  for (size_t i = 0; i < fast.tensors.size(); ++i) {
    if (fast.tensors[i].shape == FastShape::kAny) continue;
    const bool same = std::strcmp(op.descs[fast.tensors[i].arg].shape, op.descs[f.arg].shape) == 0;
    if (!same || fast.tensors[i].optional) continue;
    f.shape = FastShape::kSame;
    f.same_offset = fast.tensors[i].offset;
    return;
  }
  const Dims& dims = rule.dims[0];
  const Term& last = dims.terms[0];
  if (rule.flag >= 0 || dims.count > 1) return;
  f.symbol = last.symbol;
  if (dims.count == 0) {
    if (dims.leading) f.shape = FastShape::kLeading;
  } else if (last.kind == Term::kName) {
    f.shape = dims.leading ? FastShape::kLeadingName : FastShape::kName;
  } else if (last.kind == Term::kProduct && !dims.leading) {
    f.shape = FastShape::kProduct;
  }
}

FastTensor make_tensor(FastOp& fast, const CompiledOp::Impl& op, uint8_t i) {
  const Arg& arg = op.args[i];
  FastTensor f{};
  f.offset = arg.offset;
  f.arg = i;
  const bool plain = (arg.scalings & TE_FL_BIT(TE_FL_SCALING_NONE)) != 0;
  const uint64_t scaled = arg.is(TE_FL_ARG_RAW_FP8) ? 0u : kScaledDTypes;
  f.refused_dtypes = plain ? ~(arg.dtypes & ~scaled) : ~uint64_t{0};
  f.quant_dtypes = arg.dtypes;
  f.place_mask = arg.places() ? ~uint64_t{0} : 0;
  f.optional = arg.is(TE_FL_ARG_OPTIONAL);
  f.allows_overlap = arg.is(TE_FL_ARG_ALLOW_OVERLAP);
  if (arg.shape.flag >= 0) f.flag_offset = op.args[static_cast<size_t>(arg.shape.flag)].offset;
  f.dims[0] = add_dims(fast, arg.shape.dims[0]);
  f.dims[1] = add_dims(fast, arg.shape.dims[1]);
  choose_shape(fast, op, f);
  return f;
}

FastOutput make_output(const FastOp& fast, const CompiledOp::Impl& op, uint8_t tensor) {
  FastOutput output{};
  output.tensor = tensor;
  const Arg& arg = op.args[fast.tensors[tensor].arg];
  for (size_t j = 0; j < fast.tensors.size(); ++j) {
    const bool allowed = j == tensor || (arg.may_alias >> fast.tensors[j].arg & 1) != 0;
    output.forbidden[j] = allowed ? 0 : ~0u;
  }
  return output;
}

}  // namespace

std::unique_ptr<FastOp> make_fast(const CompiledOp::Impl& op) {
  if (!op.lists.empty() || !op.communicators.empty() || op.tensors.empty() ||
      op.tensors.size() > kMaxFastTensors)
    return nullptr;
  auto fast = std::make_unique<FastOp>();
  fast->op = &op;
  fast->number = g_numbers.fetch_add(1, std::memory_order_relaxed);
  fast->args_size = op.schema.args_size;
  fast->symbol_count = static_cast<uint32_t>(op.symbols.size());
  if (op.saved >= 0) fast->saved_offset = op.args[static_cast<size_t>(op.saved)].offset;
  for (const uint8_t i : op.tensors) {
    const Arg& arg = op.args[i];
    if (!fits_int32(arg.shape.dims[0]) || !fits_int32(arg.shape.dims[1])) return nullptr;
    fast->uses_product |= arg.shape.uses(Term::kProduct);
    fast->tensors.push_back(make_tensor(*fast, op, i));
    const uint32_t flag = fast->tensors.back().flag_offset;
    const auto& flags = fast->flag_offsets;
    if (flag != 0 && std::find(flags.begin(), flags.end(), flag) == flags.end()) {
      fast->flag_offsets.push_back(flag);
    }
    if (arg.is(TE_FL_ARG_HOST)) fast->host_offsets.push_back(arg.offset);
    const bool required = arg.places() && !arg.is(TE_FL_ARG_OPTIONAL);
    if (fast->anchor_offset == 0 && required) fast->anchor_offset = arg.offset;
  }
  if (fast->anchor_offset == 0) return nullptr;
  fast->memorable = fast->tensors.size() <= CheckMemo::kMaxTensors;
  fast->lanes = (fast->tensors.size() + kLanes - 1) / kLanes * kLanes;
  for (uint8_t a = 0; a < fast->tensors.size(); ++a) {
    const Arg& arg = op.args[fast->tensors[a].arg];
    if (arg.writes()) fast->outputs.push_back(make_output(*fast, op, a));
    for (uint8_t b = 0; b < fast->tensors.size(); ++b) {
      if (arg.same_as == fast->tensors[b].arg) fast->same_dtype.push_back({a, b});
    }
  }
  for (const uint8_t i : op.scalars) {
    const Arg& arg = op.args[i];
    const bool is_float = arg.type == TE_FL_ARG_F32 || arg.type == TE_FL_ARG_F64;
    const bool wide = arg.type == TE_FL_ARG_F64 || arg.type == TE_FL_ARG_I64;
    const auto span = static_cast<uint64_t>(arg.int_high) - static_cast<uint64_t>(arg.int_low);
    fast->scalars.push_back({arg.offset, is_float, wide, arg.int_low, span, arg.low, arg.high});
  }
  return fast;
}

}  // namespace te_fl::core
