// Makes one rank's part of a communicator: chooses the provider, compares the facts of all ranks,
// and makes the provider's object.
#include "comm/make_state.hpp"

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

std::string describe_rank(const Comm::State& state) {
  std::string text = fingerprint_table();
  if (!text.empty() && text.back() != '\n') text += '\n';
  text += "communicator provider = " + state.provider->name + " of plugin " +
          state.provider->plugin + " " + state.provider->version;
  if (state.provider->api.version != nullptr) {
    const char* library = state.provider->api.version(state.provider->desc.self);
    text += std::string(", library ") + (library == nullptr ? "unknown" : library);
  }
  text += "\ncommunicator size = " + std::to_string(state.c.size) +
          "\ncommunicator timeout = " + std::to_string(state.timeout.count()) + " ms\n";
  for (const auto& [op, impl] : state.implementations)
    text += "communicator " + op + " = " + impl + "\n";
  return text;
}

// The store key under which a rank writes its error if its provider could not make the
// communicator's object; other ranks poll it.
constexpr char kRefused[] = "refused";
// te_fl_comm_config.timeout_ms has 32 bits: 49 days.
constexpr milliseconds kLongestTimeout{UINT32_MAX};

// The error that another rank has written, as COMM_FAILED; OK if there is none.
Status refused(Comm::State& state) {
  const auto refusal = state.face->store().look(state.face->key(kRefused));
  if (!refusal.ok() || !refusal->has_value()) return {};
  return Status(StatusCode::kCommFailed, **refusal);
}

// Writes this rank's error for the other ranks, which read the first error that was written. If the
// store fails, they run into their timeout.
void publish_refusal(Comm::State& state, const Status& why) {
  if (state.c.size == 1) return;
  (void)state.face->store().set(state.face->key(kRefused),
                                "rank " + std::to_string(state.c.rank) + ": " + why.to_string());
}

// Waits for rank 0's id. Stops early if any rank has reported an error.
Result<std::string> id_of_first(Comm::State& state) {
  const Clock::time_point end = Clock::now() + state.timeout;
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    const milliseconds turn = std::clamp(left, milliseconds(1), milliseconds(200));
    Result<std::string> id = state.face->store().get(state.face->key("id"), turn);
    if (id.ok() || id.status().code() != StatusCode::kTimeout) return id;
    TE_FL_RETURN_IF_ERROR(refused(state));
    if (left.count() <= 0) return id;
  }
}

Result<std::string> share_id(Comm::State& state) {
  const te_fl_comm_api& api = state.provider->api;
  if (api.unique_id == nullptr) return std::string();
  if (state.c.rank != 0) return id_of_first(state);
  const std::string key = state.face->key("id");
  core::ErrorText errors;
  size_t bytes = 0;
  void* self = state.provider->desc.self;
  te_fl_status code =
      errors.call([&] { return api.unique_id(self, nullptr, 0, &bytes, errors.sink()); });
  std::string id(bytes, '\0');
  if (code == TE_FL_OK && bytes != 0)
    code =
        errors.call([&] { return api.unique_id(self, id.data(), bytes, &bytes, errors.sink()); });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "unique_id of '" + state.provider->name + "'"));
  TE_FL_RETURN_IF_ERROR(state.face->store().set(key, id));
  return id;
}

// Waits until the provider's ready() returns true.
Status wait_ready(Comm::State& state) {
  if (state.provider->api.ready == nullptr) return {};
  const Clock::time_point end = Clock::now() + state.timeout;
  Clock::time_point look = Clock::now() + milliseconds(100);
  for (auto pause = std::chrono::microseconds(50);;
       pause = std::min(pause * 2, decltype(pause)(5000))) {
    core::ErrorText errors;
    int32_t done = 0;
    const te_fl_status code =
        errors.call([&] { return state.provider->api.ready(state.c.self, &done, errors.sink()); });
    TE_FL_RETURN_IF_ERROR(errors.status(code, "communicator '" + state.name + "'"));
    if (done != 0) return {};
    if (Clock::now() > look) {
      TE_FL_RETURN_IF_ERROR(refused(state));
      look = Clock::now() + milliseconds(100);
    }
    if (Clock::now() > end) {
      return Status(StatusCode::kTimeout, "communicator '" + state.name + "' of provider '" +
                                              state.provider->name + "' was not ready within " +
                                              std::to_string(state.timeout.count()) +
                                              " ms (TE_FL_COMM_TIMEOUT_MS)");
    }
    std::this_thread::sleep_for(pause);
  }
}

