#include "te_fl/comm.hpp"

#include <algorithm>
#include <map>
#include <thread>

#include "comm/agreement.hpp"
#include "comm/calls.hpp"
#include "comm/choose_provider.hpp"
#include "comm/process_store.hpp"
#include "comm/rep.hpp"
#include "comm/watchdog.hpp"
#include "core/base/error_text.hpp"
#include "core/base/fork.hpp"
#include "registry/implementation.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/watch.hpp"

namespace te_fl {
namespace comm {
namespace {

constinit core::ForkMutex mutex(core::LockLevel::kComms);
const core::ForkMutex::Registration registration(mutex);
std::atomic<uint64_t> g_ids{0};
std::atomic<uint64_t> g_forks{0};
const core::ForkedChild child(core::LockLevel::kComms,
                              [] { g_forks.fetch_add(1, std::memory_order_relaxed); });

using Reps = std::map<uint64_t, std::weak_ptr<Comm::Rep>>;
std::atomic<Reps*> g_reps{nullptr};
// Under the mutex.
Reps& reps() {
  return core::made_once(g_reps, [] { return new Reps; });
}

}  // namespace

core::ForkMutex& list_mutex() noexcept { return mutex; }

uint64_t fork_generation() noexcept { return g_forks.load(std::memory_order_relaxed); }

void add(const std::shared_ptr<Comm::Rep>& rep) {
  const std::lock_guard lock(mutex);
  reps()[rep->c.id] = rep;
}

void remove(const Comm::Rep& rep) {
  const std::lock_guard lock(mutex);
  reps().erase(rep.c.id);
}

std::shared_ptr<Comm::Rep> find(uint64_t id) {
  const std::lock_guard lock(mutex);
  const auto at = reps().find(id);
  return at == reps().end() ? nullptr : at->second.lock();
}

std::vector<std::shared_ptr<Comm::Rep>> all() {
  std::vector<std::shared_ptr<Comm::Rep>> found;
  const std::lock_guard lock(mutex);
  for (const auto& [id, rep] : reps()) {
    if (auto held = rep.lock(); held != nullptr && held->fork_generation == fork_generation())
      found.push_back(std::move(held));
  }
  return found;
}

Status check_process(const Comm::Rep& rep) {
  if (rep.fork_generation == fork_generation()) return {};
  return failed_precondition("communicator '" + rep.name +
                             "' was made before this process was forked off, and its connections "
                             "are the parent's; make another one in the child");
}

void fail_all(const std::shared_ptr<Comm::Rep>& first, Status why) {
  if (!first->mark_failed(why)) return;
  // All of them know why before any is aborted: a call that ends by it tells the reason.
  std::vector<std::shared_ptr<Comm::Rep>> failed{first};
  for (const auto& rep : all()) {
    const bool now =
        rep != first &&
        rep->mark_failed(
            Status(StatusCode::kCommFailed,
                   "communicator '" + rep->name + "' was aborted with the process's others", why));
    if (!now) continue;
    rep->told.store(true, std::memory_order_release);
    failed.push_back(rep);
  }
  for (const auto& rep : failed) rep->abort();
  for (const auto& rep : failed) tell_last(*rep);
  if (const std::string ranks = arrivals(*first); !ranks.empty()) {
    const std::lock_guard lock(first->mutex);
    first->failure = Status(why.code(), why.message() + "; " + ranks, why.cause());
    why = first->failure;
  }
  first->told.store(true, std::memory_order_release);
  log::error(why.to_string());
}

namespace {

using std::chrono::milliseconds;

Result<milliseconds> timeout_of(const CommOptions& options) {
  if (options.timeout) return *options.timeout;
  TE_FL_ASSIGN_OR_RETURN(const int64_t ms, environment::get_int("TE_FL_COMM_TIMEOUT_MS"));
  return milliseconds(ms);
}

Status check(const CommOptions& o) {
  const auto bad = [&](const std::string& why) {
    return invalid_argument("communicator '" + o.name + "': " + why);
  };
  if (o.size < 1 || o.rank < 0 || o.rank >= o.size) {
    return bad("rank " + std::to_string(o.rank) + " of " + std::to_string(o.size) +
               ", must be one of 0 to size - 1");
  }
  if (o.name.empty() || o.name.find('/') != std::string::npos)
    return bad("its name must not be empty and have no '/'");
  if (o.timeout && o.timeout->count() < 1) return bad("timeout must be at least 1 ms");
  if (o.store == nullptr && o.size > 1) {
    return bad("it has " + std::to_string(o.size) +
               " ranks and no store by which they find each other; give CommOptions::store "
               "(Store::open, or Store::in_process for threads)");
  }
  return {};
}

std::string facts_of(const Comm::Rep& rep) {
  std::string text = fingerprint_table();
  if (!text.empty() && text.back() != '\n') text += '\n';
  text += "communicator provider = " + rep.provider->name + " of plugin " + rep.provider->plugin +
          " " + rep.provider->version;
  if (rep.provider->api.version != nullptr) {
    const char* library = rep.provider->api.version(rep.provider->desc.self);
    text += std::string(", library ") + (library == nullptr ? "unknown" : library);
  }
  text += "\ncommunicator size = " + std::to_string(rep.c.size) +
          "\ncommunicator timeout = " + std::to_string(rep.timeout.count()) + " ms\n";
  for (const auto& [op, impl] : rep.implementations)
    text += "communicator " + op + " = " + impl + "\n";
  return text;
}

// The store's word of a rank whose provider did not make its part, for those that wait for it.
constexpr char kRefused[] = "refused";

// The failure that some rank told, if one did.
Status refused(Comm::Rep& rep) {
  const auto told = rep.face->store().look(rep.face->key(kRefused));
  if (!told.ok() || !told->has_value()) return {};
  return Status(StatusCode::kCommFailed, **told);
}

// The first failure is what all see; a store that does not take it leaves them their time-out.
void tell_refused(Comm::Rep& rep, const Status& why) {
  if (rep.c.size == 1) return;
  (void)rep.face->store().set(rep.face->key(kRefused),
                              "rank " + std::to_string(rep.c.rank) + ": " + why.to_string());
}

// Waits for rank 0's id as long as no rank has refused.
Result<std::string> id_of_first(Comm::Rep& rep) {
  const Clock::time_point end = Clock::now() + rep.timeout;
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    const milliseconds turn = std::clamp(left, milliseconds(1), milliseconds(200));
    Result<std::string> id = rep.face->store().get(rep.face->key("id"), turn);
    if (id.ok() || id.status().code() != StatusCode::kTimeout) return id;
    TE_FL_RETURN_IF_ERROR(refused(rep));
    if (left.count() <= 0) return id;
  }
}

Result<std::string> id_of(Comm::Rep& rep) {
  const te_fl_comm_api& api = rep.provider->api;
  if (api.unique_id == nullptr) return std::string();
  if (rep.c.rank != 0) return id_of_first(rep);
  const std::string key = rep.face->key("id");
  core::ErrorText errors;
  size_t bytes = 0;
  void* self = rep.provider->desc.self;
  te_fl_status code =
      errors.call([&] { return api.unique_id(self, nullptr, 0, &bytes, errors.sink()); });
  std::string id(bytes, '\0');
  if (code == TE_FL_OK && bytes != 0)
    code =
        errors.call([&] { return api.unique_id(self, id.data(), bytes, &bytes, errors.sink()); });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "unique_id of '" + rep.provider->name + "'"));
  TE_FL_RETURN_IF_ERROR(rep.face->store().set(key, id));
  return id;
}

