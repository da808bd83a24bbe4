// Sums the memory of a call's tensors. Under TE_FL_VALIDATE, also asks the devices whether the
// tensors' memory is theirs.
#include <array>
#include <cstdio>
#include <exception>
#include <string>

#include "core/base/answer.hpp"
#include "core/base/settings.hpp"
#include "core/device/device_use.hpp"
#include "core/op/op_finder.hpp"
#include "core/tensor/quant_parts.hpp"

namespace te_fl::core {
namespace {

int64_t bytes_of(const te_fl_tensor& t) {
  return bytes_for(static_cast<DType>(dtype_index(t.dl.dtype)), numel_of(t));
}

struct Part {
  const char* name;
  const void* data;
  int64_t bytes;
};

using Parts = std::array<Part, 1 + kQuantParts.size()>;

// Lists the memory blocks of a non-empty tensor. For block scales, lists the first value only.
int list_parts(const te_fl_tensor& t, Parts& parts) {
  int n = 0;
  const auto add = [&](const char* name, const void* data, int64_t bytes) {
    if (data != nullptr) parts[n++] = {name, data, bytes};
  };
  if (t.dl.data != nullptr) {
    const ByteRange range = byte_range(t);
    add("data", range.begin, range.end - range.begin);
  }
  const te_fl_quant* q = quant_of(t);
  if (q == nullptr) return n;
  const QuantBytes looked_at{bytes_of(t), 1, 1};
  for (const QuantPart& part : kQuantParts) add(part.name, part.in(*q), part.bytes(looked_at));
  return n;
}

using CheckPointer = decltype(te_fl_device_api::check_pointer);

// The device's result of checking an address. kLost: the device is lost and cannot check.
enum class Answer { kBelongs, kDoesNot, kLost };

Answer ask(CheckPointer check, void* self, const void* data, size_t bytes,
           const te_fl_error_sink& sink) noexcept {
  try {
    const te_fl_status code = known_status(check(self, data, bytes, &sink));
    if (TE_FL_STATUS_CODE(code) == TE_FL_DEVICE_LOST) return Answer::kLost;
    return code == TE_FL_OK ? Answer::kBelongs : Answer::kDoesNot;
  } catch (const std::exception& e) {  // a plugin must not throw (R5)
    char text[160];
    std::snprintf(text, sizeof text, "check_pointer threw an exception (rule R5): %s", e.what());
    sink.write(sink.host, text);
  } catch (...) {
    sink.write(sink.host, "check_pointer threw an exception (rule R5)");
  }
  return Answer::kDoesNot;
}

// Marks the device as lost. Dispatch also returns the lost device's error for this call.
void retire(const Device& device, const char* op, const char* arg, const char* detail) noexcept {
  try {
    lose_device(device, "op '" + std::string(op) + "': the memory of argument '" + arg +
                            "' cannot be looked at (TE_FL_VALIDATE): " + detail);
  } catch (...) {  // no memory for the text: a later call on the device fails in the same way
  }
}

}  // namespace

uint64_t CompiledOp::element_bytes(const void* args) const noexcept {
  const ArgsView view(args);
  uint64_t sum = 0;
  const auto add = [&](const te_fl_tensor* t) {
    if (t != nullptr) sum += static_cast<uint64_t>(bytes_of(*t));
  };
  for (const uint8_t i : impl_->tensors) add(view.tensor(impl_->args[i]));
  for (const uint8_t i : impl_->lists) {
    for (int64_t k = 0; k < view.count(impl_->args[i]); ++k) add(view.element(impl_->args[i], k));
  }
  return sum;
}

void Finder::keep_detail(void* finder, const char* text) noexcept {
  auto* self = static_cast<Finder*>(finder);
  if (text != nullptr) std::snprintf(self->detail_, sizeof self->detail_, "%s", text);
}

bool Finder::check_argument_memory(int i, int64_t index, const te_fl_tensor* t) noexcept {
  if (t == nullptr || !op_.args[static_cast<size_t>(i)].places() || numel_of(*t) == 0) return true;
  if (Device{t->dl.device.type, 0, 0}.is_host()) return true;  // pinned memory
  const DeviceEntry* entry = find_device(device_);
  if (entry == nullptr || !entry->in_service()) return true;  // dispatch reports this error
  const auto check = slot(*entry->desc->api, &te_fl_device_api::check_pointer);
  if (check == nullptr) return true;
  const te_fl_error_sink sink{sizeof sink, 0, this, &keep_detail};
  Parts parts;
  const int count = list_parts(*t, parts);
  for (int k = 0; k < count; ++k) {
    const auto bytes = static_cast<size_t>(parts[k].bytes);
    const Answer answer = ask(check, entry->desc->self, parts[k].data, bytes, sink);
    if (answer == Answer::kBelongs) continue;
    if (answer == Answer::kLost) {
      retire(device_, op_.schema.name, op_.schema.args[i]->name, detail_);
      return true;
    }
    part_ = parts[k].name;
    return fail(Problem::kNotItsMemory, i, index);
  }
  return true;
}

bool Finder::check_memory() noexcept {
  if (device_.is_host() || !g_validate.load(std::memory_order_relaxed)) return true;
  for (const uint8_t i : op_.tensors) {
    if (!check_argument_memory(i, -1, args_.tensor(op_.args[i]))) return false;
  }
  for (const uint8_t i : op_.lists) {
    for (int64_t k = 0; k < args_.count(op_.args[i]); ++k) {
      if (!check_argument_memory(i, k, args_.element(op_.args[i], k))) return false;
    }
  }
  return true;
}

}  // namespace te_fl::core
