// te-fl check: what its parts share. The parent (check.cpp) never opens the plugin. Children
// (check_worker.cpp) do, one op of one implementation at a time, and tell it what they are about to
// do before they do it: a crash or a hang costs the case that it happened in.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.hpp"

namespace te_fl_tool::check {

enum class Outcome { kPass, kFail, kUnsupported };
const char* to_string(Outcome outcome);

// One line of the result: what was checked, of which case, with which outcome.
struct Finding {
  std::string check = {};  // binary, load, structs, device, environment, result, guard,
                           // determinism, stream, strided, concurrent, leak, sweep, lifecycle
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

// "2026-11-22T10:00:00Z", the machine and its processor, te-fl's version and ABI.
void describe_run(const CheckOptions& options, Report& report);

// The place of the code at an offset from a library's base: "relu(float const*, long)+0x1c
// (libacme.so)", or "libacme.so+0x11c0" if the library has no name for it.
std::string code_at(const std::string& library, uint64_t offset);

// The reason for which no bytes of the file at a path can be had: it is not there, is a folder or a
// device, or may not be read. Empty: they can.
std::string why_unreadable(const std::string& path);

// The file, without opening it. `stop` is set if nothing that could be opened is there.
std::vector<Finding> lint(const std::string& path, bool& stop);

// Loads the plugin and serves the parent's orders: JSON lines on two file descriptors.
int serve(const CheckOptions& options);
// As serve(), in an interpreter's process, from the text that the parent gave it.
int serve_text(const std::string& options);

// Times every op of the report with `te-fl bench` and adds what it said. Returns what came of the
// comparison of a large call's results with the reference's, which goes before.
std::vector<Finding> measure_speed(const CheckOptions& options, Report& report);

void print(const Report& report);
std::string json_report(const Report& report);
std::string junit_text(const Report& report);
std::string html_text(const Report& report);

}  // namespace te_fl_tool::check