// Waits until ready() says so.
Status wait_ready(Comm::Rep& rep) {
  if (rep.provider->api.ready == nullptr) return {};
  const Clock::time_point end = Clock::now() + rep.timeout;
  Clock::time_point look = Clock::now() + milliseconds(100);
  for (auto pause = std::chrono::microseconds(50);;
       pause = std::min(pause * 2, decltype(pause)(5000))) {
    core::ErrorText errors;
    int32_t done = 0;
    const te_fl_status code =
        errors.call([&] { return rep.provider->api.ready(rep.c.self, &done, errors.sink()); });
    TE_FL_RETURN_IF_ERROR(errors.status(code, "communicator '" + rep.name + "'"));
    if (done != 0) return {};
    if (Clock::now() > look) {
      TE_FL_RETURN_IF_ERROR(refused(rep));
      look = Clock::now() + milliseconds(100);
    }
    if (Clock::now() > end) {
      return Status(StatusCode::kTimeout, "communicator '" + rep.name + "' of provider '" +
                                              rep.provider->name + "' was not ready within " +
                                              std::to_string(rep.timeout.count()) +
                                              " ms (TE_FL_COMM_TIMEOUT_MS)");
    }
    std::this_thread::sleep_for(pause);
  }
}

te_fl_comm_config config_of(const Comm::Rep& rep, const std::string& id) {
  te_fl_comm_config config;
  config.device_provider = rep.c.device_provider;
  config.device = rep.c.device;
  config.rank = rep.c.rank;
  config.size = rep.c.size;
  config.name = rep.name.c_str();
  config.id = id.empty() ? nullptr : id.data();
  config.id_bytes = id.size();
  config.store = rep.face->c();
  config.timeout_ms = static_cast<uint32_t>(rep.timeout.count());
  return config;
}

