#include "jax/jax_call.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

#include "ops/op_defaults.hpp"
#include "ops/quant_parts.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::jax {
namespace {

using python::kColumnwiseData;
using python::kColumnwiseScaleInv;
using python::kParts;
using python::kScaleInv;
using python::kScalingNames;

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

// Removes the next word from the front of `text` and returns it; returns an empty view at the end.
std::string_view next_word(std::string_view& text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string_view::npos) return text = {};
  const size_t end = std::min(text.find(' ', begin), text.size());
  const std::string_view word = text.substr(begin, end - begin);
  text.remove_prefix(end);
  return word;
}

template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

Result<std::unique_ptr<OpCall>> OpCall::parse(std::string_view text) {
  auto call = std::make_unique<OpCall>();
  if (Status status = call->read(text); !status.ok()) {
    return status.wrap("the call " + quoted(text) + " of an XLA program cannot be read");
  }
  return call;
}

Status OpCall::read(std::string_view text) {
  const size_t arrow = text.find(" ->");
  const size_t bar = text.find(" |");
  if (arrow == std::string_view::npos || bar == std::string_view::npos || bar < arrow) {
    return invalid_argument("it is not OP OPERANDS -> RESULTS | SETTINGS [| POLICY]");
  }
  std::string_view operands = text.substr(0, arrow);
  Result<OpId> op = OpManager::instance().registry().find(next_word(operands));
  if (!op.ok()) return op.status();
  op_ = op.value();
  schema_ = OpManager::instance().registry().schema(op_);
  args_ = python::default_arguments(*schema_);
  if (Status status = read_arrays(operands, false); !status.ok()) return status;
  const std::string_view results = text.substr(arrow + 3, bar - arrow - 3);
  if (Status status = read_arrays(results, true); !status.ok()) return status;
  std::string_view settings = text.substr(bar + 2);
  if (const size_t second = settings.find(" | "); second != std::string_view::npos) {
    Result<python::LinePolicy> policy = python::LinePolicy::parse(settings.substr(second + 3));
    if (!policy.ok()) return policy.status();
    policy_ = std::move(policy).value();
    settings = settings.substr(0, second);
  }
  for (std::string_view word; !(word = next_word(settings)).empty();) {
    const size_t equals = word.find('=');
    if (equals == std::string_view::npos) return invalid_argument(quoted(word) + " has no value");
    const Status status = read_setting(word.substr(0, equals), word.substr(equals + 1));
    if (!status.ok()) return status;
  }
  for (const auto& entry : lists_) {  // the lists no longer grow, so pointers into them stay valid
    const te_fl_arg_desc& arg = *find(entry.first);
    const te_fl_tensor* const* data = entry.second.data();
    const auto count = static_cast<int64_t>(entry.second.size());
    std::memcpy(args_.data() + arg.offset, &data, sizeof data);
    std::memcpy(args_.data() + arg.count_offset, &count, sizeof count);
  }
  return {};
}

Status OpCall::read_arrays(std::string_view words, bool results) {
  for (std::string_view word; !(word = next_word(words)).empty();) {
    Use use;
    if (word != "rng" || (schema_->flags & TE_FL_SCHEMA_USES_RNG) == 0) {
      const size_t dot = word.find('.');
      Result<TensorSlot*> slot = find_slot(word.substr(0, dot));
      if (!slot.ok()) return slot.status();
      use.slot = slot.value();
      if (dot != std::string_view::npos) {
        for (int i = 0; i < static_cast<int>(std::size(kParts)); ++i) {
          if (kParts[i].name == word.substr(dot + 1)) use.part = i;
        }
        if (use.part < 0) return invalid_argument(quoted(word) + " is no part of a tensor");
        use.slot->tensor.quant = &use.slot->quant;
      }
    }
    if (!results) {
      operand_names_.emplace_back(word);
      operands_.push_back(use);
      continue;
    }
    for (size_t i = 0; i < operand_names_.size(); ++i) {
      if (operand_names_[i] == word) use.same_as = static_cast<int>(i);
    }
    result_names_.emplace_back(word);
    results_.push_back(use);
  }
  return {};
}

