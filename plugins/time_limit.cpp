#include "plugins/time_limit.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/base/lock_level.hpp"

namespace te_fl::plugins {
namespace {

struct Shared {
  std::function<te_fl_status()> call;
  core::Mutex mutex{core::LockLevel::kTimeLimit};
  std::condition_variable_any ended;
  bool done = false;
  te_fl_status status = TE_FL_OK;
};

}  // namespace

LimitedCall run_with_limit(std::function<te_fl_status()> call, std::chrono::milliseconds limit) {
  auto shared = std::make_shared<Shared>();
  shared->call = std::move(call);
  std::thread helper;
  try {
    helper = std::thread([shared] {
      const te_fl_status status = shared->call();
      const std::lock_guard lock(shared->mutex);
      shared->status = status;
      shared->done = true;
      shared->ended.notify_all();
    });
  } catch (const std::system_error&) {
    return {TE_FL_OUT_OF_MEMORY, false};
  }
  std::unique_lock lock(shared->mutex);
  const bool done = shared->ended.wait_for(lock, limit, [&] { return shared->done; });
  const te_fl_status status = shared->status;
  lock.unlock();
  if (!done) {
    helper.detach();
    return {TE_FL_TIMEOUT, true};
  }
  helper.join();  // its thread-local destructors may need the plugin's code
  return {status, false};
}

}  // namespace te_fl::plugins
