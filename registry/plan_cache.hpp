#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/op/op_table.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

namespace te_fl::registry {

struct Implementation;

// Logical clock for Plan::last_used. Advances each time a plan is created.
extern std::atomic<uint64_t> g_plan_tick;

// A plan: data that an implementation's prepare() computed in advance for all calls of one
// signature (dtypes, shapes, strides, scalars; see PlanKey). ~Plan() calls the plugin's
// destroy_plan(). If the plan owns device memory, ~Plan() first waits until none of its streams is
// being captured and all calls that used the plan are complete (R26). Call check_captures() before
// dropping plans of a live implementation: ~Plan() then waits only for captures that another thread
// has begun since.
struct Plan {
  Plan(const Implementation& owner, std::string signature, const Device& of, void* made)
      : impl(&owner), key(std::move(signature)), device(of), plan(made) {
    for (auto& stream : recent) stream.store(&recent, std::memory_order_relaxed);
  }
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Marks the plan as recently used, which postpones its LRU eviction.
  void use() const noexcept;

  const Implementation* impl;
  std::string key;
  const Device device;
  void* plan;

  // For a plan that owns device memory: records that a call is about to enqueue work on `stream`.
  void used_on(void* stream) const {
    for (const auto& known : recent) {
      if (known.load(std::memory_order_relaxed) == stream) [[likely]]
        return;
    }
    note_stream(stream);
  }
  void note_stream(void* stream) const;

  // `streams`: the streams on which work that uses this plan was enqueued. PlanCache's lock guards
  // the vector. It may be read without the lock only while its streams are in queried_streams() and
  // no call can use the plan. `recent` caches some of the streams for look-ups without the lock; an
  // unused slot holds the address of `recent`, which is no stream.
  mutable std::vector<void*> streams;
  mutable std::array<std::atomic<const void*>, 4> recent;
  mutable std::atomic<uint64_t> last_used{0};
  // True if a call that used this plan was captured into a graph. The graph may access memory of
  // the plan, so the plan is never dropped, and each launch of a graph adds the launch's stream to
  // the plan's streams. PlanCache's lock guards this member.
  bool captured = false;
};

// The plans of one implementation, shared by all threads. Beyond kMaxPlans (kMaxMemoryPlans for
// plans that own device memory) the least recently used plan is dropped, except plans that a graph
// was captured with. A dropped plan is destroyed when no thread is inside an op that may use it
// and, if it owns device memory, when the events after its work are complete. This is checked
// whenever a plan is added.
class PlanCache {
 public:
  static constexpr size_t kMaxPlans = 2048;
  static constexpr size_t kMaxMemoryPlans = 256;
  explicit PlanCache(const Implementation& impl) : impl_(impl) {}

  // Finds the plan for `key`; null if there is none. With `capturing`, marks the plan as captured,
  // so that it is never dropped.
  const Plan* find(std::string_view key, bool capturing);
  // Adds a plan. If another thread has added one for this key, destroys `plan` and returns the
  // other.
  const Plan* insert(std::string key, const Device& device, void* plan);
  // Removes and returns the plans for a device that is being removed. The caller keeps the plans
  // and their implementation alive until every thread that is inside an op now has left it, and
  // then destroys the plans.
  std::vector<std::unique_ptr<Plan>> take(const Device& device);
  size_t size() const;

 private:
  enum class Work : uint8_t { kRuns, kDone, kUnknown };
  struct Retired {
    std::unique_ptr<Plan> plan;
    uint64_t epoch;
    bool busy = false;  // a thread is querying the plan's streams without the lock
    Work work = Work::kRuns;
    bool marked = false;          // true if the events are recorded
    std::vector<Event> behind{};  // one per stream, recorded when no call can use the plan
  };
  void drop_oldest();
  // Destroys dropped plans that no thread and no device work uses any more.
  void reap();
  // Asks the device whether all work that uses the retired plan is complete.
  static Work list_work(Retired& retired) noexcept;

  const Implementation& impl_;
  std::unordered_map<std::string_view, std::unique_ptr<Plan>> plans_;
  std::list<Retired> retired_;  // oldest first; addresses are stable
};

// Call before a stream is destroyed. Waits for the stream's work that uses plans with device
// memory, including plans that are in no cache any more. After this, no plan refers to the stream.
void leave_stream(const Device& device, void* stream);
// Call before a graph is launched on the stream. The graph may use every plan of the device that
// owns memory and was captured, so the stream is added to all of these.
void note_launch(const Device& device, void* stream);
// BUSY, with the names of the implementation and the device, if a stream of a matching plan is
// being captured. Considers plans that own device memory and for which `picks` returns true.
// `picks` runs under the plans' lock. Call this before dropping plans and before any other change.
Status check_captures(const std::function<bool(const Plan&)>& picks);

inline void Plan::use() const noexcept {
  // Writes only a new value, since threads share the cache line.
  const uint64_t now = g_plan_tick.load(std::memory_order_relaxed);
  if (last_used.load(std::memory_order_relaxed) != now) {
    last_used.store(now, std::memory_order_relaxed);
  }
}

// Changes when any plan is dropped. Plan pointers that threads cached before are then stale.
extern std::atomic<uint64_t> g_plan_generation;

// The key of a plan. It contains everything that prepare() may read of a call: dtypes, shapes,
// strides, alignment (up to 256 bytes), scaling modes, which data and scales each quantised tensor
// has, which outputs begin at the address of another argument, scalars, the te_fl_saved record, the
// device, context flags, and whether the RNG seed and offset are in device memory.
// tests/registry/plan_key_test.cpp lists every member of a call, and the reason for each member
// that the key omits.
class PlanKey {
 public:
  void set(const core::CompiledOp& op, const void* args, const te_fl_context& context);
  // Encodes the context's flags, and which RNG addresses it has, as one word of the key; the device
  // is encoded separately. Excludes the flags for capturing and validation: a captured call uses
  // the plan made before the capture, when every operation was allowed, and validation does not
  // change a plan.
  static uint64_t context_word(const te_fl_context& context) noexcept {
    return whole_context_word(context) & ~uint64_t{TE_FL_CALL_CAPTURING | TE_FL_CALL_VALIDATE};
  }
  // Like context_word(), with the flags for capturing and validation.
  static uint64_t whole_context_word(const te_fl_context& context) noexcept {
    return context.flags |
           (context.rng != nullptr && context.rng->seed_address != nullptr ? uint64_t{1} << 32
                                                                           : 0) |
           (context.rng != nullptr && context.rng->offset_address != nullptr ? uint64_t{1} << 33
                                                                             : 0);
  }
  std::string_view text() const noexcept {
    return {reinterpret_cast<const char*>(words_.data()), words_.size() * sizeof(uint64_t)};
  }
  // True if `key` belongs to a call on `device`.
  static bool belongs_to(std::string_view key, const Device& device);

 private:
  void add_device(const te_fl_context& context);
  void add(uint64_t word) { words_.push_back(word); }
  void add_sharing(const te_fl_op_schema& schema, const void* args);
  void add_list_sharing(const te_fl_op_schema& schema, const void* args, uint32_t out);

  std::vector<uint64_t> words_;
};

}  // namespace te_fl::registry
