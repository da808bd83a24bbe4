#include "plugins/on_demand.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "core/base/fork.hpp"
#include "plugins/loader.hpp"
#include "plugins/records.hpp"

namespace te_fl::plugins::on_demand {
namespace {

struct Waiting {
  Manifest manifest;
  // Set by the thread that is loading the plugin, or that waits for its turn to load it (LoadTurn).
  // The entry stays until the load is complete, so that other threads wait for the same load.
  bool taken = false;
};

constinit core::ForkMutex waiting_mutex(core::LockLevel::kWaitingPlugins);
const core::ForkMutex::Registration waiting_registration(waiting_mutex);
std::atomic<bool> g_any{false};

std::vector<Waiting>& all() {  // never freed, like the records
  static auto* const list = new std::vector<Waiting>;
  return *list;
}

bool supports_device(const Manifest& manifest, const Device& device) {
  return std::any_of(manifest.load_for.begin(), manifest.load_for.end(), [&](const Device& d) {
    return d.type == device.type && d.provider == device.provider;
  });
}

std::vector<Manifest> those_for(const Device* device) {
  const std::lock_guard lock(waiting_mutex);
  std::vector<Manifest> list;
  for (const Waiting& w : all()) {
    if (device == nullptr || supports_device(w.manifest, *device)) list.push_back(w.manifest);
  }
  return list;
}

bool take(const std::string& name) {
  const std::lock_guard lock(waiting_mutex);
  for (Waiting& w : all()) {
    if (w.manifest.name == name && !w.taken) return w.taken = true;
  }
  return false;
}

}  // namespace

void wait(const Manifest& manifest) {
  const std::lock_guard lock(waiting_mutex);
  all().push_back({manifest});
  g_any.store(true, std::memory_order_release);
}

void forget(const std::string& name) {
  const std::lock_guard lock(waiting_mutex);
  std::erase_if(all(), [&](const Waiting& w) { return w.manifest.name == name; });
  g_any.store(!all().empty(), std::memory_order_release);
}

bool any() noexcept { return g_any.load(std::memory_order_acquire); }

void load(const Device* device, OpRegistry& registry) {
  if (!any()) return;
  for (const Manifest& manifest : those_for(device)) {
    bool mine = false;
    const LoadRequest request{manifest.library_path, manifest.path, &manifest, "", [&] {
                                mine = take(manifest.name);
                                return mine && records::active(manifest.name).instance == nullptr;
                              }};
    static_cast<void>(load_library(request, registry));  // it records and logs the result
    if (mine) forget(manifest.name);
  }
}

}  // namespace te_fl::plugins::on_demand
