#include "core/op/op_finder.hpp"

#include <algorithm>
#include <cmath>

#include "core/base/settings.hpp"
#include "core/tensor/tensor_access.hpp"
#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::core {
namespace {

uintptr_t element_bytes(int dtype) {
  return static_cast<uintptr_t>(std::max(bits(static_cast<DType>(dtype)) / 8, 1));
}

// True if the tensor's size in bytes fits an int64. Extents of 0 count as 1.
bool fits(const te_fl_dltensor& dl) {
  int64_t bytes = 8;
  for (int i = 0; i < dl.ndim; ++i) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(dl.shape[i], 1), &bytes)) return false;
    if (dl.strides == nullptr) continue;
    int64_t reach = 0;
    if (__builtin_mul_overflow(std::max<int64_t>(dl.shape[i] - 1, 0), dl.strides[i], &reach))
      return false;
    if (reach > (INT64_MAX >> 8) || reach < -(INT64_MAX >> 8)) return false;
  }
  return bytes < INT64_MAX - 4096;
}

}  // namespace

int64_t numel_of(const te_fl_tensor& t) noexcept {
  int64_t count = 1;
  for (int i = 0; i < t.dl.ndim; ++i) count *= t.dl.shape[i];
  return count;
}

bool is_compact(const te_fl_tensor& t) noexcept {
  if (t.dl.strides == nullptr || numel_of(t) == 0) return true;
  int64_t expected = 1;
  for (int i = t.dl.ndim - 1; i >= 0; --i) {
    if (t.dl.shape[i] != 1 && t.dl.strides[i] != expected) return false;
    expected *= t.dl.shape[i];
  }
  return true;
}

const char* first_byte(const te_fl_tensor& t) noexcept {
  if (numel_of(t) == 0) return nullptr;
  if (t.dl.data != nullptr) return static_cast<const char*>(t.dl.data) + t.dl.byte_offset;
  const te_fl_quant* q = quant_of(t);
  return q != nullptr ? static_cast<const char*>(q->columnwise_data) : nullptr;
}

bool ArgsView::is_neutral(const Arg& arg) const noexcept {
  if (!has(arg)) return true;
  switch (arg.type) {
    case TE_FL_ARG_TENSOR:
    case TE_FL_ARG_SAVED:
    case TE_FL_ARG_COMMUNICATOR:
      return read<const void*>(arg.offset) == nullptr;
    case TE_FL_ARG_TENSOR_LIST:
    case TE_FL_ARG_I64_LIST:
      return count(arg) == 0;
    case TE_FL_ARG_F32:
      return read<float>(arg.offset) == static_cast<float>(arg.neutral);
    default:
      return scalar(arg) == arg.neutral;
  }
}

bool merge_devices(Device& into, const Device& next) noexcept {
  if (into == next) return true;
  const auto pinned_for = [](const Device& host, const Device& chip) {
    return (host.type == TE_FL_DEVICE_CUDA_HOST && chip.type == TE_FL_DEVICE_CUDA) ||
           (host.type == TE_FL_DEVICE_ROCM_HOST && chip.type == TE_FL_DEVICE_ROCM);
  };
  if (into.is_host() && next.is_host()) {
    into = Device{};
    return true;
  }
  if (pinned_for(next, into)) return true;
  if (!pinned_for(into, next)) return false;
  into = next;
  return true;
}

Finder::Finder(const CompiledOp::Impl& op, const void* args) noexcept
    : op_(op),
      raw_(args),
      args_(args != nullptr ? args : static_cast<const void*>(&op.schema.arg_count)) {
  for (int8_t& s : frame_.setter) s = -1;
}

bool Finder::fail(Problem problem, int arg, int64_t index, int other, int dim) noexcept {
  finding_ = {problem, arg, index, other, dim};
  return false;
}

