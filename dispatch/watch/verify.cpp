#include "dispatch/watch/verify.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/fork.hpp"
#include "core/base/text.hpp"
#include "dispatch/watch/call_copy.hpp"
#include "dispatch/watch/call_file.hpp"
#include "dispatch/watch/compare_outputs.hpp"
#include "dispatch/watch/quarantine.hpp"
#include "dispatch/watch/replay_command.hpp"
#include "registry/arguments.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/watch.hpp"

namespace te_fl::dispatch {

struct Verification::Config {
  uint64_t generation = 0;
  Status error;
  uint64_t threshold = 0;                  // a call is checked if its hash is below
  std::set<std::string, std::less<>> ops;  // empty: all ops
  uint64_t seed = 0;
  bool quarantine = false;
  std::string folder;
  int64_t cases = 0;
};

struct Verification::State {
  std::shared_ptr<const Config> config;
  // Call counters by op name, since a row's table may be freed. Entries are never removed.
  std::map<std::string, std::atomic<uint64_t>, std::less<>> calls;
};

// The thread's cached copy of the state, so that calls that are not checked take no lock.
struct Verification::Seen {
  std::shared_ptr<const Config> config;
  std::map<std::string, std::atomic<uint64_t>*, std::less<>> calls;
};

struct Verification::Rep {
  Rep(const Call& c, std::shared_ptr<const Config> conf)
      : call(c), config(std::move(conf)), copy(c) {}
  const Call& call;
  std::shared_ptr<const Config> config;
  CallCopy copy;
};

namespace {

constinit core::ForkMutex verify_mutex(core::LockLevel::kVerification);
const core::ForkMutex::Registration verify_registration(verify_mutex);

struct Counters {
  std::atomic<uint64_t> agreed{0}, differed{0}, saved{0}, captured{0}, skipped{0}, failed{0};
};
Counters g_counts;
std::atomic<uint64_t> g_files{0};

// The mixing function of SplitMix64.
uint64_t mixed(uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

uint64_t hash_text(std::string_view text) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

// Parses "0.05:op,op2". The fraction becomes a threshold for a 64-bit hash.
Status parse(std::string_view text, uint64_t& threshold, std::set<std::string, std::less<>>& ops) {
  const size_t colon = text.find(':');
  const std::string rate(core::trim(text.substr(0, colon)));
  double share = 0;
  const auto [end, error] = std::from_chars(rate.data(), rate.data() + rate.size(), share);
  if (error != std::errc() || end != rate.data() + rate.size() || !(share > 0 && share <= 1)) {
    return invalid_argument("TE_FL_VERIFY=" + std::string(text) + ": '" + rate +
                            "' is not a share of calls above 0 and up to 1 (RATE or RATE:OP,OP2)");
  }
  threshold = share >= 1 ? UINT64_MAX : static_cast<uint64_t>(share * 0x1p64);
  if (colon == std::string_view::npos) return {};
  std::vector<std::string> known;
  for (const te_fl_op_schema* schema : core::catalogue()) known.emplace_back(schema->name);
  std::string_view rest = text.substr(colon + 1);
  while (true) {
    const size_t comma = rest.find(',');
    const std::string op(core::trim(rest.substr(0, comma)));
    const bool custom = op.find("::") != std::string::npos;
    if (!custom && std::find(known.begin(), known.end(), op) == known.end()) {
      return invalid_argument("TE_FL_VERIFY=" + std::string(text) + ": there is no op '" + op +
                              "'" + core::did_you_mean(op, known) + " (`te-fl ops` lists them)");
    }
    ops.insert(op);
    if (comma == std::string_view::npos) return {};
    rest.remove_prefix(comma + 1);
  }
}

std::string text_setting(const char* name) {
  const Result<std::string> value = environment::get(name);
  return value.ok() ? std::string(core::trim(*value)) : std::string();
}

int64_t int_setting(const char* name) {
  const Result<int64_t> value = environment::get_int(name);
  return value.ok() ? *value : 0;
}

std::string file_word(std::string_view text) {
  std::string out;
  for (const char c : text) out += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return out;
}

int64_t cases_in(const std::filesystem::path& folder) {
  int64_t count = 0;
  std::error_code code;
  for (std::filesystem::directory_iterator at(folder, code), end; !code && at != end;
       at.increment(code)) {
    if (at->path().extension() == ".call") ++count;
  }
  return count;
}

// True if another implementation can compute comparable results: the op is a compute op without an
// opaque saved record.
bool comparable(const Call& call) {
  if (core::class_of(call.row.compiled->schema()) != core::OpClass::kCompute) return false;
  const te_fl_saved* record = saved_record(call.row, call.args);
  return record == nullptr || record->opaque == 0;
}

bool is_power_of_two(uint64_t n) { return (n & (n - 1)) == 0; }

}  // namespace

const Implementation* reference_for(const OpRow& row, const core::Signature& signature,
                                    bool deterministic) {
  PolicySettings settings;
  settings.prefer = Kind::kReference;
  settings.deterministic = deterministic;
  policy::CallTraits call{row.compiled->schema().name, Device{},        true, 0, signature.dtypes,
                          signature.scalings,          signature.later, false};
  for (const policy::Standing& v : policy::decide(settings, call, row.views).order) {
    const Implementation* impl = row.impls[v.impl].get();
    if (v.refusal == policy::Refusal::kNone && impl->kind == Kind::kReference) return impl;
  }
  return nullptr;
}

Verification::~Verification() = default;

// The configuration from the environment, which is read again only after a change.
std::shared_ptr<const Verification::Config> Verification::read(State& state) {
  {
    const std::lock_guard lock(verify_mutex);
    if (state.config != nullptr && state.config->generation == environment::generation()) {
      return state.config;
    }
  }
  // Reads the settings before taking the lock, since kEnvironment precedes it.
  auto made = std::make_shared<Config>();
  made->generation = environment::generation();
  made->error = parse(text_setting("TE_FL_VERIFY"), made->threshold, made->ops);
  made->seed = static_cast<uint64_t>(int_setting("TE_FL_VERIFY_SEED"));
  made->quarantine = text_setting("TE_FL_VERIFY_ACTION") == "quarantine";
  made->folder = text_setting("TE_FL_VERIFY_DIR");
  made->cases = int_setting("TE_FL_VERIFY_CASES");
  const std::lock_guard lock(verify_mutex);
  return state.config = made;
}

// The 0-based number of this call among the op's calls in the process.
uint64_t Verification::count(State& state, Seen& seen, std::string_view op) {
  auto at = seen.calls.find(op);
  if (at == seen.calls.end()) {
    const std::lock_guard lock(verify_mutex);
    at = seen.calls.emplace(op, &state.calls[std::string(op)]).first;
  }
  return at->second->fetch_add(1, std::memory_order_relaxed);
}

Result<std::unique_ptr<Verification>> Verification::begin(const Call& call) {
  if (Unwatched::now()) return std::unique_ptr<Verification>();
  static constinit std::atomic<State*> made{nullptr};
  State& state = core::made_once(made, [] { return new State; });
  thread_local Seen seen;
  if (seen.config == nullptr || seen.config->generation != environment::generation()) {
    seen.config = read(state);
  }
  const std::shared_ptr<const Config>& config = seen.config;
  if (!config->error.ok()) return config->error;
  const std::string_view op = call.row.compiled->schema().name;
  if (!config->ops.empty() && !config->ops.contains(op)) return std::unique_ptr<Verification>();
  const uint64_t number = count(state, seen, op);
  if (mixed(config->seed ^ hash_text(op) ^ mixed(number)) > config->threshold)
    return std::unique_ptr<Verification>();
  if (call.capturing) {
    ++g_counts.captured;
    return std::unique_ptr<Verification>();
  }
  if (!comparable(call)) {
    ++g_counts.skipped;
    return std::unique_ptr<Verification>();
  }
  std::unique_ptr<Verification> v(new Verification(call));
  v->rep_ = std::make_unique<Rep>(call, config);
  const Status copied = v->rep_->copy.before();
  TE_FL_RETURN_IF_ERROR(v->rep_->copy.waited().wrap(
      "work that was enqueued before op '" + std::string(op) +
      "' has failed, for which TE_FL_VERIFY waited; the op did not run"));
  if (!copied.ok()) {
    ++g_counts.skipped;
    log::once(
        log::Level::kInfo, "verify " + std::string(op),
        "TE_FL_VERIFY leaves out a call of op '" + std::string(op) + "': " + copied.message());
    return std::unique_ptr<Verification>();
  }
  return v;
}

Verification::Verification(const Call&) {}

Status Verification::conclude(const Status& status, const Execution& execution) {
  outcome_ = "failed";
  if (!status.ok() || execution.impl == nullptr) {
    ++g_counts.failed;
    return status;
  }
  if (execution.impl->kind == Kind::kReference || !comparable(rep_->call)) {
    ++g_counts.skipped;
    outcome_ = "left out: the reference ran it, or it cannot be compared";
    return status;
  }
  check(execution);
  return rep_->copy.waited().wrap("op '" + execution.impl->op + "' in '" + execution.impl->impl_id +
                                  "' failed after it was enqueued (TE_FL_VERIFY)");
}

void Verification::check(const Execution& execution) {
  const Call& call = rep_->call;
  const bool deterministic = policy::settings_of(call.policy).deterministic;
  const Implementation* reference = reference_for(call.row, call.signature, deterministic);
  std::string why = "no reference implementation takes such a call";
  if (reference != nullptr) {
    Status copied = rep_->copy.after();
    if (!rep_->copy.waited().ok()) {
      ++g_counts.failed;
      return;
    }
    if (copied.ok()) copied = rep_->copy.rerun();
    core::ErrorText errors;
    te_fl_status code = copied.to_c();
    why = copied.message();
    if (copied.ok()) {
      te_fl_context context = context_of(call, deterministic, errors.sink());
      context.device = Device{}.to_c();
      context.provider = 0;
      context.stream = nullptr;
      context.rng = &rep_->copy.plan().rng();
      code = run_on_copies(call, *reference, context, rep_->copy.plan().args(), errors);
      why = "'" + reference->impl_id + "' did not run it: " + errors.text();
    }
    if (code == TE_FL_OK) return compare(*reference, execution);
  }
  ++g_counts.skipped;
  outcome_ = "left out: " + why;
  log::once(log::Level::kInfo, "verify " + execution.impl->op,
            "TE_FL_VERIFY leaves out a call of op '" + execution.impl->op + "': " + why);
}

void Verification::compare(const Implementation& reference, const Execution& execution) {
  const core::CompiledOp& op = *rep_->call.row.compiled;
  const char* const right = rep_->copy.again().data();
  const CallDistances distances{rep_->copy.written().data() - right,
                                rep_->copy.read().data() - right};
  int compared = 0;
  const auto found = compare_outputs(op, rep_->copy.plan().args(), distances, compared);
  if (found.empty()) {
    ++(compared == 0 ? g_counts.skipped : g_counts.agreed);
    outcome_ = compared == 0 ? std::string("left out: nothing to compare")
                             : "agreed with '" + reference.impl_id + "'";
    return;
  }
  ++g_counts.differed;
  std::string what;
  for (const OutputDifference& d : found) what += (what.empty() ? "" : "; ") + d.text();
  outcome_ = "differs from '" + reference.impl_id + "': " + what;
  differs(execution, reference, std::move(what));
}

void Verification::differs(const Execution& execution, const Implementation& reference,
                           std::string what) {
  const Call& call = rep_->call;
  const Implementation& impl = *execution.impl;
  uint64_t nth = 0;
  {
    const std::lock_guard lock(verify_mutex);
    static auto* const counts = new std::map<std::string, uint64_t>;
    nth = ++(*counts)[impl.op + ' ' + impl.impl_id + ' ' + std::to_string(call.signature.dtypes) +
                      ' ' + std::to_string(call.signature.scalings)];
  }
  const std::string file = save(execution, what);
  // Logs the 1st, 2nd, 4th, 8th, ... difference; the first has all the details, the others show the
  // frequency.
  if (is_power_of_two(nth)) {
    log::warning("op '" + impl.op + "': '" + impl.impl_id + "' (" + impl.owner +
                 ") does not agree with '" + reference.impl_id + "' (difference number " +
                 std::to_string(nth) + " of such calls): " + what + "; with " +
                 registry::describe_arguments(call.row.compiled->schema(), call.args) +
                 (file.empty() ? std::string("; the call was not saved (TE_FL_VERIFY_DIR)")
                               : "; `" + replay_command(impl.owner, file) + "` runs it again"));
  }
  if (!rep_->config->quarantine) return;
  const Chip chip = find_chip(call.signature.device);
  hold({impl.op, impl.impl_id, impl.owner, find_build_id(impl.owner), chip.name, chip.driver,
        call.signature.dtypes, call.signature.scalings,
        "it does not agree with '" + reference.impl_id + "': " + what, file,
        file.empty() ? std::string() : replay_command(impl.owner, file)});
}

// Saves the call and returns the path. The file gets its final name only when it is complete. Empty
// if it was not saved.
std::string Verification::save(const Execution& execution, const std::string& what) const {
  const Config& config = *rep_->config;
  if (config.folder.empty()) return {};
  const std::filesystem::path folder = config.folder;
  std::error_code code;
  std::filesystem::create_directories(folder, code);
  if (cases_in(folder) >= config.cases) return {};
  const Call& call = rep_->call;
  const Implementation& impl = *execution.impl;
  const bool deterministic = policy::settings_of(call.policy).deterministic;
  nlohmann::json d = describe_call(*call.row.compiled, rep_->copy.plan(), rep_->copy.again().data(),
                                   call.signature.device, deterministic);
  const Chip chip = find_chip(call.signature.device);
  d["impl"] = impl.impl_id;
  d["owner"] = impl.owner;
  d["build"] = find_build_id(impl.owner);
  d["chip"] = chip.name;
  d["driver"] = chip.driver;
  d["staged"] = execution.staged;
  d["note"] = what;
  const std::string name = file_word(impl.op) + "-" + file_word(impl.impl_id) + "-" +
                           std::to_string(getpid()) + "-" + std::to_string(++g_files) + ".call";
  const std::string path = std::filesystem::absolute(folder / name, code).string();
  const Status written = write_call_file(path, d, rep_->copy.read(), rep_->copy.written());
  if (written.ok()) {
    ++g_counts.saved;
    return path;
  }
  log::once(log::Level::kWarning, "verify saving", "a call cannot be saved: " + written.message());
  return {};
}

Status verify_status() {
  const std::string setting = text_setting("TE_FL_VERIFY");
  uint64_t threshold = 0;
  std::set<std::string, std::less<>> ops;
  return setting.empty() ? Status() : parse(setting, threshold, ops);
}

}  // namespace te_fl::dispatch

namespace te_fl {

VerifyCounts verify_counts() {
  const auto& c = dispatch::g_counts;
  return {c.agreed, c.differed, c.saved, c.captured, c.skipped, c.failed};
}

}  // namespace te_fl
