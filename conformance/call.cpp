#include "conformance/call.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "conformance/compare.hpp"
#include "conformance/device_mirror.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::conformance {
namespace {

// The argument struct of any op, filled according to its schema.
class Arguments {
 public:
  Arguments(const te_fl_op_schema& schema, Problem& p, const DeviceMirror& mirror)
      : memory_(schema.args_size / 8 + 1), mirror_(mirror) {
    put<uint32_t>(0, schema.args_size);
    std::set<std::string> known;
    for (uint32_t i = 0; i < schema.arg_count; ++i) {
      const te_fl_arg_desc& arg = *schema.args[i];
      known.insert(arg.name);
      fill(arg, p);
    }
    auto check = [&](const auto& names) {
      for (const auto& [name, value] : names)
        if (known.count(name) == 0) throw std::logic_error(p.op_name + " has no argument " + name);
    };
    check(p.singles), check(p.lists), check(p.scalars), check(p.number_lists);
  }
  const void* get() const { return memory_.data(); }
  te_fl_saved* saved() { return saved_.get(); }

 private:
  template <class T>
  void put(size_t offset, T value) {
    std::memcpy(reinterpret_cast<char*>(memory_.data()) + offset, &value, sizeof value);
  }

  void fill(const te_fl_arg_desc& arg, Problem& p) {
    const auto scalar = p.scalars.find(arg.name);
    const double value = scalar == p.scalars.end() ? arg.neutral : scalar->second;
    switch (arg.type) {
      case TE_FL_ARG_TENSOR: {
        const auto t = p.singles.find(arg.name);
        if (t == p.singles.end() && (arg.flags & TE_FL_ARG_OPTIONAL) == 0)
          throw std::logic_error(p.op_name + ": the case lacks " + arg.name);
        return put<const te_fl_tensor*>(arg.offset,
                                        t == p.singles.end() ? nullptr : placed(arg, *t->second));
      }
      case TE_FL_ARG_TENSOR_LIST: {
        const auto list = p.lists.find(arg.name);
        lists_.emplace_back();
        if (list != p.lists.end())
          for (Tensor* t : list->second) lists_.back().push_back(placed(arg, *t));
        put<const te_fl_tensor* const*>(arg.offset,
                                        lists_.back().empty() ? nullptr : lists_.back().data());
        return put<int64_t>(arg.count_offset, static_cast<int64_t>(lists_.back().size()));
      }
      case TE_FL_ARG_I64:
        return put<int64_t>(arg.offset, static_cast<int64_t>(value));
      case TE_FL_ARG_F32:
        return put<float>(arg.offset, static_cast<float>(value));
      case TE_FL_ARG_F64:
        return put<double>(arg.offset, value);
      case TE_FL_ARG_COMMUNICATOR:
        return put<const te_fl_communicator*>(arg.offset, p.comm);
      case TE_FL_ARG_I64_LIST: {
        const std::vector<int64_t>& numbers = p.number_lists[arg.name];
        put<const int64_t*>(arg.offset, numbers.empty() ? nullptr : numbers.data());
        return put<int64_t>(arg.count_offset, static_cast<int64_t>(numbers.size()));
      }
      case TE_FL_ARG_SAVED: {
        if (p.saved_storage >= 0) saved_ = std::make_unique<te_fl_saved>();
        return put<te_fl_saved*>(arg.offset, saved_.get());
      }
      default:
        return put<int32_t>(arg.offset, static_cast<int32_t>(value));
    }
  }

  const te_fl_tensor* placed(const te_fl_arg_desc& arg, const Tensor& t) const {
    return (arg.flags & TE_FL_ARG_HOST) != 0 ? &t.c : mirror_.of(t);
  }

  std::vector<uint64_t> memory_;
  const DeviceMirror& mirror_;
  std::vector<std::vector<const te_fl_tensor*>> lists_;
  std::unique_ptr<te_fl_saved> saved_;
};

// The tensors of arguments that are always in host memory, wherever the op runs.
std::set<const Tensor*> host_tensors(const te_fl_op_schema& schema, const Problem& p) {
  std::set<const Tensor*> result;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    if ((schema.args[i]->flags & TE_FL_ARG_HOST) == 0) continue;
    if (const auto t = p.singles.find(schema.args[i]->name); t != p.singles.end())
      result.insert(t->second);
    if (const auto list = p.lists.find(schema.args[i]->name); list != p.lists.end())
      result.insert(list->second.begin(), list->second.end());
  }
  return result;
}

