// The stream scopes of the calling thread.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/device/current_stream.hpp"
#include "core/device/device_use.hpp"

namespace te_fl {

struct StreamScope::Frame {
  enum class Of {
    kAll,     // the default stream of every device
    kOne,     // a stream of `device`
    kUnknown  // a stream that several devices may have
  };
  Of of = Of::kAll;
  Device device;
  void* handle = nullptr;
  core::StreamRef record;
  const Frame* outer = nullptr;

  bool is_for(const Device& d) const noexcept { return of != Of::kOne || device == d; }
};

namespace {

using Frame = StreamScope::Frame;

constinit thread_local const Frame* t_innermost = nullptr;

const Frame* frame_for(const Device& device) noexcept {
  const Frame* frame = t_innermost;
  while (frame != nullptr && !frame->is_for(device)) frame = frame->outer;
  return frame;
}

// True if the device's plugin accepts the stream as its own, or cannot check streams.
bool may_have(const Device& device, void* stream) {
  const Result<core::DeviceUse> use = core::DeviceUse::of(device);
  if (!use.ok()) return false;
  const te_fl_device_desc& d = *(*use)->desc;
  const auto check = core::slot(*d.api, &te_fl_device_api::check_stream);
  if (check == nullptr) return true;
  core::ErrorText errors;
  return errors.call([&] { return check(d.self, stream, errors.sink()); }) == TE_FL_OK;
}

// True if all devices come from one plugin.
bool one_provider(const std::vector<Device>& all) {
  const core::DeviceEntry* first = nullptr;
  for (const Device& d : all) {
    const core::DeviceEntry* entry = core::find_device(d);
    if (entry == nullptr) return false;  // it has just been removed
    if (first == nullptr) first = entry;
    if (entry->provider != first->provider) return false;
  }
  return true;
}

// The devices that a stream may belong to: the devices on which te-fl made it or, if there are
// none, all devices whose plugin does not refuse the stream. If devices of several plugins exist,
// no plugin is asked: a plugin may dereference a foreign handle as a pointer of its own library.
std::vector<Device> find_devices(void* stream) {
  std::vector<Device> all = core::ready_devices(), made;
  std::erase_if(all, [](const Device& d) { return d.is_host(); });
  std::ranges::copy_if(all, std::back_inserter(made),
                       [&](const Device& d) { return core::is_own_stream(d, stream); });
  if (!made.empty() || all.size() < 2) return made.empty() ? all : made;
  if (one_provider(all)) {
    std::erase_if(all, [&](const Device& d) { return !may_have(d, stream); });
  }
  return all;
}

std::unique_ptr<Frame> make_frame(const Device* device, void* stream) {
  auto frame = std::make_unique<Frame>();
  frame->handle = stream;
  if (device == nullptr && stream != nullptr) {
    const std::vector<Device> candidates = find_devices(stream);
    frame->of = candidates.size() == 1 ? Frame::Of::kOne : Frame::Of::kUnknown;
    if (candidates.size() == 1) frame->device = candidates.front();
  } else if (device != nullptr) {
    frame->of = Frame::Of::kOne;
    frame->device = *device;
  }
  if (frame->of == Frame::Of::kOne) frame->record = core::stream_record(frame->device, stream);
  return frame;
}

}  // namespace

StreamScope::StreamScope(const Device& device, void* stream) : frame_(make_frame(&device, stream)) {
  frame_->outer = std::exchange(t_innermost, frame_.get());
}
StreamScope::StreamScope(void* stream) : frame_(make_frame(nullptr, stream)) {
  frame_->outer = std::exchange(t_innermost, frame_.get());
}
StreamScope::~StreamScope() { t_innermost = frame_->outer; }

namespace devices {

void* current_stream() noexcept { return t_innermost != nullptr ? t_innermost->handle : nullptr; }

void* current_stream(const Device& device) noexcept {
  if (device.is_host()) return nullptr;
  const Frame* frame = frame_for(device);
  return frame != nullptr ? frame->handle : nullptr;
}

}  // namespace devices

namespace core {

Result<StreamRef> current_stream(const Device& device) {
  const Frame* frame = device.is_host() ? nullptr : frame_for(device);
  if (frame == nullptr || frame->handle == nullptr) return StreamRef();
  if (frame->of == Frame::Of::kUnknown) {
    return failed_precondition(
        "the calling thread's stream may be of " + to_string(device) +
        " or of another device; name the device: StreamScope(device, stream)");
  }
  if (frame->record->get() == nullptr) {
    return failed_precondition("the calling thread's stream of " + to_string(device) +
                               " has been retired; close its StreamScope");
  }
  return frame->record;
}

std::optional<OpenStream> innermost_stream() {
  const Frame* frame = t_innermost;
  if (frame == nullptr) return std::nullopt;
  return OpenStream{frame->device, frame->of == Frame::Of::kOne, frame->handle};
}

std::vector<OpenStream> open_streams() {
  std::vector<OpenStream> streams;
  for (const Frame* frame = t_innermost; frame != nullptr; frame = frame->outer) {
    streams.push_back({frame->device, frame->of == Frame::Of::kOne, frame->handle});
    if (frame->of != Frame::Of::kOne) break;  // this scope hides the outer ones
  }
  std::ranges::reverse(streams);
  return streams;
}

}  // namespace core
}  // namespace te_fl
