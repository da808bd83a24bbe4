// te-fl check: the end of a plugin (rule R15), and a second life.
#include <chrono>
#include <filesystem>
#include <memory>
#include <thread>

#include "conformance/check/steps.hpp"

namespace te_fl_tool::check {
namespace {

namespace conformance = te_fl::conformance;
using conformance::Prepared;

Finding made(Outcome outcome, const std::string& name, const std::string& message) {
  Finding f;
  f.check = "lifecycle", f.name = name, f.outcome = outcome, f.message = message;
  return f;
}

int64_t threads_now() {
  int64_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ++n;
  return n;
}

struct Ran {
  std::unique_ptr<Prepared> prepared;
  std::string name;
  std::vector<uint8_t> bytes;
};

// One passing case of every op; its memory stays alive.
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
      r.prepared->leave_ranks();  // a plugin with a live communicator is not deactivated
      r.bytes = r.prepared->bytes();
      ran.push_back(std::move(r));
      break;
    }
  }
  return ran;
}

// Threads of the plugin may take a moment to end; memory that it writes late, too.
Finding watch(const std::vector<Ran>& ran, int64_t threads_before, const std::string& when) {
  for (int i = 0; i < 20 && threads_now() > threads_before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  for (const Ran& r : ran)
    if (r.prepared->bytes() != r.bytes)
      return made(Outcome::kFail, when,
                  "memory of the finished call " + r.name +
                      " was written after the plugin was deactivated (rule R15)");
  if (const int64_t left = threads_now() - threads_before; left > 0)
    return made(
        Outcome::kFail, when,
        std::to_string(left) + " threads of the plugin run on after it was deactivated (rule R15)");
  return made(Outcome::kPass, when, std::to_string(ran.size()) + " ops had run");
}

// A driver starts threads when a device is used for the first time, and ranks use those that come
// after the subject's as well.
void use_devices(const std::vector<std::pair<Subject, conformance::Table>>& work) {
  for (const auto& [subject, cases] : work) {
    const auto first = te_fl::parse_device(subject.device_name);
    if (!first.ok() || first->is_host()) continue;
    for (te_fl::Device d = *first; te_fl::devices::find(d).ok(); ++d.index) {
      const auto memory = te_fl::devices::allocate(d, 1, nullptr);
      if (memory.ok()) te_fl::devices::free(d, *memory, nullptr);
    }
  }
}

te_fl::Status end(const te_fl::plugins::PluginInfo& plugin) {
  using te_fl::plugins::State;
  TE_FL_RETURN_IF_ERROR(te_fl::plugins::deactivate(plugin.name, true));
  for (const auto& now : te_fl::plugins::list()) {
    const bool gone = now.state == State::kDeactivated || now.state == State::kFailed ||
                      now.state == State::kSkipped;  // the latter: another file of that name
    if (now.name == plugin.name && !gone)
      return te_fl::Status(te_fl::StatusCode::kFailedPrecondition,
                           "it is " + std::string(te_fl::plugins::to_string(now.state)) +
                               " instead of deactivated: " + now.reason);
  }
  return {};
}

}  // namespace

std::vector<Finding> lifecycle_of(const te_fl::plugins::PluginInfo& plugin,
                                  const std::vector<std::pair<Subject, conformance::Table>>& work) {
  std::vector<Finding> found;
  // Threads that te-fl itself starts on first use count as there before, and so do those of a
  // module's libraries: an interpreter does not let go of them.
  const bool is_module = plugin.abi == "Python";
  const std::string path = is_module ? plugin.name : plugin.path;
  if (is_module) run_all(work);
  use_devices(work);
  int64_t before = 0;
  if (const te_fl::Status status = end(plugin); !status.ok())
    return {made(Outcome::kFail, "deactivate at once", status.to_string())};
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  before = threads_now();
  for (int life = 1; life <= 2; ++life) {
    const std::string when = "deactivate, life " + std::to_string(life);
    if (const auto again = te_fl::plugins::load(path); !again.ok()) {
      found.push_back(made(Outcome::kFail, "load again", again.status().to_string()));
      return found;
    }
    note_code_of(plugin);
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
