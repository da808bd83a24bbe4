#pragma once

#include <atomic>
#include <cstdint>

namespace te_fl::registry {

struct Implementation;
struct Plan;

// A thread's record of a call that it has made before: the implementation that serves it, and the
// plan. Its pointers are used only for the table, and while no plan has been dropped, since they
// were found.
struct KnownCall {
  uint64_t filled = 0;  // identifies the call; another number is another call
  uint64_t table = 0;   // Table::id; 0: nothing is known of the route
  // Not in the order of Call's: compared with it as one word, they would wait for its stores.
  bool capturing = false;
  bool deterministic = false;
  uint32_t policy = 0;
  // The route's first implementation, if it may serve such calls on the caller's own arguments;
  // else null.
  const Implementation* first = nullptr;
  std::atomic<uint64_t>* counter = nullptr;  // of `first`

  const Plan* plan = nullptr;
  uint64_t plan_of = 0;          // Implementation::number
  uint64_t plan_generation = 0;  // g_plan_generation when it was found
  uint64_t plan_context = 0;     // the key's word for the context besides the device

  // The implementation whose supports() accepted these very arguments, addresses and numbers
  // included (R10).
  uint64_t accepted_by = 0;       // Implementation::number; 0: nobody's
  uint64_t accepted_context = 0;  // PlanKey::whole_context_word()

  void forget_plan() noexcept { plan = nullptr; }
  void forget_answer() noexcept { accepted_by = 0; }
};

}  // namespace te_fl::registry
