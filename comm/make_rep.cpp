// Makes one rank's part of a communicator: the choice of the provider, the agreement of the ranks,
// the provider's object.
#include "comm/make_rep.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <utility>

#include "comm/agreement.hpp"
#include "comm/calls.hpp"
#include "comm/choose_provider.hpp"
#include "comm/process_store.hpp"
#include "comm/watchdog.hpp"
#include "core/base/error_text.hpp"
#include "core/base/settings.hpp"
#include "policy/current.hpp"
#include "registry/implementation.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/watch.hpp"

namespace te_fl::comm {
namespace {

using std::chrono::milliseconds;

std::atomic<uint64_t> g_ids{0};

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

// The store key for a rank's error if its provider could not make its object; other ranks poll it.
constexpr char kRefused[] = "refused";
// te_fl_comm_config.timeout_ms has 32 bits: 49 days.
constexpr milliseconds kLongestTimeout{UINT32_MAX};

// The error that another rank has written, as COMM_FAILED; OK if there is none.
Status refused(Comm::Rep& rep) {
  const auto told = rep.face->store().look(rep.face->key(kRefused));
  if (!told.ok() || !told->has_value()) return {};
  return Status(StatusCode::kCommFailed, **told);
}

// Writes this rank's error for the other ranks, which read the first error that was written. If the
// store fails, they run into their timeout.
void tell_refused(Comm::Rep& rep, const Status& why) {
  if (rep.c.size == 1) return;
  (void)rep.face->store().set(rep.face->key(kRefused),
                              "rank " + std::to_string(rep.c.rank) + ": " + why.to_string());
}

// Waits for rank 0's id. Stops early if any rank has reported an error.
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

// Waits until the provider's ready() returns true.
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

// Makes the provider's object; by split() if `parent` is not null.
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
  rep.c.id = g_ids.fetch_add(1) + 1;  // from here on the destructor destroys `self`
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

namespace {

// The thread's policy. An error if it is invalid, since it could decide no call.
Result<SelectionPolicy> policy_now() {
  Result<SelectionPolicy> policy = current_policy();
  if (!policy.ok()) return policy;
  TE_FL_RETURN_IF_ERROR(policy::settings_error(policy->settings()));
  return policy;
}

void keep_policy(Comm::Rep& rep, const SelectionPolicy& policy) {
  rep.policy = policy.id();
  PolicySettings settings = policy.settings();
  settings.deterministic = true;
  rep.deterministic_policy = SelectionPolicy::intern(std::move(settings)).id();
}

}  // namespace

Result<milliseconds> timeout_of(const CommOptions& options) {
  if (options.timeout) return std::min(*options.timeout, kLongestTimeout);
  TE_FL_ASSIGN_OR_RETURN(const int64_t ms, environment::get_int("TE_FL_COMM_TIMEOUT_MS"));
  return milliseconds(ms);
}

Result<std::shared_ptr<Comm::Rep>> make_rep(const CommOptions& options, const Comm::Rep* parent,
                                            int color) {
  TE_FL_RETURN_IF_ERROR(check(options));
  TE_FL_ASSIGN_OR_RETURN(const milliseconds timeout, timeout_of(options));
  const auto cannot = [&](const Status& s) {
    return s.wrap("communicator '" + options.name + "' cannot be made");
  };
  const Result<SelectionPolicy> policy = policy_now();
  if (!policy.ok()) return cannot(policy.status());
  std::shared_ptr<registry::CommProvider> provider;
  if (parent != nullptr) {
    provider = parent->provider;
  } else {
    const bool processes = options.store != nullptr &&
                           dynamic_cast<const ProcessStore*>(options.store.get()) == nullptr;
    TE_FL_ASSIGN_OR_RETURN(
        provider, choose_provider(options.device, policy->settings(), options.provider, processes));
  }
  std::shared_ptr<Comm::Rep> rep = start(options, timeout, std::move(provider));
  keep_policy(*rep, *policy);
  rep->implementations = choose_implementations(*rep->provider, policy->settings(), rep->device);
  const Facts facts{facts_of(*rep), core::g_validate.load(std::memory_order_relaxed)};
  const Result<bool> validates = agree(*rep->face, rep->c.rank, rep->c.size, facts, timeout);
  if (!validates.ok()) return cannot(validates.status());
  rep->validates = *validates;
  if (Status s = make(*rep, parent, color); !s.ok()) {
    tell_refused(*rep, s);
    return cannot(s);
  }
  tell_made(*rep);
  add(rep);
  watch_calls();
  if (Status s = watch(); !s.ok()) {
    // Other ranks that have made their objects would wait for this rank in their first collective,
    // so they must fail too.
    fail_all(rep, s,
             "rank " + std::to_string(options.rank) + " of communicator '" + options.name +
                 "' gave it up: " + s.message());
    return cannot(s);
  }
  return rep;
}

}  // namespace te_fl::comm
