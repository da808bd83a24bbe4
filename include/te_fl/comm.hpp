#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/export.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

namespace te_fl {

// Key-value store by which the ranks of a job exchange their addresses at start-up. Each key is set
// once. Thread-safe. te-fl has three implementations: a folder that all ranks can access, a server
// in rank 0's process, and one for threads of a process. A program may implement its own, for
// example over MPI. If its functions throw during a communicator's calls, these calls return
// COMM_FAILED; only std::bad_alloc is passed on.
class TE_FL_API Store {
 public:
  virtual ~Store() = default;
  // ALREADY_EXISTS if the key has another value already, for example from an earlier run that used
  // the same store.
  virtual Status set(std::string_view key, std::string_view value) = 0;
  // Waits until a rank has set the key. TIMEOUT names the key and the store.
  virtual Result<std::string> get(std::string_view key, std::chrono::milliseconds timeout) = 0;
  // Returns the value if the key has been set. Never waits for a rank.
  virtual Result<std::optional<std::string>> look(std::string_view key) = 0;
  // Deletes every key that begins with `prefix`, to save memory. No rank reads these keys any more,
  // so a store may also keep them; this default implementation does nothing.
  virtual Status forget(std::string_view prefix);
  // Address for messages: "file:/shared/job7" or "tcp://10.0.0.1:29511".
  virtual std::string address() const = 0;

  // Opens the store with this address. "file:PATH": PATH is a folder that all ranks can access and
  // that is empty or absent when the first rank opens it. "tcp://HOST:PORT": rank 0 runs a server
  // there. Errors name the address, the problem (a port in use, a folder of an earlier run) and a
  // remedy.
  static Result<std::shared_ptr<Store>> open(std::string_view address, int rank, int size,
                                             std::chrono::milliseconds timeout);
  // A store for ranks that are threads of this process.
  static std::shared_ptr<Store> in_process();
};

// This process's rank in the job, as the environment gives it: either TE_FL_RANK, TE_FL_WORLD_SIZE
// and TE_FL_STORE, which tools/launch.py sets, or torchrun's RANK, WORLD_SIZE, LOCAL_RANK,
// MASTER_ADDR and MASTER_PORT (te-fl uses the port after MASTER_PORT). Without either, the job has
// one rank.
struct Job {
  int rank = 0;
  int size = 1;
  int local_rank = 0;         // rank among those on this machine; selects the device
  std::string store_address;  // empty for a job of one rank
  TE_FL_API static Result<Job> from_environment();
};

struct CommOptions {
  Device device;  // the device that this rank's collectives run on
  int rank = 0;
  int size = 1;
  std::shared_ptr<Store> store;  // may be null if size is 1
  std::string name = "world";    // for messages; unique within one store
  // The provider's name ("nccl", "gloo", "threads"). Empty: policy chooses among the providers that
  // support the device as it chooses among implementations: by kind, vendor filters and priority.
  std::string provider;
  // Time limit for making the communicator and for every collective. Absent: TE_FL_COMM_TIMEOUT_MS.
  // Values of 2^32 ms or more count as 2^32 - 1 ms (49 days).
  std::optional<std::chrono::milliseconds> timeout;
};

// A communicator: the ranks that call collectives together (te_fl::ops::all_reduce(..., comm.c())).
//
// When a communicator is made, all ranks compare everything that could make them choose or compute
// differently (plugins, versions, policy, the job's settings) and agree on the implementations of
// the collectives. A difference is FAILED_PRECONDITION on every rank, and the message lists it by
// rank. If TE_FL_VALIDATE is on at that time on any rank, all ranks compare the arguments of each
// collective before it begins, as long as the communicator lives. Afterwards a failure of one rank
// becomes COMM_FAILED on all ranks: a watchdog detects errors and collectives that do not end, and
// then aborts every communicator of the process.
//
// Movable, not copyable. All ranks call the same collectives in the same order, each rank from one
// thread at a time. Each rank destroys its Comm independently of the others. If another thread is
// inside a collective or a group, the destruction takes place when that has ended. After a fork,
// calls in the child return FAILED_PRECONDITION.
class Comm {
 public:
  // Called by every rank. NOT_FOUND if no provider supports the device; the message lists the
  // providers and says how to load more. TIMEOUT names the ranks that did not arrive.
  // FAILED_PRECONDITION for a difference between ranks.
  TE_FL_API static Result<Comm> create(const CommOptions& options);
  // The communicator of all ranks of the job (Job::from_environment()). FAILED_PRECONDITION if this
  // process already has one, or if another thread is making it.
  TE_FL_API static Result<Comm> world(const Device& device);
  Comm() = default;
  TE_FL_API Comm(Comm&& other) noexcept;
  TE_FL_API Comm& operator=(Comm&& other) noexcept;
  TE_FL_API ~Comm();

  // Called by every rank of this communicator. Ranks with the same color form one new communicator,
  // ordered by key and then by rank in this one. A rank with a negative color joins none and gets
  // an empty Comm.
  TE_FL_API Result<Comm> split(int color, int key, std::string name) const;
  // True if all ranks of `other` are known to be ranks of this communicator: the two are the same,
  // or both were split off the same communicator. All ranks of `other` get the same answer. Not a
  // collective.
  TE_FL_API bool includes(const Comm& other) const noexcept;

  explicit operator bool() const noexcept { return state_ != nullptr; }
  TE_FL_API int rank() const noexcept;
  TE_FL_API int size() const noexcept;
  TE_FL_API const Device& device() const noexcept;
  TE_FL_API const std::string& name() const noexcept;
  TE_FL_API const std::string& provider() const noexcept;
  // The communicator argument for ops. Valid as long as the Comm; null for an empty Comm.
  TE_FL_API const te_fl_communicator* c() const noexcept;
  // Op and impl_id of every collective, as agreed by the ranks.
  TE_FL_API const std::vector<std::pair<std::string, std::string>>& implementations()
      const noexcept;
  // OK, or the failure that aborted the communicator. FAILED_PRECONDITION in a child of the process
  // that made it.
  TE_FL_API Status status() const;
  // Ends collectives that are waiting: on this rank at once, on the other ranks when they notice,
  // which takes at most a second for ranks that wait. `reason` is part of the errors on all ranks.
  // Does nothing in a child of the process that made the communicator.
  TE_FL_API void abort(std::string reason);

  struct State;  // used by the library only

 private:
  explicit Comm(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// A group of collectives on one provider's communicators. Collectives that the calling thread calls
// within the group begin together, so that sends and receives cannot deadlock by their order. end()
// returns the status of the group. If end() is not called, because of an exception or an early
// return, the destructor ends the group and logs its status. A group must end on the thread that
// began it.
class [[nodiscard]] CommGroup {
 public:
  TE_FL_API static Result<CommGroup> begin(const Comm& comm);
  TE_FL_API CommGroup(CommGroup&& other) noexcept;
  CommGroup& operator=(CommGroup&&) = delete;
  TE_FL_API ~CommGroup();
  TE_FL_API Status end();

 private:
  explicit CommGroup(std::shared_ptr<Comm::State> state) noexcept : state_(std::move(state)) {}
  std::shared_ptr<Comm::State> state_;  // null after end()
};

}  // namespace te_fl