PolicySettings pinned(const std::string& op, const std::string& impl_id, bool deterministic) {
  PolicySettings settings;
  settings.strict = true;
  settings.deterministic = deterministic;
  settings.per_op[op] = {PolicyToken{PolicyToken::Type::kImpl, Kind::kDefault, impl_id}};
  return settings;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Checks that the op did not change bytes in the gaps of a strided output, which belong to no
// element.
std::string check_gaps(const Tensor& t, const std::vector<std::unique_ptr<Tensor>>& all) {
  if (t.strides.empty() || t.data == nullptr) return {};
  const int width = storage_bits(t.spec.dtype) / 8;
  std::vector<uint8_t> covered(t.data->size(), 0);
  for (const auto& other : all) {  // several outputs may share one storage
    if (other->data != t.data || other->role == Role::kIn) continue;
    for (int64_t i = 0; i < other->numel(); ++i)
      std::memset(&covered[other->index(i) * width], 1, width);
  }
  for (size_t i = 0; i < covered.size(); ++i)
    if (!covered[i] && t.data->data()[i] != t.data->initial()[i])
      return t.name + ": byte " + std::to_string(i) +
             " of its storage is between the elements and was written (rule R11)";
  return {};
}

// Checks the guard bytes around the storage of a saved record, after it was copied back.
std::string written_outside(const Problem& saved) {
  for (const auto& t : saved.tensors)
    if (const std::string outside = t->data->written_outside(); !outside.empty())
      return "the saved record's storage: bytes outside its memory were written, the nearest one " +
             outside + " (rule R11)";
  return {};
}

// True for memory that the op only reads, such as the input scale of a quantised output.
bool read_only(const Tensor& t, const Buffer* b) {
  return t.role == Role::kIn ||
         (b == t.scale.get() && !t.spec.current() && t.spec.scaling == TE_FL_SCALING_TENSOR);
}

Result to_result(const te_fl::Result<Decision>& decision) {
  if (!decision.ok()) return {Outcome::kFail, decision.status().to_string(), 0};
  if (decision->impl_id.empty()) return {Outcome::kUnsupported, "", 0};
  if (!decision->runs.empty()) return {Outcome::kPass, decision->runs, 0};
  return {Outcome::kFail,
          "its describe() reports no kernel for a call that it supports: " + decision->silent +
              " (rule R31)",
          0};
}

}  // namespace

std::string check_memory(const Problem& p, bool untouched) {
  std::set<const Buffer*> written;
  for (const auto& t : p.tensors)
    for (const Buffer* b : t->buffers())
      if (!read_only(*t, b)) written.insert(b);
  for (const auto& t : p.tensors) {
    for (const Buffer* b : t->buffers()) {
      if (const std::string outside = b->written_outside(); !outside.empty())
        return t->name + ": bytes outside its memory were written, the nearest one " + outside +
               " (rule R11)";
      if (b->unchanged()) continue;
      if (untouched) return t->name + " was written although the call was refused (rule R6)";
      if (written.count(b) == 0)
        return t->name + " is an input and was written, first in byte " +
               std::to_string(b->first_change()) + " (rule R11)";
    }
    if (t->role == Role::kIn) continue;
    std::string gap = check_gaps(*t, p.tensors);
    if (!gap.empty()) return gap;
  }
  return {};
}

