#include "thread_ranks.hpp"

#include <unistd.h>

#include <list>
#include <map>
#include <optional>
#include <random>

#include "families.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::reference {
namespace {

using backend::Error;
using backend::guard;

// ---- how ranks find their meeting

// The Meeting objects of a process. The key is the token that rank 0 of a communicator publishes in
// the store. A forked child gets its own table, because a thread of the parent may have held the
// mutex.
struct Table {
  const pid_t process = getpid();
  const uint64_t nonce = std::random_device{}() | uint64_t{std::random_device{}()} << 32;
  Table* const parents;
  std::mutex mutex;
  uint64_t next = 1;
  std::map<std::string, std::weak_ptr<Meeting>> meetings;
  explicit Table(Table* of_parent) : parents(of_parent) {}

  // Returns the prefix of this process's tokens, a text unique to the process.
  std::string prefix() const {
    return "process " + std::to_string(process) + " of " + std::to_string(nonce);
  }
};

Table& table() {
  static std::atomic<Table*> current{nullptr};
  Table* found = current.load();
  while (found == nullptr || found->process != getpid()) {
    auto made = std::make_unique<Table>(found);
    if (current.compare_exchange_strong(found, made.get())) return *made.release();
  }
  return *found;
}

std::string publish(const std::shared_ptr<Meeting>& meeting) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.meetings, [](const auto& entry) { return entry.second.expired(); });
  const std::string token = all.prefix() + ": " + std::to_string(all.next++);
  all.meetings[token] = meeting;
  return token;
}

std::shared_ptr<Meeting> find(const std::string& token, const te_fl_comm_config& config) {
  Table& all = table();
  const std::string who = "communicator '" + std::string(config.name) + "'";
  if (token.compare(0, all.prefix().size() + 2, all.prefix() + ": ") != 0) {
    throw Error(TE_FL_FAILED_PRECONDITION,
                "the ranks of " + who +
                    " are in several processes, and provider 'threads' supports those that are "
                    "threads of one; load a provider that connects processes, as gloo does (rank " +
                    std::to_string(config.rank) + " is in " + all.prefix() +
                    ", and rank 0 published '" + token + "')");
  }
  const std::lock_guard lock(all.mutex);
  const auto found = all.meetings.find(token);
  std::shared_ptr<Meeting> meeting = found == all.meetings.end() ? nullptr : found->second.lock();
  if (meeting == nullptr) {
    throw Error(TE_FL_COMM_FAILED, "rank 0 of " + who + " has destroyed it before rank " +
                                       std::to_string(config.rank) + " joined");
  }
  return meeting;
}

constexpr char kKey[] = "meeting";

// Writes the token to the store. If that fails, reports the store's message to `errors` and throws.
void set(const te_fl_comm_config& config, const std::string& token,
         const te_fl_error_sink* errors) {
  const te_fl_comm_store& store = *config.store;
  const te_fl_status code = store.set(store.host, kKey, token.data(), token.size(), errors);
  if (code == TE_FL_OK) return;
  throw Error(TE_FL_STATUS_CODE(code),
              "rank 0 cannot say where communicator '" + std::string(config.name) + "' is");
}

std::string get(const te_fl_comm_config& config, const te_fl_error_sink* errors) {
  const te_fl_comm_store& store = *config.store;
  std::string token(256, '\0');
  size_t bytes = 0;
  const uint32_t timeout = config.timeout_ms == 0 ? UINT32_MAX : config.timeout_ms;
  const te_fl_status code =
      store.get(store.host, kKey, timeout, token.data(), token.size(), &bytes, errors);
  if (code != TE_FL_OK) {
    throw Error(TE_FL_STATUS_CODE(code), "rank 0 of communicator '" + std::string(config.name) +
                                             "' did not publish its token");
  }
  token.resize(bytes);
  return token;
}

std::shared_ptr<Meeting> find_meeting(const te_fl_comm_config& config,
                                      const te_fl_error_sink* errors) {
  if (config.rank != 0) return find(get(config, errors), config);
  auto made = std::make_shared<Meeting>(config.name, config.size, config.timeout_ms);
  if (config.size > 1) set(config, publish(made), errors);
  return made;
}

// ---- groups

