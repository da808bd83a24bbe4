#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>

#include "comm/file_store.hpp"
#include "comm/process_store.hpp"
#include "comm/store_text.hpp"
#include "comm/tcp_store.hpp"
#include "core/base/fork.hpp"

namespace te_fl {
namespace {

// A store that this process has opened. While it is alive, opening its address again returns the
// same object. After its end the next open starts a new generation with separate keys. All ranks
// must open stores in the same order, so that their generations match.
struct Opened {
  std::weak_ptr<Store> store;
  uint32_t generation = 0;
  bool opening = false;
};
using OpenedKey = std::tuple<std::string, int, pid_t>;  // the PID separates a forked child

constinit core::ForkMutex stores_mutex(core::LockLevel::kStores);
const core::ForkMutex::Registration stores_registration(stores_mutex);

std::map<OpenedKey, Opened>& opened() {
  static constinit std::atomic<std::map<OpenedKey, Opened>*> made = nullptr;
  return core::made_once(made, [] { return new std::map<OpenedKey, Opened>; });
}

constexpr std::string_view kForms =
    "; it must be file:PATH, a folder that all ranks see, or tcp://HOST:PORT, where rank 0 serves";

Status malformed(std::string_view address, const std::string& why) {
  return invalid_argument("the store's address '" + std::string(address) + "' " + why +
                          std::string(kForms));
}

struct HostPort {
  std::string host;
  int port = 0;
};

// Parses "host:29500" or "[::1]:29500".
Result<HostPort> parse_host_port(std::string_view address, std::string_view rest) {
  const size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos) return malformed(address, "has no port");
  std::string_view host = rest.substr(0, colon);
  const std::string_view digits = rest.substr(colon + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  int port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size() || port < 1 || port > 65535)
    return malformed(address, "has the port '" + std::string(digits) + "', not one of 1 to 65535");
  if (host.empty()) return malformed(address, "has no host");
  return HostPort{std::string(host), port};
}

constexpr std::string_view kFile = "file:", kTcp = "tcp://";

Result<std::shared_ptr<Store>> open_new(std::string_view address, const comm::StoreRank& rank,
                                        std::chrono::milliseconds timeout) {
  if (address.starts_with(kFile)) {
    const std::string_view path = address.substr(kFile.size());
    if (path.empty()) return malformed(address, "names no folder");
    return comm::open_file_store(std::string(path), rank, timeout);
  }
  if (address.starts_with(kTcp)) {
    TE_FL_ASSIGN_OR_RETURN(const HostPort at,
                           parse_host_port(address, address.substr(kTcp.size())));
    return comm::open_tcp_store(at.host, at.port, rank, timeout);
  }
  return malformed(address, "is of no known kind");
}

// True in a forked child if the parent has opened a store at this address. The caller holds
// stores_mutex.
bool opened_by_parent(std::string_view address) {
  return std::ranges::any_of(opened(), [&](const auto& entry) {
    return std::get<0>(entry.first) == address && std::get<2>(entry.first) != ::getpid() &&
           entry.second.generation > 0;
  });
}

// The error for a store that the parent of this forked process has opened. The usual error about an
// earlier run's folder would be wrong, since the parent may still use it.
Result<std::shared_ptr<Store>> is_parents(std::string_view address, StatusCode code) {
  return Status(code, "the store " + std::string(address) +
                          " is that of the process which this one was forked off, whose job goes "
                          "on with it; name another one for the child's job (TE_FL_STORE)");
}

}  // namespace

Result<std::shared_ptr<Store>> Store::open(std::string_view address, int rank, int size,
                                           std::chrono::milliseconds timeout) {
  if (size < 1 || rank < 0 || rank >= size) {
    return invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                            " opens the store " + std::string(address) +
                            "; ranks are 0 to the number of ranks less 1");
  }
  const OpenedKey key{address, rank, ::getpid()};
  // Resets `opening` if an exception ends the attempt, so that another attempt is possible.
  struct Opening {
    const OpenedKey& key;
    bool mine = false;
    ~Opening() {
      if (!mine) return;
      const std::lock_guard lock(stores_mutex);
      if (const auto at = opened().find(key); at != opened().end()) at->second.opening = false;
    }
  } opening{key};
  uint32_t generation = 0;
  bool parents = false;
  {
    const std::lock_guard lock(stores_mutex);
    parents = opened_by_parent(address);
    Opened& entry = opened()[key];
    if (std::shared_ptr<Store> alive = entry.store.lock()) return alive;
    if (entry.opening) {
      return failed_precondition("rank " + std::to_string(rank) + " opens the store " +
                                 std::string(address) + " in two threads at once; open it in one");
    }
    entry.opening = opening.mine = true;
    generation = entry.generation + 1;
  }
  auto store = parents && address.starts_with(kFile)
                   ? is_parents(address, StatusCode::kAlreadyExists)
                   : open_new(address, {rank, size, generation}, timeout);
  if (parents && !store.ok()) store = is_parents(address, store.status().code());
  if (store.ok()) {
    const std::lock_guard lock(stores_mutex);
    Opened& entry = opened()[key];
    entry.store = *store;
    entry.generation = generation;
  }
  return store;
}

Status Store::forget(std::string_view) { return {}; }

std::shared_ptr<Store> Store::in_process() { return std::make_shared<comm::ProcessStore>(); }

}  // namespace te_fl
