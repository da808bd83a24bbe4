#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "core/base/fork.hpp"
#include "core/device/allocator.hpp"
#include "core/device/current_stream.hpp"
#include "core/device/device_use.hpp"

namespace te_fl {
namespace core {

constinit std::atomic<void (*)(const Device& device, void* stream)> g_stream_goes{nullptr};

namespace {

constinit ForkMutex streams_mutex(LockLevel::kStreams);
const ForkMutex::Registration streams_registration(streams_mutex);

struct Known {
  StreamRef own;  // holds the stream until destroy_stream; null for a foreign stream
  std::weak_ptr<StreamRecord> record;
  bool made = false;  // create_stream made it; if `record` has expired, it is being destroyed
};
using Key = std::tuple<int32_t, int32_t, uint32_t, void*>;  // device and stream or event handle
Key make_key(const Device& device, void* handle) {
  return {device.type, device.index, device.provider, handle};
}

std::map<Key, Known>& known_streams() {
  static auto* const all = new std::map<Key, Known>;
  return *all;
}

// The live timed events; true if the event has been recorded. Plugins are asked for the elapsed
// time only between recorded events.
std::map<Key, bool>& timed_events() {
  static auto* const all = new std::map<Key, bool>;
  return *all;
}

void destroy_on_device(const Device& device, void* handle) {
  const Inside inside(device);
  if (inside.too_late()) return;
  DeviceEntry* entry = find_device(device);
  if (entry == nullptr) return;  // does not happen: a live stream keeps its device in the list
  const te_fl_device_desc& d = *entry->desc;
  ErrorText errors;
  report_release(errors.call([&] { return d.api->destroy_stream(d.self, handle, errors.sink()); }),
                 errors, device);
  entry->release();
}

// Returns the stream's record and creates it if there is none. The caller holds the lock.
StreamRef record_in(Known& known, const Device& device, void* handle) {
  if (StreamRef record = known.record.lock()) return record;
  auto record = std::make_shared<StreamRecord>(device, handle, false);
  known.record = record;
  return record;
}

// The record of a stream; null if create_stream made the stream and it is being destroyed.
StreamRef living_record(const Device& device, void* handle) {
  const std::lock_guard lock(streams_mutex);
  Known& known = known_streams()[make_key(device, handle)];
  if (known.made && known.record.expired()) return nullptr;
  return record_in(known, device, handle);
}

// The record of a known stream; null if there is none.
StreamRef find_record(const Device& device, void* handle) {
  const std::lock_guard lock(streams_mutex);
  const auto at = known_streams().find(make_key(device, handle));
  return at != known_streams().end() ? at->second.record.lock() : nullptr;
}

// In a forked child, drops the uses by threads of the parent, which do not exist in the child.
void forget_uses() {
  for (auto& [key, known] : known_streams()) {
    if (const StreamRef record = known.record.lock()) record->in_use.store(0);
  }
}
const ForkedChild forked_child(LockLevel::kStreams, &forget_uses);

// Removes and returns a stream that create_stream made; null for any other stream.
StreamRef take_own(const Device& device, void* handle) {
  const std::lock_guard lock(streams_mutex);
  const auto at = known_streams().find(make_key(device, handle));
  return at != known_streams().end() ? std::move(at->second.own) : nullptr;
}

}  // namespace

StreamRecord::~StreamRecord() {
  if (made) {
    if (const auto hook = g_stream_goes.load(std::memory_order_acquire)) hook(device, handle);
    if (const AllocatorRef allocator = find_allocator(device)) allocator->retire_stream(handle);
    destroy_on_device(device, handle);
  }
  const std::lock_guard lock(streams_mutex);
  const auto at = known_streams().find(make_key(device, handle));
  // A new stream may have got the same handle meanwhile; its record is kept.
  if (at != known_streams().end() && at->second.record.expired()) known_streams().erase(at);
}

StreamRef stream_record(const Device& device, void* handle) {
  if (handle == nullptr) return nullptr;
  const std::lock_guard lock(streams_mutex);
  return record_in(known_streams()[make_key(device, handle)], device, handle);
}

StreamUse::StreamUse(StreamRef record) noexcept : record_(std::move(record)) {
  if (record_ == nullptr) return;
  record_->in_use.fetch_add(1, std::memory_order_seq_cst);
  if (!record_->retired.load(std::memory_order_seq_cst)) return;
  record_->in_use.fetch_sub(1, std::memory_order_release);
  record_ = nullptr;
  goes_ = true;
}

StreamUse::StreamUse(const Device& device, void* handle)
    : StreamUse(handle != nullptr ? living_record(device, handle) : nullptr) {
  goes_ = handle != nullptr && record_ == nullptr;
}

StreamUse::~StreamUse() {
  if (record_ != nullptr) record_->in_use.fetch_sub(1, std::memory_order_release);
}

bool is_own_stream(const Device& device, void* handle) {
  const StreamRef record = find_record(device, handle);
  return record != nullptr && record->made;
}

Status check_side(const Device& device, void* stream, const Device& other) {
  if (stream == nullptr || !is_own_stream(other, stream) || is_own_stream(device, stream)) {
    return {};
  }
  return invalid_argument("a copy from " + to_string(other) + " to " + to_string(device) +
                          " takes a stream of " + to_string(device) +
                          "; the given stream belongs to " + to_string(other));
}

}  // namespace core

namespace devices {
namespace {

using core::DeviceEntry;
using core::DeviceUse;
using core::ErrorText;

Status missing(const Device& device, const char* what, const char* function, const char* way_out) {
  return Status(StatusCode::kUnsupported, te_fl::to_string(device) + " has no " + what + " (its " +
                                              function + " is NULL); " + way_out);
}

Status no_streams(const Device& device, const char* function) {
  return missing(device, "streams", function, "use its default stream, nullptr");
}

Status no_events(const Device& device, const char* function) {
  return missing(device, "events", function, "synchronize the stream instead");
}

Status null_event(const Device& device) {
  return invalid_argument("the event of " + te_fl::to_string(device) +
                          " is null; make it with devices::create_event");
}

// An error if this event has no time. OK if it has one or will have one when its work is done.
Status check_timed(const Device& device, void* event, const std::string& which) {
  if (event == nullptr) return null_event(device);
  const std::string text = "the " + which + " event of " + te_fl::to_string(device);
  const std::lock_guard lock(core::streams_mutex);
  const auto at = core::timed_events().find(core::make_key(device, event));
  if (at == core::timed_events().end()) {
    return invalid_argument(text +
                            " was not created with `timed`, so it has no time; create both "
                            "events so (Event::create, devices::create_event)");
  }
  if (at->second) return {};
  return failed_precondition(text + " was never recorded, so it has no time; record it first");
}

}  // namespace

Result<void*> create_stream(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const te_fl_device_desc& d = *use->desc;
  if (d.api->create_stream == nullptr) return no_streams(device, "create_stream");
  if (d.api->destroy_stream == nullptr) return no_streams(device, "destroy_stream");
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, core::acquire_device(device));
  ErrorText errors;
  void* stream = nullptr;
  const te_fl_status code =
      errors.call([&] { return d.api->create_stream(d.self, &stream, errors.sink()); });
  TE_FL_ASSIGN_OR_RETURN(
      stream, core::made_object(entry, errors, code, stream, "creation of a stream on "));
  auto own = std::make_shared<core::StreamRecord>(device, stream, true);
  const std::lock_guard lock(core::streams_mutex);
  core::known_streams().insert_or_assign(core::make_key(device, stream),
                                         core::Known{own, own, true});
  return stream;
}

void destroy_stream(const Device& device, void* stream) noexcept {
  if (stream == nullptr) return;
  if (core::take_own(device, stream) != nullptr) return;  // its last owner destroys it
  try {
    log::error("destroy_stream on " + te_fl::to_string(device) +
               ": create_stream did not create this stream; nothing was destroyed");
  } catch (...) {  // no memory for the message
  }
}

Status retire_stream(const Device& device, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const auto refuse = [&](const std::string& why) {
    return invalid_argument("retire_stream on " + te_fl::to_string(device) + ": " + why);
  };
  if (stream == nullptr) return refuse("the default stream stays as long as the device");
  if (core::is_own_stream(device, stream)) {
    return refuse("te-fl created this stream; end it with destroy_stream");
  }
  TE_FL_ASSIGN_OR_RETURN(const bool capturing, is_capturing(device, stream));
  if (capturing) {
    return failed_precondition("retire_stream on " + te_fl::to_string(device) +
                               ": the stream is being captured into a graph; end the capture "
                               "first");
  }
  Status waited;  // the wait for the stream's work: its memory is used on other streams afterwards
  if (core::find_record(device, stream) != nullptr) waited = synchronize(device, stream);
  // A thread that frees memory on the stream from now on sees that it is retired. Waits here for
  // the threads that have already begun to free.
  const core::StreamRef record = core::stream_record(device, stream);
  record->retired.store(true, std::memory_order_seq_cst);
  while (record->in_use.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
  if (const auto hook = core::g_stream_goes.load(std::memory_order_acquire)) hook(device, stream);
  if (const core::AllocatorRef allocator = core::find_allocator(device)) {
    allocator->retire_stream(stream);
  }
  {
    const std::lock_guard lock(core::streams_mutex);
    const auto at = core::known_streams().find(core::make_key(device, stream));
    if (at != core::known_streams().end() && at->second.record.lock() == record) {
      core::known_streams().erase(at);
    }
  }
  const te_fl_device_desc& d = *use->desc;
  const auto retire = core::slot(*d.api, &te_fl_device_api::retire_stream);
  if (retire == nullptr) return waited;
  ErrorText errors;
  const te_fl_status code = errors.call([&] { return retire(d.self, stream, errors.sink()); });
  if (!waited.ok() || code == TE_FL_OK) return waited;
  return core::device_status(device, stream, errors, code,
                             "retiring a stream of " + te_fl::to_string(device));
}

Result<void*> create_event(const Device& device, bool timed) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const te_fl_device_desc& d = *use->desc;
  if (d.api->create_event == nullptr) return no_events(device, "create_event");
  if (d.api->destroy_event == nullptr) return no_events(device, "destroy_event");
  if (timed && core::slot(*d.api, &te_fl_device_api::elapsed_time) == nullptr) {
    return missing(device, "timed events", "elapsed_time", "measure on the host");
  }
  const uint32_t flags = timed ? uint32_t{TE_FL_EVENT_TIMED} : 0u;
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, core::acquire_device(device));
  ErrorText errors;
  void* event = nullptr;
  const te_fl_status code =
      errors.call([&] { return d.api->create_event(d.self, flags, &event, errors.sink()); });
  TE_FL_ASSIGN_OR_RETURN(event,
                         core::made_object(entry, errors, code, event, "creation of an event on "));
  if (timed) {
    const std::lock_guard lock(core::streams_mutex);
    core::timed_events().insert_or_assign(core::make_key(device, event), false);
  }
  return event;
}

