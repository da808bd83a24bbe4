// te-fl check: the tests that run once per op: inputs with gaps, calls from many threads, leaks.
#include <malloc.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <thread>

#include "conformance/check/steps.hpp"

namespace te_fl_tool::check {
namespace {

namespace conformance = te_fl::conformance;
using conformance::Case;
using conformance::Prepared;
using conformance::Table;

constexpr int kThreads = 8, kRounds = 12;

Finding made(const char* check, Outcome outcome, const std::string& message,
             const Case* c = nullptr, const std::string& dtype = "") {
  Finding f;
  f.check = check, f.outcome = outcome, f.message = message, f.dtype = dtype;
  if (c != nullptr) f.name = c->name;
  return f;
}

// Cases that pass, one per dtype, at most `most`. Excludes large cases, cases that must be refused,
// and cases with more than `ranks` ranks.
std::vector<const Case*> passing(const Subject& subject, const Table& cases, size_t most,
                                 int ranks = std::numeric_limits<int>::max()) {
  std::vector<const Case*> chosen;
  std::set<std::string> dtypes;
  for (const Case& c : cases) {
    if (chosen.size() >= most) break;
    if (c.large || c.ranks > ranks) continue;
    Prepared prepared(c, subject.device);
    if (prepared.problem().want_code != 0 || prepared.bytes().empty()) continue;
    if (dtypes.count(dtype_of(prepared.problem())) != 0) continue;
    const auto outcome = prepared.run(subject.impl).outcome;
    beat();
    if (outcome != conformance::Outcome::kPass) continue;
    dtypes.insert(dtype_of(prepared.problem()));
    chosen.push_back(&c);
  }
  return chosen;
}

// Inputs whose rows have gaps: the result must be correct, or the call refused.
std::vector<Finding> strided(const Subject& subject, const Table& cases) {
  std::vector<Finding> found;
  for (const Case* c : passing(subject, cases, 6)) {
    Prepared prepared(*c, subject.device, true);
    if (!prepared.has_strided_inputs()) continue;
    const std::string dtype = dtype_of(prepared.problem());
    const conformance::Result r = prepared.run(subject.impl);
    const bool refused =
        r.outcome != conformance::Outcome::kPass && r.message.find("must be") != std::string::npos;
    if (r.outcome == conformance::Outcome::kUnsupported)
      found.push_back(
          made("strided", Outcome::kUnsupported, strip_prefix(r.message, subject.impl), c, dtype));
    else if (r.outcome == conformance::Outcome::kPass || refused)
      found.push_back(made("strided", Outcome::kPass, "", c, dtype));
    else
      found.push_back(made("strided", Outcome::kFail,
                           "inputs with gaps between their rows: " + r.message +
                               "; refuse strides that the kernel does not follow, with "
                               "TE_FL_UNSUPPORTED in supports() (rules R6, R12)",
                           c, dtype));
  }
  return found;
}

// Prepares the case with data that no other thread has, so that data leaking between calls are
// detected. Null unless the case passes when it runs alone.
std::unique_ptr<Prepared> alone(const Subject& subject, const Case& c, uint64_t thread) {
  Case own = c;
  own.seed += thread * 0x9e3779b97f4a7c15u;
  auto prepared = std::make_unique<Prepared>(own, subject.device);
  const auto outcome = prepared->run(subject.impl).outcome;
  beat();
  if (outcome == conformance::Outcome::kPass) return prepared;
  return std::make_unique<Prepared>(c, subject.device);
}

// Collectives of several communicators on the same devices must start in the same order on all
// devices; otherwise their queues deadlock. Independent threads have no such order, so on devices
// only cases with one rank are used.
std::vector<Finding> concurrent(const Subject& subject, const Table& cases) {
  const bool queues = !subject.device.is_host();
  const auto chosen = queues ? passing(subject, cases, 4, 1) : passing(subject, cases, 4);
  if (chosen.empty()) {
    const auto several = [](const Case& c) { return c.ranks > 1; };
    if (!queues || std::none_of(cases.begin(), cases.end(), several)) return {};
    return {made("concurrent", Outcome::kUnsupported,
                 "it has no case of one rank, and threads' collectives of several have no order")};
  }
  std::vector<std::vector<std::unique_ptr<Prepared>>> work(kThreads);
  for (int t = 0; t < kThreads; ++t)
    for (const Case* c : chosen) work[t].push_back(alone(subject, *c, static_cast<uint64_t>(t)));
  std::vector<std::pair<size_t, std::string>> wrong(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds && wrong[t].second.empty(); ++round)
        for (size_t i = 0; i < chosen.size() && wrong[t].second.empty(); ++i) {
          const size_t at = (i + static_cast<size_t>(t)) % chosen.size();
          const conformance::Result r = work[t][at]->run(subject.impl);
          beat();
          if (r.outcome != conformance::Outcome::kPass) wrong[t] = {at, r.message};
        }
    });
  for (auto& thread : threads) thread.join();
  for (const auto& [at, message] : wrong)
    if (!message.empty())
      return {made("concurrent", Outcome::kFail,
                   "right alone, and wrong while 8 threads call the op (rule R13): " + message,
                   chosen[at])};
  return {made("concurrent", Outcome::kPass, "8 threads", chosen[0])};
}

