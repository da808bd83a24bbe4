#include "core/base/environment_table.hpp"

#include <algorithm>
#include <charconv>
#include <vector>

#include "core/base/text.hpp"
#include "te_fl/environment.hpp"

namespace te_fl::core {
namespace {

using enum VariableType;

constexpr VariableSpec kSpecs[] = {
    {"TE_FL_PREFER", "", kEnum, "", "flagos default vendor reference",
     "Kind of implementation that is tried first; flagos and default mean the portable one."},
    {"TE_FL_PREFER_VENDOR", "", kBool, "", "",
     "Older form of TE_FL_PREFER: 1 means vendor, 0 means flagos. TE_FL_PREFER wins."},
    {"TE_FL_STRICT", "", kBool, "0", "",
     "1: the first choice runs or the call is an error. 0: the next candidate is tried."},
    {"TE_FL_ALLOW_VENDORS", "", kList, "", "",
     "Vendors whose VENDOR implementations may be used, comma separated, any case; empty: all."},
    {"TE_FL_DENY_VENDORS", "", kList, "", "",
     "Vendors whose VENDOR implementations may not be used, comma separated, any case; wins over "
     "allow."},
    {"TE_FL_PER_OP", "", kPolicy, "", "",
     "Exclusive lists per op, 'op=token|token;op2=token'; a token is flagos, default, vendor, "
     "reference, "
     "vendor:NAME or impl:ID."},
    {"TE_FL_DETERMINISTIC", "", kBool, "0", "",
     "1: only implementations that give the same bits for the same inputs."},
    {"TE_FL_MAX_STAGED_BYTES", "", kInt, "", "0 9223372036854775807",
     "Most bytes that one call on a device's tensors may copy to and from the host for a host "
     "implementation; 0: none; empty: no limit."},
    {"TE_FL_POLICY_FILE", "", kString, "", "",
     "JSON file of a policy, as `te-fl tune` writes it or by hand (docs/policy-file.md); variables "
     "win over it.",
     true},
    {"TE_FL_PLUGIN_MODULES", "", kList, "", "",
     "Plugins to load, comma separated: paths, names of manifests, and in Python modules.", true},
    {"TE_FL_SKIP_MODULES", "", kList, "", "",
     "Modules of Python that are not loaded as plugins, comma separated, by the name of the module "
     "or of the package's entry point; *: none of installed packages."},
    {"TE_FL_PLUGIN_PATH", "", kPathList, "", "",
     "Folders in which plugin manifests are looked for before te-fl's own, colon separated; empty: "
     "none are looked for.",
     true},
    {"TE_FL_PLUGIN_TIMEOUT_MS", "", kInt, "10000", "1 3600000",
     "How long a plugin may take to start, in milliseconds; after that it is abandoned."},
    {"TE_FL_COMM_TIMEOUT_MS", "", kInt, "600000", "1 86400000",
     "How long the ranks of a communicator wait for each other, in milliseconds, when it is made "
     "and "
     "in each collective; after that every communicator of the process is aborted."},
    {"TE_FL_SKIP_CUDA", "", kBool, "0", "", "1: the CUDA plugin is left out."},
    {"TE_FL_DEVICE_CACHE_MB", "", kInt, "512", "0 1048576",
     "Freed memory that a device's plugin may keep for the next allocation, in MiB for each "
     "device; "
     "0: none, so that memory checkers see every allocation."},
    {"TEFL_LOG_LEVEL", "TE_FL_LOG_LEVEL", kEnum, "INFO",
     "TRACE DEBUG INFO WARNING ERROR OFF NOTSET WARN CRITICAL FATAL",
     "Least severe messages that are written to stderr. The last four are Python's names of "
     "levels: "
     "NOTSET means TRACE, WARN means WARNING, CRITICAL and FATAL mean OFF."},
    {"TE_FL_NUM_THREADS", "", kInt, "0", "0 1024",
     "Threads of the host backends' pool, the caller included; 0: as many as cores are available."},
    {"TE_FL_VALIDATE", "", kBool, "0", "",
     "1: arguments are also checked for overlapping memory, memory that is not the device's, "
     "streams of other devices, and values in a device's memory such as indices, for which the "
     "stream is waited for; that costs more than the usual checks."},
    {"TE_FL_SYNC", "", kBool, "0", "",
     "1: the stream is synchronised after each op, so that a device error names the op that caused "
     "it."},
    {"TE_FL_VERIFY", "", kString, "", "",
     "RATE or RATE:OP,OP2: the share of calls, above 0 and up to 1, after which the reference "
     "implementation runs on copies of the arguments and the results are compared. The calls are "
     "chosen by counting them."},
    {"TE_FL_VERIFY_ACTION", "", kEnum, "log", "log quarantine",
     "What happens if TE_FL_VERIFY finds a difference: a warning, with the call saved; or also "
     "that the implementation is no longer used for the op and signature, in later runs too: from "
     "the next call on, or, among several ranks (WORLD_SIZE), from the end of the step on, where "
     "they agree (te_fl::step_boundary())."},
    {"TE_FL_VERIFY_SEED", "", kInt, "0", "0 9223372036854775807",
     "Seed of the choice of calls that TE_FL_VERIFY checks."},
    {"TE_FL_VERIFY_DIR", "", kString, "te_fl_cases", "",
     "Folder in which TE_FL_VERIFY saves calls whose results differ, for `te-fl replay`; empty: "
     "none are saved.",
     true},
    {"TE_FL_VERIFY_CASES", "", kInt, "16", "0 1000000",
     "Maximum number of calls saved in TE_FL_VERIFY_DIR."},
    {"TE_FL_USAGE", "", kBool, "0", "",
     "1: at the program's end stderr lists which implementation ran which op, and what "
     "TE_FL_VERIFY found; the first line names the process's rank, if it has one."},
    {"TE_FL_CRASH_REPORT", "", kBool, "1", "",
     "1: if SIGSEGV, SIGBUS, SIGILL, SIGFPE or SIGABRT ends the process inside an implementation, "
     "a "
     "line on stderr names the implementation, its plugin, the op and the arguments; the signal is "
     "then passed on to the handler that was installed before, or to the default action. 0: te-fl "
     "installs no handler, or writes nothing from then on."},
    {"TE_FL_TRACE", "", kString, "", "",
     "File into which calls, implementations, staging and fallbacks are written at the end, per "
     "thread and stream, for Perfetto and `te-fl tune`; %p in it becomes the process's number and "
     "%r its rank, 0 if it has none. Without them a forked child adds its number at the end, and "
     "each rank but 0 .rank and its number; `te-fl merge-traces` makes one file of them.",
     true},
    {"TE_FL_TRACE_EVENTS", "", kInt, "200000", "1 100000000",
     "Maximum number of calls that TE_FL_TRACE keeps in memory; later calls are only counted."},
    {"TE_FL_AS_TRANSFORMER_ENGINE", "", kBool, "0", "",
     "1: where te-fl's Python package is installed, `import transformer_engine` means te-fl from "
     "the interpreter's start (docs/transformer-engine.md)."},
    {"TE_FL_INSIDE_TRANSFORMER_ENGINE", "", kString, "", "",
     "1: where te-fl's Python package is installed, the package transformer_engine that is "
     "installed too computes with te-fl; cpu, or the type of another vendor's device such as musa: "
     "and that device answers its requests for CUDA (docs/inside-transformer-engine.md)."},
    {"TE_FL_TORCH_NODE", "", kBool, "1", "",
     "0: te_fl.pytorch leaves out the autograd node that `python -m te_fl build-node` has compiled "
     "(docs/pytorch.md)."},
    {"TE_FL_STORE", "", kString, "", "",
     "Where the ranks of a job find each other: file:PATH, a folder that all see and that is empty "
     "or absent when the job begins, or tcp://HOST:PORT, where rank 0 serves; te-fl launch "
     "sets it.",
     true},
    {"TE_FL_RANK", "", kInt, "", "0 2147483646",
     "This process's number among the ranks of its job; te-fl launch sets it, and RANK, which "
     "torchrun sets, is read where it is unset."},
    {"TE_FL_WORLD_SIZE", "", kInt, "", "1 2147483647",
     "How many ranks the job has; set with TE_FL_RANK."},
    {"TE_FL_LOCAL_RANK", "", kInt, "", "0 2147483646",
     "This process's number among the ranks on its machine, by which it takes its device; unset: "
     "TE_FL_RANK."},
    {"TE_FL_TP_OVERLAP", "", kBool, "0", "",
     "1: te_fl.pytorch's products under sequence parallelism are computed in pieces beside the "
     "transfers that they feed or follow, which the copy engines of one host's GPUs make "
     "(docs/ranks-overlap.md); all ranks need the same."},
    {"TE_FL_QUARANTINE_FILE", "", kString, "", "",
     "File of implementations that are not used for calls that they computed wrongly; unset: "
     "te_fl/quarantine.json "
     "in $XDG_STATE_HOME or ~/.local/state; empty: none.",
     true},
};

std::vector<std::string> words(std::string_view text) {
  std::vector<std::string> result;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    if (end > 0) result.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return result;
}

std::vector<std::string> bool_words() {
  return {"0", "1", "true", "false", "on", "off", "yes", "no"};
}

std::string list_choices(const std::vector<std::string>& list) {
  std::string text;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i > 0) text += i + 1 == list.size() ? " or " : ", ";
    text += list[i];
  }
  return text;
}

