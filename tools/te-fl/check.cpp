// te-fl check: the parent process. It inspects the plugin's file, lets child processes check the
// ops, and collects their findings.
#include "check_parent.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "check_child.hpp"
#include "commands.hpp"
#include "conformance/check/choice.hpp"
#include "conformance/check/output.hpp"
#include "conformance/check/steps.hpp"
#include "te_fl/environment.hpp"

namespace te_fl_tool {
namespace check {
namespace {

using nlohmann::json;

// After this number of crashes and hangs in one op, the op's remaining cases are skipped.
constexpr int kPatience = 3;
// Limit for unloading a plugin, which includes joining its threads.
constexpr double kEndLimitS = 20;

std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

bool plain(const std::string& text) {
  return text.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
             "_-./:+=@,") == std::string::npos;
}

class Run {
 public:
  Run(const CheckOptions& options, Report& report) : options_(options), report_(report) {}

  // Loads the plugin in a first child. Returns false if that fails.
  bool load() {
    Child child(options_);
    return open(child, true);
  }
  const std::vector<Target>& all() const { return all_; }

  void devices() {
    if (!options_.op.empty() || !options_.family.empty() || !options_.impl.empty()) return;
    Child child(options_);
    for (const DeviceFacts& d : report_.devices)
      if (!stopped())
        work(child, {{"device_section", d.name}}, {.op = "", .impl = "", .device = d.name});
  }

  void targets() {
    for (const Target& t : report_.targets)
      if (t.family.empty())
        add({.check = "result",
             .op = t.op,
             .impl = t.impl,
             .device = t.device,
             .dtype = "-",
             .name = "",
             .outcome = Outcome::kUnsupported,
             .message = "an op outside the catalogue: the conformance table has no case of it"});
    int jobs =
        options_.jobs > 0 ? options_.jobs : static_cast<int>(std::thread::hardware_concurrency());
    jobs = std::clamp(jobs, 1, static_cast<int>(std::max<size_t>(report_.targets.size(), 1)));
    std::vector<std::thread> threads;
    for (int i = 0; i < jobs; ++i)
      threads.emplace_back([this] {
        Child child(options_);
        for (size_t at; !stopped() && (at = next_++) < report_.targets.size();)
          if (const Target& t = report_.targets[at]; !t.family.empty())
            work(child, {{"op", t.op}, {"impl", t.impl}, {"device", t.device}}, t);
      });
    for (auto& thread : threads) thread.join();
  }

  void lifecycle() {
    Child child(options_);
    if (!open(child, false)) return;
    json work = json::array();
    for (const Target& t : report_.targets)
      if (!t.family.empty()) work.push_back({{"op", t.op}, {"impl", t.impl}, {"device", t.device}});
    child.send({{"lifecycle", work}});
    json last;
    follow(child, {}, std::max(options_.time_limit, kEndLimitS), last);
  }

  // True after a failure if the run ends at the first one.
  bool stopped() const { return options_.stop && failed_; }

  // Returns the error text if no plugin has the requested name; empty if one has.
  const std::string& unknown() const { return unknown_; }

  void add(Finding f) {
    const std::lock_guard lock(mutex_);
    if (f.outcome == Outcome::kFail && f.reproduce.empty()) f.reproduce = command(f);
    if (f.outcome == Outcome::kFail) failed_ = true;
    if (joined(f)) return;
    report_.findings.push_back(std::move(f));
  }

 private:
  // Merges a finding into an earlier one if both differ only in the case. Applies to findings of
  // kind sweep, guard, describe or processes that are not failures: one finding then covers all
  // cases of a dtype with the same outcome. Returns true if it was merged.
  bool joined(const Finding& f) {
    if (f.outcome == Outcome::kFail || (f.check != "sweep" && f.check != "guard" &&
                                        f.check != "describe" && f.check != "processes"))
      return false;
    const auto [at, is_new] = joined_.try_emplace(
        {f.check, f.op, f.impl, f.device, f.dtype, to_string(f.outcome), f.message},
        report_.findings.size());
    if (is_new) return false;
    Finding& first = report_.findings[at->second];
    ++first.cases;
    first.milliseconds += f.milliseconds;
    return true;
  }

