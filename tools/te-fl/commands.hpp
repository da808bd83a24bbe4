#pragma once

#include <string>
#include <vector>

namespace te_fl_tool {

// What scripts can rely on; listed in --help.
enum ExitCode {
  kSuccess = 0,
  kProblem = 1,      // the command ran and found a problem: doctor's findings, an invalid policy
  kUsage = 2,        // misspelt command, option or value
  kNoCandidate = 3,  // explain: no implementation would serve the call
};

struct ExplainOptions {
  std::string op;
  std::string device = "cpu";
  std::vector<std::string> dtypes;
  std::vector<std::string> scalings;
  std::vector<std::string> settings;  // VAR=VALUE
  bool json = false;
};

struct OpsOptions {
  std::string family;
  bool json = false;
  bool names = false;
};

struct EnvOptions {
  bool json = false;
  bool markdown = false;
};

int info(bool json);
int ops(const OpsOptions& options);
int explain(const ExplainOptions& options);
int env(const EnvOptions& options);
int doctor(bool json);
int completion(const std::string& shell);

}  // namespace te_fl_tool
