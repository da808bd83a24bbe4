#pragma once

#include <atomic>
#include <cstdint>

namespace te_fl::registry {

struct Implementation;
struct Plan;

// Dispatch's data about a call that the thread has made before: the implementation that runs the
// call, and its plan. The pointers are valid only for the same table and while no plan has been
// dropped.
struct KnownCall {
  uint64_t filled = 0;  // identifies the call; a new number invalidates the record
  uint64_t table = 0;   // Table::id; 0: the route is unknown
  // `capturing` and `policy` are in a different order than in Call. In the same order the compiler
  // could compare both with one wide load, and that load of Call would stall, because Call's
  // members were just written by narrower stores (no store forwarding).
  bool capturing = false;
  bool deterministic = false;
  uint32_t policy = 0;
  // The route's first implementation, if it may run such calls without staging; otherwise null.
  const Implementation* first = nullptr;
  std::atomic<uint64_t>* counter = nullptr;  // call counter of `first`

  const Plan* plan = nullptr;
  uint64_t plan_of = 0;          // Implementation::number of the plan's owner
  uint64_t plan_generation = 0;  // g_plan_generation at the look-up
  uint64_t plan_context = 0;     // PlanKey::context_word() of the call that the plan is for

  // The implementation whose supports() accepted exactly these arguments, addresses and numbers
  // included (R10).
  uint64_t accepted_by = 0;       // Implementation::number of the implementation; 0: none
  uint64_t accepted_context = 0;  // PlanKey::whole_context_word() of the accepted call

  void forget_plan() noexcept { plan = nullptr; }
  void forget_answer() noexcept { accepted_by = 0; }
};

}  // namespace te_fl::registry
