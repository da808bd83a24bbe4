#include "core/op_fast.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "core/op_finder.hpp"
#include "core/settings.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::core {
namespace {

// A DLPack dtype as one word (code, bits, lanes in memory order), the bit of its index, and its
// alignment less one.
constexpr uint32_t kNoDType = 1u << 31;  // in no dtype mask
struct DTypeRow {
  uint32_t word = 0;
  uint32_t bit = kNoDType;  // of an empty row
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
        row = {word, 1u << index, (bits - 1) / 8};
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

struct State {
  uint64_t bad = 0;      // anything but 0: not sure
  uint64_t extents = 0;  // or of all extents
  int32_t leading_count = -1;
  const int64_t* leading = nullptr;
  int64_t product = -1;
  int64_t* values = nullptr;  // of the symbols; below 0: not set
};

template <class T>
uint64_t bits_of(T value) {
  return static_cast<uint64_t>(value);
}

// The first tensor with "..." sets the leading extents; the others are compared.
[[gnu::always_inline]] inline void match_leading(State& s, const int64_t* shape, int32_t count,
                                                 bool uses_product) {
  if (s.leading_count >= 0) {
    if (count != s.leading_count) {
      s.bad = 1;
      return;
    }
    for (int32_t d = 0; d < count; ++d) s.bad |= bits_of(shape[d] ^ s.leading[d]);
    return;
  }
  s.leading_count = count;
  s.leading = shape;
  // Overflow is harmless: extents that make it happen are refused by the test at the end.
  uint64_t product = 1;
  for (int32_t d = 0; d < count; ++d) {
    s.extents |= bits_of(shape[d]);
    product *= bits_of(shape[d]);
  }
  if (!uses_product) return;
  if (s.product >= 0) s.bad |= bits_of(s.product) ^ product;
  s.product = static_cast<int64_t>(product);
}

[[gnu::always_inline]] inline void bind_or_compare(State& s, uint8_t symbol, int64_t extent) {
  const int64_t value = s.values[symbol];
  s.values[symbol] = extent;  // differs from a value already set only if the call is refused
  s.bad |= value >= 0 ? bits_of(value ^ extent) : 0;
}

[[gnu::always_inline]] inline void match_product(State& s, int64_t extent) {
  s.bad |= s.product >= 0 ? bits_of(s.product ^ extent) : 0;
  s.product = extent;
}

// A 64-bit division costs as much as the rest of a tensor's checks: compare by a product where the
// name is set, and divide in 32 bits where it is not.
[[gnu::always_inline]] inline void match_times(State& s, const FastTerm& term, int64_t extent) {
  const int64_t value = s.values[term.symbol];
  const auto factor = static_cast<uint32_t>(term.value);
  s.bad |= bits_of(extent >> 32 != 0);
  if (value >= 0) {
    s.bad |= bits_of(value >> 31 != 0) | ((bits_of(value) * factor) ^ bits_of(extent));
    return;
  }
  const auto narrow = static_cast<uint32_t>(extent);
  s.bad |= narrow % factor;
  s.values[term.symbol] = narrow / factor;
}

[[gnu::always_inline]] inline void match_term(State& s, const FastTerm& term, int64_t extent) {
  switch (term.kind) {
    case Term::kName:
      return bind_or_compare(s, term.symbol, extent);
    case Term::kConst:
      s.bad |= bits_of(extent ^ term.value);
      return;
    case Term::kAny:
      return;
    case Term::kTimes:
      return match_times(s, term, extent);
    case Term::kPlus:
      s.bad |= bits_of(extent < term.value);
      return bind_or_compare(s, term.symbol, std::max<int64_t>(extent, 0) - term.value);
    case Term::kOneOr:
      if (extent != 1) bind_or_compare(s, term.symbol, extent);
      return;
    case Term::kProduct:
      return match_product(s, extent);
  }
}

// By value: a State whose address is known to nobody can live in registers.
[[gnu::noinline]] State match_terms(const FastOp& op, const FastTensor& f, const std::byte* args,
                                    State s, const int64_t* shape, int32_t rank) {
  const bool second = f.flag_offset != 0 && load<int32_t>(args + f.flag_offset) == 0;
  const FastDims& dims = f.dims[second ? 1 : 0];
  const int32_t leading = rank - dims.count;
  if (leading < 0 || (leading > 0 && !dims.leading)) {
    s.bad = 1;
    return s;
  }
  if (dims.leading) match_leading(s, shape, leading, op.uses_product);
  const FastTerm* term = op.terms.data() + dims.first;
  for (int32_t d = leading; d < rank; ++d, ++term) {
    s.extents |= bits_of(shape[d]);
    match_term(s, *term, shape[d]);
  }
  return s;
}

[[gnu::always_inline]] inline void match_shape(const FastOp& op, const FastTensor& f,
                                               const std::byte* args, State& s,
                                               const te_fl_dltensor& dl) {
  const int64_t* shape = dl.shape;
  const int32_t rank = dl.ndim;
  switch (f.shape) {
    case FastShape::kAny:
      for (int32_t d = 0; d < rank; ++d) s.extents |= bits_of(shape[d]);
      return;
    case FastShape::kSame: {
      const auto* other = load<const te_fl_tensor*>(args + op.tensors[f.same_as].offset);
      if (rank != other->dl.ndim) {
        s.bad = 1;
        return;
      }
      for (int32_t d = 0; d < rank; ++d) s.bad |= bits_of(shape[d] ^ other->dl.shape[d]);
      return;
    }
    case FastShape::kLeading:
      return match_leading(s, shape, rank, op.uses_product);
    case FastShape::kLeadingName:
      if (rank < 1) {
        s.bad = 1;
        return;
      }
      match_leading(s, shape, rank - 1, op.uses_product);
      s.extents |= bits_of(shape[rank - 1]);
      return bind_or_compare(s, f.symbol, shape[rank - 1]);
    case FastShape::kName:
    case FastShape::kProduct:
      if (rank != 1) {
        s.bad = 1;
        return;
      }
      s.extents |= bits_of(shape[0]);
      return f.shape == FastShape::kName ? bind_or_compare(s, f.symbol, shape[0])
                                         : match_product(s, shape[0]);
    case FastShape::kTerms:
      s = match_terms(op, f, args, s, shape, rank);
      return;
  }
}

typedef uint32_t Lanes __attribute__((vector_size(4 * kLanes)));

// Whether an output begins where a tensor begins that it may not share memory with. `begins` are
// hashes of the addresses: two tensors that agree in them by chance are left to the Finder.
[[gnu::always_inline]] inline bool may_alias(const FastOp& op, const uint32_t* begins) {
  Lanes hits{};
  for (const FastOutput& output : op.outputs) {
    const uint32_t begin = begins[output.tensor];
    for (size_t b = 0; b < op.blocks; ++b) {
      const auto there = load<Lanes>(begins + b * kLanes);
      hits |= static_cast<Lanes>(there == begin) & load<Lanes>(output.forbidden + b * kLanes);
    }
  }
  uint64_t words[2];
  std::memcpy(words, &hits, sizeof words);
  return (words[0] | words[1]) != 0;
}

// Strides that neither overlap nor reach far. Quantised and packed tensors have to be compact,
// which the Finder finds out.
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
  if (t.dl.strides != nullptr || t.quant->struct_size < sizeof(te_fl_quant)) return false;
  if (t.quant->scaling == TE_FL_SCALING_NONE) return false;
  uint64_t extents = 0;
  for (int32_t d = 0; d < t.dl.ndim; ++d) extents |= static_cast<uint64_t>(t.dl.shape[d]);
  if (extents >> kExtentBits[t.dl.ndim] != 0) return false;  // its elements could not be counted
  return inspect_quant(*op.op, arg, ArgsView(args), t) == Problem::kNone;
}

inline bool scalars_in_order(const FastOp& op, const std::byte* args) {
  bool good = true;
  for (const FastScalar& f : op.scalars) {
    const std::byte* at = args + f.offset;
    switch (f.type) {
      case TE_FL_ARG_F32: {
        const double value = load<float>(at);
        good &= value >= f.float_low && value <= f.float_high;
        break;
      }
      case TE_FL_ARG_F64: {
        const double value = load<double>(at);
        good &= value >= f.float_low && value <= f.float_high;
        break;
      }
      case TE_FL_ARG_I64:
        good &= load<uint64_t>(at) - static_cast<uint64_t>(f.low) <= f.span;
        break;
      default: {
        const int64_t value = load<int32_t>(at);
        good &= static_cast<uint64_t>(value) - static_cast<uint64_t>(f.low) <= f.span;
      }
    }
  }
  return good;
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
  if (anchor == nullptr || anchor->struct_size < sizeof(te_fl_tensor)) return false;
  const auto device = load<uint64_t>(&anchor->dl.device);
  const auto head = load<uint64_t>(anchor);  // struct_size and provider

  State s;
  int64_t values[kMaxSymbols];
  for (uint32_t i = 0; i < op.symbol_count; ++i) values[i] = -1;
  s.values = values;
  uint32_t dtypes = 0, scalings = 0;
  uint32_t max_rank = 0;
  alignas(16) uint32_t begins[kMaxFastTensors];
  uint32_t dtype[kMaxFastTensors];
  const size_t count = op.tensors.size();
  const FastTensor* f = op.tensors.data();
  for (size_t i = 0; i < count; ++i, ++f) {
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
    max_rank = rank > max_rank ? rank : max_rank;
    const auto word = load<uint32_t>(&dl.dtype);
    const DTypeRow& row = kDTypes.rows[word * kDTypes.factor >> (32 - kTableBits)];
    s.bad |= word ^ row.word;
    dtypes |= row.bit;
    dtype[i] = row.bit;
    if (t->quant == nullptr) [[likely]] {
      s.bad |= row.bit & ~f->plain_dtypes;
      scalings |= TE_FL_BIT(TE_FL_SCALING_NONE);
    } else {
      const uint32_t allowed = op.op->args[f->arg].dtypes;
      if ((row.bit & allowed) == 0 || word != row.word || !quant_in_order(op, *f, raw, *t))
        return false;
      scalings |= 1u << t->quant->scaling;
    }
    const uintptr_t at = reinterpret_cast<uintptr_t>(dl.data) + dl.byte_offset;
    s.bad |= at & row.below_alignment;
    s.bad |= bits_of(dl.data == nullptr);
    s.bad |= (load<uint64_t>(&dl.device) ^ device) & f->place_mask;
    begins[i] = static_cast<uint32_t>((at * 0x9e3779b97f4a7c15u) >> 32);
    if (dl.strides != nullptr && !strides_in_order(*f, dl)) return false;
    match_shape(op, *f, args, s, dl);
  }
  s.bad |= s.extents >> kExtentBits[max_rank];
  for (const FastPair& p : op.same_dtype) {
    s.bad |= bits_of(dtype[p.a] != dtype[p.b] && dtype[p.b] != 0 && dtype[p.a] != 0);
  }
  for (const uint32_t offset : op.host_offsets) {
    const auto* t = load<const te_fl_tensor*>(args + offset);
    s.bad |= bits_of(t != nullptr && t->dl.device.type != TE_FL_DEVICE_CPU);
  }
  for (size_t i = count; i < op.blocks * kLanes; ++i) begins[i] = 0;
  if (s.bad != 0 || may_alias(op, begins) || !scalars_in_order(op, args)) return false;
  if (op.saved_offset != 0 && load<const void*>(args + op.saved_offset) != nullptr) return false;
  out.dtypes = dtypes;
  out.scalings = scalings;
  out.version = 1;
  out.device = {anchor->dl.device.type, anchor->dl.device.index, anchor->provider};
  if (out.device.is_host()) out.device = Device{};
  if (op.op->has_newer) [[unlikely]] {
    const ArgsView view(raw);
    for (const Arg& arg : op.op->args) {
      if (arg.since > out.version && !view.is_neutral(arg)) out.version = arg.since;
    }
  }
  return true;
}

namespace {

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
    f.same_as = static_cast<uint8_t>(i);
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
  const uint32_t scaled = arg.is(TE_FL_ARG_RAW_FP8) ? 0u : kScaledDTypes;
  f.plain_dtypes = plain ? arg.dtypes & ~scaled : 0u;
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
  if (!op.lists.empty() || op.tensors.empty() || op.tensors.size() > kMaxFastTensors)
    return nullptr;
  auto fast = std::make_unique<FastOp>();
  fast->op = &op;
  fast->args_size = op.schema.args_size;
  fast->symbol_count = static_cast<uint32_t>(op.symbols.size());
  if (op.saved >= 0) fast->saved_offset = op.args[static_cast<size_t>(op.saved)].offset;
  for (const uint8_t i : op.tensors) {
    const Arg& arg = op.args[i];
    if (!fits_int32(arg.shape.dims[0]) || !fits_int32(arg.shape.dims[1])) return nullptr;
    fast->uses_product |= arg.shape.uses(Term::kProduct);
    fast->tensors.push_back(make_tensor(*fast, op, i));
    if (arg.is(TE_FL_ARG_HOST)) fast->host_offsets.push_back(arg.offset);
    const bool required = arg.places() && !arg.is(TE_FL_ARG_OPTIONAL);
    if (fast->anchor_offset == 0 && required) fast->anchor_offset = arg.offset;
  }
  if (fast->anchor_offset == 0) return nullptr;
  fast->blocks = (fast->tensors.size() + kLanes - 1) / kLanes;
  for (uint8_t a = 0; a < fast->tensors.size(); ++a) {
    const Arg& arg = op.args[fast->tensors[a].arg];
    if (arg.writes()) fast->outputs.push_back(make_output(*fast, op, a));
    for (uint8_t b = 0; b < fast->tensors.size(); ++b) {
      if (arg.same_as == fast->tensors[b].arg) fast->same_dtype.push_back({a, b});
    }
  }
  for (const uint8_t i : op.scalars) {
    const Arg& arg = op.args[i];
    fast->scalars.push_back(
        {arg.offset, arg.type, arg.int_low,
         static_cast<uint64_t>(arg.int_high) - static_cast<uint64_t>(arg.int_low), arg.low,
         arg.high});
  }
  return fast;
}

}  // namespace te_fl::core
