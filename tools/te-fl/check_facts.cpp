// te-fl check: the facts about the run itself in a report.
#include <sys/utsname.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <thread>

#include "check_parent.hpp"
#include "te_fl/plugin.h"
#include "te_fl/version.hpp"

namespace te_fl_tool::check {
namespace {

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[40];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "processor unknown";
}

std::string machine() {
  utsname names{};
  uname(&names);
  return std::string(names.nodename) + ", " + names.sysname + " " + names.release + " " +
         names.machine + ", " + processor() + ", " +
         std::to_string(std::thread::hardware_concurrency()) + " threads";
}

// Formats the options as on a command line, without those that have default values.
std::string words(const CheckOptions& o) {
  std::string text;
  const auto word = [&](const std::string& w) { text += (text.empty() ? "" : " ") + w; };
  const auto option = [&](const char* name, const std::string& value) {
    if (!value.empty()) word(std::string(name) + " " + value);
  };
  option("--builtin", o.builtin), option("--python", o.python), option("--op", o.op),
      option("--family", o.family);
  option("--impl", o.impl), option("--device", o.device), option("--case", o.name);
  if (o.quick) word("--quick");
  if (o.thorough) word("--long");
  if (o.stop) word("--stop");
  word("--seed " + std::to_string(o.seed));
  char limit[40];
  std::snprintf(limit, sizeof limit, "--time-limit %g", o.time_limit);
  word(limit);
  if (o.jobs > 0) word("--jobs " + std::to_string(o.jobs));
  return text;
}

}  // namespace

void describe_run(const CheckOptions& options, Report& report) {
  report.date = now();
  report.host = machine();
  report.te_fl = std::string(TE_FL_VERSION) + ", plugin ABI " + std::to_string(TE_FL_ABI_MAJOR) +
                 "." + std::to_string(TE_FL_ABI_MINOR);
  report.options = words(options);
}

}  // namespace te_fl_tool::check
