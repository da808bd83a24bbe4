// te-fl check: deactivating a plugin (rule R15), and loading it again.
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "conformance/check/steps.hpp"
#include "conformance/check/threads.hpp"

namespace te_fl_tool::check {
namespace {

namespace conformance = te_fl::conformance;
using conformance::Prepared;

Finding made(Outcome outcome, const std::string& name, const std::string& message) {
  Finding f;
  f.check = "lifecycle", f.name = name, f.outcome = outcome, f.message = message;
  return f;
}

using Threads = std::map<std::string, std::string>;

// The plugin's new threads, by id. Threads that te-fl, a driver, a communicator library or an
// interpreter starts on first use do not count: they have no code of the plugin on their stacks.
Threads came_since(const Threads& before) {
  Threads came;
  for (auto& thread : threads_now())
    if (!before.contains(thread.first) && runs_code(thread.first, &in_plugin)) came.insert(thread);
  return came;
}

struct Ran {
  std::unique_ptr<Prepared> prepared;
  std::string name;
  std::vector<uint8_t> bytes;
};

// Runs one passing case of each op. Their memory stays allocated.
std::vector<Ran> run_all(const std::vector<std::pair<Subject, conformance::Table>>& work) {
  std::vector<Ran> ran;
  for (const auto& [subject, cases] : work) {
    const auto device = te_fl::parse_device(subject.device_name);
    if (!device.ok()) continue;
    for (const auto& c : cases) {
      if (c.large) continue;
      Ran r{std::make_unique<Prepared>(c, *device), c.name, {}};
      if (r.prepared->problem().want_code != 0 || r.prepared->bytes().empty()) continue;
      if (r.prepared->run(subject.impl).outcome != conformance::Outcome::kPass) continue;
      r.prepared->leave_ranks();  // a live communicator prevents a deactivation
      r.bytes = r.prepared->bytes();
      ran.push_back(std::move(r));
      break;
    }
  }
  return ran;
}

// Checks for remaining threads and late writes. Threads of the plugin get some time to end, and
// late writes some time to happen.
Finding watch(const std::vector<Ran>& ran, const Threads& before, const std::string& when) {
  for (int i = 0; i < 20 && threads_now().size() > before.size() && !came_since(before).empty();
       ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  for (const Ran& r : ran)
    if (r.prepared->bytes() != r.bytes)
      return made(Outcome::kFail, when,
                  "memory of the finished call " + r.name +
                      " was written after the plugin was deactivated (rule R15)");
  if (const Threads came = came_since(before); !came.empty()) {
    std::string names;
    for (const auto& [id, name] : came) names += (names.empty() ? "" : ", ") + name;
    return made(Outcome::kFail, when,
                std::to_string(came.size()) +
                    " threads of the plugin run on after it was deactivated (rule R15), named " +
                    names);
  }
  return made(Outcome::kPass, when, std::to_string(ran.size()) + " ops had run");
}

te_fl::Status end(const te_fl::plugins::PluginInfo& plugin) {
  using te_fl::plugins::State;
  TE_FL_RETURN_IF_ERROR(te_fl::plugins::deactivate(plugin.name, true));
  for (const auto& now : te_fl::plugins::list()) {
    const bool gone = now.state == State::kDeactivated || now.state == State::kFailed ||
                      now.state == State::kSkipped;  // kSkipped: another file with that name
    if (now.name == plugin.name && !gone)
      return te_fl::Status(te_fl::StatusCode::kFailedPrecondition,
                           "it is " + std::string(te_fl::plugins::to_string(now.state)) +
                               " instead of deactivated: " + now.reason);
  }
  return {};
}

}  // namespace

std::vector<Finding> check_lifecycle(
    const te_fl::plugins::PluginInfo& plugin,
    const std::vector<std::pair<Subject, conformance::Table>>& work) {
  std::vector<Finding> found;
  const std::string path = plugin.abi == "Python" ? plugin.name : plugin.path;
  if (const te_fl::Status status = end(plugin); !status.ok())
    return {made(Outcome::kFail, "deactivate at once", status.to_string())};
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const Threads before = threads_now();
  for (int life = 1; life <= 2; ++life) {
    const std::string when = "deactivate, life " + std::to_string(life);
    if (const auto again = te_fl::plugins::load(path); !again.ok()) {
      found.push_back(made(Outcome::kFail, "load again", again.status().to_string()));
      return found;
    }
    note_code_digest(plugin);
    const std::vector<Ran> ran = run_all(work);
    if (const te_fl::Status status = end(plugin); !status.ok()) {
      found.push_back(made(Outcome::kFail, when, status.to_string()));
      return found;
    }
    found.push_back(watch(ran, before, when));
    if (found.back().outcome == Outcome::kFail) return found;
  }
  return found;
}

}  // namespace te_fl_tool::check