const te_fl_tensor* Finder::tensor() const noexcept {
  if (finding_.arg < 0 || raw_ == nullptr) return nullptr;
  const Arg& arg = op_.args[static_cast<size_t>(finding_.arg)];
  if (arg.is_tensor()) return args_.tensor(arg);
  return arg.is_list() && finding_.index >= 0 ? args_.element(arg, finding_.index) : nullptr;
}

bool Finder::reads(const Arg& arg) const noexcept { return op_.reads(arg, args_); }

bool Finder::run(Signature& out) noexcept {
  const bool good = check_struct() && check_scalars() && check_integers() && check_tensors() &&
                    check_lists() && check_saved() && check_communicators() && check_rules() &&
                    check_memory();
  if (good) {
    signature_.device = device_.is_host() ? Device{} : device_;
    out = signature_;
  }
  return good;
}

bool Finder::numbers(Signature& out) noexcept {
  if (!check_struct() || !check_scalars() || !bind_extents() || !check_rules()) return false;
  out.later = signature_.later;
  return true;
}

bool Finder::check_struct() noexcept {
  if (raw_ == nullptr) return fail(Problem::kNullArgs, -1);
  if (args_.size() < op_.schema.least_args_size) return fail(Problem::kArgsSize, -1);
  for (const Arg& arg : op_.args) {
    if (arg.later != 0 && !args_.is_neutral(arg)) signature_.later |= arg.later;
  }
  return true;
}

// ---- checks of scalars

bool Finder::check_scalar(int i) noexcept {
  const Arg& arg = op_.args[static_cast<size_t>(i)];
  if (!args_.has(arg)) return true;
  if (arg.type == TE_FL_ARG_F32 || arg.type == TE_FL_ARG_F64) {
    const double value = args_.scalar(arg);
    if (std::isnan(value)) return fail(Problem::kNan, i);
    return value >= arg.low && value <= arg.high ? true : fail(Problem::kRange, i);
  }
  const int64_t value =
      arg.type == TE_FL_ARG_I64 ? args_.read<int64_t>(arg.offset) : args_.read<int32_t>(arg.offset);
  if (value >= arg.int_low && value <= arg.int_high) return true;
  const Problem problem = arg.type == TE_FL_ARG_BOOL   ? Problem::kBool
                          : arg.type == TE_FL_ARG_ENUM ? Problem::kEnum
                                                       : Problem::kRange;
  return fail(problem, i);
}

bool Finder::check_scalars() noexcept {
  for (const uint8_t i : op_.scalars) {
    if (!check_scalar(i)) return false;
  }
  return true;
}

// ---- checks of integer lists and of rules

bool Finder::check_integers() noexcept {
  for (const uint8_t i : op_.integers) {
    const Arg& arg = op_.args[i];
    const int64_t count = args_.count(arg);
    if (count < 0) return fail(Problem::kNegativeCount, i);
    if (count > kMaxListCount) return fail(Problem::kLongList, i);
    if (count == 0 && !arg.is(TE_FL_ARG_OPTIONAL)) return fail(Problem::kNoIntegers, i);
    if (count > 0 && args_.read<const void*>(arg.offset) == nullptr)
      return fail(Problem::kNullList, i);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t value = args_.integer(arg, k);
      if (value < arg.int_low || value > arg.int_high) return fail(Problem::kIntegerRange, i, k);
    }
  }
  return true;
}

// Binds the names that rules use, for a call whose tensors have been checked.
bool Finder::bind_extents() noexcept {
  if (!op_.rules_use_extents) return true;
  for (const uint8_t i : op_.tensors) {
    const te_fl_tensor* t = args_.tensor(op_.args[i]);
    if (t != nullptr && !match_shape(i, -1, *t)) return false;
  }
  return true;
}

bool Finder::check_rules() noexcept {
  for (size_t i = 0; i < op_.rules.size(); ++i) {
    const Constraint& rule = op_.rules[i];
    if (is_broken(rule, {op_, args_, frame_}))
      return fail(Problem::kRule, rule.left.arg, -1, -1, static_cast<int>(i));
  }
  return true;
}

