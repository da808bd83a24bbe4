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

class PlanCache;  // defined in registry/plan_cache.hpp

// Statistics about staged calls: calls with tensors on a device that ran on copies in host memory.
// Any thread may update them.
struct StagedFigures {
  std::atomic<uint64_t> calls{0};
  std::atomic<uint64_t> bytes{0};    // copied in both directions
  std::atomic<uint64_t> copying{0};  // ns spent in copies
  std::atomic<uint64_t> waiting{0};  // ns spent waiting for earlier work of the stream
  std::atomic<bool> logged{false};   // a log line has reported such calls
};

// A registered implementation. Immutable except for its lock, plans and statistics. Shared by the
// tables that contain it; the last owner destroys its plans first, then keep_alive.
struct Implementation {
  Implementation() = default;
  ~Implementation();
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  std::shared_ptr<void> keep_alive;  // declared first, so it is released after the plans
  te_fl_op_desc desc{};              // a copy whose strings are the members below
  std::string op;
  std::string impl_id;
  std::string vendor;  // in lower case
  std::string owner;
  const char* interned_id = nullptr;  // te_fl_saved.producer: lives as long as the process; equal
                                      // ids have equal addresses
  const char* interned_op = nullptr;
  Kind kind = Kind::kDefault;
  uint64_t number = 0;          // unique in the process, never reused
  uint32_t counter = 0;         // index of its call counters
  bool direct = false;          // run() needs neither scratch memory nor a plan nor a lock
  uint32_t later = 0;           // mask of the later-added arguments that it supports (R23)
  bool checks_support = false;  // supports() must be called for each call
  bool plan_memory = false;     // its plans own device memory (R26)
  bool not_in_place = false;    // the op may run in place, but this implementation may not
  mutable SerialLock serial;
  mutable std::unique_ptr<PlanCache> plans;  // null if prepare() is absent
  mutable StagedFigures staged;
  // Set when dispatch falls back after this implementation's first refusal, or first clean failure,
  // so that later ones are not considered for the log.
  mutable std::atomic<bool> refusal_logged{false}, failure_logged{false};
};

// Hook set by dispatch: called when an implementation with stream state (R27) is destroyed; frees
// that state.
extern std::atomic<void (*)(uint64_t number)> g_stream_state_goes;

// Returns a string with the same text whose address is valid for the life of the process.
const char* intern_string(std::string_view text);

}  // namespace te_fl::registry
