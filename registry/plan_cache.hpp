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

// Advances when a plan is made: what Plan::last_used counts in.
extern std::atomic<uint64_t> g_plan_tick;

// A plan that prepare() made for one full signature. Destroys its plan; if it owns device memory,
// then when no stream that worked with it is being captured any more and the work of every call
// that had it is done (R26). Whoever lets plans of living implementations go asks check_captures()
// before, so that only a capture which another thread began since is waited for.
struct Plan {
  Plan(const Implementation& owner, std::string signature, const Device& of, void* made)
      : impl(&owner), key(std::move(signature)), device(of), plan(made) {
    for (auto& stream : recent) stream.store(&recent, std::memory_order_relaxed);
  }
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // It is in use now, so others are dropped before it.
  void use() const noexcept;

  const Implementation* impl;
  std::string key;
  const Device device;
  void* plan;

  // Notes, for a plan that owns device memory, that a call is about to enqueue work on `stream`.
  void used_on(void* stream) const {
    for (const auto& known : recent) {
      if (known.load(std::memory_order_relaxed) == stream) [[likely]]
        return;
    }
    note_stream(stream);
  }
  void note_stream(void* stream) const;

  // Streams that have work of it. PlanCache's lock guards them; they are read without it while they
  // are asked about and nobody can call with the plan. Some are in `recent`, too, for those who ask
  // without the lock; a place there that is empty has the place's own address.
  mutable std::vector<void*> streams;
  mutable std::array<std::atomic<const void*>, 4> recent;
  mutable std::atomic<uint64_t> last_used{0};
  // A graph may hold what it owns, so it is never dropped, and works with it on every stream that a
  // graph is launched on. PlanCache's lock guards it.
  bool captured = false;
};

// Plans of one implementation, shared by all threads, least recently used dropped beyond kMaxPlans,
// or kMaxMemoryPlans if they own device memory, save those that a graph was captured with.
// A dropped plan is destroyed when no thread is inside an op that may use it, and, if it owns
// device memory, when the events behind its work are done. These are looked at when a plan is
// added.
class PlanCache {
 public:
  static constexpr size_t kMaxPlans = 2048;
  static constexpr size_t kMaxMemoryPlans = 256;
  explicit PlanCache(const Implementation& impl) : impl_(impl) {}

  // The plan for `key`, null if there is none (any more). One that is found while `capturing` is
  // kept from then on.
  const Plan* find(std::string_view key, bool capturing);
  // Adds a plan, or returns the one that another thread added first (and destroys this one).
  const Plan* insert(std::string key, const Device& device, void* plan);
  // Takes out the plans for a device that goes. They may be destroyed when no thread is inside an
  // op that entered before; their implementation is to be kept until then.
  std::vector<std::unique_ptr<Plan>> take(const Device& device);
  size_t size() const;

 private:
  enum class Work : uint8_t { kRuns, kDone, kUnknown };
  struct Retired {
    std::unique_ptr<Plan> plan;
    uint64_t epoch;
    bool busy = false;  // a thread looks at its streams, without the lock
    Work work = Work::kRuns;
    bool marked = false;          // the events are recorded
    std::vector<Event> behind{};  // on each of its streams, once nobody can enqueue with it
  };
  void drop_oldest();
  // Destroys what has been dropped and is used by nobody any more, here or on the device.
  void reap();
  // Asks the device what there still is of the plan's work.
  static Work work_of(Retired& retired) noexcept;

  const Implementation& impl_;
  std::unordered_map<std::string_view, std::unique_ptr<Plan>> plans_;
  std::list<Retired> retired_;  // the oldest first; elements stay where they are
};

// A stream is about to go: what it has of plans that own device memory is waited for, of all plans
// that there are, also of those that are in no cache any more. Then none of them names it.
void leave_stream(const Device& device, void* stream);
// A graph is about to be launched on the stream: it may work with every plan of the device that
// owns memory and that a call was captured with, so the stream is one of theirs from now on.
void note_launch(const Device& device, void* stream);
// BUSY, naming the implementation and the device, if a plan that owns device memory and that
// `picks` says true of has a stream that is being captured. `picks` is called under the lock of the
// plans. To be asked before plans are let go, while nothing has been changed.
Status check_captures(const std::function<bool(const Plan&)>& picks);

inline void Plan::use() const noexcept {
  // Written only when it says something new: threads share it.
  const uint64_t now = g_plan_tick.load(std::memory_order_relaxed);
  if (last_used.load(std::memory_order_relaxed) != now) {
    last_used.store(now, std::memory_order_relaxed);
  }
}

// Changes when any plan is dropped: pointers that threads keep are then stale.
extern std::atomic<uint64_t> g_plan_generation;

// Everything that prepare() may read of a call: dtypes, shapes, strides, alignment (up to 256
// bytes), scaling modes, which parts are present, which outputs begin where another argument does,
// scalars, the saved record, device, context flags, and whether the random state is the device's.
// tests/registry/plan_key_test.cpp lists every member, and why the others are left out.
class PlanKey {
 public:
  void set(const core::CompiledOp& op, const void* args, const te_fl_context& context);
  // The word by which a key tells contexts apart, the device aside. A call that is captured gets
  // the plan that was made before capture, when all is allowed; and what is looked at besides
  // changes no plan.
  static uint64_t context_word(const te_fl_context& context) noexcept {
    return whole_context_word(context) & ~uint64_t{TE_FL_CALL_CAPTURING | TE_FL_CALL_VALIDATE};
  }
  // As context_word(), but tells a call that is being captured or validated from one that is not.
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
  // True if `key` is that of a call on `device`.
  static bool is_of(std::string_view key, const Device& device);

 private:
  void add_device(const te_fl_context& context);
  void add(uint64_t word) { words_.push_back(word); }
  void add_sharing(const te_fl_op_schema& schema, const void* args);
  void add_list_sharing(const te_fl_op_schema& schema, const void* args, uint32_t out);

  std::vector<uint64_t> words_;
};

}  // namespace te_fl::registry