struct Holdings {
  int64_t heap = 0, device_used = 0, objects = 0, files = 0;
};

Holdings holdings(const te_fl::Device& device) {
  Holdings h;
  const struct mallinfo2 info = mallinfo2();
  h.heap = static_cast<int64_t>(info.uordblks + info.hblkhd);
  h.objects = te_fl::devices::live_objects(device);
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++h.files;
  if (const auto props = te_fl::devices::properties(device);
      props.ok() && !device.is_host() && props->free_memory > 0)
    h.device_used = static_cast<int64_t>(props->total_memory - props->free_memory);
  return h;
}

// The smallest growth of memory in any of four rounds.
template <class Round>
Holdings measure_growth(const te_fl::Device& device, const Round& round) {
  Holdings least{INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX}, before = holdings(device);
  for (int i = 0; i < 4; ++i) {
    round();
    const Holdings now = holdings(device);
    least.heap = std::min(least.heap, now.heap - before.heap);
    least.device_used = std::min(least.device_used, now.device_used - before.device_used);
    least.objects = std::min(least.objects, now.objects - before.objects);
    least.files = std::min(least.files, now.files - before.files);
    before = now;
  }
  return least;
}

// Finds leaks, that is, memory that grows in every round; a cache that fills once is not a leak.
// Also detects failures that occur only after many calls.
std::vector<Finding> leaks(const Subject& subject, const Table& cases) {
  const auto chosen = passing(subject, cases, 2);
  if (chosen.empty()) return {};
  const Case& c = *chosen[0];
  Prepared prepared(c, subject.device);
  double slowest = 0.02;
  int made_calls = 0;
  std::string wrong;  // the first failure
  const auto calls = [&](int n, const conformance::How& how = {}) {
    for (int i = 0; i < n; ++i) {
      const conformance::Result r = prepared.run(subject.impl, how);
      slowest = std::max(slowest, r.milliseconds);
      beat();
      if (how.describe) continue;
      ++made_calls;
      if (r.outcome != conformance::Outcome::kPass && wrong.empty())
        wrong = "right at first, and wrong in call " + std::to_string(made_calls) +
                " of one case in a row: " + r.message;
    }
  };
  calls(20);
  const int n = std::clamp(static_cast<int>(300 / slowest), 20, 250);
  calls(n);
  Holdings least = measure_growth(subject.device, [&] { calls(n); });
  if (!wrong.empty()) return {made("leak", Outcome::kFail, wrong, &c)};
  if (!subject.device.is_host() && least.device_used > 0) {
    // Uploads the same tensors and copies them back without a call of the op. If memory grows
    // nevertheless, the device causes it.
    const Holdings device = measure_growth(subject.device, [&] { calls(n, {.describe = true}); });
    if (device.device_used > 0)
      return {
          made("leak", Outcome::kUnsupported,
               "the device's used memory grows by " + std::to_string(device.device_used) +
                   " bytes in every " + std::to_string(n) +
                   " times that tensors are placed there without a call: the memory that the op "
                   "keeps cannot be measured (see the device section, \"device/leak\")",
               &c)};
  }
  const auto grown = [&](const char* what, int64_t growth, int64_t allowed) -> std::string {
    if (growth <= allowed) return {};
    return std::string(what) + " grows by " + std::to_string(growth) + " in every " +
           std::to_string(n) + " calls (rule R11: run() keeps nothing that outlives the call)";
  };
  for (const std::string& leak :
       {grown("the device's used memory, in bytes,", least.device_used, 0),
        grown("the heap, in bytes,", least.heap, int64_t{8} * n),
        grown("the number of live objects of the device", least.objects, 0),
        grown("the number of open files", least.files, 0)})
    if (!leak.empty()) return {made("leak", Outcome::kFail, leak, &c)};
  return {made("leak", Outcome::kPass, std::to_string(5 * n) + " calls", &c)};
}

}  // namespace

const std::vector<ExtraStep>& extra_steps() {
  static const std::vector<ExtraStep> steps = {
      {"strided", strided}, {"concurrent", concurrent}, {"leak", leaks}};
  return steps;
}

}  // namespace te_fl_tool::check