Result run_one(Problem& p, const Device& device, const std::string& impl_id, const How& how) {
  OpManager& manager = OpManager::instance();
  Result result;
  const auto id = OpRegistry::instance().find(p.op_name);
  if (!id.ok()) return {Outcome::kFail, id.status().to_string(), 0};
  std::optional<te_fl::Stream> own;
  if (how.own_stream) {
    te_fl::Result<te_fl::Stream> made = te_fl::Stream::create(device);
    if (!made.ok()) return {Outcome::kFail, made.status().to_string(), 0};
    own.emplace(std::move(*made));
  }
  void* const stream = own.has_value() ? own->get() : nullptr;
  DeviceMirror mirror(device, stream, how.guard_alignment, how.guard_start, how.margins);
  DeviceMirror saved_mirror(device, stream, how.guard_alignment, how.guard_start, how.margins);
  CallOptions options;
  options.stream = stream;
  options.rng = p.rng;
  const te_fl_op_schema& schema = *OpRegistry::instance().schema(*id);
  Status placed = mirror.upload(p.tensors, host_tensors(schema, p));
  if (placed.ok() && !p.rng_state.empty()) {
    placed = mirror.upload_words(options.rng.seed_address, p.rng_state.size());
    options.rng.offset_address = options.rng.seed_address + p.rng_state.size() - 1;
  }
  if (!placed.ok()) return {Outcome::kFail, placed.to_string(), 0};
  Arguments args(schema, p, mirror);
  const PolicyScope scope(pinned(p.op_name, impl_id, how.deterministic));
  std::vector<uint8_t> storage;
  Problem saved_memory("saved", 0);
  if (args.saved() != nullptr) {
    const auto bytes = manager.saved_bytes(*id, args.get(), options);
    if (!bytes.ok()) {
      const bool refused = bytes.status().code() == StatusCode::kUnsupported;
      return {refused ? Outcome::kUnsupported : Outcome::kFail, bytes.status().to_string(), 0};
    }
    if (*bytes > 0) {
      Tensor* storage = saved_memory.out("storage", TE_FL_U8, {static_cast<int64_t>(*bytes)});
      placed = saved_mirror.upload(saved_memory.tensors);
      if (!placed.ok()) return {Outcome::kFail, placed.to_string(), 0};
      args.saved()->storage = saved_mirror.of(*storage);
    }
  }
  if (how.describe) {
    const auto decision = manager.resolve(*id, args.get(), options);
    if (const Status s = mirror.download(); !s.ok()) return {Outcome::kFail, s.to_string(), 0};
    result = to_result(decision);
    if (!decision.ok() && !p.may_refuse.empty() && contains(result.message, p.may_refuse))
      result = {Outcome::kPass, "", 0};
    if (!check_memory(p, true).empty())
      return {Outcome::kFail, "its describe() wrote to a tensor; it must change nothing (rule R31)",
              0};
    return result;
  }
  const auto start = std::chrono::steady_clock::now();
  Status status = manager.call(*id, args.get(), options);
  result.milliseconds =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  placed = mirror.download();
  if (placed.ok()) placed = saved_mirror.download();
  // Without TE_FL_VALIDATE the op may report the error late (rule R12) and may have written the
  // outputs.
  const bool may_be_late = p.late_error && !environment::get_bool("TE_FL_VALIDATE").value();
  if (may_be_late && status.ok()) status = std::exchange(placed, Status());
  if (!placed.ok()) return {Outcome::kFail, placed.to_string(), result.milliseconds};
  for (const DeviceMirror* m : {&mirror, &saved_mirror})
    if (!m->written_outside().empty()) return {Outcome::kFail, m->written_outside(), 0, true};
  if (const std::string outside = written_outside(saved_memory); !outside.empty())
    return {Outcome::kFail, outside, 0, true};
  const std::string text = status.to_string();
  const bool invalid = status.code() == StatusCode::kInvalidArgument,
             unsupported = status.code() == StatusCode::kUnsupported;
  if (!status.ok()) {
    result.message = check_memory(p, true);
    if (!result.message.empty()) {
      result.message += "; it answered " + text;
      return result;
    }
    result.message = text;
    const bool right_error = p.want_code > 0 ? static_cast<int>(status.code()) == p.want_code
                                             : p.want_code < 0 && (invalid || unsupported);
    if (right_error && contains(text, p.want_text))
      result.outcome = Outcome::kPass;
    else if ((invalid || unsupported) && !p.may_refuse.empty() && contains(text, p.may_refuse))
      result.outcome = Outcome::kPass;
    else if (unsupported)
      result.outcome = Outcome::kUnsupported;
    return result;
  }
  if (p.want_code != 0) {
    result.message = "the call succeeded; it must be refused";
    return result;
  }
  result.message = check_memory(p, false);
  for (Expectation& e : p.expectations) {
    if (e.result != nullptr) e.want = e.result->values();
    if (result.message.empty()) result.message = compare(e);
  }
  if (result.message.empty()) result.outcome = Outcome::kPass;
  return result;
}

}  // namespace te_fl::conformance
