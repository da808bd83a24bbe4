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

// The ranks of a job tell each other by it, while they start, how they are reached: values by key,
// of which each is set once. Thread-safe. The classes behind it are a folder that all ranks see, a
// server in rank 0's process, or a program's own, over MPI say. What that throws in a
// communicator's calls is COMM_FAILED there, but for std::bad_alloc.
class TE_FL_API Store {
 public:
  virtual ~Store() = default;
  // ALREADY_EXISTS if the key was set before to something else, as by an earlier run that used the
  // same store.
  virtual Status set(std::string_view key, std::string_view value) = 0;
  // Waits until some rank has set the key. TIMEOUT names the key and the store.
  virtual Result<std::string> get(std::string_view key, std::chrono::milliseconds timeout) = 0;
  // The value if it has been set; never waits for a rank.
  virtual Result<std::optional<std::string>> look(std::string_view key) = 0;
  // Takes every key that begins with `prefix` out of the store, to save memory: no rank asks for
  // one of them any more. A store may keep them, as this one does.
  virtual Status forget(std::string_view prefix);
  // "file:/shared/job7" or "tcp://10.0.0.1:29511", for messages.
  virtual std::string address() const = 0;

  // `address` is "file:PATH", PATH being a folder that all ranks see and that is empty or absent
  // when the first of them comes, or "tcp://HOST:PORT", where rank 0 serves. Errors name the
  // address, what is wrong with it (a port in use, a folder of an earlier run) and the way out.
  static Result<std::shared_ptr<Store>> open(std::string_view address, int rank, int size,
                                             std::chrono::milliseconds timeout);
  // For ranks that are threads of this process.
  static std::shared_ptr<Store> in_process();
};

// The ranks of a job, as the environment tells them: TE_FL_RANK, TE_FL_WORLD_SIZE and TE_FL_STORE,
// which tools/launch.py sets, or torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
// MASTER_PORT, the port after which is te-fl's. One rank without either.
struct Job {
  int rank = 0;
  int size = 1;
  int local_rank = 0;         // among those on this machine, by which a rank takes its device
  std::string store_address;  // empty: one rank, which needs none
  TE_FL_API static Result<Job> from_environment();
};

struct CommOptions {
  Device device;  // the one on which this rank's collectives run
  int rank = 0;
  int size = 1;
  std::shared_ptr<Store> store;  // may be null where size is 1
  std::string name = "world";    // for messages; of one store, each name is given once
  // The provider's name ("nccl", "gloo", "threads"). Empty: that which policy ranks first of those
  // that serve the device, by kind, vendor filters and priority, as it ranks implementations.
  std::string provider;
  // For making it and for every collective; absent: TE_FL_COMM_TIMEOUT_MS. One of 2^32 ms or more
  // is as one of 2^32 - 1 ms, 49 days.
  std::optional<std::chrono::milliseconds> timeout;
};

// The ranks that call collectives together (te_fl::ops::all_reduce(..., comm.c())). When one is
// made, all ranks compare what could make them choose or compute differently - plugins, versions,
// policy, the job's settings - and agree on the implementations of the collectives; a difference
// is FAILED_PRECONDITION on every rank, with the difference by rank. If TE_FL_VALIDATE is on then
// for one of them, all compare each collective before it begins, as long as the communicator lives.
// From then on a failure of one rank is COMM_FAILED on all: a watchdog looks for errors and for
// collectives that do not end, and what it finds aborts every communicator of the process.
//
// Movable, not copyable. All ranks call the same collectives in the same order, from one thread at
// a time. A communicator is destroyed by each rank for itself; under a collective or a group of
// another thread, as soon as that has ended. After a fork the child's calls are
// FAILED_PRECONDITION.
class Comm {
 public:
  // Called by every rank. NOT_FOUND if no provider serves the device, naming those that there are
  // and how more are loaded; TIMEOUT if some rank did not come, naming which; FAILED_PRECONDITION
  // for a difference between ranks.
  TE_FL_API static Result<Comm> create(const CommOptions& options);
  // All ranks of the job, by Job::from_environment(). A second one in a process is
  // FAILED_PRECONDITION while the first is alive or made, by this thread or another.
  TE_FL_API static Result<Comm> world(const Device& device);
  Comm() = default;
  TE_FL_API Comm(Comm&& other) noexcept;
  TE_FL_API Comm& operator=(Comm&& other) noexcept;
  TE_FL_API ~Comm();

  // Called by every rank of this one: those of one color become one communicator, in the order of
  // their keys, then of their ranks here. A negative color: this rank is in none, and gets an empty
  // Comm.
  TE_FL_API Result<Comm> split(int color, int key, std::string name) const;
  // True if all ranks of `other` are known to be ranks of this one: both are the same, or were
  // split off the same one. The same answer on all ranks of `other`; no collective.
  TE_FL_API bool includes(const Comm& other) const noexcept;

  explicit operator bool() const noexcept { return rep_ != nullptr; }
  TE_FL_API int rank() const noexcept;
  TE_FL_API int size() const noexcept;
  TE_FL_API const Device& device() const noexcept;
  TE_FL_API const std::string& name() const noexcept;
  TE_FL_API const std::string& provider() const noexcept;
  // For the ops' structs. Valid as long as the Comm; null of an empty one.
  TE_FL_API const te_fl_communicator* c() const noexcept;
  // Op and impl_id of every collective that the ranks agreed upon.
  TE_FL_API const std::vector<std::pair<std::string, std::string>>& implementations()
      const noexcept;
  // OK, or the failure that aborted it. FAILED_PRECONDITION in a child of the process that made it.
  TE_FL_API Status status() const;
  // Ends what its collectives wait for, on this rank at once and on the others as these notice, a
  // second later at most where they wait. Their failures have the reason, too. Does nothing in a
  // child of the process that made it.
  TE_FL_API void abort(std::string reason);

  struct Rep;  // the library's own

 private:
  explicit Comm(std::shared_ptr<Rep> rep) noexcept : rep_(std::move(rep)) {}
  std::shared_ptr<Rep> rep_;
};

// Collectives of the communicator's provider that the calling thread calls inside begin together:
// sends and receives do not wait for each other's order. end() gives the status of the whole; left
// without it, by an exception or an early return, what was begun is ended and its status logged. It
// ends on the thread that began it.
class [[nodiscard]] CommGroup {
 public:
  TE_FL_API static Result<CommGroup> begin(const Comm& comm);
  TE_FL_API CommGroup(CommGroup&& other) noexcept;
  CommGroup& operator=(CommGroup&&) = delete;
  TE_FL_API ~CommGroup();
  TE_FL_API Status end();

 private:
  explicit CommGroup(std::shared_ptr<Comm::Rep> rep) noexcept : rep_(std::move(rep)) {}
  std::shared_ptr<Comm::Rep> rep_;  // null: ended
};

}  // namespace te_fl