te_fl_comm_config make_config(const Comm::State& state, const std::string& id) {
  te_fl_comm_config config;
  config.device_provider = state.c.device_provider;
  config.device = state.c.device;
  config.rank = state.c.rank;
  config.size = state.c.size;
  config.name = state.name.c_str();
  config.id = id.empty() ? nullptr : id.data();
  config.id_bytes = id.size();
  config.store = state.face->c();
  config.timeout_ms = static_cast<uint32_t>(state.timeout.count());
  return config;
}

// Makes the provider's object; by split() if `parent` is not null.
Status make(Comm::State& state, const Comm::State* parent, int color) {
  const te_fl_comm_api& api = state.provider->api;
  const bool splits = parent != nullptr && color >= 0 && api.split != nullptr;
  std::string id;
  if (!splits) {
    TE_FL_ASSIGN_OR_RETURN(id, share_id(state));
  }
  const te_fl_comm_config config = make_config(state, id);
  core::ErrorText errors;
  void* self = nullptr;
  const te_fl_status code = errors.call([&] {
    return splits ? api.split(parent->c.self, &config, color, &self, errors.sink())
                  : api.create(state.provider->desc.self, &config, &self, errors.sink());
  });
  TE_FL_RETURN_IF_ERROR(errors.status(
      code, "communicator '" + state.name + "' of provider '" + state.provider->name + "'"));
  state.provider->live.fetch_add(1);
  state.c.self = self;
  state.c.id = g_ids.fetch_add(1) + 1;  // from here on the destructor destroys `self`
  return wait_ready(state);
}

std::shared_ptr<Comm::State> start(const CommOptions& options, milliseconds timeout,
                                   std::shared_ptr<registry::CommProvider> provider) {
  auto state = std::make_shared<Comm::State>();
  state->provider = std::move(provider);
  state->name = options.name;
  state->store = options.store != nullptr ? options.store : Store::in_process();
  state->face = std::make_unique<NamespacedStore>(state->store, options.name);
  state->timeout = timeout;
  state->device = options.device;
  state->fork_generation = fork_generation();
  state->c.device = options.device.to_c();
  state->c.device_provider = options.device.provider;
  state->c.rank = options.rank;
  state->c.size = options.size;
  state->c.maker = registry::intern_string(state->provider->plugin);
  state->origin = std::make_shared<const char>();
  for (int rank = 0; rank < options.size; ++rank) state->origin_ranks.push_back(rank);
  return state;
}

}  // namespace

namespace {

// Returns the thread's policy. Returns an error if it is invalid, since no call could be dispatched
// under it.
Result<SelectionPolicy> policy_now() {
  Result<SelectionPolicy> policy = current_policy();
  if (!policy.ok()) return policy;
  TE_FL_RETURN_IF_ERROR(policy::settings_error(policy->settings()));
  return policy;
}

void keep_policy(Comm::State& state, const SelectionPolicy& policy) {
  state.policy = policy.id();
  PolicySettings settings = policy.settings();
  settings.deterministic = true;
  state.deterministic_policy = SelectionPolicy::intern(std::move(settings)).id();
}

}  // namespace

Result<milliseconds> checked_timeout(const CommOptions& options) {
  if (options.timeout) return std::min(*options.timeout, kLongestTimeout);
  TE_FL_ASSIGN_OR_RETURN(const int64_t ms, environment::get_int("TE_FL_COMM_TIMEOUT_MS"));
  return milliseconds(ms);
}

Result<std::shared_ptr<Comm::State>> make_state(const CommOptions& options,
                                                const Comm::State* parent, int color) {
  TE_FL_RETURN_IF_ERROR(check(options));
  TE_FL_ASSIGN_OR_RETURN(const milliseconds timeout, checked_timeout(options));
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
  std::shared_ptr<Comm::State> state = start(options, timeout, std::move(provider));
  keep_policy(*state, *policy);
  state->implementations =
      choose_implementations(*state->provider, policy->settings(), state->device);
  const Facts facts{describe_rank(*state), core::g_validate.load(std::memory_order_relaxed)};
  const Result<bool> validates = agree(*state->face, state->c.rank, state->c.size, facts, timeout);
  if (!validates.ok()) return cannot(validates.status());
  state->validates = *validates;
  if (Status s = make(*state, parent, color); !s.ok()) {
    publish_refusal(*state, s);
    return cannot(s);
  }
  publish_made(*state);
  add(state);
  watch_calls();
  if (Status s = watch(); !s.ok()) {
    // Other ranks that have made their objects would wait for this rank in their first collective,
    // so they must fail too.
    fail_all(state, s,
             "rank " + std::to_string(options.rank) + " of communicator '" + options.name +
                 "' stopped creating it: " + s.message());
    return cannot(s);
  }
  return state;
}

}  // namespace te_fl::comm
