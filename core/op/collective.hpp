#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/op/op_table.hpp"
#include "te_fl/status.hpp"

// Dispatch tells the keeper of communicators, which lies above it, of every call of a collective.
namespace te_fl::core {

struct CollectiveCall {
  const CompiledOp& op;
  const void* args;
  const te_fl_communicator& communicator;
  void* stream;
  bool capturing;
};

// The keeper's own record of a call, from begin() to end().
struct CollectiveTicket {
  std::shared_ptr<void> communicator;  // null: nobody keeps it
  bool transfer = false;               // between two ranks
  uint32_t policy = 0;                 // the policy that decides; before begin() the thread's
};

// All run on the calling thread.
struct CollectiveKeeper {
  // May refuse the call, which then does not run.
  Status (*begin)(const CollectiveCall& call, CollectiveTicket& ticket);
  // Gets the call's status and gives the one that the caller sees.
  Status (*end)(const CollectiveCall& call, CollectiveTicket& ticket, Status result);
  // The policy that decides calls with the communicator where `current` is the thread's: the one
  // under which its ranks made it, since a choice of one rank alone would leave the others waiting.
  // `name` becomes the communicator's if the two differ.
  uint32_t (*policy)(const te_fl_communicator& communicator, uint32_t current, std::string& name);
};

// Null until the first communicator is made. Never taken away.
extern std::atomic<const CollectiveKeeper*> g_collective_keeper;

}  // namespace te_fl::core