// The provider's part; `parent` and `color` if it is split off one.
Status make(Comm::Rep& rep, const Comm::Rep* parent, int color) {
  const te_fl_comm_api& api = rep.provider->api;
  const bool splits = parent != nullptr && color >= 0 && api.split != nullptr;
  std::string id;
  if (!splits) {
    TE_FL_ASSIGN_OR_RETURN(id, id_of(rep));
  }
  const te_fl_comm_config config = config_of(rep, id);
  core::ErrorText errors;
  void* self = nullptr;
  const te_fl_status code = errors.call([&] {
    return splits ? api.split(parent->c.self, &config, color, &self, errors.sink())
                  : api.create(rep.provider->desc.self, &config, &self, errors.sink());
  });
  TE_FL_RETURN_IF_ERROR(errors.status(
      code, "communicator '" + rep.name + "' of provider '" + rep.provider->name + "'"));
  rep.provider->live.fetch_add(1);
  rep.c.self = self;
  rep.c.id = g_ids.fetch_add(1) + 1;  // from here on the destructor has something to destroy
  return wait_ready(rep);
}

std::shared_ptr<Comm::Rep> start(const CommOptions& options, milliseconds timeout,
                                 std::shared_ptr<registry::CommProvider> provider) {
  auto rep = std::make_shared<Comm::Rep>();
  rep->provider = std::move(provider);
  rep->name = options.name;
  rep->store = options.store != nullptr ? options.store : Store::in_process();
  rep->face = std::make_unique<StoreFace>(rep->store, options.name);
  rep->timeout = timeout;
  rep->device = options.device;
  rep->fork_generation = fork_generation();
  rep->c.device = options.device.to_c();
  rep->c.device_provider = options.device.provider;
  rep->c.rank = options.rank;
  rep->c.size = options.size;
  rep->c.maker = registry::intern_string(rep->provider->plugin);
  rep->origin = std::make_shared<const char>();
  for (int rank = 0; rank < options.size; ++rank) rep->origin_ranks.push_back(rank);
  return rep;
}

}  // namespace

