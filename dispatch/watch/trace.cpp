#include "dispatch/watch/trace.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <unordered_map>

#include "core/base/file.hpp"
#include "core/base/fork.hpp"
#include "core/base/job_rank.hpp"
#include "core/base/text.hpp"
#include "dispatch/watch/call_file.hpp"
#include "registry/arguments.hpp"
#include "registry/plan_cache.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/version.hpp"
#include "te_fl/watch.hpp"

namespace te_fl {
namespace dispatch {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr size_t kMaxDescriptions = 4096;
constexpr uint32_t kNone = UINT32_MAX;
constexpr int64_t kMaxValues = 4096;  // integer tensors up to this size are recorded completely

struct Event {
  const char* op;
  const char* impl;  // null: no implementation executed the call
  int64_t start, nanoseconds;
  int64_t thread;
  void* stream;
  Device device;
  uint32_t description;
  uint32_t text;    // earlier attempts, or the error; kNone: none
  uint32_t kernel;  // kernels that the implementation named; kNone: none
  uint32_t reason;  // the reason of the choice; kNone: unknown
  bool staged, failed;
  bool verification;  // the comparison of a call's results; `text` is its outcome
};

// The key for a cached result of describe(): description number, implementation, and true if the
// call was staged.
using KernelKey = std::tuple<uint32_t, uint64_t, bool>;
// The key for a cached reason of a choice: that of the kernel, and the policy.
using ReasonKey = std::tuple<uint32_t, uint64_t, bool, uint32_t>;

struct Recording {
  std::string path;
  Status error;  // the reason for which the file cannot be written
  pid_t process = 0;
  bool child = false;  // true if forked from a process that was tracing
  int rank = -1;       // in the job; -1: none
  size_t limit = 0;
  uint64_t dropped = 0;
  std::vector<Event> events;
  std::unordered_map<std::string, uint32_t> known;  // index of each description, by call signature
  std::vector<json> descriptions;
  std::map<std::string, uint32_t> texts;
  std::map<KernelKey, uint32_t> kernels;  // results of describe(), as indices of texts
  std::map<ReasonKey, uint32_t> reasons;  // reasons of choices, as indices of texts
};

constinit core::ForkMutex trace_mutex(core::LockLevel::kTrace);
const core::ForkMutex::Registration trace_registration(trace_mutex);
const Clock::time_point g_began = Clock::now();
// The system time of the start, which aligns the traces of several processes.
const std::chrono::system_clock::time_point g_began_at = std::chrono::system_clock::now();
// The environment's change counter when the trace began; UINT64_MAX: the trace begins at the next
// call.
std::atomic<uint64_t> g_started{UINT64_MAX};
const core::ForkedChild trace_forked_child(core::LockLevel::kTrace,
                                           [] { g_started.store(UINT64_MAX); });

Recording& recording() {
  static Recording* const instance = new Recording;
  return *instance;
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - g_began).count();
}

int64_t thread_number() {
  static thread_local const int64_t number = syscall(SYS_gettid);
  return number;
}

void write_at_exit() {
  if (const Status s = write_trace(); !s.ok()) log::warning(s.message());
}

// The process's rank in its job; -1: none.
int rank_in_job() { return core::job_rank().value_or(-1); }

// The path of the trace file from the setting; empty: none. Replaces "%p" by the process id and
// "%r" by the rank. Without these, only rank 0 of the parent process uses the plain path.
std::string file_asked_for(const Result<std::string>& setting, int rank, bool child) {
  std::string path = setting.ok() ? *setting : std::string();
  if (path.empty()) return path;
  const auto put = [&](const char* mark, const std::string& text) {
    const size_t at = path.find(mark);
    if (at == std::string::npos) return false;
    path.replace(at, 2, text);
    return true;
  };
  const bool by_rank = put("%r", std::to_string(std::max(rank, 0)));
  if (put("%p", std::to_string(getpid()))) return path;
  if (!by_rank && rank > 0) path += ".rank" + std::to_string(rank);
  if (child) path += "." + std::to_string(getpid());
  return path;
}

Status cannot_write(const std::string& path, const Status& why) {
  return failed_precondition("the trace " + path +
                             " cannot be written (TE_FL_TRACE): " + why.message());
}

// OK if the file can be written when the process ends.
Status check_writable(const std::string& path) {
  if (path.empty()) return {};
  const Status good = core::FileReplacement(path).status();
  return good.ok() ? good : cannot_write(path, good);
}

// Records the values of short integer tensors in host memory, since they determine the work of many
// ops (lengths, indices).
void add_values(const Call& call, json& description) {
  const te_fl_op_schema& schema = call.row.compiled->schema();
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type != TE_FL_ARG_TENSOR || arg.role == TE_FL_OUT) continue;
    const te_fl_tensor* t = registry::tensor_argument(arg, call.args);
    if (t == nullptr || t->dl.strides != nullptr || t->dl.data == nullptr) continue;
    const int dtype = dtype_index(t->dl.dtype);
    const bool host = Device{t->dl.device.type, t->dl.device.index, 0}.is_host();
    if (!host || (dtype != TE_FL_I32 && dtype != TE_FL_I64)) continue;
    int64_t count = 1;
    for (int d = 0; d < t->dl.ndim; ++d) count *= t->dl.shape[d];
    if (count > kMaxValues) continue;
    const char* at = static_cast<const char*>(t->dl.data) + t->dl.byte_offset;
    std::vector<int64_t> values(static_cast<size_t>(count));
    for (size_t k = 0; k < values.size(); ++k) {
      int32_t narrow = 0;
      if (dtype == TE_FL_I64) {
        std::memcpy(&values[k], at + 8 * k, 8);
      } else {
        std::memcpy(&narrow, at + 4 * k, 4);
        values[k] = narrow;
      }
    }
    description["args"][arg.name]["values"] = values;
  }
}

