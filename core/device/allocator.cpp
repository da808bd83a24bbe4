#include "core/device/allocator.hpp"

#include <atomic>
#include <chrono>
#include <utility>

#include "core/base/abi_struct.hpp"
#include "core/base/settings.hpp"
#include "core/base/text.hpp"
#include "core/device/device_use.hpp"
#include "te_fl/memory.hpp"

namespace te_fl::core {
namespace {

Status check_allocator(const Device& device, const te_fl_allocator& api) {
  const auto refuse = [&](const std::string& why) {
    return invalid_argument("the allocator for " + to_string(device) + " " + why);
  };
  if (!plausible_size(api.struct_size, kLeastAllocator)) {
    return refuse("has " + size_text(api.struct_size, kLeastAllocator));
  }
  if (api.name == nullptr || api.name[0] == '\0') {
    return refuse("has no name, which messages about it need (rule R25)");
  }
  if (api.allocate == nullptr || api.free == nullptr || api.record_stream == nullptr) {
    return refuse(
        "lacks a required function: allocate, free and record_stream may not be NULL (rule R4)");
  }
  return {};
}

std::string seconds_text(std::chrono::nanoseconds time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

}  // namespace

Allocator::Allocator(const Device& device, const te_fl_allocator& api,
                     std::chrono::nanoseconds slow)
    : device_(device),
      api_(copy_struct<te_fl_allocator>(&api)),
      text_("allocator '" + std::string(api.name) + "' of " + to_string(device)),
      slow_(slow) {}

Allocator::~Allocator() {
  if (api_.destroy == nullptr) return;
  try {
    api_.destroy(api_.self);
  } catch (...) {  // R5 forbids exceptions; a destructor cannot return an error
  }
}

Status Allocator::check_given(const te_fl_memory_desc& memory, const void* data) const {
  const auto refuse = [&](const std::string& why) {
    return internal_error(text_ + " was called for " + bytes_text(memory.bytes) + " and returned " +
                          why + " (rule R25); the program that installed it has to correct it");
  };
  if (data == nullptr) return refuse("a null pointer without an error");
  if (reinterpret_cast<uintptr_t>(data) % memory.alignment != 0) {
    return refuse("memory that is not aligned to " + std::to_string(memory.alignment) + " bytes");
  }
  // Asking the device about a pointer takes about a microsecond, too much for every result of a
  // small op. After kTrusted correct blocks, an allocator is checked under TE_FL_VALIDATE only.
  constexpr int kTrusted = 256;
  if (checked_.load(std::memory_order_relaxed) >= kTrusted &&
      !g_validate.load(std::memory_order_relaxed)) {
    return {};
  }
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device_));
  const te_fl_device_desc& d = *use->desc;
  const auto check = slot(*d.api, &te_fl_device_api::check_pointer);
  if (check == nullptr) return {};
  ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return check(d.self, data, memory.bytes, errors.sink()); });
  if (code == TE_FL_OK) {
    if (checked_.load(std::memory_order_relaxed) < kTrusted) ++checked_;
    return {};
  }
  if (TE_FL_STATUS_CODE(code) == TE_FL_DEVICE_LOST) {  // a lost device cannot check the memory
    return device_status(device_, memory.stream, errors, code,
                         "whether " + text_ + " returned memory of its device cannot be checked");
  }
  return refuse("memory that is not " + to_string(device_) + "'s: " + errors.text());
}

Result<void*> Allocator::allocate(const te_fl_memory_desc& memory) const {
  ErrorText errors;
  void* data = nullptr;
  const auto begin = std::chrono::steady_clock::now();
  const te_fl_status code =
      errors.call([&] { return api_.allocate(api_.self, &memory, &data, errors.sink()); });
  if (std::chrono::steady_clock::now() - begin > slow_) {
    log::once(log::Level::kWarning, "slow " + text_,
              text_ + " took more than " + seconds_text(slow_) + " for " +
                  bytes_text(memory.bytes) +
                  "; the op that asked waited for it, and so did those behind it on its stream");
  }
  if (code != TE_FL_OK) {
    return device_status(device_, memory.stream, errors, code,
                         "allocation of " + bytes_text(memory.bytes) + " by " + text_);
  }
  if (Status good = check_given(memory, data); !good.ok()) {
    if (data != nullptr) give_back(data);
    return good;
  }
  return data;
}

void Allocator::give_back(void* data) const noexcept {
  ErrorText errors;
  report_release(errors.call([&] { return api_.free(api_.self, data, errors.sink()); }), errors,
                 device_);
}

void Allocator::free(void* data, void* allocated_on, void* stream) const noexcept {
  if (stream != allocated_on) {
    ErrorText errors;
    report_release(
        errors.call([&] { return api_.record_stream(api_.self, data, stream, errors.sink()); }),
        errors, device_);
  }
  give_back(data);
}

bool Allocator::trim(uint64_t bytes) const noexcept {
  if (api_.trim == nullptr) return false;
  ErrorText errors;
  const te_fl_status code = errors.call([&] { return api_.trim(api_.self, bytes, errors.sink()); });
  report_release(code, errors, device_);
  return code == TE_FL_OK;
}

void Allocator::retire_stream(void* stream) const noexcept {
  if (api_.retire_stream == nullptr) return;
  ErrorText errors;
  report_release(errors.call([&] { return api_.retire_stream(api_.self, stream, errors.sink()); }),
                 errors, device_);
}

}  // namespace te_fl::core

namespace te_fl::devices {

Status install_allocator(const Device& device, const te_fl_allocator* allocator) {
  TE_FL_ASSIGN_OR_RETURN(const core::DeviceUse use, core::DeviceUse::of(device));
  if (device.is_host()) {
    return Status(StatusCode::kUnsupported,
                  "memory of " + to_string(device) +
                      " is the process's own; an allocator is installed for a device that a "
                      "plugin provides");
  }
  core::AllocatorRef next;
  if (allocator != nullptr) {
    TE_FL_RETURN_IF_ERROR(core::check_allocator(device, *allocator));
    next = std::make_shared<const core::Allocator>(device, *allocator);
  }
  core::exchange_allocator(device, std::move(next));
  return {};
}

}  // namespace te_fl::devices
