#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/store_face.hpp"
#include "core/base/fork.hpp"
#include "registry/comm_providers.hpp"
#include "te_fl/comm.hpp"

namespace te_fl {
namespace comm {

using Clock = std::chrono::steady_clock;

// A collective as messages tell of it: what its first tensor is, and the how manyth it is.
struct Step {
  uint64_t number = 0;  // from 1; sends and receives are counted apart
  const char* op = nullptr;
  te_fl_dtype dtype{};
  int32_t rank = -1;  // of the tensor; -1: there is none
  std::array<int64_t, 8> shape{};
  // "all_reduce number 17 of f32[1024,64]"
  std::string text() const;
  // text() without the shape, which differs where ranks bring rows of their own.
  std::string text_of_rows() const;
};

// The facts of a collective's schema that tell what its calls have in common on all ranks. `layout`
// is CallLayout::number of the op.
struct OpFacts {
  uint64_t layout = 0;
  bool transfer = false;  // between two ranks, not all
  bool uneven = false;    // ranks bring tensors of several sizes
  int64_t tensor = -1;    // offset of the first tensor in the arguments; -1: there is none
  // Offsets of the numbers that all ranks give alike, with their words for messages.
  struct Alike {
    const char* name = nullptr;
    uint32_t offset = 0;
    const char* words = nullptr;  // of an enum, space separated
  };
  std::vector<Alike> alike;
};

// The step that TE_FL_VALIDATE compared last, and how many others were compared as that number
// before it. `word`: where this rank's text is in the store.
struct Compared {
  uint64_t number = 0;
  int attempt = 0;
  std::string text, word;
};

// The mark behind collectives that were enqueued on a device.
struct Mark {
  bool set = false;
  Event event;
  Step step;
  Clock::time_point since;
};

}  // namespace comm

// Made by Comm::create and Comm::split, kept by the Comm and, while it looks, by the watchdog.
struct Comm::Rep {
  ~Rep();
  std::shared_ptr<registry::CommProvider> provider;
  std::string name;
  std::shared_ptr<Store> store;  // null: of one rank
  std::unique_ptr<comm::StoreFace> face;
  std::chrono::milliseconds timeout{};
  te_fl_communicator c{};
  Device device;
  std::vector<std::pair<std::string, std::string>> implementations;
  // The policy under which all ranks made it, which decides all its calls; and the same with
  // deterministic results, for calls under a policy that asks for them.
  uint32_t policy = 0, deterministic_policy = 0;
  uint64_t fork_generation = 0;
  std::atomic<bool> is_world{false};
  bool validates = false;  // some rank asked for TE_FL_VALIDATE when it was made, and all compare
  // The one of Comm::create() that it was split off, or that it is itself, by an address of its own
  // in this process, and the ranks of that which are in this one, by their ranks here.
  std::shared_ptr<const char> origin;
  std::vector<int> origin_ranks;
  mutable std::atomic<int> splits{0};

  // Calls and groups that are under way, and true from the end of the Comm on: the provider's part
  // ends with the last of them.
  std::atomic<int> users{0};
  std::atomic<bool> dropped{false};
  // Its Comm is gone: closes it now, or lets the last user do so.
  void drop() noexcept;
  void use() noexcept { users.fetch_add(1); }
  void leave() noexcept;
  // The call that a thread is inside, which alone writes what follows.
  std::atomic<bool> inside{false};
  std::vector<comm::OpFacts> known_ops;
  comm::Compared compared;
  std::atomic<comm::Clock::rep> since{0};  // a call is inside the provider since then; 0: none is
  // Held while the provider is asked something by another thread than the one that calls
  // collectives, and while it destroys; `closed`, once it has.
  std::mutex life;
  bool closed = false;
  // The watchdog's: when it asks the store next if another rank aborted it; max(): never again.
  comm::Clock::time_point next_question{};
  std::mutex mutex;  // of what follows; held for moments
  comm::Step last, last_transfer;
  bool in_transfer = false;  // true: of the two, the latter is the newest
  const comm::Step& newest_step() const { return in_transfer ? last_transfer : last; }
  // The marks behind the oldest collective that may not have ended, and behind the newest, which
  // moves with every call while the first is not reached.
  comm::Mark oldest, newest;
  Status failure;
  std::atomic<bool> failed{false};
  std::atomic<bool> told{false};  // `failure` has all that is known of it

  // Waits, for a moment, until it is known which ranks came.
  Status failed_status();
  // From here on it is failed; false if it was before.
  bool mark_failed(Status why);
  // Ends what its collectives wait for.
  void abort() noexcept;
  // Ends the provider's part, on the calling thread.
  void close() noexcept;
};

namespace comm {

// All that are alive in this process, for the watchdog and for calls that name one by its id.
void add(const std::shared_ptr<Comm::Rep>& rep);
void remove(const Comm::Rep& rep);
std::shared_ptr<Comm::Rep> find(uint64_t id);
std::vector<std::shared_ptr<Comm::Rep>> all();
// Guards the list of them, and that of open groups.
core::ForkMutex& list_mutex() noexcept;
// Changes with every fork, in the child.
uint64_t fork_generation() noexcept;
// FAILED_PRECONDITION in a child of the process that made it.
Status check_process(const Comm::Rep& rep);
// Fails the communicator, then every other of the process because of it, and adds to the failure
// where the other ranks are, as far as they say so within a moment. `aborted`: the program aborted
// it, in words for the other ranks of all of them.
void fail_all(const std::shared_ptr<Comm::Rep>& first, Status why, std::string aborted = {});
// Puts into the store, for the other ranks, that this one's program aborted the communicator.
void tell_abort(Comm::Rep& rep, const std::string& text);
// The text that some rank put there by tell_abort(); empty if none did.
Result<std::string> told_abort(Comm::Rep& rep);
// A call's part in a communicator, which is not destroyed meanwhile. `begun`: use() was called.
class Use {
 public:
  explicit Use(Comm::Rep& rep, bool begun = false) : rep_(rep) {
    if (!begun) rep_.use();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() { rep_.leave(); }

 private:
  Comm::Rep& rep_;
};

// Takes a key of the communicator, or all that begin with it, out of the store, which needs none of
// them any more. A store that fails keeps it.
void forget(StoreFace& face, const std::string& prefix) noexcept;
// Says in the store that this rank has made its part, and by which process.
void tell_made(Comm::Rep& rep) noexcept;
// The number of a rank's process, if it was one of this machine and has ended; else 0.
int ended_process_of(Comm::Rep& rep, int rank);
// On rank 0, removes from the store the keys by which the ranks made the communicator, if each of
// them has made it.
void forget_making(Comm::Rep& rep) noexcept;
// Puts this rank's last collective into the store, for the others to tell.
void tell_last(Comm::Rep& rep);
// Says where each rank was when it failed, as each tells.
std::string arrivals(Comm::Rep& rep);

}  // namespace comm
}  // namespace te_fl