// The index of the call's description. Calls that differ only in data share one. kNone if there are
// too many.
uint32_t find_description(const Call& call) {
  te_fl_context context = context_of(call, false, nullptr);
  context.rng = {};
  registry::PlanKey metadata;
  metadata.set(*call.row.compiled, call.args, context);
  const std::string key = (std::to_string(call.op) + ' ').append(metadata.text());
  {
    const std::lock_guard lock(trace_mutex);
    const auto at = recording().known.find(key);
    if (at != recording().known.end()) return at->second;
    if (recording().descriptions.size() >= kMaxDescriptions) return kNone;
  }
  StagingPlan plan;
  if (!plan.make(*call.row.compiled, call.args, call.signature.device, call.options.rng,
                 StagingPlan::Scope::kAll)
           .ok()) {
    return kNone;
  }
  char* const nowhere = reinterpret_cast<char*>(uintptr_t{1} << 20);
  plan.bind(nowhere);
  const bool deterministic = policy::settings_of(call.policy).deterministic;
  json d = describe_call(*call.row.compiled, plan, nowhere, call.signature.device, deterministic);
  d["text"] = registry::describe_arguments(call.row.compiled->schema(), call.args);
  if (core::class_of(call.row.compiled->schema()) != core::OpClass::kCompute) {
    d.erase("args");  // metadata queries and collectives cannot be replayed alone
  } else {
    add_values(call, d);
  }
  const std::lock_guard lock(trace_mutex);
  Recording& s = recording();
  const auto [at, added] = s.known.emplace(key, static_cast<uint32_t>(s.descriptions.size()));
  if (added) s.descriptions.push_back(std::move(d));
  return at->second;
}

// The index of a text, which is added if there is room. The caller holds the lock.
uint32_t find_number(Recording& s, std::string text) {
  if (text.empty()) return kNone;
  if (s.texts.size() >= kMaxDescriptions) text = "(too many different ones were kept already)";
  return s.texts.emplace(std::move(text), static_cast<uint32_t>(s.texts.size())).first->second;
}

// The kernels that the implementation launched for the call. Asks the implementation once per
// description. The caller holds no lock.
uint32_t describe_kernel(const Call& call, uint32_t description, const Execution& execution) {
  if (execution.impl->desc.describe == nullptr || description == kNone) return kNone;
  const KernelKey kernel_key(description, execution.impl->number, execution.staged);
  {
    const std::lock_guard lock(trace_mutex);
    const auto at = recording().kernels.find(kernel_key);
    if (at != recording().kernels.end()) return at->second;
  }
  const bool deterministic = policy::settings_of(call.policy).deterministic;
  Described answer = described(call, {execution.impl, execution.staged}, deterministic);
  const std::lock_guard lock(trace_mutex);
  Recording& s = recording();
  return s.kernels.try_emplace(kernel_key, find_number(s, std::move(answer.text))).first->second;
}

