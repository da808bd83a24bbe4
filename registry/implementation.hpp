#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "registry/serial_lock.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/plugin.h"

namespace te_fl::registry {

class PlanCache;  // registry/plan_cache.hpp

// The cost of serving calls on copies in host memory; any thread adds to it.
struct StagedFigures {
  std::atomic<uint64_t> calls{0};
  std::atomic<uint64_t> bytes{0};    // copied, both ways
  std::atomic<uint64_t> copying{0};  // ns
  std::atomic<uint64_t> waiting{0};  // ns, for the stream's earlier work
  std::atomic<bool> logged{false};   // true once a log line has told of it
};

// One registered implementation. Immutable but for its lock, its plans and its figures; shared by
// the tables that list it, and destroyed when the last of them is: plans first, then keep_alive.
struct Implementation {
  Implementation() = default;
  ~Implementation();
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  std::shared_ptr<void> keep_alive;  // declared first: released after the plans
  te_fl_op_desc desc{};              // a copy; its strings are the ones below
  std::string op;
  std::string impl_id;
  std::string vendor;  // lower case
  std::string owner;
  const char* interned_id =
      nullptr;  // te_fl_saved.producer: valid forever, equal ids have equal addresses
  const char* interned_op = nullptr;
  Kind kind = Kind::kDefault;
  uint64_t number = 0;          // unique in the process, never given again
  uint32_t counter = 0;         // index of its call counters
  bool direct = false;          // run() needs nothing but a context: no scratch, plan or lock
  uint32_t later = 0;           // mask of the op's later arguments that it knows (R23)
  bool checks_support = false;  // supports() is to be called per call
  bool plan_memory = false;     // its plans own device memory (R26)
  bool not_in_place = false;    // the op may be called in place, which this does not do
  mutable SerialLock serial;
  mutable std::unique_ptr<PlanCache> plans;  // null unless prepare() is present
  mutable StagedFigures staged;
  // True once the log has looked at the first refusal, and at the first clean failure.
  mutable std::atomic<bool> refusal_logged{false}, failure_logged{false};
};

// Called as an implementation with stream state goes (R27), which is freed then. Set by dispatch.
extern std::atomic<void (*)(uint64_t number)> g_stream_state_goes;

// A string with the same text and an address that lasts as long as the process.
const char* intern_string(std::string_view text);

}  // namespace te_fl::registry
