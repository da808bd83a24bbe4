#include "plugins/repeated_calls.hpp"

#include <algorithm>
#include <bit>
#include <span>

#include "py/interpreter.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::python {
namespace {

constexpr size_t kMaxParts = 64;

uint64_t pair(uint32_t low, uint32_t high) noexcept { return low | uint64_t{high} << 32; }

uint64_t word_of(const te_fl_dtype& dtype) noexcept {
  return dtype.code | uint64_t{dtype.bits} << 8 | uint64_t{dtype.lanes} << 16;
}

}  // namespace

bool FlatCall::set(const OpBinding& op, const Wanted& wanted, const te_fl_context& ctx,
                   const void* args) {
  words_.clear();
  parts_.clear();
  words_.reserve(128);
  parts_.reserve(16);
  add(pair(static_cast<uint32_t>(ctx.device.type), static_cast<uint32_t>(ctx.device.index)));
  add(pair(ctx.provider, ctx.flags));
  const ArgumentReader reader(op, args);
  return std::all_of(wanted.args.begin(), wanted.args.end(),
                     [&](const BoundArg* arg) { return add_argument(*arg, reader); });
}

bool FlatCall::add_argument(const BoundArg& arg, const ArgumentReader& args) {
  const te_fl_arg_desc& desc = *arg.desc;
  if ((desc.flags & TE_FL_ARG_QUANT_ONLY) != 0) {
    add(0);
    return args.read<const te_fl_tensor*>(desc.offset) == nullptr;
  }
  switch (desc.type) {
    case TE_FL_ARG_TENSOR: {
      const auto* t = args.read<const te_fl_tensor*>(desc.offset);
      add(t != nullptr);
      return t == nullptr || add_tensor(*t);
    }
    case TE_FL_ARG_TENSOR_LIST: {
      const auto tensors = args.list<const te_fl_tensor*>(desc);
      add(tensors.size());
      return std::all_of(tensors.begin(), tensors.end(),
                         [&](const te_fl_tensor* t) { return add_tensor(*t); });
    }
    case TE_FL_ARG_I64_LIST: {
      const auto numbers = args.list<int64_t>(desc);
      add(numbers.size());
      for (const int64_t n : numbers) add(static_cast<uint64_t>(n));
      return true;
    }
    case TE_FL_ARG_BOOL:
    case TE_FL_ARG_ENUM:
    case TE_FL_ARG_I32:
      add(static_cast<uint64_t>(args.read<int32_t>(desc.offset)));
      return true;
    case TE_FL_ARG_F32:
      add(std::bit_cast<uint32_t>(args.read<float>(desc.offset)));
      return true;
    default:  // I64 and F64
      add(args.read<uint64_t>(desc.offset));
      return true;
  }
}

bool FlatCall::add_tensor(const te_fl_tensor& t) {
  const bool quantised = t.quant != nullptr && t.quant->scaling != TE_FL_SCALING_NONE;
  add(quantised ? pair(t.quant->scaling, t.quant->flags) + (uint64_t{1} << 63) : 0);
  if (!quantised) return add_part(t.dl);
  const te_fl_quant& q = *t.quant;
  add(std::bit_cast<uint32_t>(q.amax_epsilon));
  const Result<DType> codes = dtype_from_c(t.dl.dtype);
  if (!codes.ok() || (t.dl.data == nullptr && q.columnwise_data == nullptr)) return false;
  bool known = true;
  if (t.dl.data != nullptr) {
    known = add_part(t.dl);
  } else {  // the column-wise codes alone; the logical shape is not theirs
    add(static_cast<uint64_t>(t.dl.ndim));
    for (int32_t d = 0; d < t.dl.ndim; ++d) add(static_cast<uint64_t>(t.dl.shape[d]));
  }
  for_each_part(t, q, *codes,
                [&](const char*, void* at, DType dtype, std::span<const int64_t> shape) {
                  add(at != nullptr);
                  if (at == nullptr) return;
                  te_fl_dltensor dl{};
                  dl.data = at;
                  dl.device = t.dl.device;
                  dl.ndim = static_cast<int32_t>(shape.size());
                  dl.dtype = to_c(dtype);
                  dl.shape = const_cast<int64_t*>(shape.data());
                  known = known && add_part(dl);
                });
  return known;
}

// Adds a tensor, and the number of the first one in the same place.
bool FlatCall::add_part(const te_fl_dltensor& dl) {
  const Result<DType> dtype = dtype_from_c(dl.dtype);
  if (!dtype.ok() || *dtype == DType::kF4E2M1 || dl.ndim > kMaxRank || parts_.size() == kMaxParts)
    return false;
  Part& part = parts_.emplace_back();
  part.dl = dl;
  part.dl.data = dl.data == nullptr ? nullptr : static_cast<char*>(dl.data) + dl.byte_offset;
  part.dl.byte_offset = 0;
  add(word_of(dl.dtype) | static_cast<uint64_t>(dl.ndim) << 32);
  add(pair(static_cast<uint32_t>(dl.device.type), static_cast<uint32_t>(dl.device.index)));
  int64_t next = 1;
  for (int32_t d = dl.ndim - 1; d >= 0; --d) {
    part.shape[d] = dl.shape[d];
    part.strides[d] = dl.strides != nullptr ? dl.strides[d] : next;
    next *= dl.shape[d];
    add(static_cast<uint64_t>(part.shape[d]));
    add(static_cast<uint64_t>(part.strides[d]));
  }
  const auto first = std::find_if(parts_.begin(), parts_.end(),
                                  [&](const Part& p) { return p.dl.data == part.dl.data; });
  add(static_cast<uint64_t>(first - parts_.begin()));
  return true;
}

Ref FlatCall::tensors(const std::shared_ptr<Lending>& lending) const {
  return make_list(parts_, [&](const Part& part) {
    const auto rank = static_cast<size_t>(part.dl.ndim);
    return lend_to_torch(lending, part.dl, {part.shape, rank}, {part.strides, rank});
  });
}

RepeatedCalls::Entry& RepeatedCalls::at(std::string_view signature) {
  const auto found = entries_.find(signature);
  if (found != entries_.end()) return found->second;
  if (entries_.size() == kMost) clear();
  return entries_.emplace(signature, Entry{}).first->second;
}

void RepeatedCalls::keep(std::string_view signature, PyObject* function) {
  Entry& entry = at(signature);
  entry.tried = true;
  if (entry.function != nullptr || PyCallable_Check(function) == 0) return;
  Py_INCREF(function);
  entry.function = function;
}

void RepeatedCalls::clear() noexcept {
  for (const auto& [signature, entry] : entries_) drop_later(entry.function);
  entries_.clear();
}

}  // namespace te_fl::python
