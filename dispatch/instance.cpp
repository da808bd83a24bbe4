// The process's manager, and what its first use starts.

#include <atomic>
#include <thread>

#include "core/base/fork.hpp"
#include "core/device/device_list.hpp"
#include "dispatch/watch/summary.hpp"
#include "plugins/builtins.hpp"
#include "plugins/discovery.hpp"
#include "plugins/loader.hpp"
#include "plugins/on_demand.hpp"
#include "plugins/records.hpp"
#include "registry/epoch.hpp"
#include "registry/fork_child.hpp"
#include "registry/remarks.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl {
namespace {

enum Start : int { kNotStarted, kStarting, kReady };

std::atomic<int> g_start{kNotStarted};
std::atomic<bool> g_cut_short{false};
// Set by the thread that starts: what it loads may ask for the manager.
constinit thread_local bool t_starting = false;

void start() {
  int expected = kNotStarted;
  if (!g_start.compare_exchange_strong(expected, kStarting, std::memory_order_acq_rel)) {
    if (t_starting) return;
    g_start.wait(kStarting, std::memory_order_acquire);
    return;
  }
  t_starting = true;
  OpRegistry& registry = OpRegistry::instance();
  for (const registry::Builtin& builtin : registry::builtins()) {
    plugins::load_builtin(builtin.name, builtin.query, registry);
  }
  plugins::discover(registry);
  registry::log_remarks();
  te_fl::registry::summarise_at_exit();
  t_starting = false;
  g_start.store(kReady, std::memory_order_release);
  g_start.notify_all();
}

// Somebody looks for a device that is not there, or for all: the first such look starts the
// manager, as an op would.
void bring_devices(const Device* device) noexcept {
  if (g_start.load(std::memory_order_acquire) == kReady && !plugins::on_demand::any()) return;
  if (t_starting || plugins::LoadTurn::mine() || registry::inside_op()) return;
  try {
    plugins::on_demand::load(device, OpManager::instance().registry());
  } catch (const std::exception& e) {
    log::error(std::string("loading a device's plugin was cut short: ") + e.what());
  }
}

[[maybe_unused]] const bool hooked = [] {
  core::g_bring_devices.store(&bring_devices, std::memory_order_release);
  return true;
}();

}  // namespace

namespace registry {

void log_remarks() {
  for (const std::string& remark : environment::remarks()) {
    log::once(log::Level::kWarning, remark, remark);
  }
}

void instance_after_fork_in_child() {
  // Another thread was loading plugins when the process forked; it is not here to go on.
  if (g_start.load(std::memory_order_relaxed) != kStarting || t_starting) return;
  g_start.store(kReady, std::memory_order_relaxed);
  g_cut_short.store(true, std::memory_order_relaxed);
}

}  // namespace registry

OpManager& OpManager::instance() {
  static constinit std::atomic<OpManager*> made{nullptr};  // never freed, like the registry
  OpManager& manager = core::made_once(made, [] { return new OpManager(OpRegistry::instance()); });
  if (g_start.load(std::memory_order_acquire) != kReady) [[unlikely]]
    start();
  if (g_cut_short.load(std::memory_order_relaxed)) [[unlikely]] {
    if (g_cut_short.exchange(false)) {
      log::warning(
          "this process was forked while its parent was loading plugins; those not loaded yet are "
          "missing");
    }
  }
  return manager;
}

}  // namespace te_fl
