#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cfloat>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "conformance/program.hpp"
#include "program.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/version.hpp"
#include "te_fl/watch.hpp"

namespace {

using namespace te_fl_tool;

const char* const kExitCodes =
    "Exit codes: 0 success, 1 a problem was found, 2 usage error (also a file that cannot be "
    "read), "
    "3 no implementation would run the call,\n4 check: nothing failed, but not everything was "
    "checked, which is no certificate.";

// The examples below the options in a command's --help.
struct Examples {
  const char* command;
  std::vector<std::pair<const char*, const char*>> lines;
};
const std::vector<Examples>& examples() {
  static const std::vector<Examples> all = {
      {"info",
       {{"te-fl info", "devices and plugins"},
        {"te-fl info --fingerprint > rank0", "what must be equal on every rank"}}},
      {"fingerprint", {{"te-fl fingerprint diff rank0 rank1", "the differences of two ranks"}}},
      {"ops",
       {{"te-fl ops norm", "the implementations of the ops with 'norm' in their name"},
        {"te-fl ops --json", "all, for a program"}}},
      {"explain",
       {{"te-fl explain gelu --dtype bf16", "which implementation would run gelu on BF16, and why"},
        {"te-fl explain generic_gemm --dtype f8e4m3,f32 --scaling tensor", "an FP8 product"},
        {"te-fl explain gelu --set TE_FL_PREFER=reference", "under another policy"},
        {"te-fl explain rmsnorm_fwd --dtype bf16 --shape 8192x4096",
         "and which kernel would run"}}},
      {"env", {{"te-fl env", "every TE_FL_* variable, its value and the value's source"}}},
      {"doctor", {{"te-fl doctor", "what is missing and what to install"}}},
      {"bench",
       {{"te-fl bench gelu --dtype bf16 --impl all", "times, and the share of the device's limit"},
        {"te-fl bench --list", "the cases and their extents"}}},
      {"check",
       {{"te-fl check ./libacme.so --html acme.html", "certifies a plugin"},
        {"te-fl check acme_ops --python python3", "certifies one in Python"}}},
      {"conformance",
       {{"te-fl conformance --plugin ./libacme.so --op relu", "the table's cases of an op"}}},
      {"new-backend",
       {{"te-fl new-backend acme ./acme", "a plugin project to start from"},
        {"te-fl new-backend acme ./acme --device", "a plugin project with a device"}}},
      {"replay",
       {{"te-fl replay te_fl_cases/NAME.call", "a call that TE_FL_VERIFY saved"},
        {"te-fl replay te_fl_cases/NAME.call --impl reference.host", "on another implementation"}}},
      {"tune",
       {{"te-fl tune run.json --out policy.json", "the fastest for each call of a TE_FL_TRACE"}}},
      {"merge-traces",
       {{"te-fl merge-traces run.json run.json.rank* --out all.json",
         "merges the ranks of TE_FL_TRACE=run.json"}}},
      {"quarantine",
       {{"te-fl quarantine list", "what TE_FL_VERIFY_ACTION=quarantine found"},
        {"te-fl quarantine clear gelu --impl vendor.acme", "allows it to run again"}}},
      {"completion", {{"source <(te-fl completion bash)", "completion of this shell"}}},
  };
  return all;
}

std::string footer(const std::vector<std::pair<const char*, const char*>>& lines) {
  std::string text = "Examples:\n";
  for (const auto& [line, what] : lines) {
    std::string shown = std::string("  ") + line;
    shown.resize(std::max<size_t>(shown.size() + 2, 56), ' ');
    text += shown + what + "\n";
  }
  return text + "\n" + kExitCodes;
}

// Adds one example of each command to the help of te-fl itself, and all examples of a command to
// its own help.
void add_examples(CLI::App& app) {
  std::vector<std::pair<const char*, const char*>> first;
  for (const Examples& e : examples()) {
    first.push_back(e.lines.front());
    CLI::App* command = app.get_subcommand(e.command);
    command->footer(footer(e.lines));
    for (CLI::App* sub : command->get_subcommands({})) sub->footer(footer(e.lines));
  }
  app.footer(footer(first) + "\n`te-fl COMMAND --help` has the options and examples of a command.");
}

// The innermost command that the command line names.
struct NamedCommand {
  const CLI::App* command;
  std::string path;  // "te-fl quarantine clear"
};
NamedCommand named_command(const CLI::App& app) {
  NamedCommand named{&app, "te-fl"};
  while (!named.command->get_subcommands().empty()) {
    named.command = named.command->get_subcommands().front();
    named.path += " " + named.command->get_name();
  }
  return named;
}

std::vector<std::string> list_commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands({})) names.push_back(sub->get_name());
  return names;
}