// ---- checks of one tensor

Problem Finder::inspect(const Arg& arg, const te_fl_tensor& t) const noexcept {
  if (t.struct_size < kLeastTensor) return Problem::kTensorSize;
  const te_fl_dltensor& dl = t.dl;
  if (dl.ndim < 0 || dl.ndim > kMaxRank) return Problem::kRank;
  if (dl.ndim > 0 && dl.shape == nullptr) return Problem::kNullShape;
  for (int i = 0; i < dl.ndim; ++i) {
    if (dl.shape[i] < 0) return Problem::kNegativeExtent;
  }
  if (!fits(dl)) return Problem::kTooLarge;
  const int dtype = dtype_index(dl.dtype);
  if (dtype == kInvalidDType || (arg.dtypes >> dtype & 1) == 0) return Problem::kDType;
  const bool has_quant = t.quant != nullptr;
  if (has_quant && t.quant->struct_size < kLeastQuant) return Problem::kQuantSize;
  if (quant_of(t) != nullptr) {
    const Problem problem = inspect_quant(op_, arg, args_, t);
    if (problem != Problem::kNone) return problem;
  } else {
    // Reports a missing part before a forbidden one, since that helps the caller more.
    const bool scaled = (kScaledDTypes >> dtype & 1) != 0;
    if (scaled && !arg.is(TE_FL_ARG_RAW_FP8)) return Problem::kMissingQuant;
    if ((arg.scalings & TE_FL_BIT(TE_FL_SCALING_NONE)) == 0) return Problem::kScaling;
  }
  return inspect_storage(arg, t, dtype);
}

Problem Finder::inspect_storage(const Arg& arg, const te_fl_tensor& t, int dtype) const noexcept {
  const te_fl_quant* q = quant_of(t);
  const bool empty = numel_of(t) == 0;
  const bool may_be_null = arg.is(TE_FL_ARG_QUANT_ONLY) || empty ||
                           (op_.enquiry && !arg.writes()) ||
                           (q != nullptr && q->columnwise_data != nullptr);
  if (t.dl.data == nullptr && !may_be_null) return Problem::kNullData;
  if (t.dl.data != nullptr) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(t.dl.data) + t.dl.byte_offset;
    if (address % element_bytes(dtype) != 0) return Problem::kAlignment;
  }
  if (arg.is(TE_FL_ARG_HOST) && !Device{t.dl.device.type, 0, 0}.is_host()) return Problem::kNotHost;
  return t.dl.strides == nullptr ? Problem::kNone : inspect_strides(arg, t, dtype);
}

Problem Finder::inspect_strides(const Arg& arg, const te_fl_tensor& t, int dtype) const noexcept {
  if (is_compact(t)) return Problem::kNone;
  const te_fl_quant* q = quant_of(t);
  if (q != nullptr && !(arg.is(TE_FL_ARG_STRIDED_CODES) && may_be_strided(*q))) {
    return Problem::kQuantStrided;
  }
  if (dtype == TE_FL_F4E2M1) return Problem::kPackedStrided;
  if (arg.is(TE_FL_ARG_ALLOW_OVERLAP)) return Problem::kNone;
  for (int i = 0; i < t.dl.ndim; ++i) {
    if (t.dl.strides[i] == 0 && t.dl.shape[i] > 1) {
      return arg.writes() ? Problem::kSelfOverlap : Problem::kBroadcast;
    }
  }
  const bool exact = arg.writes() && g_validate.load(std::memory_order_relaxed);
  return exact && overlaps_itself(t) ? Problem::kSelfOverlap : Problem::kNone;
}

void Finder::note(const Arg&, const te_fl_tensor& t) noexcept {
  signature_.dtypes |= uint64_t{1} << dtype_index(t.dl.dtype);
  const te_fl_quant* q = quant_of(t);
  signature_.scalings |=
      1u << (q == nullptr ? static_cast<uint32_t>(TE_FL_SCALING_NONE) : q->scaling);
}

