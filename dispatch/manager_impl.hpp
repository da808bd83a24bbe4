#pragma once

#include <atomic>
#include <cstdint>
#include <map>

#include "core/base/process_end.hpp"
#include "core/base/settings.hpp"
#include "dispatch/call.hpp"
#include "dispatch/staging/staging_pool.hpp"
#include "registry/registry_impl.hpp"
#include "registry/workspace.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl {
namespace dispatch {

// The number of calls that an implementation has executed.
struct UsageCounts {
  uint64_t calls = 0;
  uint64_t staged_calls = 0;
  uint64_t staged_bytes = 0;
  uint64_t copying_nanoseconds = 0;
  uint64_t waiting_nanoseconds = 0;
};

}  // namespace dispatch

struct OpManager::Impl {
  explicit Impl(OpRegistry& r);
  ~Impl();

  enum Switch : uint64_t { kSync = 1, kValidate = 2, kVerify = 4, kTrace = 8 };
  static constexpr int kSwitchBits = 4;
  // The flags for TE_FL_SYNC, TE_FL_VALIDATE, TE_FL_VERIFY and TE_FL_TRACE. Cached until a setting
  // of the environment changes.
  uint64_t switches() {
    const uint64_t word = switch_word.load(std::memory_order_relaxed);
    if (word >> kSwitchBits == core::g_generation.load(std::memory_order_acquire))
      return word & ((1u << kSwitchBits) - 1);
    return read_switches();
  }
  uint64_t read_switches();

  OpRegistry& registry;
  OpRegistry::Impl& table_owner;
  registry::DeviceArenas arenas;
  dispatch::StagingPool staging;
  std::atomic<uint64_t> switch_word{~uint64_t{0}};       // generation << kSwitchBits | Switch
  std::map<uint64_t, dispatch::UsageCounts> usage_base;  // at the reset, by implementation number
};

// The constant part of a prepared handle. The chosen route is cached per thread.
struct PreparedOp::Rep {
  OpManager::Impl* manager;
  OpId op;
  core::Signature signature;
  uint64_t number;  // unique in the process
};

namespace dispatch {

// Marks the thread as inside te-fl, finds the op's row in the table and returns f(call). T is
// Status or a Result.
template <class T, class F>
T with_call(OpManager::Impl& manager, OpId op, const void* args, const CallOptions& options,
            F&& f) {
  ThreadRecord& thread = registry::this_thread();
  const EpochGuard guard(thread.slot);
  if (core::ends_elsewhere()) [[unlikely]]
    return core::process_ends("no op is called");
  const Table& table = manager.table_owner.table();
  const registry::OpRow* const row = table.row(op.index);
  if (row == nullptr) [[unlikely]]
    return no_such_op(table, op);
  Call call{manager, thread, table, *row, op.index, args, options};
  return f(call);
}

}  // namespace dispatch
}  // namespace te_fl
