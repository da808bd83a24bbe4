#include "te_fl/comm.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "comm/make_state.hpp"
#include "comm/state.hpp"
#include "core/base/fork.hpp"
#include "core/base/process_end.hpp"
#include "registry/thread_record.hpp"
#include "te_fl/log.hpp"
#include "te_fl/watch.hpp"

namespace te_fl {
namespace comm {
namespace {

constinit core::ForkMutex mutex(core::LockLevel::kComms);
const core::ForkMutex::Registration registration(mutex);
std::atomic<uint64_t> g_forks{0};
const core::ForkedChild child(core::LockLevel::kComms,
                              [] { g_forks.fetch_add(1, std::memory_order_relaxed); });

using States = std::map<uint64_t, std::weak_ptr<Comm::State>>;
std::atomic<States*> g_states{nullptr};
// The caller holds the mutex.
States& states() {
  return core::made_once(g_states, [] { return new States; });
}

}  // namespace

core::ForkMutex& list_mutex() noexcept { return mutex; }

uint64_t fork_generation() noexcept { return g_forks.load(std::memory_order_relaxed); }

void add(const std::shared_ptr<Comm::State>& state) {
  const std::lock_guard lock(mutex);
  states()[state->c.id] = state;
}

void remove(const Comm::State& state) {
  const std::lock_guard lock(mutex);
  states().erase(state.c.id);
}

std::shared_ptr<Comm::State> find(uint64_t id) {
  const std::lock_guard lock(mutex);
  const auto at = states().find(id);
  return at == states().end() ? nullptr : at->second.lock();
}

std::vector<std::shared_ptr<Comm::State>> all() {
  std::vector<std::shared_ptr<Comm::State>> found;
  const std::lock_guard lock(mutex);
  for (const auto& [id, state] : states()) {
    if (auto held = state.lock(); held != nullptr && held->fork_generation == fork_generation())
      found.push_back(std::move(held));
  }
  return found;
}

Status check_process(const Comm::State& state) {
  if (state.fork_generation == fork_generation()) return {};
  return failed_precondition("communicator '" + state.name +
                             "' was made before this process was forked off, and its connections "
                             "are the parent's; make another one in the child");
}

namespace {
Status with_the_others(const Comm::State& state, const Status& why) {
  return Status(StatusCode::kCommFailed,
                "communicator '" + state.name + "' was aborted with the process's others", why);
}
}  // namespace

namespace {
void set_failure(Comm::State& state, const Status& why) {
  const std::lock_guard lock(state.mutex);
  state.failure = why;
}
}  // namespace

void fail_all(const std::shared_ptr<Comm::State>& first, Status why, std::string aborted) {
  if (!first->mark_failed(why)) return;
  if (aborted.empty()) {
    first->abort();  // first, since the store may be slow to answer
    if (Result<std::string> reported = read_abort(*first); reported.ok())
      aborted = std::move(*reported);
    if (!aborted.empty() && why.message().find(aborted) == std::string::npos) {
      why = Status(why.code(), why.message() + "; " + aborted, why.cause());
      set_failure(*first, why);
    }
  }
  // Records the reason in all communicators before any is aborted, so that calls that end because
  // of the abort report it.
  std::vector<std::shared_ptr<Comm::State>> failed{first};
  for (const auto& state : all()) {
    if (state != first && state->mark_failed(with_the_others(*state, why))) failed.push_back(state);
  }
  for (const auto& state : failed) {
    if (!aborted.empty()) publish_abort(*state, aborted);
  }
  for (const auto& state : failed) state->abort();
  for (const auto& state : failed) publish_last(*state);
  if (const std::string ranks = arrivals(*first); !ranks.empty()) {
    why = Status(why.code(), why.message() + "; " + ranks, why.cause());
    set_failure(*first, why);
  }
  // A failed call waits up to a second for the final text of the failure (State::reported), so that
  // its error names the ranks, even if another communicator failed first.
  for (const auto& state : failed) {
    if (state != first) set_failure(*state, with_the_others(*state, why));
    state->reported.store(true, std::memory_order_release);
  }
  log::error(why.to_string());
}

}  // namespace comm

Comm::State::~State() { close(); }

void Comm::State::drop() noexcept {
  dropped.store(true);
  if (users.load() == 0) close();
}

void Comm::State::leave() noexcept {
  if (users.fetch_sub(1) == 1 && dropped.load()) close();
}

void Comm::State::close() noexcept {
  if (c.id == 0) return;
  // A forked child closes nothing: the communicator belongs to the parent, and another thread of
  // the parent may hold the lock.
  if (fork_generation != comm::fork_generation()) return;
  comm::remove(*this);
  const registry::EpochGuard inside(registry::this_thread().slot);  // exit() waits for it
  if (core::ends_elsewhere()) return;
  const std::lock_guard lock(life);
  if (std::exchange(closed, true)) return;
  comm::forget_making(*this);
  try {
    provider->api.destroy(c.self);
  } catch (...) {
    log::warning("communicator '" + name + "': destroy threw an exception (rule R5)");
  }
  provider->live.fetch_sub(1);
}

Status Comm::State::failed_status() {
  using std::chrono::milliseconds;
  for (int i = 0; i < 200 && !reported.load(std::memory_order_acquire); ++i)
    std::this_thread::sleep_for(milliseconds(5));
  const std::lock_guard lock(mutex);
  return failure;
}

bool Comm::State::mark_failed(Status why) {
  const std::lock_guard lock(mutex);
  if (failed.load(std::memory_order_relaxed)) return false;
  failure = std::move(why);
  failed.store(true, std::memory_order_release);
  return true;
}

void Comm::State::abort() noexcept {
  const registry::EpochGuard inside(registry::this_thread().slot);
  const std::lock_guard lock(life);
  if (closed || core::ends_elsewhere()) return;
  try {
    provider->api.abort(c.self);
  } catch (...) {
    log::warning("communicator '" + name + "': abort threw an exception (rule R5)");
  }
}

Comm::Comm(Comm&& other) noexcept = default;
Comm& Comm::operator=(Comm&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}
Comm::~Comm() {
  if (state_ != nullptr) state_->drop();
}

Result<Comm> Comm::create(const CommOptions& options) {
  TE_FL_ASSIGN_OR_RETURN(std::shared_ptr<State> state, comm::make_state(options, nullptr, 0));
  return Comm(std::move(state));
}

namespace {

// Ensures that only one thread of a process at a time makes the job's communicator. A forked child
// is not affected by an attempt of its parent.
class WorldAttempt {
 public:
  WorldAttempt() {
    const uint64_t mine = comm::fork_generation() + 1;
    uint64_t before = g_attempt.load();
    while (before != mine && !g_attempt.compare_exchange_weak(before, mine)) {
    }
    alone_ = before != mine;
  }
  WorldAttempt(const WorldAttempt&) = delete;
  WorldAttempt& operator=(const WorldAttempt&) = delete;
  ~WorldAttempt() {
    if (alone_) g_attempt.store(0);
  }
  bool alone() const { return alone_; }