bool Finder::place(int i, int64_t index, const te_fl_tensor& t) noexcept {
  if (!op_.args[static_cast<size_t>(i)].places()) return true;
  const Device device{t.dl.device.type, t.dl.device.index, t.provider};
  if (device_setter_ < 0) {
    device_ = device;
    device_setter_ = i;
    return true;
  }
  return merge_devices(device_, device) ? true : fail(Problem::kDevice, i, index, device_setter_);
}

// Tensor j, or its element `index` if j is a list. Null if it is absent or malformed; a malformed
// tensor is reported by its own check.
const te_fl_tensor* Finder::partner(int j, int64_t index) const noexcept {
  const Arg& other = op_.args[static_cast<size_t>(j)];
  const te_fl_tensor* t = nullptr;
  if (other.is_tensor()) {
    t = args_.tensor(other);
  } else if (other.is_list() && index >= 0 && index < args_.count(other)) {
    t = args_.element(other, index);
  }
  return t != nullptr && t->struct_size >= kLeastTensor ? t : nullptr;
}

const te_fl_tensor* Finder::other_tensor() const noexcept {
  return finding_.other < 0 ? nullptr : partner(finding_.other, finding_.index);
}

bool Finder::check_same_dtype(int i, int64_t index, const te_fl_tensor& t) noexcept {
  const Arg& arg = op_.args[static_cast<size_t>(i)];
  const te_fl_tensor* other = arg.same_as < 0 ? nullptr : partner(arg.same_as, index);
  if (other == nullptr || dtype_index(other->dl.dtype) == dtype_index(t.dl.dtype)) return true;
  return fail(Problem::kSameDType, i, index, arg.same_as);
}

bool Finder::check_tensor(int i, int64_t index, const te_fl_tensor* t) noexcept {
  const Arg& arg = op_.args[static_cast<size_t>(i)];
  if (t == nullptr) {
    if (arg.is_tensor() && arg.is(TE_FL_ARG_OPTIONAL)) return true;
    return fail(Problem::kMissing, i, index);
  }
  const Problem problem = inspect(arg, *t);
  if (problem != Problem::kNone) return fail(problem, i, index);
  note(arg, *t);
  return check_same_dtype(i, index, *t) && place(i, index, *t) && match_shape(i, index, *t);
}

bool Finder::check_tensors() noexcept {
  for (const uint8_t i : op_.tensors) {
    if (!check_tensor(i, -1, args_.tensor(op_.args[i]))) return false;
  }
  for (const uint8_t i : op_.tensors) {
    const te_fl_tensor* t = args_.tensor(op_.args[i]);
    if (t != nullptr && op_.args[i].writes() && !check_aliases(i, -1, *t)) return false;
  }
  return true;
}

// ---- checks of the saved record

bool Finder::check_saved() noexcept {
  if (op_.saved < 0) return true;
  const Arg& arg = op_.args[static_cast<size_t>(op_.saved)];
  const auto* record = args_.has(arg) ? args_.read<const te_fl_saved*>(arg.offset) : nullptr;
  if (record == nullptr) {
    return arg.is(TE_FL_ARG_OPTIONAL) ? true : fail(Problem::kMissingSaved, op_.saved);
  }
  if (record->struct_size < kLeastSaved) return fail(Problem::kSavedSize, op_.saved);
  const te_fl_tensor* storage = record->storage;
  if (storage == nullptr) return true;
  const bool shaped = storage->struct_size >= kLeastTensor && storage->dl.ndim == 1 &&
                      storage->dl.shape != nullptr && storage->dl.shape[0] >= 0 &&
                      dtype_index(storage->dl.dtype) == TE_FL_U8 && is_compact(*storage) &&
                      (storage->dl.data != nullptr || storage->dl.shape[0] == 0);
  if (!shaped) return fail(Problem::kSavedStorage, op_.saved);
  const Device device{storage->dl.device.type, storage->dl.device.index, storage->provider};
  Device merged = device_;
  const bool together = device_setter_ < 0 || merge_devices(merged, device);
  return together ? true : fail(Problem::kDevice, op_.saved, -1, device_setter_);
}