  std::string command(const Finding& f) const {
    std::string text = "te-fl check ";
    const auto word = [&](const std::string& w) { text += plain(w) ? w : quoted(w); };
    if (options_.builtin.empty())
      word(options_.plugin);
    else
      text += "--builtin " + options_.builtin;
    if (!options_.python.empty()) {
      text += " --python ";
      word(options_.python);
    }
    if (!f.op.empty()) text += " --op " + f.op;
    if (!f.impl.empty()) text += " --impl " + f.impl;
    if (!f.device.empty() && f.device != "cpu") text += " --device " + f.device;
    if (!f.name.empty() && (!f.op.empty() || f.check == "device"))
      text += " --case " + quoted(f.name);
    const bool drawn =
        f.name.find("/fuzz/") != std::string::npos || f.name.find("/sweep/") != std::string::npos;
    if (drawn) text += " --seed " + std::to_string(options_.seed);
    if (drawn && options_.thorough) text += " --long";
    return text;
  }

  // Starts a child and waits until it has loaded the plugin; the first child also reports the ops
  // and devices.
  bool open(Child& child, bool first) {
    if (!child.start()) {
      const std::string why = std::strerror(errno);
      add({.check = "load",
           .outcome = Outcome::kFail,
           .message = "no process could be started" +
                      (options_.python.empty() ? "" : " with --python " + options_.python) + ": " +
                      why});
      return false;
    }
    const double load_limit = std::max(options_.time_limit, 5.0);
    json message;
    std::string crash;
    for (;;) {
      const Child::Got got = child.receive(load_limit, message);
      if (got == Child::Got::kMessage && message.contains("crash")) {
        crash = message["crash"];
      } else if (got == Child::Got::kMessage && message.contains("crash_offset")) {
        crash += " in " + code_at(code_, message["crash_offset"]);
      } else if (got == Child::Got::kMessage && message.contains("failed")) {
        if (!message["unknown"].get<bool>()) return failed(message["failed"]);
        unknown_ = message["failed"];
        return false;
      } else if (got == Child::Got::kMessage && message.contains("hello")) {
        if (first) greet(message["hello"]);
        return true;
      } else if (got != Child::Got::kMessage) {
        const std::string end = child.stop(), printed = child.printed();
        if (got == Child::Got::kSilence)
          return failed("loading it took longer than " + seconds_text(load_limit) + " (rule R14)");
        return failed("the process that loaded it died: " + (crash.empty() ? end : crash) +
                      (printed.empty() ? "" : "; it printed: " + printed));
      }
    }
  }

  bool failed(const std::string& message) {
    add({.check = "load", .outcome = Outcome::kFail, .message = message});
    return false;
  }

  static std::string seconds_text(double seconds) {
    char text[40];
    std::snprintf(text, sizeof text, "%g s", seconds);
    return text;
  }

  void greet(const json& hello) {
    report_.name = hello["name"], report_.vendor = hello["vendor"];
    report_.version = hello["version"], report_.build_id = hello["build_id"];
    report_.path = hello["path"];
    code_ = hello["code"];
    std::error_code unknown;
    if (!std::filesystem::is_regular_file(code_, unknown)) code_ = report_.path;
    for (const json& d : hello["devices"])
      report_.devices.push_back({d["name"], d["chip"], d["driver"]});
    std::set<std::string> served;
    for (const json& t : hello["targets"]) {
      all_.push_back({t["op"], t["impl"], t["device"], t["family"], t["first"]});
      served.insert(all_.back().op + " " + all_.back().impl);
    }
    add({.check = "load",
         .message = "loads; implementations of ops: " + std::to_string(served.size()) +
                    ", devices: " + std::to_string(report_.devices.size())});
    const std::string changed = hello["changed"];
    if (!changed.empty())
      add({.check = "environment",
           .outcome = Outcome::kFail,
           .message = "rule R8: while it was loaded: " + changed});
    const std::string status = hello["status"];
    if (!status.empty())
      add({.check = "status",
           .outcome = Outcome::kFail,
           .message = "a function of the plugin, while it was loaded: " + status});
    if (const std::string setting = hello["setting"]; !setting.empty())
      add({.check = "settings",
           .outcome = Outcome::kFail,
           .message = "while it was loaded: " + undeclared_text(setting)});
  }