// All that create() and split() have in common.
Result<std::shared_ptr<Comm::Rep>> make_rep(const CommOptions& options, const Comm::Rep* parent,
                                            int color) {
  TE_FL_RETURN_IF_ERROR(check(options));
  TE_FL_ASSIGN_OR_RETURN(const milliseconds timeout, timeout_of(options));
  std::shared_ptr<registry::CommProvider> provider;
  if (parent != nullptr) {
    provider = parent->provider;
  } else {
    const bool processes = options.store != nullptr &&
                           dynamic_cast<const ProcessStore*>(options.store.get()) == nullptr;
    TE_FL_ASSIGN_OR_RETURN(provider, choose_provider(options.device, options.provider, processes));
  }
  std::shared_ptr<Comm::Rep> rep = start(options, timeout, std::move(provider));
  rep->implementations = choose_implementations(*rep->provider, rep->device);
  const auto named = [&](const Status& s) {
    return s.wrap("communicator '" + rep->name + "' cannot be made");
  };
  if (Status s = agree(*rep->face, rep->c.rank, rep->c.size, {facts_of(*rep)}, timeout); !s.ok())
    return named(s);
  if (Status s = make(*rep, parent, color); !s.ok()) {
    tell_refused(*rep, s);
    return named(s);
  }
  add(rep);
  watch_calls();
  watch();
  return rep;
}

}  // namespace comm

Comm::Rep::~Rep() { close(); }

void Comm::Rep::close() noexcept {
  if (c.id == 0) return;
  // The parent's communicator is the parent's to end, and the lock may be another thread's there.
  if (fork_generation != comm::fork_generation()) return;
  comm::remove(*this);
  const std::lock_guard lock(life);
  if (std::exchange(closed, true)) return;
  try {
    provider->api.destroy(c.self);
  } catch (...) {
    log::warning("communicator '" + name + "': destroy threw an exception (rule R5)");
  }
  provider->live.fetch_sub(1);
}

Status Comm::Rep::failed_status() {
  using std::chrono::milliseconds;
  for (int i = 0; i < 200 && !told.load(std::memory_order_acquire); ++i)
    std::this_thread::sleep_for(milliseconds(5));
  const std::lock_guard lock(mutex);
  return failure;
}

bool Comm::Rep::mark_failed(Status why) {
  const std::lock_guard lock(mutex);
  if (failed.load(std::memory_order_relaxed)) return false;
  failure = std::move(why);
  failed.store(true, std::memory_order_release);
  return true;
}

void Comm::Rep::abort() noexcept {
  const std::lock_guard lock(life);
  if (closed) return;
  try {
    provider->api.abort(c.self);
  } catch (...) {
    log::warning("communicator '" + name + "': abort threw an exception (rule R5)");
  }
}

Comm::Comm(Comm&& other) noexcept = default;
Comm& Comm::operator=(Comm&& other) noexcept {
  std::swap(rep_, other.rep_);
  return *this;
}
Comm::~Comm() {
  if (rep_ != nullptr) rep_->close();
}

Result<Comm> Comm::create(const CommOptions& options) {
  TE_FL_ASSIGN_OR_RETURN(std::shared_ptr<Rep> rep, comm::make_rep(options, nullptr, 0));
  return Comm(std::move(rep));
}

Result<Comm> Comm::world(const Device& device) {
  for (const auto& rep : comm::all()) {
    if (!rep->is_world) continue;
    return failed_precondition(
        "Comm::world: this process has the job's communicator already; use that one, or split() "
        "it");
  }
  TE_FL_ASSIGN_OR_RETURN(const Job job, Job::from_environment());
  CommOptions options;
  options.device = device;
  options.rank = job.rank;
  options.size = job.size;
  TE_FL_ASSIGN_OR_RETURN(const auto timeout, comm::timeout_of(options));
  if (!job.store_address.empty()) {
    TE_FL_ASSIGN_OR_RETURN(options.store,
                           Store::open(job.store_address, job.rank, job.size, timeout));
  }
  TE_FL_ASSIGN_OR_RETURN(Comm made, create(options));
  made.rep_->is_world = true;
  return made;
}

