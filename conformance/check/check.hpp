// te-fl check: what its parent and its children share. The parent (tools/te-fl/check.cpp) never
// opens the plugin. Children (worker.cpp) do, one op of one implementation at a time, and tell it
// what they are about to do before they do it: a crash or a hang costs the case that it happened
// in.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "conformance/check/options.hpp"

namespace te_fl_tool::check {

enum class Outcome { kPass, kFail, kUnsupported };
const char* to_string(Outcome outcome);

// One line of the result: what was checked, of which case, with which outcome.
struct Finding {
  std::string check = {};  // binary, load, structs, device, environment, result, guard,
                           // determinism, stream, strided, concurrent, leak, sweep, lifecycle,
                           // processes
  std::string op = {}, impl = {}, device = {}, dtype = {},
              name = {};  // of the case, if there is one
  Outcome outcome = Outcome::kPass;
  std::string message = {};  // the first difference, the reason of a refusal, or what was found
  std::string reproduce = {};
  double milliseconds = 0;
  int cases = 1;  // more than one: what was found alike of so many cases
};
void to_json(nlohmann::json& out, const Finding& f);
void from_json(const nlohmann::json& in, Finding& f);

// The speed of an implementation on one benchmark case.
struct Speed {
  std::string op, impl, device, name;
  double microseconds = 0, gigabytes_per_second = 0, share_of_copy = 0;
};
void to_json(nlohmann::json& out, const Speed& s);

// An op that an implementation of the plugin serves on a device: the unit of work of a child.
struct Target {
  std::string op, impl, device = {};  // no device: none that it serves is here
  std::string family = {};            // of the conformance table; empty: it has no cases of the op
  bool first = true;                  // the device is the first of its type that it serves
};

// A device that the plugin brings, as it describes itself.
struct DeviceFacts {
  std::string name, chip, driver;
};

struct Report {
  std::string plugin, name, vendor, version, build_id, path;  // path: empty for a built-in
  std::vector<DeviceFacts> devices;
  std::string date, host, te_fl, options;  // when, where, by which te-fl, and with which options
  std::vector<Target> targets;
  // The reasons for which a run without a failure would be no certificate: options that choose a
  // part, ops for which no device is here, no op case that ran.
  std::vector<std::string> left_out;
  // Parts of the check that did not run, with the reason: grey in the reports, and no fault.
  std::map<std::string, std::string> not_run;
  std::vector<Finding> findings;
  std::vector<Speed> speeds;
  double seconds = 0, speed_seconds = 0;  // the latter of the former
  uint64_t seed = 0;

  int count(Outcome outcome) const;
  bool certified() const { return count(Outcome::kFail) == 0 && left_out.empty(); }
};

// Loads the plugin and serves the parent's orders: JSON lines on two file descriptors.
int serve(const CheckOptions& options);
// As serve(), in an interpreter's process, from the text that the parent gave it.
int serve_text(const std::string& options);

void print(const Report& report);
std::string json_report(const Report& report);
std::string junit_text(const Report& report);
std::string html_text(const Report& report);

}  // namespace te_fl_tool::check