// Reports an unknown option or subcommand. CLI11 itself would only report that it was not expected,
// or that something else is missing.
void complain_of_argument(const CLI::App& app) {
  const auto [command, path] = named_command(app);
  const std::vector<std::string> extras = app.remaining(true);
  const auto dashed = std::find_if(extras.begin(), extras.end(),
                                   [](const std::string& word) { return word.rfind('-', 0) == 0; });
  const std::string word = dashed == extras.end() ? extras.front() : *dashed;
  std::vector<std::string> names = list_commands(*command);
  for (const CLI::Option* option : command->get_options()) names.push_back(option->get_name());
  complain("unknown argument '" + word + "'" + did_you_mean(word.substr(0, word.find('=')), names) +
           " (" + path + " --help lists all)");
}

// Returns the text for a command-line error. It is te-fl's own where CLI11's text names internal
// types or impossible values.
std::string mistake(const CLI::App& command, const CLI::ParseError& error) {
  const std::string text = error.what();
  const std::string conversion = "Could not convert: ", equals = " = ";
  const size_t value = text.find(equals);
  if (text.rfind(conversion, 0) == 0 && value != std::string::npos) {
    return text.substr(conversion.size(), value - conversion.size()) +
           " does not take the value '" + text.substr(value + equals.size()) + "'";
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    return text.substr(0, text.find(':')) + " requires a value";
  }
  const std::vector<std::string> commands = list_commands(command);
  if (dynamic_cast<const CLI::RequiredError*>(&error) == nullptr || commands.empty()) return text;
  std::string all;
  for (const std::string& name : commands) all += (all.empty() ? "" : ", ") + name;
  return "it requires one of its commands: " + all;
}

// Reports a misspelt subcommand or option with the nearest valid name, and other mistakes with the
// command's name.
int usage_error(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
  if (argc > 1 && argv[1][0] != '-') {
    const std::vector<std::string> names = list_commands(app);
    if (std::find(names.begin(), names.end(), argv[1]) == names.end()) {
      complain(std::string("unknown command '") + argv[1] + "'" + did_you_mean(argv[1], names) +
               " (te-fl --help lists all)");
      return kUsage;
    }
  }
  const bool incomplete = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
                          dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  if (incomplete && !app.remaining(true).empty()) {
    complain_of_argument(app);
    return kUsage;
  }
  const auto [command, path] = named_command(app);
  const std::string of = command == &app ? "" : path.substr(path.find(' ') + 1) + ": ";
  complain(of + mistake(*command, error) + " (" + path + " --help lists all)");
  return kUsage;
}

// A validator for numbers in a range. CLI11's own range validators accept some texts that are not
// numbers.
CLI::Validator within(double least, double most, const std::string& text) {
  return CLI::Validator(
      [=](const std::string& word) -> std::string {
        double value = 0;
        if (CLI::detail::lexical_cast(word, value) && value >= least && value <= most) return {};
        return "'" + word + "' is not " + text;
      },
      "");
}

std::string is_shell(const std::string& word) {
  const std::vector<std::string> shells = {"bash", "zsh", "fish"};
  if (std::find(shells.begin(), shells.end(), word) != shells.end()) return {};
  return "'" + word + "' is not bash, zsh or fish" + did_you_mean(word, shells);
}

// Checks options that take comma-separated names for empty names, which CLI11 skips silently.
bool lists_are_whole(int argc, char** argv) {
  for (const std::string option : {"--dtype", "--scaling", "--impl"}) {
    for (int i = 2; i < argc; ++i) {
      const std::string word = argv[i];
      std::string list;
      if (word.rfind(option + "=", 0) == 0) {
        list = word.substr(option.size() + 1);
      } else if (word == option && i + 1 < argc) {
        list = argv[i + 1];
      } else {
        continue;
      }
      const std::string between = "," + list + ",";
      if (between.find(",,") == std::string::npos) continue;
      complain(std::string(argv[1]) + ": " + option + " '" + list +
               "' has an empty name; leave it out, with its comma");
      return false;
    }
  }
  return true;
}

