#include "dispatch/staging/staging_plan.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <tuple>
#include <utility>

#include "core/base/abi_struct.hpp"
#include "core/op/op_finder.hpp"
#include "core/tensor/quant_parts.hpp"
#include "core/tensor/tensor_access.hpp"
#include "registry/arguments.hpp"

namespace te_fl::dispatch {
namespace {

constexpr size_t kAlignment = 256;

// Stores `value` in a pointer variable of any pointer type at `slot`.
void set_pointer(void* slot, const void* value) noexcept {
  std::memcpy(slot, &value, sizeof value);
}

size_t code_bytes(const te_fl_tensor& t, int64_t elements) {
  return static_cast<size_t>(
      bytes_for(static_cast<DType>(dtype_index(t.dl.dtype)), std::max<int64_t>(elements, 0)));
}

}  // namespace

void StagingPlan::put(uint32_t offset, const void* pointer) noexcept {
  std::memcpy(reinterpret_cast<char*>(args_.data()) + offset, &pointer, sizeof pointer);
}

void StagingPlan::add(const void* memory, size_t bytes, bool in, bool out, void* slot,
                      ptrdiff_t delta) {
  if (memory == nullptr) return;
  if (bytes == 0) {
    empty_.push_back(slot);
    return;
  }
  Part& part = parts_.emplace_back();
  part.begin = reinterpret_cast<uintptr_t>(memory);
  part.bytes = bytes;
  part.in = in;
  part.out = out;
  part.on_host = on_host_;
  part.slot = slot;
  part.delta = delta;
}

Status StagingPlan::make(const core::CompiledOp& op, const void* args, const Device& device,
                         const te_fl_rng& rng, Scope scope) {
  const te_fl_op_schema& schema = op.schema();
  op_ = &op;
  scope_ = scope;
  caller_ = args;
  device_ = device;
  uint32_t size = 0;
  std::memcpy(&size, args, sizeof size);
  size = std::min(size, schema.args_size);
  args_.assign(schema.args_size / sizeof(uint64_t) + 1, 0);
  std::memcpy(args_.data(), args, size);
  std::memcpy(args_.data(), &size, sizeof size);
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type == TE_FL_ARG_TENSOR) {
      if (const te_fl_tensor* t = registry::tensor_argument(arg, args))
        put(arg.offset, stage(i, *t));
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const registry::TensorList list = registry::list_argument(arg, args);
      if (list.count == 0) continue;
      auto& staged = lists_.emplace_back();
      for (int64_t k = 0; k < list.count; ++k) staged.push_back(stage(i, *list.data[k]));
      put(arg.offset, staged.data());
    } else if (arg.type == TE_FL_ARG_I64_LIST) {
      if (scope_ == Scope::kDevice) continue;  // used in place, like all host memory
      const registry::IntegerList list = registry::integers_argument(arg, args);
      put(arg.offset, integers_.emplace_back(list.data, list.data + list.count).data());
    } else if (arg.type == TE_FL_ARG_SAVED) {
      stage_record(i);
    } else if (arg.type == TE_FL_ARG_COMMUNICATOR) {
      if (registry::member_or<const void*>(arg.offset, args, nullptr) == nullptr) continue;
      problem_ = "argument '" + std::string(arg.name) +
                 "' is a communicator: a copy of the call would be one that the other ranks do not "
                 "make (rule R29)";
    }
  }
  rng_ = rng;
  if ((schema.flags & TE_FL_SCHEMA_USES_RNG) == 0) {
    rng_.seed_address = rng_.offset_address = nullptr;
  } else {
    on_host_ = device_.is_host();
    add(rng.seed_address, sizeof *rng.seed_address, true, false, &rng_.seed_address);
    add(rng.offset_address, sizeof *rng.offset_address, true, false, &rng_.offset_address);
  }
  if (!problem_.empty()) return Status(StatusCode::kUnsupported, problem_).set_clean();
  merge();
  order_copies();
  return {};
}

// Returns true if the implementation uses the caller's tensor in place. Also sets on_host_.
bool StagingPlan::stays(const te_fl_tensor& t, bool host_only) {
  on_host_ = host_only || Device{t.dl.device.type, t.dl.device.index, t.provider}.is_host();
  return on_host_ && scope_ == Scope::kDevice;
}