const te_fl_arg_desc* OpCall::find(std::string_view name) const noexcept {
  for (uint32_t i = 0; i < schema_->arg_count; ++i) {
    if (schema_->args[i]->name == name) return schema_->args[i];
  }
  return nullptr;
}

Result<OpCall::TensorSlot*> OpCall::find_slot(std::string_view name) {
  if (const auto known = slots_.find(name); known != slots_.end()) return &known->second;
  const std::string_view argument = name.substr(0, name.find('['));
  const te_fl_arg_desc* arg = find(argument);
  const bool list = argument.size() != name.size();
  if (arg == nullptr || arg->type != (list ? TE_FL_ARG_TENSOR_LIST : TE_FL_ARG_TENSOR)) {
    return invalid_argument(std::string(schema_->name) + " has no tensor argument " + quoted(name));
  }
  TensorSlot& slot = slots_[std::string(name)];
  slot.tensor = te_fl_tensor{};
  slot.quant = te_fl_quant{};
  if (list) {
    lists_[std::string(argument)].push_back(&slot.tensor);
  } else {
    const te_fl_tensor* pointer = &slot.tensor;
    std::memcpy(args_.data() + arg->offset, &pointer, sizeof pointer);
  }
  return &slot;
}

Status OpCall::read_setting(std::string_view name, std::string_view value) {
  if (const size_t dot = name.find('.'); dot != std::string_view::npos) {
    Result<TensorSlot*> slot = find_slot(name.substr(0, dot));
    if (!slot.ok()) return slot.status();
    return read_quantisation(*slot.value(), name.substr(dot + 1), value);
  }
  const te_fl_arg_desc* arg = find(name);
  if (arg == nullptr) {
    return invalid_argument(std::string(schema_->name) + " has no argument " + quoted(name));
  }
  return read_scalar(*arg, value);
}

Status OpCall::read_scalar(const te_fl_arg_desc& arg, std::string_view value) {
  const Status wrong = invalid_argument(quoted(value) + " is no value of " + quoted(arg.name));
  switch (arg.type) {
    case TE_FL_ARG_ENUM: {
      const std::vector<std::string> names = python::split_words(arg.enum_names);
      for (size_t i = 0; i < names.size(); ++i) {
        if (names[i] != value) continue;
        python::put_scalar(args_, arg, static_cast<double>(i));
        return {};
      }
      return wrong;
    }
    case TE_FL_ARG_I64: {  // read as an integer: a double could not hold every int64
      const std::optional<int64_t> parsed = number<int64_t>(value);
      if (!parsed.has_value()) return wrong;
      std::memcpy(args_.data() + arg.offset, &*parsed, sizeof *parsed);
      return {};
    }
    case TE_FL_ARG_BOOL:
    case TE_FL_ARG_I32: {
      const std::optional<int32_t> parsed = number<int32_t>(value);
      if (!parsed.has_value()) return wrong;
      python::put_scalar(args_, arg, *parsed);
      return {};
    }
    case TE_FL_ARG_F32:
    case TE_FL_ARG_F64: {
      const std::optional<double> parsed = number<double>(value);
      if (!parsed.has_value()) return wrong;
      python::put_scalar(args_, arg, *parsed);
      return {};
    }
    case TE_FL_ARG_I64_LIST: {
      std::vector<int64_t>& list = integers_.emplace_back();
      while (!value.empty()) {
        const size_t comma = std::min(value.find(','), value.size());
        const std::optional<int64_t> parsed = number<int64_t>(value.substr(0, comma));
        if (!parsed.has_value()) return wrong;
        list.push_back(*parsed);
        value.remove_prefix(std::min(comma + 1, value.size()));
      }
      const int64_t* data = list.data();
      const auto count = static_cast<int64_t>(list.size());
      std::memcpy(args_.data() + arg.offset, &data, sizeof data);
      std::memcpy(args_.data() + arg.count_offset, &count, sizeof count);
      return {};
    }
    default:
      return wrong;
  }
}

