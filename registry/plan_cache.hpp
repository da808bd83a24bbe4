#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/op/op_table.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"

namespace te_fl::registry {

struct Implementation;

// Advances when a plan is made: what Plan::last_used counts in.
extern std::atomic<uint64_t> g_plan_tick;

// A plan that prepare() made for one full signature. Destroys its plan.
struct Plan {
  Plan(const Implementation& owner, std::string signature, void* made)
      : impl(&owner), key(std::move(signature)), plan(made) {}
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // It is in use now, so others are dropped before it.
  void use() const noexcept;

  const Implementation* impl;
  std::string key;
  void* plan;
  mutable std::atomic<uint64_t> last_used{0};
  bool captured =
      false;  // a graph may hold what it owns: never dropped; PlanCache's lock guards it
};

// Plans of one implementation, shared by all threads, least recently used dropped beyond kMaxPlans,
// save those that a graph was captured with.
// A dropped plan is destroyed when no thread is inside an op that may use it.
class PlanCache {
 public:
  static constexpr size_t kMaxPlans = 256;
  explicit PlanCache(const Implementation& impl) : impl_(impl) {}

  // The plan for `key`, null if there is none (any more). One that is found while `capturing` is
  // kept from then on.
  const Plan* find(std::string_view key, bool capturing);
  // Adds a plan, or returns the one that another thread added first (and destroys this one).
  const Plan* insert(std::string key, void* plan);
  // Takes out the plans for a device that goes. They may be destroyed when no thread is inside an
  // op that entered before; their implementation is to be kept until then.
  std::vector<std::unique_ptr<Plan>> take(const Device& device);
  size_t size() const;

 private:
  struct Retired {
    std::unique_ptr<Plan> plan;
    uint64_t epoch;
  };
  void drop_oldest();

  const Implementation& impl_;
  std::unordered_map<std::string_view, std::unique_ptr<Plan>> plans_;
  std::deque<Retired> retired_;
};

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
  // What the key says of a context besides the device. A call that is captured gets the plan that
  // was made before capture, when all is allowed; and what is looked at besides changes no plan.
  static uint64_t context_word(const te_fl_context& context) noexcept {
    return (context.flags & ~uint32_t{TE_FL_CALL_CAPTURING | TE_FL_CALL_VALIDATE}) |
           uint64_t{context.rng.state != nullptr} << 32;
  }
  std::string_view text() const noexcept {
    return {reinterpret_cast<const char*>(words_.data()), words_.size() * sizeof(uint64_t)};
  }
  // Whether `key` is that of a call on `device`.
  static bool is_of(std::string_view key, const Device& device);

 private:
  void add_device(const te_fl_context& context);
  void add(uint64_t word) { words_.push_back(word); }
  void add_record(const te_fl_arg_desc& arg, const te_fl_saved* record);
  void add_text(std::string_view text);
  void add_sharing(const te_fl_op_schema& schema, const void* args);
  void add_list_sharing(const te_fl_op_schema& schema, const void* args, uint32_t out);

  std::vector<uint64_t> words_;
};

}  // namespace te_fl::registry
