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

// One published table; writers copy, change and replace it under one process-wide lock.
struct OpRegistry::Impl {
  using Table = registry::Table;
  using Match = std::function<bool(const registry::Implementation&)>;

  Impl();
  ~Impl();

  // For a thread inside an op (EpochGuard): valid until it leaves.
  const Table& table() const noexcept { return *current_.load(std::memory_order_acquire); }

  Status add(std::span<const te_fl_op_desc* const> descs, const std::string& owner,
             const std::string& vendor, const std::shared_ptr<void>& keep_alive);
  Result<OpId> declare(const te_fl_op_schema& schema);
  // NOT_FOUND if there is no such implementation.
  Status set_priority(std::string_view op, std::string_view impl_id, int32_t priority);
  // BUSY, and why, if what `match` picks cannot be removed now: from inside, or while a stream that
  // worked with a plan of R26 is being captured.
  Status check_removal(const Match& match) const;
  // Removes what `match` picks and waits until every thread that was inside has left, also if that
  // is nothing; returns how many. To be called after check_removal(): a capture that another thread
  // began meanwhile is waited for.
  size_t remove(const Match& match);
  // Takes a device out of service: from the next one on, calls on it are answered `why` until
  // restore(). One that is barred already stays so for its first reason.
  void bar(const Device& device, const Status& why);
  // The device is (again) there, perhaps another one: forgets that it was barred, and its
  // architecture.
  void restore(const Device& device);
  // Destroys the plans for a device that is barred. Waits for the threads that are inside.
  void drop_plans(const Device& device);
  // Architecture of a device, asked once.
  Result<uint32_t> arch(const Device& device);
  // Publishes the same table anew, so that all choices are made again. Takes no lock: its caller
  // holds it, and frees `dead` without it: tables that nobody can see any more.
  void publish_again(std::vector<std::unique_ptr<const Table>>& dead);
  // The surviving thread's view: locks of implementations that others held are free again.
  void after_fork_in_child() noexcept;

 private:
  struct Retired {
    std::unique_ptr<const Table> table;
    uint64_t epoch;
  };
  // These hold the lock.
  std::unique_ptr<Table> copy_table() const;
  void publish(std::unique_ptr<Table> next);
  void take_dead(uint64_t oldest, std::vector<std::unique_ptr<const Table>>& dead);
  // Takes the lock; frees tables that nobody can see any more, outside it. Where no memory is left
  // for that they stay until the next change.
  void reclaim() noexcept;
  // Takes the lock. In a child of a fork that found another thread holding implementations: nobody
  // who is here holds this one, which is in no published table.
  bool held_by_none_here(const registry::Implementation& impl) const;

  std::atomic<const Table*> current_{nullptr};
  std::deque<Retired> retired_;
  std::vector<std::pair<Device, uint32_t>> archs_;
};

namespace registry {

// Makes the choices of all registries be made again.
void choose_again();

}  // namespace registry
}  // namespace te_fl