Status OpCall::read_quantisation(TensorSlot& slot, std::string_view what, std::string_view value) {
  te_fl_quant& quant = slot.quant;
  slot.tensor.quant = &quant;
  if (what == "scaling") {
    for (uint32_t i = 1; i < std::size(kScalingNames); ++i) {
      if (kScalingNames[i] == value) quant.scaling = i;
    }
    if (quant.scaling != TE_FL_SCALING_NONE) return {};
  } else if (const std::optional<float> parsed = number<float>(value); parsed.has_value()) {
    const bool on = *parsed != 0;
    if (what == "compute_scale") {
      if (on) quant.flags |= TE_FL_QUANT_COMPUTE_SCALE;
      return {};
    }
    if (what == "pow2_scale") {
      if (on) quant.flags |= TE_FL_QUANT_POW2_SCALE;
      return {};
    }
    if (what == "amax_epsilon") {
      quant.amax_epsilon = *parsed;
      return {};
    }
  }
  return invalid_argument(quoted(value) + " is no value of a tensor's " + quoted(what));
}

void OpCall::bind(const Use& use, const Array& array, const Device& device) noexcept {
  if (use.slot == nullptr) {
    random_ = static_cast<const uint64_t*>(array.data);
    return;
  }
  te_fl_tensor& t = use.slot->tensor;
  if (use.part >= 0) {
    std::memcpy(reinterpret_cast<char*>(&use.slot->quant) + kParts[use.part].offset, &array.data,
                sizeof array.data);
    if (use.part != kColumnwiseData || t.dl.data != nullptr) return;
    // A tensor without row-wise data: the logical shape is the transposed shape of the column-wise
    // codes. MXFP8 does not transpose its column-wise codes, so there the two shapes are equal.
    auto& shape = use.slot->shape;
    const bool transposed = use.slot->quant.scaling != TE_FL_SCALING_MXFP8;
    shape = {array.extents[transposed ? 1 : 0], array.extents[transposed ? 0 : 1]};
    t.dl = te_fl_dltensor{nullptr, device.to_c(), 2, array.dtype, shape.data(), nullptr, 0};
  } else {
    t.dl = te_fl_dltensor{array.data,    device.to_c(), array.rank, array.dtype,
                          array.extents, nullptr,       0};
  }
  t.provider = device.provider;
}

Status OpCall::check(const Use& use, const Array& array, const std::string& name) const {
  int64_t elements = 1;
  for (int32_t d = 0; d < array.rank; ++d) elements *= array.extents[d];
  const auto expect = [&](int64_t wanted, int bits) {
    if (elements == wanted && array.dtype.bits == bits) return Status();
    return invalid_argument(quoted(name) + " has " + std::to_string(elements) + " elements of " +
                            std::to_string(array.dtype.bits) + " bits; it is to have " +
                            std::to_string(wanted) + " of " + std::to_string(bits));
  };
  if (use.slot == nullptr) return expect(4, 32);
  if (use.part < 0) return {};
  const te_fl_dltensor& t = use.slot->tensor.dl;
  if (t.ndim == 0) return invalid_argument(quoted(name) + " is a part of a tensor without data");
  int64_t rows = 1;
  for (int32_t d = 0; d + 1 < t.ndim; ++d) rows *= t.shape[d];
  const int64_t columns = t.shape[t.ndim - 1];
  if (use.part == kColumnwiseData) return expect(rows * columns, 8);
  const auto scaling = static_cast<Scaling>(use.slot->quant.scaling);
  const bool of_blocks = (use.part == kScaleInv || use.part == kColumnwiseScaleInv) &&
                         scaling != Scaling::kTensor && scaling != Scaling::kNone;
  if (!of_blocks) return expect(1, 32);
  const auto extents = scale_inv_shape(scaling, use.part == kColumnwiseScaleInv, rows, columns);
  const bool bytes = scaling == Scaling::kMXFP8 || scaling == Scaling::kNVFP4;
  return expect(extents[0] * extents[1], bytes ? 8 : 32);
}