void destroy_event(const Device& device, void* event) noexcept {
  if (event == nullptr) return;
  const core::Inside inside(device);
  if (inside.too_late()) return;
  DeviceEntry* entry = core::find_device(device);
  if (entry == nullptr || entry->desc->api->destroy_event == nullptr) return;
  {
    const std::lock_guard lock(core::streams_mutex);
    core::timed_events().erase(core::make_key(device, event));
  }
  ErrorText errors;
  const te_fl_device_desc& d = *entry->desc;
  core::report_release(
      errors.call([&] { return d.api->destroy_event(d.self, event, errors.sink()); }), errors,
      device);
  entry->release();
}

Status record_event(const Device& device, void* event, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const te_fl_device_desc& d = *use->desc;
  if (event == nullptr) return null_event(device);
  if (d.api->record_event == nullptr) return no_events(device, "record_event");
  ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return d.api->record_event(d.self, event, stream, errors.sink()); });
  if (code == TE_FL_OK) {
    const std::lock_guard lock(core::streams_mutex);
    const auto at = core::timed_events().find(core::make_key(device, event));
    if (at != core::timed_events().end()) at->second = true;
    return {};
  }
  return core::device_status(device, stream, errors, code,
                             "recording an event on " + te_fl::to_string(device));
}

Status wait_event(const Device& device, void* event, void* stream) {
  return wait_event(device, device, event, stream);
}