// The reason for which the implementation runs such calls, in the words of `te-fl explain`.
std::string choice_text(const Call& call, const Execution& execution) {
  const te_fl_saved* record = call.row.saved != nullptr && call.row.saved->role == TE_FL_IN
                                  ? saved_record(call.row, call.args)
                                  : nullptr;
  if (record != nullptr && record->opaque != 0) return "the forward op ran in it";
  const Result<Choice> decision = choose(call, call.policy);
  if (!decision.ok()) return {};
  for (const Candidate& c : list_candidates(call.row, *decision, call.args, execution.failures)) {
    if (c.impl_id == execution.impl->impl_id) return c.reason;
  }
  return {};
}

// The index of the reason for the choice. Decides once per description and policy. The caller holds
// no lock.
uint32_t describe_choice(const Call& call, uint32_t description, const Execution& execution) {
  if (description == kNone) return kNone;
  const ReasonKey key(description, execution.impl->number, execution.staged, call.policy);
  {
    const std::lock_guard lock(trace_mutex);
    const auto at = recording().reasons.find(key);
    if (at != recording().reasons.end()) return at->second;
  }
  std::string text = choice_text(call, execution);
  const std::lock_guard lock(trace_mutex);
  Recording& s = recording();
  return s.reasons.try_emplace(key, find_number(s, std::move(text))).first->second;
}

std::string reason_text(const Status& status, const Execution& execution) {
  std::string text;
  for (const Failure& f : execution.failures) {
    text += (text.empty() ? "" : "; ") + f.impl->impl_id + ": " + f.text.substr(0, 300);
  }
  if (!status.ok()) text = status.message().substr(0, 600);
  return text;
}

std::string hex(const void* p) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", p);
  return p == nullptr ? "default" : text;
}

// One line of JSON. Replaces bytes that are not UTF-8, in names or messages.
std::string text_line(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// Writes the name of a Perfetto track.
void name_track(core::FileReplacement& out, int group, int64_t track, const std::string& name) {
  out.write(text_line({{"ph", "M"},
                       {"name", "thread_name"},
                       {"pid", group},
                       {"tid", track},
                       {"args", {{"name", name}}}}) +
            ",\n");
}

void write_events(core::FileReplacement& out, const Recording& s) {
  std::map<std::pair<std::string, void*>, int64_t> streams;
  std::set<int64_t> threads;
  std::vector<const std::string*> texts(s.texts.size());
  for (const auto& [text, number] : s.texts) texts[number] = &text;
  for (const int group : {1, 2}) {
    out.write(json{{"ph", "M"},
                   {"name", "process_name"},
                   {"pid", group},
                   {"args", {{"name", group == 1 ? "calls by thread" : "enqueued by stream"}}}}
                  .dump() +
              ",\n");
  }
  for (const Event& e : s.events) {
    json args = {{"impl", e.impl == nullptr ? "none" : e.impl}, {"device", to_string(e.device)}};
    if (e.description != kNone) {
      // `te-fl tune` counts the calls by this number.
      if (!e.verification) args["call"] = e.description;
      args["arguments"] = s.descriptions[e.description].value("text", "");
    }
    if (e.kernel != kNone) args["kernel"] = *texts[e.kernel];
    if (e.staged) args["staged"] = true;
    if (e.reason != kNone) args["why"] = *texts[e.reason];
    if (e.text != kNone)
      args[e.verification ? "result" : e.failed ? "error" : "fallback"] = *texts[e.text];
    json event = {{"ph", "X"},
                  {"name", e.verification ? std::string("verify ") + e.op : std::string(e.op)},
                  {"cat", e.verification    ? "verify"
                          : e.failed        ? "failed"
                          : e.staged        ? "staged"
                          : e.text != kNone ? "fallback"
                                            : "call"},
                  {"pid", 1},
                  {"tid", e.thread},
                  {"ts", static_cast<double>(e.start) / 1000},
                  {"dur", static_cast<double>(e.nanoseconds) / 1000},
                  {"args", args}};
    if (threads.insert(e.thread).second)
      name_track(out, 1, e.thread, "thread " + std::to_string(e.thread));
    out.write(text_line(event) + ",\n");
    if (e.device.is_host()) continue;
    const auto key = std::pair(to_string(e.device), e.stream);
    const auto [at, added] = streams.emplace(key, static_cast<int64_t>(streams.size()) + 1);
    if (added) name_track(out, 2, at->second, key.first + " stream " + hex(e.stream));
    event["pid"] = 2;
    event["tid"] = at->second;
    out.write(text_line(event) + ",\n");
  }
}

// Writes the events to their file, if there is one and this process recorded them. Requires the
// lock.
Status write_recording(const Recording& s) {
  if (s.path.empty() || s.process != getpid()) return {};
  core::FileReplacement out(s.path);
  out.write("{\"traceEvents\": [\n");
  write_events(out, s);
  const json last = {
      {"ph", "M"}, {"name", "process_sort_index"}, {"pid", 1}, {"args", {{"sort_index", 0}}}};
  const int64_t began =
      std::chrono::duration_cast<std::chrono::microseconds>(g_began_at.time_since_epoch()).count();
  json other = {{"te_fl", TE_FL_VERSION},
                {"events_dropped", s.dropped},
                {"process", s.process},
                {"began_us", began}};
  if (s.rank >= 0) other["rank"] = s.rank;
  out.write(text_line(last) + "],\n\"otherData\": " + text_line(other) +
            ",\n\"te_fl_calls\": " + text_line(s.descriptions) + "}\n");
  const Status written = out.commit();
  return written.ok() ? written : cannot_write(s.path, written);
}

// Begins a recording with the current settings. A forked child begins a new recording, and so does
// a setting with another file. In that case the events recorded so far are first written to the
// previous file, under the same lock, so that no other thread's event is lost.
void start() {
  const Result<std::string> setting = environment::get("TE_FL_TRACE");
  const Result<int64_t> limit = environment::get_int("TE_FL_TRACE_EVENTS");
  const int rank = rank_in_job();
  const std::lock_guard lock(trace_mutex);
  Recording& s = recording();
  static bool registered = false;
  if (!registered) std::atexit(&write_at_exit);
  registered = true;
  const bool child = s.child || (s.process != 0 && s.process != getpid());
  std::string path = file_asked_for(setting, rank, child);
  if (s.process != getpid() || s.path != path) {
    if (const Status written = write_recording(s); !written.ok()) log::warning(written.message());
    s.events.clear();
    s.dropped = 0;
    s.child = child;
    s.process = getpid();
  }
  s.rank = rank;
  s.error = check_writable(path);
  s.path = s.error.ok() ? std::move(path) : std::string();
  s.limit = limit.ok() ? static_cast<size_t>(*limit) : 0;
}

}  // namespace