std::vector<std::string> choices_of(const VariableSpec& spec) {
  return spec.type == kBool ? bool_words() : words(spec.choices);
}

Status wrong_value(const VariableSpec& spec, std::string_view shown_name, std::string_view value) {
  std::string text = std::string(shown_name) + "=" + std::string(value) +
                     " is not accepted: it must be " + accepted_values(spec);
  if (spec.type != kInt) text += did_you_mean(value, choices_of(spec));
  return invalid_argument(text);
}

Result<std::string> check_bool(const VariableSpec& spec, std::string_view shown_name,
                               std::string_view value) {
  const std::string word = lower(value);
  if (word == "1" || word == "true" || word == "on" || word == "yes") return std::string("1");
  if (word == "0" || word == "false" || word == "off" || word == "no") return std::string("0");
  return wrong_value(spec, shown_name, value);
}

Result<std::string> check_int(const VariableSpec& spec, std::string_view shown_name,
                              std::string_view value) {
  const auto bounds = words(spec.choices);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool whole = error == std::errc() && end == value.data() + value.size();
  const bool inside =
      bounds.size() != 2 || (number >= std::stoll(bounds[0]) && number <= std::stoll(bounds[1]));
  if (!whole || !inside) return wrong_value(spec, shown_name, value);
  return std::to_string(number);
}

}  // namespace