Status wait_event(const Device& device, const Device& event_device, void* event, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse of_event, DeviceUse::of(event_device));
  const te_fl_device_desc& d = *use->desc;
  if (d.api->wait_event == nullptr) return no_events(device, "wait_event");
  if (of_event->desc->api->wait_event != d.api->wait_event) {
    return invalid_argument("a stream of " + te_fl::to_string(device) +
                            " cannot wait for an event of " + te_fl::to_string(event_device) +
                            ", which another plugin provides (rule R24); wait for it on the host: "
                            "Event::synchronize, devices::synchronize_event");
  }
  if (event == nullptr) return null_event(event_device);
  ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return d.api->wait_event(d.self, event, stream, errors.sink()); });
  if (code == TE_FL_OK) return {};
  return core::device_status(device, stream, errors, code,
                             "a stream's wait for an event on " + te_fl::to_string(device));
}

Status synchronize_event(const Device& device, void* event) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const te_fl_device_desc& d = *use->desc;
  if (event == nullptr) return null_event(device);
  if (d.api->synchronize_event == nullptr) return no_events(device, "synchronize_event");
  ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return d.api->synchronize_event(d.self, event, errors.sink()); });
  if (code == TE_FL_OK) return {};
  return core::device_status(device, nullptr, errors, code,
                             "waiting for an event of " + te_fl::to_string(device));
}

