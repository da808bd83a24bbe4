// The list of devices and the names of providers. Readers take no lock and follow one atomic
// pointer, so a forked child can use the list whatever other threads were doing at the fork.
#include "core/device/device_list.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>

#include "core/base/abi_struct.hpp"
#include "core/base/best_effort.hpp"
#include "core/base/fork.hpp"
#include "core/base/text.hpp"
#include "core/device/host_device.hpp"
#include "core/device/inside.hpp"
#include "core/device/installed_allocators.hpp"

namespace te_fl::core {
namespace {

constinit ForkMutex list_mutex(LockLevel::kDeviceList);
const ForkMutex::Registration list_registration(list_mutex);
constinit ForkMutex name_mutex(LockLevel::kProviderNames);
const ForkMutex::Registration name_registration(name_mutex);

using List = std::vector<DeviceEntry*>;

// Lists and entries are never freed: readers hold plain pointers, and devices are rarely added or
// removed.
std::atomic<const List*> current{nullptr};

const List& devices_now() {
  const List* list = current.load(std::memory_order_acquire);
  if (list != nullptr) return *list;
  static const List* const first = new List{new DeviceEntry{Device{}, host_device(), "host"}};
  const List* expected = nullptr;
  current.compare_exchange_strong(expected, first, std::memory_order_acq_rel);
  return *current.load(std::memory_order_acquire);
}

// Initialises the first list while the library is loaded. With lazy initialisation, a child forked
// during it would wait for a thread that it does not have.
[[maybe_unused]] const List& first_list = devices_now();

// Makes `next` the current list. The caller holds the lock. Earlier lists and their entries are
// kept.
void publish(std::unique_ptr<const List> next) {
  static auto* const lists = new std::vector<std::unique_ptr<const List>>;
  lists->push_back(std::move(next));
  current.store(lists->back().get(), std::memory_order_release);
}

std::vector<std::string>& provider_names() {  // index: id - 1
  static auto* const names = new std::vector<std::string>;
  return *names;
}

Status check_desc(const te_fl_device_desc* desc) {
  if (desc == nullptr) return invalid_argument("a device descriptor is null");
  if (!plausible_size(desc->struct_size, kLeastDeviceDesc)) {
    return invalid_argument("a device descriptor has " +
                            size_text(desc->struct_size, kLeastDeviceDesc));
  }
  if (desc->device.index < 0) {
    return invalid_argument("a device descriptor's index is " + std::to_string(desc->device.index) +
                            ", must not be negative");
  }
  if (desc->device.type == TE_FL_DEVICE_EXT &&
      (desc->provider == nullptr || desc->provider[0] == '\0')) {
    return invalid_argument("a kDLExtDev device must name its provider (rule R18)");
  }
  if (desc->api == nullptr) {
    return invalid_argument("a device's function table is missing (rule R4)");
  }
  if (!plausible_size(desc->api->struct_size, kLeastDeviceApi)) {
    return invalid_argument("a device's function table has " +
                            size_text(desc->api->struct_size, kLeastDeviceApi));
  }
  const te_fl_device_api& api = *desc->api;
  if (!api.allocate || !api.free || !api.copy || !api.fill || !api.synchronize || !api.properties) {
    return invalid_argument(
        "a device's function table lacks a required function: allocate, free, copy, fill, "
        "synchronize and "
        "properties may not be NULL (rule R4)");
  }
  return {};
}

}  // namespace

namespace {

DeviceEntry* find_entry(const List& list, const Device& device) noexcept {
  for (DeviceEntry* entry : list) {
    if (entry->device == device) return entry;
  }
  return nullptr;
}

// The entry of a device that may be taken out of the list. Takes no lock: another thread may take
// the device out of the list at any moment, but the returned entry is never freed.
Result<DeviceEntry*> removable_entry(const Device& device) {
  const List& now = devices_now();
  DeviceEntry* entry = find_entry(now, device);
  if (entry == nullptr) return not_found("there is no device " + to_string(device));
  if (entry == now.front()) return failed_precondition("the host cannot be removed");
  return entry;
}

void bring_devices(const Device* device) noexcept {
  if (auto* bring = g_bring_devices.load(std::memory_order_acquire)) bring(device);
}

}  // namespace

DeviceEntry* find_device(const Device& device) noexcept {
  const List& list = devices_now();
  if (DeviceEntry* entry = find_entry(list, device)) return entry;
  if (!device.is_host()) {
    bring_devices(&device);
    if (DeviceEntry* entry = find_entry(devices_now(), device)) return entry;
    auto* const make = g_make_device.load(std::memory_order_acquire);
    return make != nullptr && make(device) ? find_entry(devices_now(), device) : nullptr;
  }
  // Pinned memory is host memory even if the plugin of its device is not loaded.
  return device.type != TE_FL_DEVICE_CPU || device.index == 0 ? list.front() : nullptr;
}

std::vector<Device> present_devices() {
  std::vector<Device> result;
  for (const DeviceEntry* entry : devices_now()) result.push_back(entry->device);
  return result;
}

std::vector<Device> ready_devices() {
  const Device host{};
  bring_devices(&host);
  return present_devices();
}

namespace {

// Publishes a list without `entry`. The caller holds the lock.
void unlist(const DeviceEntry* entry) {
  auto next = std::make_unique<List>(devices_now());
  std::erase(*next, entry);
  publish(std::move(next));
}

bool is_listed(const DeviceEntry* entry) {
  const List& now = devices_now();
  return std::find(now.begin(), now.end(), entry) != now.end();
}

// The reason for which a device was lost. Reasons are few and are read without a lock, so they are
// never freed; the linked list keeps them reachable for leak checkers.
struct KeptReason {
  std::string text;
  KeptReason* next;
};
std::atomic<KeptReason*> g_reasons{nullptr};

}  // namespace

bool DeviceEntry::lose(const std::string& reason) {
  if (lost() != nullptr) return false;
  auto* kept = new KeptReason{reason, g_reasons.load(std::memory_order_relaxed)};
  while (!g_reasons.compare_exchange_weak(kept->next, kept, std::memory_order_acq_rel)) {
  }
  const std::string* none = nullptr;
  return lost_.compare_exchange_strong(none, &kept->text, std::memory_order_acq_rel);
}

void DeviceEntry::last_gone() noexcept {
  drop_allocator(device);
  for (bool listed = true; listed;) {
    try {
      const std::lock_guard lock(list_mutex);
      unlist(this);
      listed = false;
    } catch (...) {  // The plugin may be unloaded only after its device has left the list, so retry
                     // until there is memory.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // Moves the function out, so that its captures are destroyed after the call. The entry itself is
  // never freed.
  const std::function<void()> gone = std::exchange(on_gone_, nullptr);
  if (gone) gone();
}

void lose_device(const Device& device, const std::string& reason) {
  DeviceEntry* entry = find_device(device);
  if (entry == nullptr || device.is_host()) return;
  if (!entry->lose(reason)) return;
  if (auto* tell = g_device_hooks.on_lost.load(std::memory_order_acquire)) tell(device, reason);
}

void find_device_again(const Device& device) noexcept {
  if (DeviceEntry* entry = find_device(device)) entry->found_again();
}

Status lost_device(const Device& device, const std::string& reason) {
  return Status(StatusCode::kDeviceLost,
                "device " + to_string(device) + " is lost since " + reason +
                    "; no op runs on it any more: restart the process, or use another device");
}

Status withdrawn_device(const Device& device) {
  return Status(StatusCode::kUnsupported,
                "device " + to_string(device) +
                    " was withdrawn: no op runs on it any more; load its plugin again, or copy the "
                    "tensors that are left to another device (Tensor::to)");
}

Status absent_device(const Device& device) {
  std::vector<std::string> names;
  for (const Device& d : devices::list()) names.push_back(to_string(d));
  return not_found("there is no device " + to_string(device) + "; present: " + join(names) +
                   "; `te-fl doctor` says what is missing");
}

void bar_device(const Device& device) {
  DeviceEntry* entry = find_device(device);
  if (entry == nullptr || device.is_host()) return;
  entry->bar();
  if (auto* tell = g_device_hooks.on_barred.load(std::memory_order_acquire)) tell(device);
}

Status check_leave(const Device& device) {
  auto* ask = g_device_hooks.check_removal.load(std::memory_order_acquire);
  return ask != nullptr ? ask(device) : Status();
}

void leave_device(const Device& device) {
  if (auto* tell = g_device_hooks.on_removed.load(std::memory_order_acquire)) tell(device);
  if (auto* release = g_device_hooks.release_cached.load(std::memory_order_acquire))
    release(device);
}

int64_t held_on(const Device& device) {
  auto* ask = g_device_hooks.count_cached.load(std::memory_order_acquire);
  return ask != nullptr ? ask(device) : 0;
}

Status retire_device(const Device& device, std::function<void()> gone) {
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, removable_entry(device));
  leave_device(device);
  entry->retire(std::move(gone));
  return {};
}

}  // namespace te_fl::core

namespace te_fl::devices {

using core::DeviceEntry;

std::vector<Device> list() {
  core::bring_devices(nullptr);
  return core::present_devices();
}

Result<const te_fl_device_desc*> find(const Device& device) {
  if (const DeviceEntry* entry = core::find_device(device)) return entry->desc;
  return core::absent_device(device);
}

namespace {

// Does the work of add() except the call of the on_added hook.
Result<Device> enlist(const te_fl_device_desc* desc) {
  TE_FL_RETURN_IF_ERROR(core::check_desc(desc));
  Device device{desc->device.type, desc->device.index, 0};
  std::string provider = desc->provider != nullptr ? desc->provider : "";
  if (device.type == TE_FL_DEVICE_EXT) device.provider = intern_provider(provider);
  if (device.provider > core::kMaxProvider) {
    return Status(StatusCode::kUnsupported, "more than " + std::to_string(core::kMaxProvider) +
                                                " names of providers and plugins are known");
  }
  if (provider.empty()) provider = te_fl::to_string({device.type, 0, 0});

  const std::lock_guard lock(core::list_mutex);
  const core::List& now = core::devices_now();
  for (const DeviceEntry* entry : now) {
    const bool taken = entry->device == device;
    const bool foreign = device.type != TE_FL_DEVICE_EXT && entry->device.type == device.type &&
                         entry->provider != provider;
    if (!taken && !foreign) continue;
    return Status(StatusCode::kAlreadyExists,
                  "device " + te_fl::to_string(device) + " of provider '" + provider +
                      "' cannot be added: provider '" + entry->provider + "' already has " +
                      te_fl::to_string(entry->device) +
                      (taken ? "" : ", and a DLPack device type has one provider (rule R18)"));
  }
  auto next = std::make_unique<core::List>();
  next->reserve(now.size() + 1);
  next->assign(now.begin(), now.end());
  next->push_back(new DeviceEntry{device, desc, std::move(provider)});
  core::publish(std::move(next));
  return device;
}

}  // namespace

Result<Device> add(const te_fl_device_desc* desc) {
  TE_FL_ASSIGN_OR_RETURN(const Device device, enlist(desc));
  // Called without the lock, since the hook looks the device up.
  try {
    if (auto* tell = core::g_device_hooks.on_added.load(std::memory_order_acquire)) tell(device);
  } catch (...) {  // no memory for the hook's work: the device is removed again
    const std::lock_guard lock(core::list_mutex);
    core::unlist(core::find_entry(core::devices_now(), device));
    throw;
  }
  return device;
}

void set_maker(bool (*make)(const Device& device) noexcept) {
  core::g_make_device.store(make, std::memory_order_release);
}

Status remove(const Device& device) {
  if (core::is_inside()) {
    return Status(StatusCode::kBusy,
                  "device " + te_fl::to_string(device) +
                      " cannot be removed from inside an op or a function of a device: this thread "
                      "would wait for itself; remove it after the call returned");
  }
  TE_FL_RETURN_IF_ERROR(
      core::check_leave(device).wrap("device " + te_fl::to_string(device) + " cannot be removed"));
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, core::removable_entry(device));
  // Closes the device before counting, so that no allocation happens between the count and the new
  // list. From then on the objects that te-fl holds can only decrease; if their number changed, the
  // comparison counted an object of another owner.
  const int64_t held = core::held_on(device);
  bool closed = entry->close(held);
  try {
    if (closed && core::held_on(device) != held) {
      entry->reopen();
      closed = false;
    }
  } catch (...) {  // no memory for the second count
    entry->reopen();
    throw;
  }
  if (!closed) {
    const int64_t others = std::max<int64_t>(entry->live() - core::held_on(device), 1);
    return Status(StatusCode::kBusy, "device " + te_fl::to_string(device) + " has " +
                                         std::to_string(others) +
                                         " live allocations, streams or events; free them first");
  }
  try {
    core::bar_device(device);
    core::wait_outside();  // ops on foreign memory hold no object of the device, so wait for them
                           // here
    core::leave_device(device);
  } catch (...) {  // no memory: the device stays in the list
    entry->unbar();
    entry->reopen();
    if (auto* tell = core::g_device_hooks.on_added.load(std::memory_order_acquire))
      core::best_effort([&] { tell(device); });
    throw;
  }
  entry->release();
  // Another thread may have pinned the entry for a moment. In that case that thread removes the
  // entry from the list when it releases the pin.
  while (core::is_listed(entry)) std::this_thread::yield();
  return {};
}

int64_t live_objects(const Device& device) {
  const DeviceEntry* entry = core::find_device(device);
  return entry != nullptr ? entry->live() : 0;
}

uint32_t intern_provider(std::string_view name) {
  if (name.empty()) return 0;
  const std::string word = core::lower(name);
  const std::lock_guard lock(core::name_mutex);
  auto& names = core::provider_names();
  const auto at = std::find(names.begin(), names.end(), word);
  if (at != names.end()) return static_cast<uint32_t>(at - names.begin()) + 1;
  names.push_back(word);
  return static_cast<uint32_t>(names.size());
}

std::string provider_name(uint32_t id) {
  if (id == 0) return "";
  const std::lock_guard lock(core::name_mutex);
  const auto& names = core::provider_names();
  return id <= names.size() ? names[id - 1] : "provider" + std::to_string(id);
}

}  // namespace te_fl::devices