// The calls of this thread between group_start() and group_end().
struct Group {
  struct Kept {
    std::shared_ptr<Meeting> meeting;
    Posted posted;
  };
  int depth = 0;
  // A list, because posted calls must not move. A deque would need 56 more bytes of static TLS per
  // thread, which is scarce when a library is loaded late.
  std::list<Kept> calls;
};
thread_local Group group;

// Starts the calls and waits for each of them, even after a failure, because a Meeting refers to a
// call until it is done. Throws the first failure.
void run_group(std::list<Group::Kept> calls) {
  std::optional<Error> failed;
  const auto keep_failure = [&](auto&& step) {
    try {
      step();
    } catch (const Error& error) {
      if (!failed) failed = error;
    }
  };
  std::vector<Group::Kept*> posted;
  for (Group::Kept& kept : calls) {
    keep_failure([&] {
      kept.meeting->post(kept.posted);
      posted.push_back(&kept);
    });
  }
  for (Group::Kept* kept : posted) keep_failure([&] { kept->meeting->wait(kept->posted); });
  if (failed) throw *failed;
}

te_fl_status group_start(void*, const te_fl_error_sink*) {
  ++group.depth;
  return TE_FL_OK;
}

te_fl_status group_end(void*, const te_fl_error_sink* errors) {
  return guard(errors, [] {
    if (group.depth == 0) {
      throw Error(TE_FL_FAILED_PRECONDITION, "group_end() without group_start() on this thread");
    }
    if (--group.depth == 0) run_group(std::exchange(group.calls, {}));
  });
}

// ---- the provider's table

te_fl_status create(void*, const te_fl_comm_config* config, void** out,
                    const te_fl_error_sink* errors) {
  return guard(errors, [&] {
    auto made = std::make_unique<ThreadRank>();
    made->meeting = find_meeting(*config, errors);
    made->rank = config->rank;
    made->process = getpid();
    made->meeting->join(config->rank, config->size);
    *out = made.release();
  });
}

// Destroys a rank. In a forked child, the Meeting is not notified, because its mutex may be locked
// for ever and no rank waits for the child.
void destroy(void* comm) {
  const std::unique_ptr<ThreadRank> rank(static_cast<ThreadRank*>(comm));
  if (rank->process == getpid()) rank->meeting->leave(rank->rank);
}

void abort(void* comm) {
  const auto& rank = *static_cast<ThreadRank*>(comm);
  if (rank.process != getpid()) return;
  rank.meeting->abort("communicator '" + rank.meeting->name() + "' was aborted by rank " +
                      std::to_string(rank.rank));
}

te_fl_status async_error(void* comm, const te_fl_error_sink* errors) {
  return guard(errors, [&] {
    const auto& rank = *static_cast<ThreadRank*>(comm);
    if (rank.process != getpid()) return;
    const std::string failure = rank.meeting->failure();
    if (!failure.empty()) throw Error(TE_FL_COMM_FAILED, failure);
  });
}

constexpr te_fl_comm_api make_api() {
  te_fl_comm_api api;
  api.create = create;
  api.destroy = destroy;
  api.abort = abort;
  api.async_error = async_error;
  api.group_start = group_start;
  api.group_end = group_end;
  return api;
}
constexpr te_fl_comm_api kApi = make_api();

constexpr te_fl_comm_desc make_desc() {
  te_fl_comm_desc desc;
  desc.flags = TE_FL_COMM_THREADS_ONLY;
  desc.name = "threads";
  desc.kind = TE_FL_KIND_REFERENCE;
  desc.device_types = kHostDevices;
  desc.api = &kApi;
  return desc;
}
constexpr te_fl_comm_desc kDesc = make_desc();

}  // namespace

const te_fl_comm_desc& thread_ranks() { return kDesc; }

void call(const ThreadRank& rank, Brought brought) {
  if (rank.process != getpid()) {
    throw Error(TE_FL_FAILED_PRECONDITION,
                "communicator '" + rank.meeting->name() + "' was made by process " +
                    std::to_string(rank.process) +
                    ", of which this is a child; make one after the fork");
  }
  Posted posted{rank.rank, std::move(brought)};
  if (group.depth > 0) {
    group.calls.push_back({rank.meeting, std::move(posted)});
    return;
  }
  rank.meeting->post(posted);
  rank.meeting->wait(posted);
}

}  // namespace te_fl::reference
