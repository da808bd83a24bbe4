// te-fl check: declarations shared by its parent and child processes. The parent
// (tools/te-fl/check.cpp) never opens the plugin. The children (worker.cpp) do, for one op of one
// implementation at a time, and announce each step before they make it, so that a crash or a hang
// costs only the case in which it happens.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "conformance/check/options.hpp"

namespace te_fl_tool::check {

enum class Outcome { kPass, kFail, kUnsupported };
const char* to_string(Outcome outcome);

// One result: the check, the case and the outcome.
struct Finding {
  std::string check = {};  // binary, load, structs, device, environment, result, guard,
                           // determinism, stream, strided, concurrent, leak, sweep, lifecycle,
                           // processes
  std::string op = {}, impl = {}, device = {}, dtype = {}, name = {};  // of the case, if any
  Outcome outcome = Outcome::kPass;
  std::string message = {};  // the first difference, the reason for a refusal, or the finding
  std::string reproduce = {};
  double milliseconds = 0;
  int cases = 1;  // number of cases that have this result, if more than one
};
void to_json(nlohmann::json& out, const Finding& f);
void from_json(const nlohmann::json& in, Finding& f);

// The speed of an implementation on one benchmark case.
struct Speed {
  std::string op, impl, device, name;
  double microseconds = 0, gigabytes_per_second = 0, share_of_copy = 0;
};
void to_json(nlohmann::json& out, const Speed& s);

// An op that one of the plugin's implementations supports on a device. A child works on one target
// at a time.
struct Target {
  std::string op, impl, device = {};  // empty device: no supported device is present
  std::string family = {};            // of conformance cases; empty: no cases for the op
  bool first = true;                  // the first device of its type that the op supports
};

// A device of the plugin, with the data that it reports about itself.
struct DeviceFacts {
  std::string name, chip, driver;
};

struct Report {
  std::string plugin, name, vendor, version, build_id, path;  // path: empty for a built-in backend
  std::vector<DeviceFacts> devices;
  std::string date, host, te_fl, options;  // time, host, te-fl's version, options
  std::vector<Target> targets;
  // The reasons for which the run gives no certificate even without a failure: options that
  // restrict the check, ops without a device on this machine, or no case of an op that ran.
  std::vector<std::string> left_out;
  // Parts of the check that did not run, with the reason. The reports show them in grey; they are
  // not failures.
  std::map<std::string, std::string> not_run;
  std::vector<Finding> findings;
  std::vector<Speed> speeds;
  double seconds = 0, speed_seconds = 0;  // total time, and the part spent on speed
  uint64_t seed = 0;

  int count(Outcome outcome) const;
  bool certified() const { return count(Outcome::kFail) == 0 && left_out.empty(); }
};

// Runs the child process: loads the plugin and executes the parent's orders, which are JSON lines
// on two file descriptors.
int serve(const CheckOptions& options);
// Like serve(), in an interpreter's process. `options` is the text that the parent passed to it.
int serve_json(const std::string& options);

void print(const Report& report);
std::string json_report(const Report& report);
std::string junit_text(const Report& report);
std::string html_text(const Report& report);

}  // namespace te_fl_tool::check