  // Handles a child's messages. Returns true when the child is done. If the child crashed or hung,
  // records a failure of the step that the child had begun, stores in `last` the step after which
  // to continue, and returns false.
  bool follow(Child& child, const Target& target, double limit, json& last) {
    json message;
    std::string crash;
    for (;;) {
      const Child::Got got = child.receive(limit, message);
      if (got == Child::Got::kMessage) {
        if (message.contains("done")) return true;
        if (message.contains("begin")) last = message;
        if (message.contains("crash")) crash = message["crash"];
        if (message.contains("crash_offset"))
          crash += " in " + code_at(code_, message["crash_offset"]);
        if (message.contains("result")) add(message["result"].get<Finding>());
        if (!stopped()) continue;
        child.stop(true);
        return true;
      }
      const std::string end = child.stop(), printed = child.printed();
      Finding f;
      f.op = target.op, f.impl = target.impl, f.device = target.device;
      f.check = last.value("check", "load"), f.name = last.value("case", "");
      f.outcome = Outcome::kFail;
      f.message = got == Child::Got::kSilence
                      ? "did not return within " + seconds_text(limit) + " (--time-limit)"
                      : "the process died: " + (crash.empty() ? end : crash) +
                            (printed.empty() ? "" : "; it printed: " + printed);
      add(std::move(f));
      return false;
    }
  }

  // Sends a list of work to a child process. After a crash or a hang, sends the rest of the list to
  // a new child.
  void work(Child& child, json order, const Target& t) {
    int from = 0;
    for (int lost = 0; lost < kPatience;) {
      if (!child.running() && !open(child, false)) return;
      order["from"] = from;
      child.send(order);
      json last = {{"resume", -1}};
      if (follow(child, t, options_.time_limit, last)) return;
      if (++lost == kPatience)
        add({.check = t.op.empty() ? "device" : "result",
             .op = t.op,
             .impl = t.impl,
             .device = t.device,
             .dtype = "-",
             .outcome = Outcome::kFail,
             .message = "given up after " + std::to_string(kPatience) +
                        " crashes or hangs; the cases after them were not run"});
      from = last["resume"];
      if (from < 0) return;
    }
  }

  const CheckOptions& options_;
  Report& report_;
  std::string unknown_;
  std::mutex mutex_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::vector<Target> all_;
  std::string code_;  // file that contains the plugin's code
  std::map<std::array<std::string, 7>, size_t> joined_;
};

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void say_what_does_not_run(const CheckOptions& o, Report& report) {
  const auto leave = [&](const char* part, const char* why) {
    report.not_run.try_emplace(part, why);
  };
  if (!o.builtin.empty()) leave("binary", "a built-in backend has no file of its own");
  if (!o.python.empty()) leave("binary", "a module is no shared library");
  if (!o.builtin.empty()) leave("lifecycle", "a built-in backend is never deactivated");
  if (!o.builtin.empty()) leave("processes", "the ranks of built-in collectives are threads");
  if (!o.python.empty()) leave("processes", "te-fl conformance has no interpreter");
  if (!o.name.empty()) leave("lifecycle", "--case"), leave("speed", "--case");
  if (o.quick) leave("speed", "--quick");
  if (!o.python.empty()) leave("speed", "te-fl bench has no interpreter");
  if (report.devices.empty()) leave("device", "the plugin brings no device");
  for (const auto& [option, value] :
       {std::pair("--op", &o.op), {"--family", &o.family}, {"--impl", &o.impl}})
    if (!value->empty()) leave("device", option);
}

bool write_file(const std::string& path, const std::string& text) {
  if (path.empty()) return true;
  std::ofstream file(path);
  file << text;
  file.flush();
  if (file) return true;
  complain("cannot write " + path);
  return false;
}

}  // namespace
}  // namespace check