Result<bool> query_event(const Device& device, void* event) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const te_fl_device_desc& d = *use->desc;
  if (event == nullptr) return null_event(device);
  const auto query = core::slot(*d.api, &te_fl_device_api::query_event);
  if (query == nullptr) return missing(device, "event queries", "query_event", "synchronize it");
  ErrorText errors;
  int32_t done = 0;
  const te_fl_status code = errors.call([&] { return query(d.self, event, &done, errors.sink()); });
  if (code == TE_FL_OK) return done != 0;
  return core::device_status(device, nullptr, errors, code,
                             "asking whether an event of " + te_fl::to_string(device) + " is done");
}

Result<uint64_t> elapsed_time(const Device& device, void* start, void* end) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const te_fl_device_desc& d = *use->desc;
  const auto elapsed = core::slot(*d.api, &te_fl_device_api::elapsed_time);
  if (elapsed == nullptr) {
    return missing(device, "timed events", "elapsed_time", "measure on the host");
  }
  for (void* event : {start, end}) {
    const std::string which = event == start ? "first" : "second";
    TE_FL_RETURN_IF_ERROR(check_timed(device, event, which));
    TE_FL_ASSIGN_OR_RETURN(const bool done, query_event(device, event));
    if (done) continue;
    return failed_precondition("the " + which + " event of " + te_fl::to_string(device) +
                               " is not done yet, so there is no time between the two; "
                               "synchronize it first");
  }
  ErrorText errors;
  uint64_t nanoseconds = 0;
  const te_fl_status code =
      errors.call([&] { return elapsed(d.self, start, end, &nanoseconds, errors.sink()); });
  if (code == TE_FL_OK) return nanoseconds;
  return core::device_status(device, nullptr, errors, code,
                             "the time between two events of " + te_fl::to_string(device));
}

Result<bool> is_capturing(const Device& device, void* stream) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const te_fl_device_desc& d = *use->desc;
  if (d.api->is_capturing == nullptr) return false;
  ErrorText errors;
  int32_t capturing = 0;
  const te_fl_status code =
      errors.call([&] { return d.api->is_capturing(d.self, stream, &capturing, errors.sink()); });
  if (code == TE_FL_OK) return capturing != 0;
  if (TE_FL_STATUS_CODE(code) == TE_FL_UNSUPPORTED) return false;  // no captures on this device
  return core::device_status(device, stream, errors, code,
                             "asking " + te_fl::to_string(device) + " whether it captures");
}

}  // namespace devices

Result<Stream> Stream::create(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(void* handle, devices::create_stream(device));
  return Stream(device, handle);
}

Stream::Stream(Stream&& other) noexcept
    : device_(std::exchange(other.device_, Device{})),
      handle_(std::exchange(other.handle_, nullptr)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  Stream old(std::move(other));
  std::swap(device_, old.device_);
  std::swap(handle_, old.handle_);
  return *this;
}

Stream::~Stream() { devices::destroy_stream(device_, handle_); }

Status Stream::synchronize() const { return devices::synchronize(device_, handle_); }

Status Stream::wait(const Event& event) const {
  if (event.get() == nullptr) {  // its device() is the host by default, so the message omits it
    return invalid_argument("the event is empty (default-made or moved from), so a stream of " +
                            to_string(device_) + " cannot wait for it; make it with Event::create");
  }
  return devices::wait_event(device_, event.device(), event.get(), handle_);
}

Result<Event> Event::create(const Device& device, bool timed) {
  TE_FL_ASSIGN_OR_RETURN(void* handle, devices::create_event(device, timed));
  return Event(device, handle);
}

Event::Event(Event&& other) noexcept
    : device_(std::exchange(other.device_, Device{})),
      handle_(std::exchange(other.handle_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  Event old(std::move(other));
  std::swap(device_, old.device_);
  std::swap(handle_, old.handle_);
  return *this;
}

Event::~Event() { devices::destroy_event(device_, handle_); }

Status Event::record(void* stream) { return devices::record_event(device_, handle_, stream); }

Status Event::synchronize() const { return devices::synchronize_event(device_, handle_); }

Result<bool> Event::done() const { return devices::query_event(device_, handle_); }

Result<uint64_t> Event::elapsed_since(const Event& start) const {
  if (start.device_ == device_) return devices::elapsed_time(device_, start.handle_, handle_);
  return invalid_argument("there is no time between an event of " + to_string(start.device_) +
                          " and one of " + to_string(device_) + ": they have no common clock");
}

}  // namespace te_fl
