// te-fl check: the steps that a child makes with one implementation on one device.
#pragma once

#include <csignal>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "conformance/check/check.hpp"
#include "conformance/run.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool::check {

struct Subject {
  std::string op, impl, device_name;
  te_fl::Device device;
  uint32_t flags = 0;      // of its descriptor
  bool describes = false;  // it has a describe()
};

// The state that a plugin has to leave as it was (rule R8): the floating-point environment and the
// handlers of signals.
class ProcessState {
 public:
  static ProcessState now();
  std::string changed() const;  // empty if nothing was
  void restore() const;

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE,  SIGILL,
                                     SIGABRT, SIGINT, SIGTERM, SIGCHLD};
  int rounding_ = 0;
  bool denormals_ = true;
  struct sigaction actions_[sizeof kSignals / sizeof kSignals[0]] = {};
};

// Collects the text that is written to the process's stdout and stderr, which are one file. Lines
// of te-fl's own log, in which a plugin may speak, are left out.
class PrintedText {
 public:
  // The first line since the last call; empty: there is none.
  std::string take();

 private:
  int64_t seen_ = 0;
};

// "TE_FL_ACME_X is a setting that ..." (R21).
std::string undeclared_text(const std::string& setting);

// "bf16", "f8e4m3 tensor": what a case is about, for the matrix.
std::string dtype_of(const te_fl::conformance::Problem& problem);

// The reason that concerns `impl`, out of dispatch's message about a refused call, which names
// every candidate.
std::string reason_of(const std::string& message, const std::string& impl);

// The outcome against the table's expectation, memory included.
Finding result_of(const Subject& subject, const te_fl::conformance::Case& c,
                  te_fl::conformance::Prepared& prepared);
// Two calls that ask for determinism leave the same bits.
Finding determinism_of(const Subject& subject, const te_fl::conformance::Case& c,
                       te_fl::conformance::Prepared& prepared);
// Repeats the call with tensors that end before pages which nobody may touch, aligned to their
// elements, or to 256 bytes if that is refused. On the host only.
Finding guard_of(const Subject& subject, const te_fl::conformance::Case& c,
                 te_fl::conformance::Prepared& prepared);
// Repeats the call with tensors that begin behind such pages.
Finding start_guard_of(const Subject& subject, const te_fl::conformance::Case& c,
                       te_fl::conformance::Prepared& prepared);
// Repeats the call on a device, whose pages cannot be protected, between other bytes: `bytes` on
// either side of each tensor.
Finding margins_of(const Subject& subject, const te_fl::conformance::Case& c,
                   te_fl::conformance::Prepared& prepared, size_t bytes = size_t{64} << 10);
// Checks describe() of a call that is served: it names what it runs, and touches nothing.
Finding describe_of(const Subject& subject, const te_fl::conformance::Case& c,
                    te_fl::conformance::Prepared& prepared);
// On a stream of its own, which alone is waited for. None if the device makes no streams.
std::optional<Finding> stream_of(const Subject& subject, const te_fl::conformance::Case& c,
                                 te_fl::conformance::Prepared& prepared);

// Says that a call has returned, at most once a second: --time-limit is for one call, however many
// a step makes and however loaded the machine is. Any thread; allocates nothing.
void beat();

// Steps that are made once for a device. The name begins "device/"; UNSUPPORTED if the device lacks
// what would be tried, any other error is what is wrong.
struct DeviceStep {
  std::string name;
  te_fl::Status (*run)(const te_fl::Device&);
  bool order = false;  // of streams and events, which it sees by fills and copies that are right
};
const std::vector<DeviceStep>& device_steps();

// Steps that are made once for an op.
struct ExtraStep {
  const char* name;
  std::function<std::vector<Finding>(const Subject&, const te_fl::conformance::Table&)> run;
};
const std::vector<ExtraStep>& extra_steps();

// Checks what rule R3 asks of the plugin's structs; it is active.
std::vector<Finding> structs_of(const te_fl::plugins::PluginInfo& plugin);

// Remembers where the plugin's code lies, so that a crash can be placed in it. Returns the file
// that the code is in.
std::string note_code_of(const te_fl::plugins::PluginInfo& plugin);
// True of an address in what note_code_of() found last, also once that is unmapped; of any if it
// found nothing, since nobody can tell then.
bool in_plugin(uintptr_t address);

// Deactivates the plugin after its ops have run, loads it again, and watches what it leaves behind.
std::vector<Finding> lifecycle_of(
    const te_fl::plugins::PluginInfo& plugin,
    const std::vector<std::pair<Subject, te_fl::conformance::Table>>& work);

}  // namespace te_fl_tool::check
