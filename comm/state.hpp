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

#include "comm/namespaced_store.hpp"
#include "core/base/fork.hpp"
#include "registry/comm_providers.hpp"
#include "te_fl/comm.hpp"

namespace te_fl {
namespace comm {

using Clock = std::chrono::steady_clock;

// Describes a collective for messages: its op, its number, and the dtype and shape of its first
// tensor.
struct Step {
  uint64_t number = 0;  // from 1; sends and receives are counted separately
  const char* op = nullptr;
  te_fl_dtype dtype{};
  int32_t rank = -1;  // rank of the tensor; -1: no tensor
  std::array<int64_t, 8> shape{};
  // The text for messages: "all_reduce number 17 of f32[1024,64]".
  std::string text() const;
  // text() without the shape, for ops whose shape differs between ranks.
  std::string text_of_rows() const;
};

// Properties of a collective, from its op's schema. They determine the properties of a call that
// must be equal on all ranks. `layout` is CallLayout::number of the op.
struct OpFacts {
  uint64_t layout = 0;
  bool transfer = false;  // point-to-point between two ranks
  bool uneven = false;    // ranks may pass tensors of different sizes
  int64_t tensor = -1;    // offset of the first tensor argument; -1: none
  // The scalar arguments that must be equal on all ranks.
  struct Alike {
    const char* name = nullptr;
    uint32_t offset = 0;
    const char* words = nullptr;  // names of an enum's values, separated by spaces
  };
  std::vector<Alike> alike;
};

// The step that TE_FL_VALIDATE compared last. `attempt` is the number of different calls that were
// compared under the same step number before. `word` is the store key of this rank's text.
struct Compared {
  uint64_t number = 0;
  int attempt = 0;
  std::string text, word;
};

// An event after collectives that were enqueued on a device.
struct Mark {
  bool set = false;
  Event event;
  Step step;
  Clock::time_point since;
};

}  // namespace comm

// One rank's part of a communicator. Made by Comm::create and Comm::split; owned by the Comm and,
// while it checks, by the watchdog.
struct Comm::State {
  ~State();
  std::shared_ptr<registry::CommProvider> provider;
  std::string name;
  std::shared_ptr<Store> store;  // null: only one rank
  std::unique_ptr<comm::NamespacedStore> face;
  std::chrono::milliseconds timeout{};
  te_fl_communicator c{};
  Device device;
  std::vector<std::pair<std::string, std::string>> implementations;
  // The policy under which all ranks made the communicator; all its calls use it.
  // deterministic_policy is the same with deterministic results, for calls under a thread policy
  // that requires them.
  uint32_t policy = 0, deterministic_policy = 0;
  uint64_t fork_generation = 0;
  std::atomic<bool> is_world{false};
  bool validates = false;  // a rank had set TE_FL_VALIDATE at creation: all ranks compare calls
  // `origin` identifies, within this process, the communicator of Comm::create() from which this
  // one was split, or this one itself. origin_ranks[i] is the rank there of this communicator's
  // rank i.
  std::shared_ptr<const char> origin;
  std::vector<int> origin_ranks;
  mutable std::atomic<int> splits{0};

  // `users` counts calls and groups in progress; `dropped` becomes true when the Comm is destroyed.
  // After that, the last user destroys the provider's object.
  std::atomic<int> users{0};
  std::atomic<bool> dropped{false};
  // Called when the Comm is destroyed. Closes at once if there are no users; otherwise the last
  // user closes.
  void drop() noexcept;
  void use() noexcept { users.fetch_add(1); }
  void leave() noexcept;
  // True while a thread is inside a call. Only that thread writes the members below.
  std::atomic<bool> inside{false};
  std::vector<comm::OpFacts> known_ops;
  comm::Compared compared;
  std::atomic<comm::Clock::rep> since{0};  // start of the call in progress; 0: none
  // `life` is held while another thread than the calling one queries the provider, and while the
  // provider's object is destroyed. `closed`: it has been destroyed.
  std::mutex life;
  bool closed = false;
  // For the watchdog: the time of its next query to the store about an abort by another rank;
  // max(): never.
  comm::Clock::time_point next_question{};
  std::mutex mutex;  // guards the members below; held briefly
  comm::Step last, last_transfer;
  bool in_transfer = false;  // true: last_transfer is newer than `last`
  const comm::Step& newest_step() const { return in_transfer ? last_transfer : last; }
  // `oldest`: the event after the oldest collective that may still be running. `newest`: the event
  // after the latest one; each call replaces it until `oldest` is reached.
  comm::Mark oldest, newest;
  Status failure;
  std::atomic<bool> failed{false};
  std::atomic<bool> reported{false};  // `failure` has its final text

  // Returns the failure. Waits briefly for its final text, which names the last collective of each
  // rank.
  Status failed_status();
  // Marks the communicator as failed. False if it had failed before.
  bool mark_failed(Status why);
  // Makes the provider abort its pending collectives.
  void abort() noexcept;
  // Destroys the provider's object on the calling thread.
  void close() noexcept;
};

namespace comm {

// The live communicators of this process, for the watchdog and for look-ups by id.
void add(const std::shared_ptr<Comm::State>& state);
void remove(const Comm::State& state);
std::shared_ptr<Comm::State> find(uint64_t id);
std::vector<std::shared_ptr<Comm::State>> all();
// Guards the list of live communicators and the list of open groups.
core::ForkMutex& list_mutex() noexcept;
// A counter that each fork increments in the child.
uint64_t fork_generation() noexcept;
// FAILED_PRECONDITION if a forked child uses the parent's communicator.
Status check_process(const Comm::State& state);
// Fails the communicator and with it all others of the process. Adds to the failure's text the last
// collective of each other rank that reports it within a short time. `aborted`: the text for the
// other ranks if the program aborted the communicator.
void fail_all(const std::shared_ptr<Comm::State>& first, Status why, std::string aborted = {});
// Writes to the store that this rank's program has aborted the communicator.
void publish_abort(Comm::State& state, const std::string& text);
// The text that a rank wrote by publish_abort(); empty if none did.
Result<std::string> read_abort(Comm::State& state);
// Keeps a communicator's provider object alive during a call. `begun`: use() was called before.
class Use {
 public:
  explicit Use(Comm::State& state, bool begun = false) : state_(state) {
    if (!begun) state_.use();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() { state_.leave(); }

 private:
  Comm::State& state_;
};

// Removes from the store all keys of the communicator that begin with `prefix`. Call it when no
// rank needs them. Ignores errors.
void forget(NamespacedStore& face, const std::string& prefix) noexcept;
// Writes to the store that this rank has made its part, and the mark of its process.
void publish_made(Comm::State& state) noexcept;
// The PID of a rank's process, if it was on this machine and has ended; otherwise 0.
int find_ended_process(Comm::State& state, int rank);
// On rank 0: removes the keys that were used to make the communicator, if all ranks have made their
// part.
void forget_making(Comm::State& state) noexcept;
// Writes this rank's last collective to the store, for the error messages of other ranks.
void publish_last(Comm::State& state);
// Describes the last collective of each rank at the failure, from the ranks' reports.
std::string arrivals(Comm::State& state);

}  // namespace comm
}  // namespace te_fl
