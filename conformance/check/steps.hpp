// te-fl check: the steps of a child for one implementation on one device.
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
  uint32_t flags = 0;      // flags of its descriptor
  bool describes = false;  // it has describe()
};

// The process state that a plugin must not change (rule R8): the floating-point environment and the
// signal handlers.
class ProcessState {
 public:
  static ProcessState now();
  std::string changed() const;  // describes the change; empty if there is none
  void restore() const;

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE,  SIGILL,
                                     SIGABRT, SIGINT, SIGTERM, SIGCHLD};
  int rounding_ = 0;
  bool denormals_ = true;
  struct sigaction actions_[sizeof kSignals / sizeof kSignals[0]] = {};
};

// Collects the text that is written to the process's stdout and stderr, which are redirected to one
// file. Skips lines of te-fl's log, which a plugin may use.
class PrintedText {
 public:
  // The first line written since the last call; empty if there is none.
  std::string take();

 private:
  int64_t seen_ = 0;
};

// The error text for an undeclared setting (R21): "TE_FL_ACME_X is a setting that ...".
std::string undeclared_text(const std::string& setting);

// The case's column in the report's matrix: "bf16", "f8e4m3 tensor".
std::string dtype_of(const te_fl::conformance::Problem& problem);

// Extracts the reason that concerns `impl` from dispatch's error text about a refused call, which
// lists all candidates.
std::string strip_prefix(const std::string& message, const std::string& impl);

// Runs the case and compares the results with its expectations; also checks the memory around the
// tensors.
Finding check_result(const Subject& subject, const te_fl::conformance::Case& c,
                     te_fl::conformance::Prepared& prepared);
// Checks that two calls in deterministic mode give the same bits.
Finding check_determinism(const Subject& subject, const te_fl::conformance::Case& c,
                          te_fl::conformance::Prepared& prepared);
// Repeats the call with tensors placed directly before inaccessible pages. They are aligned to
// their elements, or to 256 bytes if that is refused. Host only.
Finding check_guard(const Subject& subject, const te_fl::conformance::Case& c,
                    te_fl::conformance::Prepared& prepared);
// Like check_guard(), with tensors placed directly after inaccessible pages.
Finding check_start_guard(const Subject& subject, const te_fl::conformance::Case& c,
                          te_fl::conformance::Prepared& prepared);
// Repeats the call on a device with different bytes in a margin around each tensor, since device
// pages cannot be protected. `bytes`: size of the margin on each side.
Finding check_margins(const Subject& subject, const te_fl::conformance::Case& c,
                      te_fl::conformance::Prepared& prepared, size_t bytes = size_t{64} << 10);
// Checks describe() for a call that is supported: it must return a text and not access any tensor.
Finding check_describe(const Subject& subject, const te_fl::conformance::Case& c,
                       te_fl::conformance::Prepared& prepared);
// Repeats the call on a new stream and waits for that stream only. nullopt if the device has no
// streams.
std::optional<Finding> check_stream(const Subject& subject, const te_fl::conformance::Case& c,
                                    te_fl::conformance::Prepared& prepared);

// Reports to the parent that a call has returned, at most once per second. --time-limit thus
// applies to a single call, independent of the number of calls in a step and of the machine's load.
// May be called from any thread; does not allocate.
void beat();

// A step that runs once per device. Its name begins with "device/". UNSUPPORTED: the device lacks
// the tested feature; any other error describes what is wrong.
struct DeviceStep {
  std::string name;
  te_fl::Status (*run)(const te_fl::Device&);
  bool order = false;  // tests the order of streams and events; relies on correct fills and copies
};
const std::vector<DeviceStep>& device_steps();

// A step that runs once per op.
struct ExtraStep {
  const char* name;
  std::function<std::vector<Finding>(const Subject&, const te_fl::conformance::Table&)> run;
};
const std::vector<ExtraStep>& extra_steps();

// Checks rule R3 for the structs of an active plugin.
std::vector<Finding> check_structs(const te_fl::plugins::PluginInfo& plugin);

// Records the address range of the plugin's code, so that a crash can be located in it. Returns the
// file that contains the code.
std::string note_code_digest(const te_fl::plugins::PluginInfo& plugin);
// True if the address is in the range that note_code_digest() recorded last, even after the code
// was unmapped. Always true if no range is known.
bool in_plugin(uintptr_t address);

// Deactivates the plugin after running its ops, loads it again, and checks what it leaves behind.
std::vector<Finding> check_lifecycle(
    const te_fl::plugins::PluginInfo& plugin,
    const std::vector<std::pair<Subject, te_fl::conformance::Table>>& work);

}  // namespace te_fl_tool::check
