#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "registry/table.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl {

// Holds one published table. Writers copy the table, change the copy and replace the table, under
// one lock for all registries.
struct OpRegistry::Impl {
  using Table = registry::Table;
  using Match = std::function<bool(const registry::Implementation&)>;

  Impl();
  ~Impl();

  // The current table. The calling thread must be inside an op (EpochGuard); the reference is valid
  // until it leaves.
  const Table& table() const noexcept { return *current_.load(std::memory_order_acquire); }

  Status add(std::span<const te_fl_op_desc* const> descs, const std::string& owner,
             const std::string& vendor, const std::shared_ptr<void>& keep_alive);
  Result<OpId> declare(const te_fl_op_schema& schema);
  // NOT_FOUND if there is no such implementation.
  Status set_priority(std::string_view op, std::string_view impl_id, int32_t priority);
  // BUSY with the reason if the implementations for which `match` is true cannot be removed now:
  // the calling thread is inside an op, or a stream that used a plan with device memory (R26) is
  // being captured.
  Status check_removal(const Match& match) const;
  // Removes the implementations for which `match` is true, and returns their number. Waits until
  // every thread that is inside an op or a device function has left it, even if nothing matches.
  // Call check_removal() first; this function also waits for the end of captures that another
  // thread has begun since.
  size_t remove(const Match& match);
  // Bars a device: later calls on it return `why` until restore(). A device that is barred already
  // keeps its first reason.
  void bar(const Device& device, const Status& why);
  // Un-bars a device that was added again, and forgets its architecture, since it may be a
  // different device.
  void restore(const Device& device);
  // Destroys the plans for a barred device. Waits for threads that are inside an op.
  void drop_plans(const Device& device);
  // The architecture of a device. Asks the device once and caches the answer.
  Result<uint32_t> arch(const Device& device);
  // Publishes a copy of the table, which invalidates all cached choices. The caller holds the lock,
  // and after releasing it destroys `dead`, which receives tables that no thread can see.
  void publish_again(std::vector<std::unique_ptr<const Table>>& dead);
  // In a forked child: releases the implementations' locks that other threads of the parent held.
  void after_fork_in_child() noexcept;

 private:
  struct Retired {
    std::unique_ptr<const Table> table;
    uint64_t epoch;
  };
  // The caller of the next three functions holds the lock.
  std::unique_ptr<Table> copy_table() const;
  void publish(std::unique_ptr<Table> next);
  void take_dead(uint64_t oldest, std::vector<std::unique_ptr<const Table>>& dead);
  // Takes the lock, and destroys tables that no thread can see after releasing it. If there is no
  // memory for that, they stay until the next change.
  void reclaim() noexcept;
  // Takes the lock. True in a forked child if only vanished threads of the parent can hold
  // references to this implementation, which is in no published table.
  bool held_by_none_here(const registry::Implementation& impl) const;

  std::atomic<const Table*> current_{nullptr};
  std::deque<Retired> retired_;
  std::vector<std::pair<Device, uint32_t>> archs_;
};

namespace registry {

// Invalidates the cached choices of all registries.
void choose_again();

}  // namespace registry
}  // namespace te_fl
