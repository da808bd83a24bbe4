#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/op/op_table.hpp"
#include "te_fl/status.hpp"

// Hooks by which dispatch reports every collective call to comm/, an upper layer that owns the
// communicators.
namespace te_fl::core {

struct CollectiveCall {
  const CompiledOp& op;
  const void* args;
  const te_fl_communicator& communicator;
  void* stream;
  bool capturing;
};

// Data of comm/ about one call, between begin() and end().
struct CollectiveTicket {
  std::shared_ptr<void> communicator;  // null: not a communicator of comm/
  bool transfer = false;               // a point-to-point transfer
  uint32_t policy = 0;                 // the call's policy; before begin(): the thread's policy
};

// The functions of comm/. They run on the calling thread.
struct CollectiveKeeper {
  // Called before the call. After an error the call does not run.
  Status (*begin)(const CollectiveCall& call, CollectiveTicket& ticket);
  // Called with the call's status; returns the status for the caller.
  Status (*end)(const CollectiveCall& call, CollectiveTicket& ticket, Status result);
  // The policy for calls with the communicator, if `current` is the thread's policy. It is the
  // policy under which the ranks made the communicator: if a single rank chose another
  // implementation, the other ranks would hang. Sets `name` to the communicator's policy name if
  // the two differ.
  uint32_t (*policy)(const te_fl_communicator& communicator, uint32_t current, std::string& name);
};

// Null until the first communicator is made, and never reset to null.
extern std::atomic<const CollectiveKeeper*> g_collective_keeper;

}  // namespace te_fl::core
