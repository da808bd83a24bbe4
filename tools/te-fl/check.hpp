// te-fl check: what its parts share. The parent (check.cpp) never opens the plugin. Children
// (check_worker.cpp) do, one op of one implementation at a time, and tell it what they are about to
// do before they do it: a crash or a hang costs the case that it happened in.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.hpp"

namespace te_fl_tool::check {

enum class Outcome { kPass, kFail, kUnsupported };
const char* to_string(Outcome outcome);

// One line of the result: what was checked, of which case, with which outcome.
struct Finding {
  std::string check = {};  // binary, load, environment, result, determinism, stream, strided,
                           // concurrent, leak, lifecycle
  std::string op = {}, impl = {}, device = {}, dtype = {},
              name = {};  // of the case, if there is one
  Outcome outcome = Outcome::kPass;
  std::string message = {};  // the first difference, the reason of a refusal, or what was found
  std::string reproduce = {};
  double milliseconds = 0;
};
void to_json(nlohmann::json& out, const Finding& f);
void from_json(const nlohmann::json& in, Finding& f);

// How fast an implementation is on one benchmark case.
struct Speed {
  std::string op, impl, device, name;
  double microseconds = 0, gigabytes_per_second = 0, share_of_copy = 0;
};
void to_json(nlohmann::json& out, const Speed& s);

// An op that an implementation of the plugin serves on a device: the unit of work of a child.
struct Target {
  std::string op, impl, device;
  bool in_table = true;  // the conformance table has cases of it
};

struct Report {
  std::string plugin, name, vendor, version, build_id, path;  // path: empty for a built-in
  std::vector<std::string> devices;
  std::vector<Target> targets;
  std::vector<Finding> findings;
  std::vector<Speed> speeds;
  double seconds = 0, speed_seconds = 0;  // the latter of the former
  uint64_t seed = 0;

  int count(Outcome outcome) const;
};

// The file, without opening it. `stop` is set if nothing that could be opened is there.
std::vector<Finding> lint(const std::string& path, bool& stop);

// Loads the plugin and serves the parent's orders: JSON lines on two file descriptors.
int serve(const CheckOptions& options);

// Times every op of the report with `te-fl bench` and adds what it said.
void measure_speed(const CheckOptions& options, Report& report);

void print(const Report& report);
std::string json_text(const Report& report);
std::string junit_text(const Report& report);
std::string html_text(const Report& report);

}  // namespace te_fl_tool::check
