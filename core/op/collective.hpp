#pragma once

#include <atomic>
#include <cstdint>

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

// Both run on the calling thread. `begin` may refuse the call, which then does not run; `ticket` is
// for `end`, which gets the call's status and gives the one that the caller sees.
struct CollectiveKeeper {
  Status (*begin)(const CollectiveCall& call, uint64_t& ticket);
  Status (*end)(const CollectiveCall& call, uint64_t ticket, Status result);
};

// Null until the first communicator is made. Never taken away.
extern std::atomic<const CollectiveKeeper*> g_collective_keeper;

}  // namespace te_fl::core