Status begin_trace() {
  const uint64_t current = environment::generation();
  if (g_started.load(std::memory_order_acquire) != current) {
    start();
    g_started.store(current, std::memory_order_release);
  }
  const std::lock_guard lock(trace_mutex);
  return recording().error;
}

Status trace_status() {
  return check_writable(file_asked_for(environment::get("TE_FL_TRACE"), rank_in_job(), false));
}

TracedCall::TracedCall(const Call& call) : call_(call), start_(0), description_(kNone) {
  description_ = find_description(call);
  start_ = now();
}

void TracedCall::record(const Status& status, const Execution& execution) {
  const int64_t end = now();
  std::string text = reason_text(status, execution);
  const char* const op = registry::intern_string(call_.row.compiled->schema().name);
  const Implementation* impl = status.ok() ? execution.impl : nullptr;
  const uint32_t kernel = impl == nullptr ? kNone : describe_kernel(call_, description_, execution);
  const uint32_t why = impl == nullptr ? kNone : describe_choice(call_, description_, execution);
  const std::lock_guard lock(trace_mutex);
  Recording& s = recording();
  if (s.process != getpid()) return;
  if (s.events.size() >= s.limit) {
    ++s.dropped;
    return;
  }
  const uint32_t number = find_number(s, std::move(text));
  s.events.push_back({op, impl == nullptr ? nullptr : impl->interned_id, start_, end - start_,
                      thread_number(), call_.options.stream, call_.signature.device, description_,
                      number, kernel, why, execution.staged, !status.ok(), false});
}

void TracedCall::record_verification(int64_t start, const Execution& execution,
                                     const std::string& outcome) {
  const int64_t end = now();
  const char* const op = registry::intern_string(call_.row.compiled->schema().name);
  const std::lock_guard lock(trace_mutex);
  Recording& s = recording();
  if (s.process != getpid()) return;
  if (s.events.size() >= s.limit) {
    ++s.dropped;
    return;
  }
  const Implementation* impl = execution.impl;
  s.events.push_back({op, impl == nullptr ? nullptr : impl->interned_id, start, end - start,
                      thread_number(), call_.options.stream, Device{}, description_,
                      find_number(s, outcome), kNone, kNone, false, false, true});
}

int64_t trace_now() { return now(); }

}  // namespace dispatch

Status write_trace() {
  using namespace dispatch;
  const std::lock_guard lock(trace_mutex);
  return write_recording(recording());
}

}  // namespace te_fl
