#include "dispatch/watch/call_file.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/op/op_finder.hpp"
#include "core/tensor/quant_parts.hpp"
#include "core/tensor/tensor_access.hpp"
#include "registry/arguments.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/tensor.hpp"
#include "te_fl/version.hpp"

namespace te_fl::dispatch {
namespace {

using nlohmann::json;

constexpr std::string_view kMagic = "te-fl call 1\n";
constexpr uint64_t kMaxDescription = uint64_t{1} << 28;
constexpr uint64_t kMaxArrayBytes = uint64_t{1} << 42;

json offset_of(const void* at, const char* base) {
  if (at == nullptr) return nullptr;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(base));
}

json describe_tensor(const te_fl_tensor& t, const char* base, bool host_only) {
  json out = {{"dtype", name(static_cast<DType>(dtype_index(t.dl.dtype)))},
              {"shape", std::vector<int64_t>(t.dl.shape, t.dl.shape + t.dl.ndim)},
              {"data", nullptr}};
  if (t.dl.data != nullptr)
    out["data"] = offset_of(static_cast<const char*>(t.dl.data) + t.dl.byte_offset, base);
  if (t.dl.strides != nullptr && !core::is_compact(t))
    out["strides"] = std::vector<int64_t>(t.dl.strides, t.dl.strides + t.dl.ndim);
  if (host_only) out["host"] = true;
  if (const te_fl_quant* q = core::quant_of(t)) {
    json& quant = out["quant"];
    quant = {{"scaling", name(static_cast<Scaling>(q->scaling))},
             {"flags", q->flags},
             {"amax_epsilon", q->amax_epsilon}};
    for (const core::QuantPart& part : core::kQuantParts) {
      quant[part.name] = offset_of(part.in(*q), base);
    }
  }
  return out;
}

// A scalar as JSON. Floats are stored with their bits too, since JSON cannot represent infinities.
json describe_scalar(const te_fl_arg_desc& arg, const void* args) {
  if (arg.type == TE_FL_ARG_I64) return registry::member_or<int64_t>(arg.offset, args, 0);
  if (arg.type == TE_FL_ARG_F32) {
    const auto value = registry::member_or<float>(arg.offset, args, 0);
    return {{"value", value}, {"bits", std::bit_cast<uint32_t>(value)}};
  }
  if (arg.type == TE_FL_ARG_F64) {
    const auto value = registry::member_or<double>(arg.offset, args, 0);
    return {{"value", value}, {"bits", std::bit_cast<uint64_t>(value)}};
  }
  return registry::member_or<int32_t>(arg.offset, args, 0);
}

Status broken(const std::string& what) {
  return Status(StatusCode::kDataLoss, "the saved call is damaged: " + what);
}

}  // namespace

json describe_call(const core::CompiledOp& op, const StagingPlan& plan, const char* base,
                   const Device& device, bool deterministic) {
  const te_fl_op_schema& schema = op.schema();
  const void* args = plan.args();
  uint32_t size = 0;
  std::memcpy(&size, args, sizeof size);
  json list = json::object();
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    const bool host = (arg.flags & TE_FL_ARG_HOST) != 0;
    if (arg.type == TE_FL_ARG_TENSOR) {
      if (const te_fl_tensor* t = registry::tensor_argument(arg, args))
        list[arg.name] = describe_tensor(*t, base, host);
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const registry::TensorList tensors = registry::list_argument(arg, args);
      json items = json::array();
      for (int64_t k = 0; k < tensors.count; ++k)
        items.push_back(describe_tensor(*tensors.data[k], base, host));
      list[arg.name] = items;
    } else if (arg.type == TE_FL_ARG_I64_LIST) {
      const registry::IntegerList integers = registry::integers_argument(arg, args);
      list[arg.name] = std::vector<int64_t>(integers.data, integers.data + integers.count);
    } else if (arg.type == TE_FL_ARG_SAVED) {
      const auto* record = registry::member_or<const te_fl_saved*>(arg.offset, args, nullptr);
      if (record == nullptr) continue;
      list[arg.name] = json::object();
      if (record->storage != nullptr)
        list[arg.name]["storage"] = describe_tensor(*record->storage, base, false);
    } else if (registry::member(arg.offset, registry::scalar_bytes(arg), args) != nullptr) {
      list[arg.name] = describe_scalar(arg, args);
    }
  }
  const te_fl_rng& rng = plan.rng();
  return {{"te_fl", TE_FL_VERSION},
          {"op", schema.name},
          {"device", to_string(device)},
          {"deterministic", deterministic},
          {"args_size", size},
          {"bytes", plan.buffer_bytes()},
          {"rng",
           {{"seed", rng.seed},
            {"offset", rng.offset},
            {"seed_address", offset_of(rng.seed_address, base)},
            {"offset_address", offset_of(rng.offset_address, base)}}},
          {"args", list}};
}

