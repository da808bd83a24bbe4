#include "jax/jax_ffi.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <string>
#include <string_view>
#include <unordered_map>

#include "jax/jax_call.hpp"

namespace te_fl::jax {
namespace {

std::atomic<int32_t> g_version{-1};
thread_local int t_depth = 0;  // the number of handlers that the thread is inside

xla::Error* make_error(const xla::CallFrame& call, xla::ErrorCode code, const char* text) {
  xla::ErrorRequest request{sizeof(xla::ErrorRequest), nullptr, text, code};
  return call.api->create_error(&request);
}

xla::ErrorCode to_error_code(StatusCode code) {
  switch (code) {
    case StatusCode::kInvalidArgument:
      return xla::ErrorCode::kInvalidArgument;
    case StatusCode::kUnsupported:
      return xla::ErrorCode::kUnimplemented;
    case StatusCode::kNotFound:
      return xla::ErrorCode::kNotFound;
    case StatusCode::kAlreadyExists:
      return xla::ErrorCode::kAlreadyExists;
    case StatusCode::kOutOfMemory:
      return xla::ErrorCode::kResourceExhausted;
    case StatusCode::kFailedPrecondition:
    case StatusCode::kIncompatible:
      return xla::ErrorCode::kFailedPrecondition;
    case StatusCode::kBusy:
    case StatusCode::kDeviceLost:
      return xla::ErrorCode::kUnavailable;
    case StatusCode::kTimeout:
      return xla::ErrorCode::kDeadlineExceeded;
    case StatusCode::kDataLoss:
      return xla::ErrorCode::kDataLoss;
    default:
      return xla::ErrorCode::kInternal;
  }
}

// At registration, XLA calls the handler with a Metadata request. Fills in the metadata and returns
// true for such a call.
bool answer_metadata(const xla::CallFrame& call) {
  for (const xla::Extension* e = call.extension; e != nullptr; e = e->next) {
    if (e->type != xla::kMetadataExtension) continue;
    xla::Metadata* metadata = reinterpret_cast<const xla::MetadataExtension*>(e)->metadata;
    const xla::ApiVersion theirs = call.api->version;
    g_version = theirs.major * 1000 + theirs.minor;
    // An XLA with an older or incompatible FFI version rejects these numbers, and registration
    // fails.
    metadata->version.major = xla::kMajor;
    metadata->version.minor = xla::kLeastMinor;
    metadata->traits = 0;
    return true;
  }
  return false;
}

te_fl_dtype to_dtype(xla::ElementType type) {
  switch (type) {
    case xla::ElementType::kPred:
      return to_c(DType::kBool);
    case xla::ElementType::kS8:
      return to_c(DType::kI8);
    case xla::ElementType::kS16:
      return to_c(DType::kI16);
    case xla::ElementType::kS32:
      return to_c(DType::kI32);
    case xla::ElementType::kS64:
      return to_c(DType::kI64);
    case xla::ElementType::kU8:
      return to_c(DType::kU8);
    case xla::ElementType::kU16:
      return to_c(DType::kU16);
    case xla::ElementType::kU32:
      return to_c(DType::kU32);
    case xla::ElementType::kU64:
      return to_c(DType::kU64);
    case xla::ElementType::kF16:
      return to_c(DType::kF16);
    case xla::ElementType::kF32:
      return to_c(DType::kF32);
    case xla::ElementType::kF64:
      return to_c(DType::kF64);
    case xla::ElementType::kBF16:
      return to_c(DType::kBF16);
    case xla::ElementType::kF8E5M2:
      return to_c(DType::kF8E5M2);
    case xla::ElementType::kF8E4M3FN:
      return to_c(DType::kF8E4M3);
    case xla::ElementType::kF8E8M0FNU:
      return to_c(DType::kF8E8M0);
  }
  // An opaque dtype, which the op's dtype check refuses. Four-bit dtypes end here, because XLA does
  // not pack them.
  return te_fl_dtype{TE_FL_CODE_OPAQUE, 8, 1};
}

constexpr size_t kMostArrays = 512;
using Arrays = std::array<Array, kMostArrays>;

Status describe(const xla::Buffers& buffers, size_t wanted, Arrays& arrays) {
  if (static_cast<size_t>(buffers.count) != wanted || wanted > kMostArrays) {
    return invalid_argument("the call's text names " + std::to_string(wanted) +
                            " arrays, XLA gives " + std::to_string(buffers.count) + "; at most " +
                            std::to_string(kMostArrays) + " are possible");
  }
  for (size_t i = 0; i < wanted; ++i) {
    const auto& buffer = *static_cast<const xla::Buffer*>(buffers.buffers[i]);
    if (buffers.types[i] != xla::kBufferArgument) {
      return invalid_argument("array " + std::to_string(i) + " of the call is a token");
    }
    arrays[i] = {to_dtype(buffer.type), buffer.data, static_cast<int32_t>(buffer.rank),
                 buffer.extents};
  }
  return {};
}

// The parsed calls that one thread caches, by their text, and the arrays of the running call.
struct ThreadCalls {
  std::unordered_map<std::string_view, std::unique_ptr<OpCall>> calls;
  std::unordered_map<std::string, int> texts;  // owns the text that the keys of `calls` point to
  Arrays operands, results;
  bool busy = false;
};
constexpr size_t kMostCalls = 4096;

Result<OpCall*> find_call(ThreadCalls& kept, std::string_view text) {
  if (const auto found = kept.calls.find(text); found != kept.calls.end()) {
    return found->second.get();
  }
  Result<std::unique_ptr<OpCall>> parsed = OpCall::parse(text);
  if (!parsed.ok()) return parsed.status();
  if (kept.calls.size() >= kMostCalls) {
    kept.calls.clear();
    kept.texts.clear();
  }
  const auto key = kept.texts.emplace(std::string(text), 0).first;
  return (kept.calls[key->first] = std::move(parsed).value()).get();
}

Status run(const xla::CallFrame& call, std::string_view text, const Device& device, void* stream) {
  static thread_local std::unique_ptr<ThreadCalls> outer;
  if (outer == nullptr) outer = std::make_unique<ThreadCalls>();
  // `busy` is true if an op's implementation runs an XLA program on this thread itself; that inner
  // call gets its own cache.
  std::unique_ptr<ThreadCalls> inner;
  if (outer->busy) inner = std::make_unique<ThreadCalls>();
  ThreadCalls& kept = inner != nullptr ? *inner : *outer;
  Result<OpCall*> found = find_call(kept, text);
  if (!found.ok()) return found.status();
  OpCall& op = *found.value();
  Status status = describe(call.operands, op.operands(), kept.operands);
  if (status.ok()) status = describe(call.results, op.results(), kept.results);
  if (!status.ok()) return status;
  struct Busy {
    bool& flag;
    explicit Busy(bool& f) : flag(f) {
      flag = true;
      ++t_depth;
    }
    ~Busy() {
      flag = false;
      --t_depth;
    }
  } const busy(kept.busy);
  return op.run(kept.operands.data(), kept.results.data(), device, stream);
}

xla::Error* handle(xla::CallFrame* call, bool cuda) noexcept try {
  if (answer_metadata(*call)) return nullptr;
  Device device;
  void* stream = nullptr;
  if (cuda) {
    xla::StreamRequest wanted{sizeof(xla::StreamRequest), nullptr, call->context, nullptr};
    if (xla::Error* error = call->api->get_stream(&wanted)) return error;
    xla::OrdinalRequest place{sizeof(xla::OrdinalRequest), nullptr, call->context, 0};
    if (xla::Error* error = call->api->get_ordinal(&place)) return error;
    device.type = TE_FL_DEVICE_CUDA;
    device.index = place.ordinal;
    stream = wanted.stream;
  }
  const xla::Attributes& attributes = call->attributes;
  if (attributes.count != 1 || attributes.types[0] != xla::kStringAttribute) {
    return make_error(*call, xla::ErrorCode::kInvalidArgument,
                      "a call of te-fl has one attribute, the string 'call'");
  }
  const auto& bytes = *static_cast<const xla::Bytes*>(attributes.values[0]);
  const Status status = run(*call, {bytes.data, bytes.size}, device, stream);
  if (status.ok()) return nullptr;
  return make_error(*call, to_error_code(status.code()), status.to_string().c_str());
} catch (const std::exception& e) {
  return make_error(*call, xla::ErrorCode::kInternal, e.what());
}

}  // namespace

xla::Error* handle_on_host(xla::CallFrame* call) noexcept { return handle(call, false); }
xla::Error* handle_on_cuda(xla::CallFrame* call) noexcept { return handle(call, true); }
int32_t seen_version() noexcept { return g_version; }
bool in_handler() noexcept { return t_depth != 0; }

}  // namespace te_fl::jax
