#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/op/call_memo.hpp"
#include "registry/epoch.hpp"
#include "registry/known_call.hpp"
#include "registry/plan_cache.hpp"
#include "registry/route_cache.hpp"
#include "registry/workspace.hpp"

namespace te_fl::registry {

// Calls served, per implementation; written by one thread, read by any.
class CallCounters {
 public:
  static constexpr uint32_t kChunk = 256;
  static constexpr uint32_t kChunks = 256;
  using Chunk = std::array<std::atomic<uint64_t>, kChunk>;

  CallCounters() = default;
  ~CallCounters();
  CallCounters(const CallCounters&) = delete;
  CallCounters& operator=(const CallCounters&) = delete;
  // The thread's counter; allocates its chunk at first use. Null if the index is beyond what is
  // counted.
  std::atomic<uint64_t>* at(uint32_t index);
  uint64_t read(uint32_t index) const noexcept;
  void clear(uint32_t index) noexcept;

 private:
  std::array<std::atomic<Chunk*>, kChunks> chunks_{};
};

// The state that dispatch keeps for one thread. Made by the thread's first call, reclaimed when the
// thread ends.
struct ThreadRecord {
  EpochSlot slot;
  uint32_t serial_locks = 0;  // held by the thread
  core::CallMemo<KnownCall> calls;
  RouteCache routes;
  HandleCache handles;
  PlanKey plan_key;  // of the call that is being made ready
  CallCounters counters;
  HostArenas arenas;
};

extern constinit thread_local ThreadRecord* t_record [[gnu::tls_model("initial-exec")]];
ThreadRecord& make_thread_record();
inline ThreadRecord& this_thread() {
  return t_record != nullptr ? *t_record : make_thread_record();
}

// Indices into CallCounters. A freed index is handed out again with all its counts zero.
uint32_t allocate_counter();
void free_counter(uint32_t index);
// Sum over all threads, ended ones included.
uint64_t read_counter(uint32_t index);

// Thread records alive; for tests.
size_t thread_record_count();

}  // namespace te_fl::registry
