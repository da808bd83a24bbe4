#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/check/options.hpp"
#include "te_fl/status.hpp"

namespace CLI {
class App;
}

namespace te_fl_tool {

// The exit codes, on which scripts can rely; --help lists them.
enum ExitCode {
  kSuccess = 0,
  kProblem = 1,      // the command ran and found a problem: doctor's findings, an invalid policy
  kUsage = 2,        // misspelt command, option or value; a named file that cannot be read
  kNoCandidate = 3,  // explain, bench: no implementation supports the call
  kIncomplete = 4,   // check: nothing failed, but not everything was checked: no certificate
};

// Returns the folder above this program's bin/: the prefix of an installation, a wheel or a build.
std::string own_prefix();

struct ExplainOptions {
  std::string op;
  std::string device = "cpu";
  std::vector<std::string> dtypes;
  std::vector<std::string> scalings;
  std::string shape;                  // extents of the te-fl bench case to explain
  std::string variant;                // part of the case's name; empty: the first case of the dtype
  std::vector<std::string> settings;  // VAR=VALUE
  te_fl::Status watching;             // error in TE_FL_VERIFY or TE_FL_TRACE
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

struct BenchOptions {
  std::string op;
  std::string device = "cpu";
  std::vector<std::string> impls;  // ids, or "all"; empty: the dispatcher's choice
  std::string dtype;               // empty: every case
  std::string variant;             // part of a case's name
  std::string shape;               // "8192x4096"; empty: the case's default
  double peak = 0;                 // peak TFLOP/s; 0: measure it
  double seconds = 0.5;            // per row
  bool verify = false;             // verify one call against the reference before timing
  bool list = false;
  bool json = false;
};

struct NewBackendOptions {
  std::string name;
  std::string folder;
  bool device = false;   // the project has a device with its own memory
  bool pytorch = false;  // the device is one of PyTorch too; requires device
};

int check_plugin(const CheckOptions& options);
int new_backend(const NewBackendOptions& options);

struct ReplayOptions {
  std::string file;
  std::string impl;    // empty: the implementation that ran the saved call
  std::string device;  // empty: the device of the saved call
  bool json = false;
};

struct TuneOptions {
  std::vector<std::string> files;  // traces, saved calls
  std::string out;                 // output file; empty: standard output
  double seconds = 0.1;            // per call and implementation
};

struct MergeTracesOptions {
  std::vector<std::string> files;  // files of TE_FL_TRACE, one per process
  std::string out;
};

struct QuarantineOptions {
  bool clear = false;    // false: list the quarantines
  std::string op, impl;  // with clear: end only the quarantines of this op and implementation;
                         // empty: any
  bool all = false;      // with clear: end all quarantines; excludes op and impl
  bool json = false;
};

int info(bool json);
int fingerprint(bool json);
int fingerprint_diff(const std::vector<std::string>& files, bool json);
int ops(const OpsOptions& options);
int explain(const ExplainOptions& options);
int env(const EnvOptions& options);
int doctor(bool json);
int bench(const BenchOptions& options);
int replay(const ReplayOptions& options);
int tune(const TuneOptions& options);
int merge_traces(const MergeTracesOptions& options);
int completion(const std::string& shell);
// Prints the possible completions of the last word after "te-fl"; the shells' completion scripts
// call it.
int complete(CLI::App& app, std::vector<std::string> words);
int quarantine(const QuarantineOptions& options);

// Ignores TE_FL_TRACE and TE_FL_VERIFY, which are meant for the user's program: if a command obeyed
// them, it would overwrite the trace that it reads, or verify the calls that it times. Called
// before a command runs its first op.
void leave_watching_to_programs();

// The suggestion "; did you mean 'x'?" with the name that is nearest to the word; empty if none is
// near.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& names);

}  // namespace te_fl_tool