std::string not_empty(const std::string& shape) {
  return shape.empty() ? "it is empty; give extents, for example 8192x4096, or leave it out" : "";
}

}  // namespace

namespace te_fl_tool {

std::string own_prefix() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path().parent_path();
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& names) {
  const std::string near = te_fl::environment::nearest(word, names);
  return near.empty() ? "" : "; did you mean '" + near + "'?";
}

void leave_watching_to_programs() {
  // An empty value turns the feature off.
  static_cast<void>(te_fl::environment::set("TE_FL_TRACE", ""));
  static_cast<void>(te_fl::environment::set("TE_FL_VERIFY", ""));
}

}  // namespace te_fl_tool

namespace {

int run_command(int argc, char** argv) {
  // the conformance command has its own parser
  if (argc > 1 && std::string_view(argv[1]) == "conformance") {
    const std::string folder = own_prefix() + "/share/te_fl/conformance";
    return te_fl::conformance::run_program(argc - 1, argv + 1, folder);
  }
  CLI::App app{
      "Inspects the te-fl runtime: devices, plugins, and which implementation would run a call.",
      "te-fl"};
  app.set_version_flag("--version", std::string("te-fl ") + TE_FL_VERSION);
  app.require_subcommand(1);
  int exit_code = kSuccess;
  bool json = false;

  auto* info_command = app.add_subcommand("info", "Version, devices, and plugins with their state");
  info_command->add_flag("--json", json, "machine-readable");
  bool fingerprint_only = false;
  info_command->add_flag(
      "--fingerprint", fingerprint_only,
      "what decides which implementation runs a call, and its hash, for ranks to compare");
  info_command->callback([&] { exit_code = fingerprint_only ? fingerprint(json) : info(json); });

  std::vector<std::string> tables;
  auto* fingerprint_command =
      app.add_subcommand("fingerprint", "Compares what `te-fl info --fingerprint` printed");
  fingerprint_command->require_subcommand(1);
  auto* diff_command = fingerprint_command->add_subcommand(
      "diff", "Prints which fingerprints differ from the rest, and in what");
  diff_command->add_option("files", tables, "two or more files, one of each rank")->required();
  diff_command->add_flag("--json", json, "machine-readable");
  diff_command->callback([&] { exit_code = fingerprint_diff(tables, json); });

  OpsOptions ops_options;
  auto* ops_command = app.add_subcommand("ops", "The matrix of ops and their implementations");
  ops_command->add_option("name", ops_options.family, "only ops whose name contains this");
  ops_command->add_flag("--json", ops_options.json, "machine-readable");
  ops_command->add_flag("--names", ops_options.names, "names only");
  ops_command->callback([&] { exit_code = ops(ops_options); });

  ExplainOptions explain_options;
  auto* explain_command = app.add_subcommand(
      "explain", "Prints which implementation would run a call, and why the others would not");
  explain_command->add_option("op", explain_options.op, "name of the op")->required();
  explain_command->add_option("--device", explain_options.device, "device of the tensors")
      ->capture_default_str();
  explain_command
      ->add_option("--dtype", explain_options.dtypes, "dtypes of the tensors (default: any)")
      ->delimiter(',');
  explain_command
      ->add_option("--scaling", explain_options.scalings,
                   "scaling modes of the tensors (default: none)")
      ->delimiter(',');
  explain_command
      ->add_option("--shape", explain_options.shape,
                   "explains a call of te-fl bench with these extents (see bench --list), "
                   "including the kernel that would run")
      ->check(not_empty);
  explain_command->add_option("--case", explain_options.variant,
                              "explains the first case of te-fl bench whose name contains this");
  explain_command->add_option("--set", explain_options.settings,
                              "VAR=VALUE: assumes this environment variable; repeatable");
  explain_command->add_flag("--json", explain_options.json, "machine-readable");
  explain_command->callback([&] { exit_code = explain(explain_options); });

  EnvOptions env_options;
  auto* env_command = app.add_subcommand(
      "env", "Lists every variable: its value, the source of the value, its meaning");
  env_command->add_flag("--json", env_options.json, "machine-readable");
  env_command->add_flag("--markdown", env_options.markdown, "docs/environment.md");
  env_command->callback([&] { exit_code = env(env_options); });

  auto* doctor_command = app.add_subcommand(
      "doctor", "Lists what is missing, what that disables, and what to install");
  doctor_command->add_flag("--json", json, "machine-readable");
  doctor_command->callback([&] { exit_code = doctor(json); });

  BenchOptions bench_options;
  auto* bench_command = app.add_subcommand(
      "bench", "Times an op and compares it with the limits of the device's memory and arithmetic");
  bench_command->add_option("op", bench_options.op, "name of the op");
  bench_command->add_option("--device", bench_options.device, "device of the tensors")
      ->capture_default_str();
  bench_command
      ->add_option("--impl", bench_options.impls,
                   "implementations by id, or all (default: the dispatcher's choice)")
      ->delimiter(',');
  bench_command->add_option("--dtype", bench_options.dtype, "only cases of this dtype");
  bench_command->add_option("--case", bench_options.variant, "only cases whose name contains this");
  bench_command
      ->add_option("--shape", bench_options.shape,
                   "extents, for example 8192x4096; --list names them")
      ->check(not_empty);
  bench_command
      ->add_option("--peak", bench_options.peak,
                   "the device's arithmetic in TFLOP/s (default: measured with a large product)")
      ->check(within(DBL_MIN, DBL_MAX, "a number above 0"));
  bench_command->add_option("--seconds", bench_options.seconds, "time to spend on a row")
      ->check(within(0.01, 600, "a number from 0.01 to 600"))
      ->capture_default_str();
  bench_command->add_flag("--verify", bench_options.verify,
                          "first compares the results of a call of at most the host's extents with "
                          "the reference; an implementation that differs is not timed");
  bench_command->add_flag("--list", bench_options.list, "the cases and their extents");
  bench_command->add_flag("--json", bench_options.json, "machine-readable");
  bench_command->callback([&] { exit_code = bench(bench_options); });

  CheckOptions check_options;
  auto* check_command = app.add_subcommand(
      "check",
      "Certifies a plugin: its file, its devices, every op that it registers, and its unloading");
  check_command->add_option("plugin", check_options.plugin, "path, or a name from the manifests");
  check_command->add_option("--builtin", check_options.builtin,
                            "a backend that is part of te-fl instead: cpu or reference");
  check_command->add_option("--python", check_options.python,
                            "the plugin is a Python module; this interpreter imports it and te_fl");
  check_command->add_option("--op", check_options.op, "only this op");
  check_command->add_option("--family", check_options.family,
                            "only ops of this family of the conformance table, such as norm");
  check_command->add_option("--impl", check_options.impl, "only this implementation");
  check_command->add_option(
      "--device", check_options.device,
      "only on this device (default: the first of every type that it supports)");
  check_command->add_option("--case", check_options.name, "only cases whose name contains this");
  check_command->add_option("--seed", check_options.seed, "seed of the cases with random shapes")
      ->capture_default_str();
  check_command->add_flag("--quick", check_options.quick,
                          "a quarter of the cases, and no timings; gives no certificate");
  check_command->add_flag("--long", check_options.thorough,
                          "several times as many random cases, and some of 2^24 elements");
  check_command->add_flag("--stop", check_options.stop, "ends at the first failure");
  check_command
      ->add_option("--time-limit", check_options.time_limit, "seconds that one call may take")
      ->check(within(0.1, 3600, "a number from 0.1 to 3600"))
      ->capture_default_str();
  check_command
      ->add_option("--jobs", check_options.jobs, "children at a time (default: processors)")
      ->check(within(1, 256, "a number from 1 to 256"));
  check_command->add_option("--json", check_options.json, "write every result to this file");
  check_command->add_option("--junit", check_options.junit, "write JUnit XML to this file");
  check_command->add_option("--html", check_options.html, "write a page to this file");
  check_command->add_flag("--worker", check_options.worker)->group("");
  check_command->callback([&] { exit_code = check_plugin(check_options); });

  NewBackendOptions new_options;
  app.add_subcommand("conformance", "Runs the cases that check uses, or a part of them (--help)");

  auto* new_command = app.add_subcommand(
      "new-backend", "Writes a standalone plugin project, which builds and passes te-fl check");
  new_command->add_option("name", new_options.name, "lower case: a letter, then letters, digits, _")
      ->required();
  new_command->add_option("folder", new_options.folder, "folder to create")->required();
  new_command->add_flag("--device", new_options.device,
                        "with a device that has its own memory, instead of kernels for the host's");
  new_command->add_flag("--pytorch", new_options.pytorch,
                        "with --device: makes it a device of PyTorch too (PrivateUse1)");
  new_command->callback([&] { exit_code = new_backend(new_options); });

  ReplayOptions replay_options;
  auto* replay_command = app.add_subcommand(
      "replay", "Runs a call that TE_FL_VERIFY saved once more and prints the differences");
  replay_command->add_option("file", replay_options.file, "the saved call")->required();
  replay_command->add_option("--impl", replay_options.impl,
                             "implementation by id (default: the one it was saved from)");
  replay_command->add_option("--device", replay_options.device,
                             "where to run it (default: where it ran, or the host)");
  replay_command->add_flag("--json", replay_options.json, "machine-readable");
  replay_command->callback([&] { exit_code = replay(replay_options); });

  TuneOptions tune_options;
  auto* tune_command = app.add_subcommand(
      "tune", "Times the candidates on the calls of a run and writes a policy file");
  tune_command->add_option("files", tune_options.files, "traces of TE_FL_TRACE, or saved calls")
      ->required();
  tune_command->add_option("--out", tune_options.out, "the policy file (default: printed)");
  tune_command
      ->add_option("--seconds", tune_options.seconds, "time to spend on a call and implementation")
      ->check(within(0.001, 600, "a number from 0.001 to 600"))
      ->capture_default_str();
  tune_command->callback([&] { exit_code = tune(tune_options); });

  MergeTracesOptions merge_options;
  auto* merge_command =
      app.add_subcommand("merge-traces", "Merges the traces of a job's ranks into one file");
  merge_command->add_option("files", merge_options.files, "traces of TE_FL_TRACE, one of each rank")
      ->required();
  merge_command->add_option("--out", merge_options.out, "the merged file")->required();
  merge_command->callback([&] { exit_code = merge_traces(merge_options); });

  QuarantineOptions quarantine_options;
  auto* quarantine_command = app.add_subcommand(
      "quarantine",
      "Shows or clears quarantines: implementations excluded after TE_FL_VERIFY found differences");
  quarantine_command->require_subcommand(1);
  auto* list_command =
      quarantine_command->add_subcommand("list", "Lists the quarantines in force, with reasons");
  list_command->add_flag("--json", quarantine_options.json, "machine-readable");
  auto* clear_command = quarantine_command->add_subcommand(
      "clear", "Removes quarantines, so that the implementations run again");
  clear_command->add_option("op", quarantine_options.op, "only those of this op");
  clear_command->add_option("--impl", quarantine_options.impl, "only those of this implementation");
  clear_command->add_flag("--all", quarantine_options.all, "every entry");
  clear_command->add_flag("--json", quarantine_options.json, "machine-readable");
  quarantine_command->callback([&] {
    quarantine_options.clear = clear_command->parsed();
    exit_code = quarantine(quarantine_options);
  });

  std::string shell;
  auto* completion_command = app.add_subcommand("completion", "Prints a shell's completion script");
  completion_command->add_option("shell", shell, "bash, zsh or fish")->required()->check(is_shell);
  completion_command->callback([&] { exit_code = completion(shell); });

  add_examples(app);

  if (argc > 1 && argv[1] == std::string("__complete")) {
    leave_watching_to_programs();
    return complete(app, {argv + 2, argv + argc});
  }
  // env and doctor show the user's TE_FL_TRACE and TE_FL_VERIFY, so these are not ignored here;
  // doctor ignores them later.
  const std::string command = argc > 1 ? argv[1] : "";
  // If a setting makes every call fail, explain prints that error instead of a call's decision.
  if (command == "explain") explain_options.watching = te_fl::watch_status();
  if (command != "env" && command != "doctor") leave_watching_to_programs();
  if (!lists_are_whole(argc, argv)) return kUsage;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error, argc, argv);
  }
  return exit_code;
}

}  // namespace

int te_fl_tool::run_program(int argc, char** argv) {
  int exit_code = kProblem;
  try {
    exit_code = run_command(argc, argv);
  } catch (const std::exception& error) {  // out of memory, or no thread could be started
    complain(error.what());
  }
  // A failed write of the help text is an error too.
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    complain(std::string("standard output cannot be written: ") +
             (errno != 0 ? std::strerror(errno) : "an earlier write failed"));
    return kProblem;
  }
  return exit_code;
}

int main(int argc, char** argv) { return te_fl_tool::run_program(argc, argv); }