std::span<const VariableSpec> variable_specs() { return kSpecs; }

std::string_view type_name(VariableType type) {
  switch (type) {
    case kBool:
      return "bool";
    case kInt:
      return "int";
    case kEnum:
      return "enum";
    case kList:
      return "list";
    case kPathList:
      return "path list";
    case kString:
      return "string";
    case kPolicy:
      return "policy";
    case kFile:
      return "file";
  }
  return "string";
}

std::string accepted_values(const VariableSpec& spec) {
  switch (spec.type) {
    case kBool:
      return list_choices(bool_words()) + " (any case)";
    case kInt: {
      const auto bounds = words(spec.choices);
      if (bounds.size() != 2) return "a whole number";
      return "a whole number from " + bounds[0] + " to " + bounds[1];
    }
    case kEnum:
      return list_choices(words(spec.choices)) + " (any case)";
    case kList:
      return "a comma separated list";
    case kPathList:
      return "a colon separated list of folders";
    case kPolicy:
      return "op=token|token;op2=token";
    case kFile:
      return "the path of a file";
    case kString:
      break;
  }
  return "any text";
}

Result<std::string> check_value(const VariableSpec& spec, std::string_view shown_name,
                                std::string_view value) {
  const std::string_view trimmed = trim(value);
  if (spec.type == kBool) return check_bool(spec, shown_name, trimmed);
  if (spec.type == kInt) return check_int(spec, shown_name, trimmed);
  if (spec.type == kEnum) {
    for (const std::string& choice : words(spec.choices)) {
      if (equal_ignoring_case(trimmed, choice)) return choice;
    }
    return wrong_value(spec, shown_name, trimmed);
  }
  return std::string(value);
}

}  // namespace te_fl::core

namespace te_fl::environment {

std::string markdown() {
  std::string text =
      "# Environment variables\n\n"
      "<!-- Generated by `te-fl env --markdown`; do not edit. -->\n\n"
      "Variables are read once, at first use, and again when a program requests it. A value set by "
      "code wins "
      "over the environment. A misspelt variable or value makes calls fail with a message that "
      "names the "
      "nearest right one. An empty bool, int or enum counts as unset. Settings of plugins begin "
      "with "
      "TE_FL_<PLUGIN>_ and are declared by the plugin: [plugin-settings.md](plugin-settings.md) "
      "has "
      "those of the plugins that come with te-fl, and `te-fl env` those of all that are here.\n\n"
      "| variable | type | default | accepted | meaning |\n|---|---|---|---|---|\n";
  const auto escaped = [](std::string cell) {  // an unescaped '|' would end the table cell
    for (size_t at = 0; (at = cell.find('|', at)) != std::string::npos; at += 2)
      cell.insert(at, "\\");
    return cell;
  };
  for (const core::VariableSpec& spec : core::variable_specs()) {
    std::string name = "`" + std::string(spec.name) + "`";
    if (!spec.alias.empty()) name += " (alias `" + std::string(spec.alias) + "`)";
    const std::string shown =
        spec.default_value.empty() ? "unset" : "`" + std::string(spec.default_value) + "`";
    text += "| " + name + " | " + std::string(core::type_name(spec.type)) + " | " + shown + " | " +
            escaped(core::accepted_values(spec)) + " | " + escaped(std::string(spec.doc)) + " |\n";
  }
  return text;
}

}  // namespace te_fl::environment