// Returns the tensor that the implementation will see: the caller's own if it is in host memory.
const te_fl_tensor* StagingPlan::stage(uint32_t index, const te_fl_tensor& t) {
  const te_fl_arg_desc& arg = *op_->schema().args[index];
  if (stays(t, (arg.flags & TE_FL_ARG_HOST) != 0)) return &t;
  const Device where{t.dl.device.type, t.dl.device.index, t.provider};
  if (!on_host_ && where != device_ && problem_.empty()) {
    problem_ = "argument '" + std::string(arg.name) + "' is on " + to_string(where) +
               ", and only tensors of " + to_string(device_) + " are copied to the host for it";
  }
  Shadow& shadow = tensors_.emplace_back();
  shadow.tensor = core::copy_struct<te_fl_tensor>(&t);
  shadow.tensor.dl.device = Device{}.to_c();
  shadow.tensor.provider = 0;
  const te_fl_quant* quant = core::quant_of(t);
  shadow.tensor.quant = nullptr;
  if (quant != nullptr) {
    shadow.quant = core::copy_struct<te_fl_quant>(quant);
    shadow.tensor.quant = &shadow.quant;
  }
  if (core::class_of(op_->schema()) == core::OpClass::kEnquiry) return &shadow.tensor;
  const bool in = op_->needs_contents(index, caller_);
  const bool out = arg.role != TE_FL_IN;
  if ((arg.flags & TE_FL_ARG_QUANT_ONLY) != 0) {
    shadow.tensor.dl.data = nullptr;
    shadow.tensor.dl.byte_offset = 0;
    shadow.quant.columnwise_data = nullptr;
  } else {
    stage_data(t, shadow, in, out);
  }
  if (quant != nullptr) stage_parts(arg, shadow, in);
  return &shadow.tensor;
}

// Adds the tensor's memory range, from its first to its last element in memory order, to the plan.
void StagingPlan::stage_data(const te_fl_tensor& t, Shadow& shadow, bool in, bool out) {
  if (t.dl.data == nullptr) return;
  const char* first = static_cast<const char*>(t.dl.data) + t.dl.byte_offset;
  shadow.tensor.dl.byte_offset = 0;
  const int64_t count = core::numel_of(t);
  if (count == 0 || core::is_compact(t)) {
    add(first, code_bytes(t, count), in, out, &shadow.tensor.dl.data);
    return;
  }
  const auto width = static_cast<int64_t>(code_bytes(t, 1));  // packed dtypes are compact
  int64_t low = 0, high = 0;
  for (int d = 0; d < t.dl.ndim; ++d) {
    const int64_t reach = t.dl.strides[d] * (t.dl.shape[d] - 1);
    (reach < 0 ? low : high) += reach;
  }
  const auto bytes = static_cast<size_t>((high - low + 1) * width);
  add(first + low * width, bytes, in, out, &shadow.tensor.dl.data, -low * width);
  if (out) split(parts_.back(), t, width);
}