Status write_call_file(const std::string& path, const json& description, const CopyBuffer& before,
                       const CopyBuffer& after) {
  core::FileReplacement out(path);
  const std::string text = description.dump(-1, ' ', false, json::error_handler_t::replace);
  const uint64_t length = text.size();
  out.write(kMagic);
  out.write({reinterpret_cast<const char*>(&length), sizeof length});
  out.write(text);
  out.write({before.data(), before.size()});
  out.write({after.data(), after.size()});
  const Status written = out.commit();
  if (written.ok()) return {};
  return failed_precondition("cannot write " + path + ": " + written.message());
}

Result<std::unique_ptr<FiledCall>> FiledCall::read(const std::string& path) {
  TE_FL_RETURN_IF_ERROR(core::check_regular(path));
  std::ifstream in(path, std::ios::binary);
  if (!in) return not_found("cannot read " + path + ": " + std::strerror(errno));
  std::string magic(kMagic.size(), '\0');
  uint64_t length = 0;
  in.read(magic.data(), static_cast<std::streamsize>(magic.size()));
  if (!in || magic != kMagic) {
    return invalid_argument(path + " is not a saved call: it does not begin with 'te-fl call 1'");
  }
  in.read(reinterpret_cast<char*>(&length), sizeof length);
  if (!in || length > kMaxDescription) return broken("its description has no length").wrap(path);
  std::string text(length, '\0');
  in.read(text.data(), static_cast<std::streamsize>(length));
  if (!in) return broken("its description is cut off").wrap(path);
  const json description = json::parse(text, nullptr, false);
  TE_FL_ASSIGN_OR_RETURN(std::unique_ptr<FiledCall> call, make(description, path));
  // A file with a known size (a pipe has none) must be large enough for the memory that is about to
  // be allocated.
  std::error_code unknown;
  const uintmax_t whole = std::filesystem::file_size(path, unknown);
  if (!unknown && call->bytes_ > whole / 2) return broken("its data is cut off").wrap(path);
  for (CopyBuffer* buffer : {&call->before_, &call->after_}) {
    *buffer = CopyBuffer(call->bytes_);
    if (buffer->data() == nullptr)
      return Status(StatusCode::kOutOfMemory, path + " holds " + std::to_string(call->bytes_) +
                                                  " bytes, for which there is no memory");
    in.read(buffer->data(), static_cast<std::streamsize>(call->bytes_));
    if (!in) return broken("its data is cut off").wrap(path);
  }
  return call;
}

Result<std::unique_ptr<FiledCall>> FiledCall::make(const json& description,
                                                   const std::string& where) {
  std::unique_ptr<FiledCall> call(new FiledCall);
  try {
    TE_FL_RETURN_IF_ERROR(call->fill(description).wrap(where));
  } catch (const json::exception& e) {
    return broken(e.what()).wrap(where);
  } catch (const std::out_of_range& e) {
    return broken(e.what()).wrap(where);
  }
  return call;
}

void FiledCall::put(uint32_t offset, const void* value, size_t bytes) noexcept {
  std::memcpy(reinterpret_cast<char*>(args_.data()) + offset, value, bytes);
}

// Records that the pointer `at` refers to `bytes` bytes at `offset` in the buffer. Throws if the
// range leaves the buffer.
void FiledCall::slot(void* at, const json& offset, size_t bytes, bool host) {
  if (offset.is_null()) return;
  const int64_t from = offset.get<int64_t>();
  if (from < 0 || static_cast<uint64_t>(from) > bytes_ ||
      bytes > bytes_ - static_cast<size_t>(from))
    throw std::out_of_range("a tensor lies outside its bytes");
  slots_.push_back({at, from, host});
}

