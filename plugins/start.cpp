// Loads the plugins at the first op, or when a device that is not in the list is first looked up.

#include "plugins/start.hpp"

#include <atomic>
#include <exception>
#include <string>

#include "core/base/fork.hpp"
#include "core/device/device_list.hpp"
#include "plugins/builtins.hpp"
#include "plugins/discovery.hpp"
#include "plugins/load_turn.hpp"
#include "plugins/loader.hpp"
#include "plugins/on_demand.hpp"
#include "plugins/records.hpp"
#include "registry/epoch.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::plugins {

namespace {

enum StartState : int { kNotStarted, kStarting, kCutShort, kStarted };
constinit std::atomic<int> g_start{kNotStarted};
// True on the thread that runs start().
constinit thread_local bool t_starting = false;

// In a forked child: if another thread was loading plugins at the fork, marks the start as
// interrupted.
void forked_child() {
  if (g_start.load(std::memory_order_relaxed) == kStarting && !t_starting)
    g_start.store(kCutShort, std::memory_order_relaxed);
}
const core::ForkedChild repair(core::LockLevel::kWaitingPlugins, &forked_child);

// The hook for a look-up of a device that is not in the list, or of all devices. The first such
// look-up loads the plugins, like the first op.
void bring_devices(const Device* device) noexcept {
  if (started() && !on_demand::any()) return;
  if (t_starting || LoadTurn::mine() || registry::inside_op()) return;
  try {
    start();
    on_demand::load(device, OpRegistry::instance());
  } catch (const std::exception& e) {
    log::error(std::string("loading a device's plugin was cut short: ") + e.what());
  }
}

// Loads the built-in backends that are not loaded yet.
void load_builtins(OpRegistry& registry) {
  for (const Builtin& builtin : builtins()) load_builtin(builtin.name, builtin.query, registry);
}

void come_to_end() noexcept {
  t_starting = false;
  g_start.store(kStarted, std::memory_order_release);
  g_start.notify_all();
}

[[maybe_unused]] const bool hooked = [] {
  core::g_bring_devices.store(&bring_devices, std::memory_order_release);
  return true;
}();

}  // namespace

bool started() noexcept { return g_start.load(std::memory_order_acquire) == kStarted; }

void log_remarks() {
  for (const std::string& remark : environment::remarks()) {
    log::once(log::Level::kWarning, remark, remark);
  }
}

void start() {
  if (started() || t_starting || LoadTurn::mine()) return;
  int expected = kCutShort;
  if (g_start.compare_exchange_strong(expected, kStarting, std::memory_order_acq_rel)) {
    t_starting = true;
    load_builtins(OpRegistry::instance());
    log::warning(
        "this process was forked while its parent was loading plugins; those not loaded yet are "
        "missing");
    come_to_end();
    return;
  }
  expected = kNotStarted;
  if (!g_start.compare_exchange_strong(expected, kStarting, std::memory_order_acq_rel)) {
    g_start.wait(kStarting, std::memory_order_acquire);
    return;
  }
  t_starting = true;
  OpRegistry& registry = OpRegistry::instance();
  load_builtins(registry);
  discover(registry);
  log_remarks();
  come_to_end();
}

}  // namespace te_fl::plugins
