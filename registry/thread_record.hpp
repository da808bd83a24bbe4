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

// The number of calls that each implementation has run on one thread. Only that thread writes the
// counters; any thread may read them.
class CallCounters {
 public:
  static constexpr uint32_t kChunk = 256;
  static constexpr uint32_t kChunks = 256;
  using Chunk = std::array<std::atomic<uint64_t>, kChunk>;

  CallCounters() = default;
  ~CallCounters();
  CallCounters(const CallCounters&) = delete;
  CallCounters& operator=(const CallCounters&) = delete;
  // The thread's counter; its chunk is allocated at first use. Null if the index is too large.
  std::atomic<uint64_t>* at(uint32_t index);
  uint64_t read(uint32_t index) const noexcept;
  void clear(uint32_t index) noexcept;

 private:
  std::array<std::atomic<Chunk*>, kChunks> chunks_{};
};

struct Implementation;

// The function of an implementation that a thread is inside, for the report of a crash
// (dispatch/crash_report.hpp). Only the thread writes it; the crash handler of another thread may
// read it.
struct EnteredFunction {
  std::atomic<const Implementation*> impl{nullptr};  // null: none
  std::atomic<const void*> args{nullptr};
  std::atomic<const char*> name{nullptr};  // null: run()
};

// Dispatch's state for one thread. Created by the thread's first call, destroyed when the thread
// ends.
struct ThreadRecord {
  static constexpr uint32_t kEnteredDepth = 4;
  EpochSlot slot;
  // By the depth of nested ops. Ops below the last depth share its element, so that the one which
  // remains when such an op has ended is that of an outer op.
  std::array<EnteredFunction, kEnteredDepth> entered;
  uint32_t serial_locks = 0;  // number of SerialLocks that the thread holds
  core::CallMemo<KnownCall> calls;
  RouteCache routes;
  HandleCache handles;
  PlanKey plan_key;  // the key of the call in preparation
  CallCounters counters;
  HostArenas arenas;
};

extern constinit thread_local ThreadRecord* t_record [[gnu::tls_model("initial-exec")]];
ThreadRecord& make_thread_record();
inline ThreadRecord& this_thread() {
  return t_record != nullptr ? *t_record : make_thread_record();
}

// Allocates and frees indices for CallCounters. A reused index starts with all counts zero.
uint32_t allocate_counter();
void free_counter(uint32_t index);
// The sum over all threads, including ended ones.
uint64_t read_counter(uint32_t index);

// Calls f(record, context) for the threads that have records, at most 256 of them. For signal
// handlers: it takes no lock and does not allocate. A thread that ends meanwhile frees its record,
// so reading it may fault.
void for_each_visible_thread(void (*f)(const ThreadRecord& record, void* context), void* context);

// The number of live thread records, for tests.
size_t thread_record_count();

}  // namespace te_fl::registry