const te_fl_tensor* FiledCall::tensor(const json& from) {
  Held& held = tensors_.emplace_back();
  const Result<DType> dtype = parse_dtype(from.at("dtype").get<std::string>());
  if (!dtype.ok()) throw std::out_of_range(dtype.status().message());
  held.shape = from.at("shape").get<std::vector<int64_t>>();
  if (held.shape.size() > kMaxRank) throw std::out_of_range("a tensor has too many dimensions");
  if (!core::checked_bytes(held.shape, *dtype).ok())
    throw std::out_of_range("a shape is too large");
  held.host = from.value("host", false);
  te_fl_dltensor& dl = held.tensor.dl;
  held.tensor.struct_size = sizeof held.tensor;
  dl.ndim = static_cast<int32_t>(held.shape.size());
  dl.dtype = to_c(*dtype);
  dl.shape = held.shape.data();
  int64_t low = 0, high = 0, count = 1;
  for (const int64_t n : held.shape) count *= n;
  if (from.contains("strides")) {
    held.strides = from.at("strides").get<std::vector<int64_t>>();
    if (held.strides.size() != held.shape.size()) throw std::out_of_range("strides without shape");
    dl.strides = held.strides.data();
    for (size_t d = 0; d < held.shape.size() && count > 0; ++d) {
      int64_t reach = 0;
      if (__builtin_mul_overflow(held.strides[d], held.shape[d] - 1, &reach) ||
          std::abs(reach) > int64_t{1} << 42)
        throw std::out_of_range("a stride is too large");
      (reach < 0 ? low : high) += reach;
    }
  } else {
    high = count - 1;
  }
  if (const json& data = from.at("data"); !data.is_null()) {
    // Checks both the lowest and the highest address of the tensor.
    const int64_t first = data.get<int64_t>();
    const int64_t below = count > 0 ? -low * bits(*dtype) / 8 : 0;
    if (first < below) throw std::out_of_range("a tensor lies outside its bytes");
    const int64_t above = count > 0 ? bytes_for(*dtype, high + 1) : 0;
    slot(&dl.data, data, static_cast<size_t>(above), held.host);
    held.first = first - below;
    held.bytes = above + below;
    if (from.contains("values")) held.values = from.at("values").get<std::vector<int64_t>>();
  }
  if (!from.contains("quant")) return &held.tensor;
  const json& q = from.at("quant");
  const Result<Scaling> scaling = parse_scaling(q.at("scaling").get<std::string>());
  if (!scaling.ok()) throw std::out_of_range(scaling.status().message());
  held.tensor.quant = &held.quant;
  held.quant.scaling = static_cast<uint32_t>(*scaling);
  held.quant.flags = q.at("flags").get<uint32_t>();
  held.quant.amax_epsilon = q.at("amax_epsilon").get<float>();
  const auto [m, k] = core::logical_matrix(held.shape);
  const core::QuantBytes bytes = core::quant_bytes(*dtype, *scaling, m, k);
  for (const core::QuantPart& part : core::kQuantParts) {
    if (!q.contains(part.name)) continue;  // written by a te-fl without this part
    slot(part.slot(held.quant), q.at(part.name), static_cast<size_t>(part.bytes(bytes)), held.host);
  }
  return &held.tensor;
}

Status FiledCall::fill(const json& d) {
  if (!d.is_object()) return broken("its description is not JSON");
  op_ = d.at("op").get<std::string>();
  OpRegistry& registry = OpRegistry::instance();
  TE_FL_ASSIGN_OR_RETURN(const OpId id, registry.find(op_));
  const te_fl_op_schema& schema = *registry.schema(id);
  const auto text = [&](const char* key) { return d.value(key, std::string()); };
  origin_ = {text("impl"), text("owner"),  text("build"), text("device"),
             text("chip"), text("driver"), text("note")};
  TE_FL_ASSIGN_OR_RETURN(device_, parse_device(d.at("device").get<std::string>()));
  deterministic_ = d.at("deterministic").get<bool>();
  bytes_ = d.at("bytes").get<size_t>();
  if (bytes_ > kMaxArrayBytes) return broken("it claims " + std::to_string(bytes_) + " bytes");
  const json& rng = d.at("rng");
  rng_.seed = rng.at("seed").get<uint64_t>();
  rng_.offset = rng.at("offset").get<uint64_t>();
  slot(&rng_.seed_address, rng.at("seed_address"), sizeof(uint64_t), false);
  slot(&rng_.offset_address, rng.at("offset_address"), sizeof(uint64_t), false);
  const auto size = d.at("args_size").get<uint32_t>();
  if (size < schema.least_args_size || size > schema.args_size) {
    return Status(StatusCode::kIncompatible,
                  "op '" + op_ + "' was saved with arguments of " + std::to_string(size) +
                      " bytes, and here they have " + std::to_string(schema.least_args_size) +
                      " to " + std::to_string(schema.args_size) +
                      "; replay it with the te-fl that saved it (" +
                      d.value("te_fl", std::string("unknown")) + ")");
  }
  args_.assign(schema.args_size / sizeof(uint64_t) + 1, 0);
  put(0, &size, sizeof size);
  const json& list = d.at("args");
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (!list.contains(arg.name)) continue;
    const json& value = list.at(arg.name);
    if (arg.type == TE_FL_ARG_TENSOR) {
      const te_fl_tensor* t = tensor(value);
      put(arg.offset, &t, sizeof t);
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      auto& items = lists_.emplace_back();
      for (const json& item : value) items.push_back(tensor(item));
      const te_fl_tensor* const* first = items.data();
      const auto count = static_cast<int64_t>(items.size());
      put(arg.offset, &first, sizeof first);
      put(arg.count_offset, &count, sizeof count);
    } else if (arg.type == TE_FL_ARG_I64_LIST) {
      const auto& items = integers_.emplace_back(value.get<std::vector<int64_t>>());
      const int64_t* first = items.data();
      const auto count = static_cast<int64_t>(items.size());
      put(arg.offset, &first, sizeof first);
      put(arg.count_offset, &count, sizeof count);
    } else if (arg.type == TE_FL_ARG_SAVED) {
      record_.struct_size = sizeof record_;
      if (value.contains("storage")) record_.storage = tensor(value.at("storage"));
      const te_fl_saved* record = &record_;
      put(arg.offset, &record, sizeof record);
    } else if (arg.type == TE_FL_ARG_I64) {
      const auto n = value.get<int64_t>();
      put(arg.offset, &n, sizeof n);
    } else if (arg.type == TE_FL_ARG_F32) {
      const auto bits = value.at("bits").get<uint32_t>();
      put(arg.offset, &bits, sizeof bits);
    } else if (arg.type == TE_FL_ARG_F64) {
      const auto bits = value.at("bits").get<uint64_t>();
      put(arg.offset, &bits, sizeof bits);
    } else {
      const auto n = value.get<int32_t>();
      put(arg.offset, &n, sizeof n);
    }
  }
  return {};
}

