// Runs tests/fault/probe.cpp in its own environment and parses its output.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "support/temp_folder.hpp"

namespace te_fl::test {

struct ProbeRun {
  int exit_code = -1;
  std::string output;  // stdout
  std::string log;     // stderr

  // Returns the line of a plugin, "name|state|origin|reason"; empty if the probe did not find the
  // plugin.
  std::string line(const std::string& name) const {
    std::istringstream lines(output);
    for (std::string text; std::getline(lines, text);) {
      if (text.starts_with(name + "|")) return text;
    }
    return {};
  }
};

// `environment` is added to this process's environment; an empty value unsets a variable,
// kSetAndEmpty sets it to the empty string.
constexpr const char* kSetAndEmpty = "(set and empty)";
inline ProbeRun run_probe(const std::map<std::string, std::string>& environment,
                          const std::string& program = FAULT_PROBE,
                          const std::string& argument = "") {
  const TempFolder folder;
  const std::string out = folder / "out", log = folder / "log";
  const pid_t child = fork();
  if (child == 0) {
    for (const auto& [name, value] : environment) {
      if (value.empty()) {
        unsetenv(name.c_str());
      } else {
        setenv(name.c_str(), value == kSetAndEmpty ? "" : value.c_str(), 1);
      }
    }
    setenv("TEFL_LOG_LEVEL", "WARNING", 1);
    if (freopen(out.c_str(), "w", stdout) == nullptr ||
        freopen(log.c_str(), "w", stderr) == nullptr)
      _exit(126);
    execl(program.c_str(), program.c_str(), argument.empty() ? nullptr : argument.c_str(), nullptr);
    _exit(127);
  }
  ProbeRun result;
  int status = 0;
  if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)) {
    result.exit_code = WEXITSTATUS(status);
  }
  result.output = read_file(out);
  result.log = read_file(log);
  return result;
}

}  // namespace te_fl::test
