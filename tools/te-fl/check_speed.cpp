// te-fl check: times the plugin's ops one after the other with te-fl bench.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <set>

#include "check_parent.hpp"
#include "commands.hpp"

namespace te_fl_tool::check {
namespace {

using nlohmann::json;

// Runs te-fl with these arguments and returns its standard output; empty if it failed. An alarm
// kills a hanging op, whose row is then missing.
std::string run_for_output(const std::vector<std::string>& words, const std::string& plugin) {
  int out[2];
  if (pipe2(out, O_CLOEXEC) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    setenv("TE_FL_PLUGIN_MODULES", plugin.c_str(), 1);
    setenv("TEFL_LOG_LEVEL", "OFF", 1);
    const int nothing = open("/dev/null", O_WRONLY);
    dup2(out[1], 1), dup2(nothing, 2);
    alarm(120);  // survives exec
    std::vector<char*> argv = {const_cast<char*>("te-fl")};
    for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
    argv.push_back(nullptr);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  close(out[1]);
  std::string text;
  char bytes[4096];
  for (ssize_t n; child > 0 && (n = read(out[0], bytes, sizeof bytes)) > 0;)
    text.append(bytes, static_cast<size_t>(n));
  close(out[0]);
  int status = 0;
  if (child > 0) waitpid(child, &status, 0);
  // exit code kProblem means that results differ; the output is complete then
  const bool whole = WIFEXITED(status) && WEXITSTATUS(status) <= kProblem;
  return whole ? text : std::string();
}

// Returns the timed cases of a dtype; of all dtypes if it is empty.
json bench_rows(const Target& t, const std::string& plugin, const std::string& dtype) {
  std::vector<std::string> words = {"bench",     t.op,   "--impl", t.impl, "--device", t.device,
                                    "--seconds", "0.05", "--peak", "1",    "--json",   "--verify"};
  if (!dtype.empty()) words.insert(words.end(), {"--dtype", dtype});
  const json all = json::parse(run_for_output(words, plugin), nullptr, false);
  json rows = json::array();
  if (all.is_array())
    for (const json& row : all)
      if (row.contains("time_us") || row.contains("differs")) rows.push_back(row);
  return rows;
}

std::string make_command(const Target& t, const std::string& variant, const std::string& plugin) {
  return (plugin.empty() ? "" : "TE_FL_PLUGIN_MODULES='" + plugin + "' ") + "te-fl bench " + t.op +
         " --impl " + t.impl + " --device " + t.device + " --case '" + variant + "' --verify";
}

}  // namespace

std::vector<Finding> measure_speed(const CheckOptions& options, Report& report) {
  std::vector<Finding> found;
  std::set<std::string> wrong;
  for (const Finding& f : report.findings)
    if (f.outcome == Outcome::kFail) wrong.insert(f.op + " " + f.impl);
  for (const Target& t : report.targets) {
    // Wrong results are not timed.
    if (t.family.empty() || wrong.count(t.op + " " + t.impl) != 0) continue;
    // Times the BF16 cases, the usual dtype of these ops; all dtypes if the implementation has no
    // BF16.
    const std::string plugin = options.builtin.empty() ? report.path : "";
    json rows = bench_rows(t, plugin, "bf16");
    if (rows.empty()) rows = bench_rows(t, plugin, "");
    for (const json& row : rows) {
      const bool differs = row.contains("differs");
      if (differs || row["verified"])
        found.push_back({.check = "speed",
                         .op = t.op,
                         .impl = t.impl,
                         .device = t.device,
                         .dtype = "-",
                         .outcome = differs ? Outcome::kFail : Outcome::kPass,
                         .message = differs ? "case '" + row["case"].get<std::string>() +
                                                  "' of te-fl bench, " +
                                                  row["differs"].get<std::string>()
                                            : "",
                         .reproduce = differs ? make_command(t, row["case"], plugin) : ""});
      if (differs) continue;
      report.speeds.push_back({t.op, t.impl, t.device, row["case"], row["time_us"], row["GB_per_s"],
                               row["GB_per_s"].get<double>() / row["copy_GB_per_s"].get<double>()});
    }
  }
  return found;
}

}  // namespace te_fl_tool::check