 private:
  static std::atomic<uint64_t> g_attempt;  // 0: none; otherwise fork generation + 1
  bool alone_ = false;
};
constinit std::atomic<uint64_t> WorldAttempt::g_attempt{0};

}  // namespace

namespace {

// The exchange of texts at the ends of steps (te_fl/watch.hpp) by a job's store. Rank 0 collects
// the texts, so that the others read one.
RankExchange exchange_by(const std::weak_ptr<Store>& weak, int rank, int size,
                         std::chrono::milliseconds timeout) {
  auto step = std::make_shared<std::atomic<uint64_t>>(0);
  return [=](const std::string& own) -> Result<std::vector<std::string>> {
    const std::shared_ptr<Store> store = weak.lock();
    if (store == nullptr) return not_found("the communicator of all ranks is gone");
    const uint64_t n = step->fetch_add(1);
    const auto prefix = [](uint64_t of) { return "te_fl_step" + std::to_string(of) + "/"; };
    const auto key = [&](int r) { return prefix(n) + std::to_string(r); };
    nlohmann::json all = nlohmann::json::array();
    if (rank != 0) {
      TE_FL_RETURN_IF_ERROR(store->set(key(rank), own));
      TE_FL_ASSIGN_OR_RETURN(const std::string text, store->get(prefix(n) + "all", timeout));
      all = nlohmann::json::parse(text, nullptr, false);
    } else {
      if (!own.empty()) all.push_back(own);
      for (int r = 1; r < size; ++r) {
        TE_FL_ASSIGN_OR_RETURN(const std::string text, store->get(key(r), timeout));
        if (!text.empty()) all.push_back(text);
      }
      TE_FL_RETURN_IF_ERROR(store->set(prefix(n) + "all", all.dump()));
      // Every rank has read the step before, or it would not have written its text of this one.
      if (n > 0) TE_FL_RETURN_IF_ERROR(store->forget(prefix(n - 1)));
    }
    std::vector<std::string> texts;
    for (const nlohmann::json& text : all)
      if (text.is_string()) texts.push_back(text.get<std::string>());
    return texts;
  };
}

}  // namespace

Result<Comm> Comm::world(const Device& device) {
  const WorldAttempt attempt;
  if (!attempt.alone()) {
    return failed_precondition(
        "Comm::world: another thread of this process makes the job's communicator at this moment; "
        "use that one, or split() it: a process is one rank of its job. Ranks that are threads are "
        "made by Comm::create with Store::in_process()");
  }
  for (const auto& state : comm::all()) {
    if (!state->is_world.load()) continue;
    return failed_precondition(
        "Comm::world: this process has the job's communicator already; use that one, or split() "
        "it: a process is one rank of its job. Ranks that are threads are made by Comm::create "
        "with Store::in_process()");
  }
  TE_FL_ASSIGN_OR_RETURN(const Job job, Job::from_environment());
  CommOptions options;
  options.device = device;
  options.rank = job.rank;
  options.size = job.size;
  TE_FL_ASSIGN_OR_RETURN(const auto timeout, comm::checked_timeout(options));
  if (!job.store_address.empty()) {
    TE_FL_ASSIGN_OR_RETURN(options.store,
                           Store::open(job.store_address, job.rank, job.size, timeout));
  }
  TE_FL_ASSIGN_OR_RETURN(Comm made, create(options));
  made.state_->is_world.store(true);
  if (options.store != nullptr)
    set_rank_exchange(exchange_by(options.store, job.rank, job.size, timeout));
  return made;
}

namespace {

// Parses the color and key that a rank wrote; nullopt if the store holds another text.
std::optional<std::pair<int, int>> read_split(const std::string& text) {
  std::pair<int, int> reported;
  const char* const end = text.data() + text.size();
  const auto color = std::from_chars(text.data(), end, reported.first);
  if (color.ec != std::errc() || color.ptr == end || *color.ptr != ' ') return std::nullopt;
  const auto key = std::from_chars(color.ptr + 1, end, reported.second);
  if (key.ec != std::errc() || key.ptr != end) return std::nullopt;
  return reported;
}

}  // namespace

Result<Comm> Comm::split(int color, int key, std::string name) const {
  if (state_ == nullptr) return invalid_argument("Comm::split: the Comm is empty");
  TE_FL_RETURN_IF_ERROR(comm::check_process(*state_));
  const comm::Use use(*state_);
  if (state_->failed.load()) return state_->failed_status();
  // Every rank writes its color and key, and reads those of all ranks.
  const int number = state_->splits.fetch_add(1);
  const std::string word = "split" + std::to_string(number) + "/";
  comm::NamespacedStore& face = *state_->face;
  TE_FL_RETURN_IF_ERROR(face.store().set(face.key(word + std::to_string(state_->c.rank)),
                                         std::to_string(color) + " " + std::to_string(key)));
  std::vector<std::pair<int, int>> mine;  // (key, rank in this communicator)
  bool everybody = true;                  // all ranks have a color, as providers' split() requires
  for (int r = 0; r < state_->c.size; ++r) {
    TE_FL_ASSIGN_OR_RETURN(const std::string answer,
                           face.store().get(face.key(word + std::to_string(r)), state_->timeout));
    const auto reported = read_split(answer);
    if (!reported) {
      return Status(StatusCode::kCommFailed,
                    "communicator '" + state_->name + "': split() found '" + answer + "' of rank " +
                        std::to_string(r) + " in the store " + face.store().address() +
                        ", and expects a color and a key; another program writes its keys: give "
                        "each job a store of its own");
    }
    everybody = everybody && reported->first >= 0;
    if (reported->first == color && color >= 0) mine.emplace_back(reported->second, r);
  }
  // All ranks have reached this split, so they have read this rank's color and key of the previous
  // split, which can be removed.
  if (number > 0)
    comm::forget(face, "split" + std::to_string(number - 1) + "/" + std::to_string(state_->c.rank));
  std::sort(mine.begin(), mine.end());
  CommOptions options;
  options.device = state_->device;
  options.name = std::move(name);
  options.store = state_->store;
  options.timeout = state_->timeout;
  options.provider = state_->provider->name;
  if (color < 0) return Comm();
  const auto at = std::find_if(mine.begin(), mine.end(),
                               [&](const auto& m) { return m.second == state_->c.rank; });
  options.rank = static_cast<int>(at - mine.begin());
  options.size = static_cast<int>(mine.size());
  options.name += "." + std::to_string(color);
  TE_FL_ASSIGN_OR_RETURN(std::shared_ptr<State> made,
                         comm::make_state(options, state_.get(), everybody ? color : -1));
  made->origin = state_->origin;
  for (size_t i = 0; i < mine.size(); ++i) {
    made->origin_ranks[i] = state_->origin_ranks[static_cast<size_t>(mine[i].second)];
  }
  return Comm(std::move(made));
}

bool Comm::includes(const Comm& other) const noexcept {
  if (state_ == nullptr || other.state_ == nullptr || state_->origin != other.state_->origin)
    return false;
  return std::ranges::all_of(other.state_->origin_ranks, [this](int rank) {
    return std::ranges::find(state_->origin_ranks, rank) != state_->origin_ranks.end();
  });
}

int Comm::rank() const noexcept { return state_ == nullptr ? 0 : state_->c.rank; }
int Comm::size() const noexcept { return state_ == nullptr ? 1 : state_->c.size; }

const Device& Comm::device() const noexcept {
  static constexpr Device kHost;
  return state_ == nullptr ? kHost : state_->device;
}

namespace {
const std::string& nothing() {
  static std::atomic<std::string*> empty{nullptr};
  return core::made_once(empty, [] { return new std::string; });
}
}  // namespace

const std::string& Comm::name() const noexcept {
  return state_ == nullptr ? nothing() : state_->name;
}
const std::string& Comm::provider() const noexcept {
  return state_ == nullptr ? nothing() : state_->provider->name;
}
const te_fl_communicator* Comm::c() const noexcept {
  return state_ == nullptr ? nullptr : &state_->c;
}

const std::vector<std::pair<std::string, std::string>>& Comm::implementations() const noexcept {
  static std::atomic<std::vector<std::pair<std::string, std::string>>*> none{nullptr};
  if (state_ != nullptr) return state_->implementations;
  return core::made_once(none, [] { return new std::vector<std::pair<std::string, std::string>>; });
}

Status Comm::status() const {
  if (state_ == nullptr) return invalid_argument("the Comm is empty");
  TE_FL_RETURN_IF_ERROR(comm::check_process(*state_));
  return state_->failed.load() ? state_->failed_status() : Status();
}

void Comm::abort(std::string reason) {
  // In a forked child the communicator belongs to the parent, whose ranks continue to use it.
  if (state_ == nullptr || !comm::check_process(*state_).ok()) return;
  comm::fail_all(
      state_,
      Status(StatusCode::kCommFailed, "communicator '" + state_->name + "' was aborted: " + reason),
      "rank " + std::to_string(state_->c.rank) + " of communicator '" + state_->name +
          "' aborted it: " + reason);
}

}  // namespace te_fl