// ---- checks of communicators

uint32_t maker_number(const char* plugin) noexcept {
  if (plugin == nullptr) return 0;
  try {
    const uint32_t number = devices::intern_provider(plugin);
    return number <= kMaxMaker ? number : 0;
  } catch (...) {  // out of memory
    return 0;
  }
}

bool Finder::check_communicators() noexcept {
  for (const uint8_t i : op_.communicators) {
    const Arg& arg = op_.args[i];
    const auto* c = args_.has(arg) ? args_.read<const te_fl_communicator*>(arg.offset) : nullptr;
    if (c == nullptr) {
      if (arg.is(TE_FL_ARG_OPTIONAL)) continue;
      return fail(Problem::kMissingCommunicator, i);
    }
    if (c->struct_size < kLeastCommunicator) return fail(Problem::kCommunicatorSize, i);
    if (c->size < 1 || c->rank < 0 || c->rank >= c->size) {
      return fail(Problem::kCommunicatorRank, i);
    }
    if (c->id == 0 || c->maker == nullptr || c->maker[0] == '\0') {
      return fail(Problem::kCommunicatorMaker, i);
    }
    const Device device{c->device.type, c->device.index, c->device_provider};
    if (device_setter_ < 0) {  // a call without tensors runs on its communicator's device
      device_ = device;
      device_setter_ = static_cast<int8_t>(i);
    }
    const bool here = device.is_host() ? device_.is_host() : device == device_;
    if (!here) return fail(Problem::kCommunicatorDevice, i);
    signature_.maker = maker_number(c->maker);
  }
  return true;
}

// ---- the signature without the checks

bool Finder::signature(Signature& out) noexcept {
  if (!check_struct()) return false;
  const auto look = [this](int i, const te_fl_tensor* t) {
    if (t == nullptr) return op_.args[static_cast<size_t>(i)].is(TE_FL_ARG_OPTIONAL);
    if (t->struct_size < kLeastTensor) return false;
    const te_fl_quant* q = t->quant;
    if (q != nullptr && (q->struct_size < kLeastQuant || q->scaling >= TE_FL_SCALING_COUNT)) {
      return false;
    }
    if (dtype_index(t->dl.dtype) == kInvalidDType) return false;
    note(op_.args[static_cast<size_t>(i)], *t);
    return place(i, -1, *t);
  };
  for (const uint8_t i : op_.tensors) {
    if (!look(i, args_.tensor(op_.args[i]))) return false;
  }
  for (const uint8_t i : op_.lists) {
    const int64_t count = args_.count(op_.args[i]);
    if (count < 0 || count > kMaxListCount) return false;
    if (count > 0 && args_.read<const void*>(op_.args[i].offset) == nullptr) return false;
    for (int64_t k = 0; k < count; ++k) {
      const te_fl_tensor* t = args_.element(op_.args[i], k);
      if (t == nullptr || !look(i, t)) return false;
    }
  }
  for (const uint8_t i : op_.communicators) {
    const Arg& arg = op_.args[i];
    const auto* c = args_.has(arg) ? args_.read<const te_fl_communicator*>(arg.offset) : nullptr;
    if (c == nullptr) continue;
    if (c->struct_size < kLeastCommunicator) return false;
    signature_.maker = maker_number(c->maker);
    if (device_setter_ < 0) device_ = {c->device.type, c->device.index, c->device_provider};
  }
  signature_.device = device_.is_host() ? Device{} : device_;
  out = signature_;
  return true;
}

}  // namespace te_fl::core