int check_plugin(const CheckOptions& requested) {
  using namespace check;
  if (requested.worker) return serve(requested);
  CheckOptions options = requested;
  const bool is_name = options.plugin.find('/') == std::string::npos;
  if (!options.python.empty() && (options.plugin.empty() || !is_name)) {
    complain("check --python requires the name of an importable module");
    return kUsage;
  }
  std::error_code unknown;
  if (is_name && options.python.empty() && !options.plugin.empty() &&
      std::filesystem::is_regular_file(options.plugin, unknown))
    options.plugin = "./" + options.plugin;
  if (options.plugin.empty() == options.builtin.empty()) {
    complain("check requires a plugin (a path, or a name from the manifests), or --builtin NAME");
    return kUsage;
  }
  if (const bool is_path = options.plugin.find('/') != std::string::npos; is_path) {
    if (const std::string why = why_unreadable(options.plugin); !why.empty()) {
      complain(why + "; check requires the library that the plugin was built to");
      return kUsage;
    }
  }
  std::signal(SIGPIPE, SIG_IGN);
  const auto start = std::chrono::steady_clock::now();
  Report report;
  report.plugin = options.builtin.empty() ? options.plugin : "built-in " + options.builtin;
  report.seed = options.seed;
  describe_run(options, report);
  Run run(options, report);
  bool stop = false;
  if (options.plugin.find('/') != std::string::npos)
    for (Finding& f : lint(options.plugin, stop)) run.add(std::move(f));
  const bool loaded = !stop && run.load();
  if (!run.unknown().empty()) {
    complain(run.unknown() + "; --builtin NAME checks a backend that is part of te-fl");
    return kUsage;
  }
  if (loaded) {
    if (const std::string mistake = choose(options, run.all(), report); !mistake.empty()) {
      complain(mistake);
      return kUsage;
    }
    if (options.builtin.empty() && options.python.empty() && report.path != options.plugin &&
        options.plugin.find('/') == std::string::npos)
      for (Finding& f : lint(report.path, stop)) run.add(std::move(f));
    say_what_does_not_run(options, report);
    run.devices();
    run.targets();
    if (options.builtin.empty() && options.name.empty() && !run.stopped()) run.lifecycle();
    if (run.stopped()) {
      report.left_out.push_back("--stop");
      for (const char* part : {"lifecycle", "processes", "speed"})
        report.not_run.try_emplace(part, "--stop");
    }
    if (report.not_run.count("processes") == 0)
      for (Finding& f : check_processes(options, report)) run.add(std::move(f));
    const auto before_speed = std::chrono::steady_clock::now();
    if (report.not_run.count("speed") == 0)
      for (Finding& f : measure_speed(options, report)) run.add(std::move(f));
    report.speed_seconds = since(before_speed);
  }
  std::stable_sort(report.findings.begin(), report.findings.end(),
                   [](const Finding& a, const Finding& b) { return a.op < b.op; });
  const auto ran = [](const Finding& f) {
    return f.check == "result" && f.outcome == Outcome::kPass;
  };
  if (std::none_of(report.findings.begin(), report.findings.end(), ran))
    report.left_out.push_back("no op case ran");
  report.seconds = since(start);
  print(report);
  bool written = write_file(options.json, json_report(report));
  written = write_file(options.junit, junit_text(report)) && written;
  written = write_file(options.html, html_text(report)) && written;
  if (report.count(Outcome::kFail) > 0 || !written) return kProblem;
  return report.certified() ? kSuccess : kIncomplete;
}

}  // namespace te_fl_tool