// Splits an output with gaps between its elements into contiguous pieces that can be copied.
void StagingPlan::split(Part& part, const te_fl_tensor& t, int64_t width) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride in bytes, extent) of each dimension
  for (int d = 0; d < t.dl.ndim; ++d) {
    if (t.dl.shape[d] > 1) dims.emplace_back(std::abs(t.dl.strides[d]) * width, t.dl.shape[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t run_bytes = width, pieces = 1;
  for (const auto& [step, count] : dims) {
    if (pieces == 1 && step == run_bytes) {
      run_bytes *= count;
      continue;
    }
    part.steps.push_back(step);
    part.counts.push_back(count);
    pieces *= count;
  }
  if (pieces > 1) part.run_bytes = static_cast<size_t>(run_bytes);
  range_count_ += pieces;
  if (range_count_ > kMaxPieces && problem_.empty()) {
    problem_ = "an output lies in " + std::to_string(range_count_) +
               " separate pieces of memory, and copies from the host write back at most " +
               std::to_string(kMaxPieces) + "; give it a layout with longer rows";
  }
}

// Adds the arrays of a quantised tensor (data, scales, amax) to the plan. For an output, an input
// scale is read, and amax is read and updated as a running maximum.
void StagingPlan::stage_parts(const te_fl_arg_desc& arg, Shadow& shadow, bool in) {
  te_fl_quant& q = shadow.quant;
  const bool out = arg.role != TE_FL_IN;
  const bool per_tensor = q.scaling == TE_FL_SCALING_TENSOR;
  const bool computes = (q.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
  const te_fl_dltensor& dl = shadow.tensor.dl;
  const std::span<const int64_t> shape(dl.shape, static_cast<size_t>(dl.ndim));
  const auto [m, k] = core::logical_matrix(shape);
  const core::QuantBytes bytes = core::quant_bytes(static_cast<DType>(dtype_index(dl.dtype)),
                                                   static_cast<Scaling>(q.scaling), m, k);
  for (const core::QuantPart& part : core::kQuantParts) {
    bool reads = in, writes = out;
    switch (part.holds) {
      case core::QuantPart::kCodes:
        break;
      case core::QuantPart::kScales:
      case core::QuantPart::kColumnwiseScales:
        // A single scale may be left unchanged if it is an input, so it is copied in too; arrays of
        // scales are always written completely.
        reads |= per_tensor;
        break;
      case core::QuantPart::kAmax:
        reads = true;
        break;
      case core::QuantPart::kScale:
        reads = true;
        writes = out && per_tensor && computes;
        break;
    }
    add(part.in(q), static_cast<size_t>(part.bytes(bytes)), reads, writes, part.slot(q));
  }
}

// Adds the saved record to the plan. The record is the caller's host struct; its storage is on the
// op's device.
void StagingPlan::stage_record(uint32_t index) {
  const te_fl_arg_desc& arg = *op_->schema().args[index];
  caller_record_ = op_->saved(caller_);
  if (caller_record_ == nullptr) return;
  reads_record_ = arg.role == TE_FL_IN;
  if (caller_record_->storage == nullptr) {
    if (scope_ == Scope::kDevice) return;
    record_ = core::copy_struct<te_fl_saved>(caller_record_);
    put(arg.offset, &record_);
    return;
  }
  const te_fl_tensor& t = *caller_record_->storage;
  if (stays(t, false)) return;
  record_ = core::copy_struct<te_fl_saved>(caller_record_);
  Shadow& shadow = tensors_.emplace_back();
  shadow.tensor = core::copy_struct<te_fl_tensor>(&t);
  shadow.tensor.dl.device = Device{}.to_c();
  shadow.tensor.provider = 0;
  record_.storage = &shadow.tensor;
  stage_data(t, shadow, arg.role != TE_FL_OUT, arg.role != TE_FL_IN);
  put(arg.offset, &record_);
}

void StagingPlan::merge() {
  std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) {
    return std::tie(a.on_host, a.begin) < std::tie(b.on_host, b.begin);
  });
  for (Part& part : parts_) {
    if (extents_.empty() || part.begin >= extents_.back().end ||
        part.on_host != extents_.back().on_host) {
      extents_.push_back({part.begin, part.begin, 0, part.on_host});
    }
    part.extent = extents_.size() - 1;
    extents_.back().end = std::max(extents_.back().end, part.begin + part.bytes);
  }
  size_t at = kAlignment;  // never 0, so that empty parts get an address too
  for (Extent& e : extents_) {
    // The copy gets the same alignment as the original.
    at = (at + kAlignment - 1) / kAlignment * kAlignment;
    e.offset = at + e.begin % kAlignment;
    at = e.offset + (e.end - e.begin);
  }
  buffer_bytes_ = at;
}

// Merges adjacent memory ranges (MemoryRange) of one extent into one copy. Ranges of different
// extents are not merged, since they may be adjacent by chance and belong to different allocations.
std::vector<StagedCopy> StagingPlan::joined(std::vector<MemoryRange> pieces) const {
  std::sort(pieces.begin(), pieces.end(), [](const MemoryRange& a, const MemoryRange& b) {
    return std::tie(a.extent, a.begin) < std::tie(b.extent, b.begin);
  });
  std::vector<MemoryRange> whole;
  for (const MemoryRange& p : pieces) {
    if (!whole.empty() && whole.back().extent == p.extent &&
        p.begin <= whole.back().begin + whole.back().bytes) {
      MemoryRange& last = whole.back();
      last.bytes = std::max(last.begin + last.bytes, p.begin + p.bytes) - last.begin;
    } else {
      whole.push_back(p);
    }
  }
  std::vector<StagedCopy> copies;
  copies.reserve(whole.size());
  for (const MemoryRange& p : whole) {
    const Extent& e = extents_[p.extent];
    copies.push_back(
        {reinterpret_cast<char*>(p.begin), e.offset + (p.begin - e.begin), p.bytes, e.on_host});
  }
  return copies;
}

void StagingPlan::order_copies() {
  std::vector<MemoryRange> in, out;
  for (const Part& part : parts_) {
    if (part.in) in.push_back({part.begin, part.bytes, part.extent});
    if (!part.out) continue;
    if (part.run_bytes == 0) {
      out.push_back({part.begin, part.bytes, part.extent});
      continue;
    }
    std::vector<int64_t> index(part.counts.size(), 0);
    uintptr_t at = part.begin;
    for (bool more = true; more;) {
      out.push_back({at, part.run_bytes, part.extent});
      more = false;
      for (size_t d = 0; d < index.size() && !more; ++d) {
        more = ++index[d] < part.counts[d];
        if (more) {
          at += static_cast<uintptr_t>(part.steps[d]);
        } else {
          at -= static_cast<uintptr_t>(part.steps[d] * (part.counts[d] - 1));
          index[d] = 0;
        }
      }
    }
  }
  in_ = joined(std::move(in));
  out_ = joined(std::move(out));
  for (const auto* copies : {&in_, &out_}) {
    for (const StagedCopy& copy : *copies) bytes_ += copy.bytes;
  }
}

void StagingPlan::bind(void* base) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(base);
  for (const Part& part : parts_) {
    const Extent& e = extents_[part.extent];
    const uintptr_t to = address + e.offset + (part.begin - e.begin);
    set_pointer(part.slot, reinterpret_cast<void*>(to + static_cast<uintptr_t>(part.delta)));
  }
  for (void* slot : empty_) set_pointer(slot, base);
  if (caller_record_ != nullptr) {
    // If the op writes the record, these members hold values of an earlier call, so they are reset.
    record_.opaque = reads_record_ ? caller_record_->opaque : 0;
    record_.producer = reads_record_ ? caller_record_->producer : nullptr;
  }
}

void StagingPlan::hand_out_record() noexcept {
  if (caller_record_ != nullptr && record_.storage != nullptr) {
    caller_record_->opaque = record_.opaque;
  }
}

}  // namespace te_fl::dispatch