// Sample data: floats between 0.5 and 1.5, codes of such values, scales of 1; integers as recorded,
// otherwise 0.
CopyBuffer FiledCall::made_up() const {
  if (before_.data() != nullptr) return before_;
  CopyBuffer out(bytes_);
  if (out.data() == nullptr) return out;
  uint32_t seed = 1;
  const auto next = [&] { return (seed = seed * 1664525u + 1013904223u) >> 8; };
  const auto fill = [&](int64_t first, int64_t bytes, DType dtype) {
    const int64_t width = std::max(bits(dtype) / 8, 1);
    char* to = out.data() + first;
    for (int64_t i = 0; i + width <= bytes; i += width) {
      const float value = 0.5f + static_cast<float>(next()) * 0x1p-24f;
      const double wide = value;
      uint16_t half = 0;
      uint8_t code = 0;
      switch (dtype) {
        case DType::kF64:
          std::memcpy(to + i, &wide, sizeof wide);
          break;
        case DType::kF32:
          std::memcpy(to + i, &value, sizeof value);
          break;
        case DType::kF16:
        case DType::kBF16:
          half =
              dtype == DType::kF16 ? numeric::float_to_fp16(value) : numeric::float_to_bf16(value);
          std::memcpy(to + i, &half, sizeof half);
          break;
        case DType::kF8E4M3:
        case DType::kF8E5M2:
          code = dtype == DType::kF8E4M3 ? numeric::float_to_e4m3(value)
                                         : numeric::float_to_e5m2(value);
          to[i] = static_cast<char>(code);
          break;
        case DType::kF8E8M0:
          to[i] = 127;  // the code of 1
          break;
        default:
          break;
      }
    }
  };
  for (const Held& held : tensors_) {
    const auto dtype = static_cast<DType>(dtype_index(held.tensor.dl.dtype));
    if (held.first >= 0) fill(held.first, held.bytes, dtype);
    const int64_t width = bits(dtype) / 8;
    const bool fits = static_cast<int64_t>(held.values.size()) * width <= held.bytes;
    for (size_t i = 0; fits && i < held.values.size(); ++i) {
      std::memcpy(out.data() + held.first + static_cast<int64_t>(i) * width, &held.values[i],
                  static_cast<size_t>(width));  // correct on little-endian hosts
    }
    if (held.tensor.quant == nullptr) continue;
    const auto scaling = static_cast<Scaling>(held.quant.scaling);
    const auto [m, k] = core::logical_matrix(held.shape);
    const core::QuantBytes bytes = core::quant_bytes(dtype, scaling, m, k);
    for (const core::QuantPart& part : core::kQuantParts) {
      const void* const at = reinterpret_cast<const char*>(&held.quant) + part.offset;
      for (const Slot& s : slots_) {
        if (s.at == at) fill(s.offset, part.bytes(bytes), part.dtype(dtype, scaling));
      }
    }
  }
  return out;
}

const void* FiledCall::bind(char* base, const Device& device, char* host_base) noexcept {
  for (const Slot& s : slots_) {
    const void* to = (s.host ? host_base : base) + s.offset;
    std::memcpy(s.at, &to, sizeof to);
  }
  for (Held& held : tensors_) {
    const Device& where = held.host ? Device{} : device;
    held.tensor.dl.device = where.to_c();
    held.tensor.provider = where.provider;
  }
  return args_.data();
}

}  // namespace te_fl::dispatch
