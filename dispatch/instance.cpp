// The process-wide OpManager.

#include <atomic>

#include "core/base/fork.hpp"
#include "dispatch/crash_report.hpp"
#include "dispatch/watch/watch.hpp"
#include "plugins/start.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl {

OpManager& OpManager::instance() {
  static constinit std::atomic<OpManager*> made{nullptr};  // never freed, like the registry
  OpManager& manager = core::made_once(made, [] { return new OpManager(OpRegistry::instance()); });
  static constinit std::atomic<bool> ready{false};
  if (!ready.load(std::memory_order_acquire)) [[unlikely]] {
    plugins::start();
    // Skipped while plugins are being loaded, since a plugin may have requested the manager.
    if (plugins::started() && !ready.exchange(true)) {
      dispatch::follow_crash_report_setting();
      dispatch::summarise_at_exit();
    }
  }
  return manager;
}

}  // namespace te_fl