Status OpCall::bind_all(const Array* operands, const Array* results, const Device& device) {
  for (auto& entry : slots_) entry.second.tensor.dl = te_fl_dltensor{};
  for (size_t i = 0; i < operands_.size(); ++i) {
    if (operands_[i].part == kColumnwiseData && operands[i].rank != 2) {
      return invalid_argument(quoted(operand_names_[i]) + " is to be a matrix");
    }
    bind(operands_[i], operands[i], device);
  }
  for (size_t i = 0; i < results_.size(); ++i) {
    if (results_[i].part == kColumnwiseData && results[i].rank != 2) {
      return invalid_argument(quoted(result_names_[i]) + " is to be a matrix");
    }
    const int before = results_[i].same_as;
    if (before >= 0 && operands[before].data != results[i].data) {
      return internal_error("XLA gave " + quoted(operand_names_[static_cast<size_t>(before)]) +
                            ", which is read and written, two places");
    }
    bind(results_[i], results[i], device);
  }
  for (size_t i = 0; i < operands_.size(); ++i) {
    if (Status status = check(operands_[i], operands[i], operand_names_[i]); !status.ok()) {
      return status;
    }
  }
  for (size_t i = 0; i < results_.size(); ++i) {
    if (Status status = check(results_[i], results[i], result_names_[i]); !status.ok()) {
      return status;
    }
  }
  return {};
}

CallOptions OpCall::options(void* stream) const noexcept {
  CallOptions options;
  options.stream = stream;
  if (random_ != nullptr) {
    options.rng.seed_address = random_;
    options.rng.offset_address = random_ + 1;
  }
  return options;
}

template <class T, class F>
T OpCall::under_policy(F&& f) const {
  // XLA decides whether a program runs on the caller's thread, so policy scopes of that thread must
  // not apply; the program carries its own policy.
  const python::WithoutPolicyScopes none;
  if (!policy_.has_value()) return f(OpManager::instance());
  Result<SelectionPolicy> policy = policy_->now();
  if (!policy.ok()) return policy.status();
  const PolicyScope scope(policy.value());
  return f(OpManager::instance());
}

Status OpCall::run(const Array* operands, const Array* results, const Device& device,
                   void* stream) {
  if (Status status = bind_all(operands, results, device); !status.ok()) return status;
  return under_policy<Status>(
      [&](OpManager& manager) { return manager.call(op_, args_.data(), options(stream)); });
}

Result<Decision> OpCall::resolve(std::vector<Array>& operands, std::vector<Array>& results,
                                 const Device& device) {
  if (operands.size() != operands_.size() || results.size() != results_.size())
    return invalid_argument("the call's text names other numbers of arrays");
  // Addresses that nothing reads: aligned, and so far apart that no arrays overlap.
  uintptr_t address = 0;
  constexpr uintptr_t kApart = uintptr_t{1} << 44;
  for (Array& array : operands) array.data = reinterpret_cast<void*>(address += kApart);
  for (size_t i = 0; i < results.size(); ++i) {
    const int before = results_[i].same_as;
    results[i].data = before >= 0 ? operands[static_cast<size_t>(before)].data
                                  : reinterpret_cast<void*>(address += kApart);
  }
  if (Status status = bind_all(operands.data(), results.data(), device); !status.ok())
    return status;
  return under_policy<Result<Decision>>(
      [&](OpManager& manager) { return manager.resolve(op_, args_.data(), options(nullptr)); });
}

}  // namespace te_fl::jax
