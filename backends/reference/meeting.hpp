// Ranks that are threads of one process meet here for a collective: each posts what it brings,
// and the one that completes the set computes for all.
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

#include "te_fl/plugin.h"

namespace te_fl::reference {

struct Brought;
using Ranks = std::span<const Brought* const>;  // all ranks' same call, in their order

// One op as the ranks do it together.
struct Collective {
  enum class Way : uint8_t { kAll, kSend, kReceive };  // with all ranks, or to or from a peer
  const char* name;
  Way way = Way::kAll;
  void (*compute)(Ranks) = nullptr;  // writes every rank's output; kAll only; NULL: nothing
  // Empty, or why calls that agree otherwise do not fit; NULL: they do.
  std::string (*misfit)(Ranks) = nullptr;
};

// One rank brings this to one call.
struct Brought {
  const Collective* op = nullptr;
  int64_t elements = 0;    // of input, or of the only tensor
  int dtype = -1;          // te_fl_dtype_index; -1: there are no tensors
  int32_t reduction = -1;  // te_fl_reduction
  int32_t root = -1;       // of broadcast
  int32_t peer = -1;       // the other rank of send and recv
  const char* in = nullptr;
  char* out = nullptr;
  int64_t bytes = 0;              // of `elements`
  int64_t row_bytes = 0;          // of all_to_all_v, as the next
  std::vector<int64_t> to, from;  // rows for and from each rank
};
// "all_reduce of 8 f32 (sum)".
std::string describe(const Brought& b);

// One call of one rank. It lies still from post() until wait() has returned.
struct Posted {
  int rank = 0;
  Brought brought;
  bool done = false;  // guarded by the meeting's mutex
};

// The ranks of one communicator. Thread-safe. What fails once has failed for all ranks and for
// ever; it is thrown as COMM_FAILED, or as TIMEOUT while not all are there.
class Meeting {
 public:
  Meeting(std::string name, int size, uint32_t timeout_ms);

  // The rank is here. Waits until all are; TIMEOUT names those that are not.
  // INVALID_ARGUMENT if it came before, or with another size.
  void join(int rank, int size);
  // The rank is gone. Calls that need it fail.
  void leave(int rank);
  void abort(const std::string& why);

  void post(Posted& call);
  // Returns when the call is done.
  void wait(const Posted& call);
  // Empty, or why the communicator failed. Waits for no rank.
  std::string failure() const;
  const std::string& name() const noexcept { return name_; }

 private:
  using Queue = std::deque<Posted*>;
  using Lock = std::unique_lock<std::mutex>;

  // With the mutex, as all below.
  void fail(std::string text, te_fl_status status = TE_FL_COMM_FAILED);
  void throw_if_failed() const;
  void progress();
  void meet();
  void transfer(size_t pair);
  void look_for_leavers();
  bool wait_until(Lock& lock, const auto& ready);
  std::string missing(const Posted& call) const;
  std::string whereabouts(int rank) const;
  // Index of the queues of what one rank sends another.
  size_t pair(int from, int to) const {
    return static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to);
  }

  enum class Presence : uint8_t { kAbsent, kHere, kGone };

  const std::string name_;
  const int size_;
  const uint32_t timeout_ms_;  // 0: none
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Presence> presence_;
  std::vector<Queue> calls_;          // of each rank, but for those to and from a peer
  std::vector<Queue> sends_, recvs_;  // of each pair
  uint64_t met_ = 0;                  // collectives done
  te_fl_status status_ = TE_FL_OK;
  std::string failure_;
  std::atomic<bool> failed_{false};  // failure_ is set, and no longer changes
};

}  // namespace te_fl::reference
