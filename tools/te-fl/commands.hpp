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

// The exit codes that scripts can rely on; listed in --help.
enum ExitCode {
  kSuccess = 0,
  kProblem = 1,      // the command ran and found a problem: doctor's findings, an invalid policy
  kUsage = 2,        // misspelt command, option or value; a file that is named and cannot be read
  kNoCandidate = 3,  // explain, bench: no implementation would serve the call
  kIncomplete = 4,   // check: nothing failed, but not everything was checked: no certificate
};

// The folder in whose bin/ this program lies: that of an installation, of a wheel, or of a build.
std::string own_prefix();

struct ExplainOptions {
  std::string op;
  std::string device = "cpu";
  std::vector<std::string> dtypes;
  std::vector<std::string> scalings;
  std::string shape;                  // of a case of te-fl bench, which is then asked about
  std::string variant;                // part of that case's name; empty: the first of the dtype
  std::vector<std::string> settings;  // VAR=VALUE
  te_fl::Status watching;             // the mistake in TE_FL_VERIFY or TE_FL_TRACE
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
  std::string shape;               // "8192x4096"; empty: the case's own
  double peak = 0;                 // TFLOP/s; 0: measured
  double seconds = 0.5;            // per row
  bool verify = false;             // one call against the reference before it is timed
  bool list = false;
  bool json = false;
};

struct NewBackendOptions {
  std::string name;
  std::string folder;
  bool device = false;  // a device with memory of its own
};

int check_plugin(const CheckOptions& options);
int new_backend(const NewBackendOptions& options);

struct ReplayOptions {
  std::string file;
  std::string impl;    // empty: the one it was saved from
  std::string device;  // empty: the case's own
  bool json = false;
};

struct TuneOptions {
  std::vector<std::string> files;  // traces, saved calls
  std::string out;                 // empty: printed
  double seconds = 0.1;            // per call and implementation
};

struct MergeTracesOptions {
  std::vector<std::string> files;  // of TE_FL_TRACE, one of each process
  std::string out;
};

struct QuarantineOptions {
  bool clear = false;    // else: list
  std::string op, impl;  // clear: only these; empty: any
  bool all = false;      // clear: without op and impl
  bool json = false;
};

int info(bool json);
int fingerprint(bool json);
int fingerprint_diff(const std::string& a, const std::string& b, bool json);
int ops(const OpsOptions& options);
int explain(const ExplainOptions& options);
int env(const EnvOptions& options);
int doctor(bool json);
int bench(const BenchOptions& options);
int replay(const ReplayOptions& options);
int tune(const TuneOptions& options);
int merge_traces(const MergeTracesOptions& options);
int completion(const std::string& shell);
// Lists the words that the last one after "te-fl" may become, for the shells' scripts.
int complete(CLI::App& app, std::vector<std::string> words);
int quarantine(const QuarantineOptions& options);

// TE_FL_TRACE and TE_FL_VERIFY are meant for the user's program, which they watch: a command that
// obeyed them would replace the trace that it is to read, and check the calls that it times. Called
// before a command runs its first op.
void leave_watching_to_programs();

}  // namespace te_fl_tool
