// A rendezvous for collectives between ranks that are threads of one process. Each rank posts its
// arguments; the last rank to do so computes the results of all ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "te_fl/backend/collective.hpp"
#include "te_fl/plugin.h"

namespace te_fl::reference {

struct Brought;
using Ranks = std::span<const Brought* const>;  // one call of all ranks, in rank order

// Describes a collective op.
struct Collective {
  enum class Way : uint8_t { kAll, kSend, kReceive };  // with all ranks, or with a peer
  const char* name;
  Way way = Way::kAll;
  void (*compute)(Ranks) = nullptr;  // writes the outputs of all ranks; kAll only; NULL: no work
  // Returns why the ranks' arguments do not fit together, or an empty text. NULL: nothing to check.
  std::string (*misfit)(Ranks) = nullptr;
};

// The arguments of one rank in one call.
struct Brought {
  const Collective* op = nullptr;
  int64_t elements = 0;    // of the input, or of the only tensor
  int dtype = -1;          // te_fl_dtype_index; -1: the op has no tensors
  int32_t reduction = -1;  // value of te_fl_reduction
  int32_t root = -1;       // root of broadcast
  int32_t peer = -1;       // the other rank of send or recv
  const char* in = nullptr;
  char* out = nullptr;
  int64_t bytes = 0;              // size of `elements` elements
  int64_t row_bytes = 0;          // of all_to_all_v, like `to` and `from`
  std::vector<int64_t> to, from;  // number of rows for and from each rank, or rank and expert
  // tensors of moe_dispatch and moe_combine, and where the rows in `to` and `from` begin in them
  std::vector<backend::MovedRows> moved;
  std::vector<int64_t> to_begins, from_begins;
};
// Returns a text such as "all_reduce of 8 f32 (sum)".
std::string describe(const Brought& b);

// One call of one rank. Must not move from post() until wait() has returned.
struct Posted {
  int rank = 0;
  Brought brought;
  bool done = false;  // guarded by the meeting's mutex
};

// The ranks of one communicator. Thread-safe. After the first failure, all calls of all ranks fail:
// with COMM_FAILED, or with TIMEOUT if not all ranks have joined.
class Meeting {
 public:
  Meeting(std::string name, int size, uint32_t timeout_ms);

  // Adds the rank and waits until all ranks have joined. Throws TIMEOUT, naming the missing ranks,
  // or INVALID_ARGUMENT if the rank has joined before or gives another size.
  void join(int rank, int size);
  // Removes the rank. Calls that need it fail.
  void leave(int rank);
  void abort(const std::string& why);

  void post(Posted& call);
  // Returns when the call is done.
  void wait(const Posted& call);
  // The communicator's failure; empty if there is none. Does not wait for other ranks.
  std::string failure() const;
  const std::string& name() const noexcept { return name_; }

 private:
  using Queue = std::deque<Posted*>;
  using Lock = std::unique_lock<std::mutex>;

  // The caller of these functions must hold the mutex.
  void fail(std::string text, te_fl_status status = TE_FL_COMM_FAILED);
  void throw_if_failed() const;
  void progress();
  void meet();
  void transfer(size_t pair);
  void look_for_leavers();
  bool wait_until(Lock& lock, const auto& ready);
  std::string missing(const Posted& call) const;
  std::string whereabouts(int rank) const;
  // Returns the index in sends_ and recvs_ for messages from rank `from` to rank `to`.
  size_t pair(int from, int to) const {
    return static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to);
  }

  enum class Presence : uint8_t { kAbsent, kHere, kGone };

  const std::string name_;
  const int size_;
  const uint32_t timeout_ms_;  // 0: there is no limit
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Presence> presence_;
  std::vector<Queue> calls_;          // by rank; only collectives of all ranks
  std::vector<Queue> sends_, recvs_;  // queues by pair of ranks
  uint64_t met_ = 0;                  // number of completed collectives
  te_fl_status status_ = TE_FL_OK;
  std::string failure_;
  std::atomic<bool> failed_{false};  // once true, failure_ is set and does not change
};

}  // namespace te_fl::reference