Result<Comm> Comm::split(int color, int key, std::string name) const {
  if (rep_ == nullptr) return invalid_argument("Comm::split: the Comm is empty");
  TE_FL_RETURN_IF_ERROR(comm::check_process(*rep_));
  if (rep_->failed.load()) return rep_->failed_status();
  // All ranks tell color and key, and each finds its own among them.
  const std::string word = "split" + std::to_string(rep_->splits.fetch_add(1)) + "/";
  comm::StoreFace& face = *rep_->face;
  TE_FL_RETURN_IF_ERROR(face.store().set(face.key(word + std::to_string(rep_->c.rank)),
                                         std::to_string(color) + " " + std::to_string(key)));
  std::vector<std::pair<int, int>> mine;  // key, rank here
  bool everybody = true;                  // is in one of the new ones, as providers' split() asks
  for (int r = 0; r < rep_->c.size; ++r) {
    TE_FL_ASSIGN_OR_RETURN(const std::string answer,
                           face.store().get(face.key(word + std::to_string(r)), rep_->timeout));
    const size_t blank = answer.find(' ');
    everybody = everybody && std::stoi(answer) >= 0;
    if (std::stoi(answer) == color && color >= 0)
      mine.emplace_back(std::stoi(answer.substr(blank + 1)), r);
  }
  std::sort(mine.begin(), mine.end());
  CommOptions options;
  options.device = rep_->device;
  options.name = std::move(name);
  options.store = rep_->store;
  options.timeout = rep_->timeout;
  options.provider = rep_->provider->name;
  if (color < 0) return Comm();
  const auto at = std::find_if(mine.begin(), mine.end(),
                               [&](const auto& m) { return m.second == rep_->c.rank; });
  options.rank = static_cast<int>(at - mine.begin());
  options.size = static_cast<int>(mine.size());
  options.name += "." + std::to_string(color);
  TE_FL_ASSIGN_OR_RETURN(std::shared_ptr<Rep> made,
                         comm::make_rep(options, rep_.get(), everybody ? color : -1));
  made->origin = rep_->origin;
  for (size_t i = 0; i < mine.size(); ++i) {
    made->origin_ranks[i] = rep_->origin_ranks[static_cast<size_t>(mine[i].second)];
  }
  return Comm(std::move(made));
}

bool Comm::includes(const Comm& other) const noexcept {
  if (rep_ == nullptr || other.rep_ == nullptr || rep_->origin != other.rep_->origin) return false;
  return std::ranges::all_of(other.rep_->origin_ranks, [this](int rank) {
    return std::ranges::find(rep_->origin_ranks, rank) != rep_->origin_ranks.end();
  });
}

int Comm::rank() const noexcept { return rep_ == nullptr ? 0 : rep_->c.rank; }
int Comm::size() const noexcept { return rep_ == nullptr ? 1 : rep_->c.size; }

const Device& Comm::device() const noexcept {
  static constexpr Device kHost;
  return rep_ == nullptr ? kHost : rep_->device;
}

namespace {
const std::string& nothing() {
  static std::atomic<std::string*> empty{nullptr};
  return core::made_once(empty, [] { return new std::string; });
}
}  // namespace

const std::string& Comm::name() const noexcept { return rep_ == nullptr ? nothing() : rep_->name; }
const std::string& Comm::provider() const noexcept {
  return rep_ == nullptr ? nothing() : rep_->provider->name;
}
const te_fl_communicator* Comm::c() const noexcept { return rep_ == nullptr ? nullptr : &rep_->c; }

const std::vector<std::pair<std::string, std::string>>& Comm::implementations() const noexcept {
  static std::atomic<std::vector<std::pair<std::string, std::string>>*> none{nullptr};
  if (rep_ != nullptr) return rep_->implementations;
  return core::made_once(none, [] { return new std::vector<std::pair<std::string, std::string>>; });
}

Status Comm::status() const {
  if (rep_ == nullptr) return invalid_argument("the Comm is empty");
  return rep_->failed.load() ? rep_->failed_status() : comm::check_process(*rep_);
}

void Comm::abort(std::string reason) {
  if (rep_ == nullptr) return;
  comm::fail_all(rep_, Status(StatusCode::kCommFailed,
                              "communicator '" + rep_->name + "' was aborted: " + reason));
}

}  // namespace te_fl
