// The program conformance, and `te-fl conformance`: runs the conformance cases on all registered
// implementations through the dispatcher. See --help.
#include "conformance/program.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <tuple>

#include "conformance/case.hpp"
#include "conformance/coverage.hpp"
#include "conformance/processes.hpp"
#include "conformance/run.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::conformance {
namespace {

constexpr int kNothingToRun = 77;

constexpr char kHelp[] =
    "conformance [options]\n"
    "  --impl ID        only this implementation (default: every one that is registered)\n"
    "  --op NAME        only this op\n"
    "  --family NAME    only this family of ops\n"
    "  --case SUBSTR    only cases whose name contains this\n"
    "  --device DEVICE  in whose memory the tensors are (default cpu), e.g. cuda:0\n"
    "  --reduced        a quarter of the table, without the large cases (for sanitizer builds)\n"
    "  --sparse         a sixteenth of it, likewise (for drivers that compile each case)\n"
    "  --skip-large     leaves out the large cases\n"
    "  --fuzz SEED      also 20 cases of drawn shapes and types for every op whose cases come in "
    "any shape\n"
    "  --sweep          instead of the table: every row length from 1 to 300 and powers of two, "
    "for\n"
    "                   every op whose cases have rows\n"
    "  --list           print the cases, run nothing\n"
    "  --verbose        print the name of each case before it is run\n"
    "  --plugin P       load this plugin first (path, or a name from the manifests)\n"
    "  --expected FILE  cases that an implementation is known not to support; with it, also those\n"
    "                   of --plugin fail on any other refusal (without: refusals are counted)\n"
    "  --json FILE      every result\n"
    "  --report         a markdown table of ops and implementations\n"
    "  --guards         each case that passes again between bytes that differ from run to run, so "
    "that\n"
    "                   reading past a tensor shows (with --device; on the host, te-fl check uses "
    "pages)\n"
    "  --self-check     prove for every case that passes that a wrong result would have failed\n"
    "  --coverage       say what the op specification allows and no case does, and\n"
    "                   which declared exceptions match no case; run nothing\n"
    "As one of several ranks (tools/launch.py -n 4 -- conformance ...) it runs the collectives' "
    "cases\n"
    "with the others, and rank 0 prints what all of them found.\n"
    "Exit code: 0 all right, 1 failures, 2 wrong usage, 77 nothing to run.\n"
    "Example: conformance --impl reference.host --case gelu/f32/7x33\n";

struct Options {
  std::string impl, op, family, substring, json, fuzz, device = "cpu", expected, folder;
  std::vector<std::string> plugins;
  std::set<std::string> built_in;  // implementations that do not come from `plugins`
  bool reduced = false, sparse = false, skip_large = false, sweep = false, list = false,
       verbose = false, report = false, self_check = false, guards = false, coverage = false,
       help = false;
  std::string expected_file() const {
    return expected.empty() ? folder + "/expected_unsupported.txt" : expected;
  }
  bool filtered() const {
    return !impl.empty() || !op.empty() || !family.empty() || !substring.empty() || reduced ||
           sparse || skip_large || sweep;
  }
};

std::string did_you_mean(const std::string& word, const std::vector<std::string>& names) {
  const std::string near = environment::nearest(word, names);
  return near.empty() ? "" : ", did you mean '" + near + "'?";
}

// An error text for a name that no case has; empty if all names exist.
std::string unknown_name(const Options& o) {
  if (o.op.empty() && o.family.empty()) return {};
  std::set<std::string> ops, families;
  for (const Case& c : all_cases()) ops.insert(c.op), families.insert(c.family);
  for (const auto& [option, name, known] :
       {std::tuple{"--op ", o.op, ops}, {"--family ", o.family, families}}) {
    if (name.empty() || known.count(name) != 0) continue;
    return option + name + ": the table has no such name" +
           did_you_mean(name, {known.begin(), known.end()}) + "; see --list";
  }
  return {};
}

// Parses the command line. Returns an error text, or an empty text.
std::string parse(int argc, char** argv, Options& o) {
  const std::map<std::string, std::string*> texts = {
      {"--impl", &o.impl},      {"--op", &o.op},     {"--family", &o.family},
      {"--case", &o.substring}, {"--json", &o.json}, {"--expected", &o.expected},
      {"--device", &o.device},  {"--fuzz", &o.fuzz}};
  const std::map<std::string, bool*> flags = {{"--reduced", &o.reduced},
                                              {"--sparse", &o.sparse},
                                              {"--skip-large", &o.skip_large},
                                              {"--sweep", &o.sweep},
                                              {"--list", &o.list},
                                              {"--verbose", &o.verbose},
                                              {"--report", &o.report},
                                              {"--self-check", &o.self_check},
                                              {"--coverage", &o.coverage},
                                              {"--guards", &o.guards},
                                              {"--help", &o.help}};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (const auto flag = flags.find(word); flag != flags.end()) {
      *flag->second = true;
      continue;
    }
    const auto text = texts.find(word);
    if (text == texts.end() && word != "--plugin") {
      std::vector<std::string> known = {"--plugin"};
      for (const auto& [name, value] : texts) known.push_back(name);
      for (const auto& [name, value] : flags) known.push_back(name);
      return "unknown option " + word + did_you_mean(word, known) + "; see --help";
    }
    if (++i == argc) return word + " requires a value";
    if (word == "--plugin")
      o.plugins.push_back(argv[i]);
    else
      *text->second = argv[i];
  }
  return {};
}

// One line of expected_unsupported.txt: impl | op | pattern of the case name | reason.
struct Unsupported {
  std::string impl, op, pattern, reason;
  bool used = false;
};

std::string trimmed(const std::string& s) {
  const size_t a = s.find_first_not_of(" \t"), b = s.find_last_not_of(" \t");
  return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}

std::vector<Unsupported> read_expected(const std::string& path, std::string& error) {
  std::vector<Unsupported> all;
  std::ifstream file(path);
  if (!file) error = "cannot read " + path;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (trimmed(line).empty() || trimmed(line)[0] == '#') continue;
    std::vector<std::string> parts;
    std::stringstream fields(line);
    for (std::string field; std::getline(fields, field, '|');) parts.push_back(trimmed(field));
    if (parts.size() != 4 || parts[3].empty()) {
      error =
          path + ":" + std::to_string(number) + ": must be \"impl | op | case pattern | reason\"";
      return all;
    }
    all.push_back({parts[0], parts[1], parts[2], parts[3]});
  }
  return all;
}

struct Tally {
  int passed = 0, failed = 0, unsupported = 0;
  double milliseconds = 0;
};

class Runner {
 public:
  Runner(Options o, std::vector<Unsupported> expected, Device device, Processes* processes)
      : options_(std::move(o)),
        expected_(std::move(expected)),
        device_(device),
        processes_(processes) {}
  int run(const Table& table);

 private:
  void one(const Case& c, Prepared& prepared, const std::string& impl);
  Result run_guarded(Prepared& prepared, const std::string& impl) const;
  void settle(const Case& c, const std::string& impl, Result& result);
  void print_summary() const;
  void print_report() const;
  int report_all();

  Options options_;
  std::vector<Unsupported> expected_;
  Device device_;
  Processes* processes_;                                          // null: this process is alone
  std::map<std::pair<std::string, std::string>, Tally> tallies_;  // key: (op, impl)
  std::set<std::string> impls_, deterministic_;
  nlohmann::json results_ = nlohmann::json::array();
};

bool drawn(const Case& c) {
  return c.name.find("/fuzz/") != std::string::npos || c.name.find("/sweep/") != std::string::npos;
}

// Compares the outcome with the exceptions in expected_unsupported.txt. Skips random cases, since
// their possible refusals cannot be declared.
void Runner::settle(const Case& c, const std::string& impl, Result& result) {
  if (drawn(c)) return;
  Unsupported* listed = nullptr;
  for (Unsupported& u : expected_) {
    const auto matches = [](const std::string& pattern, const std::string& text) {
      return fnmatch(pattern.c_str(), text.c_str(), 0) == 0;
    };
    if (u.impl == impl && matches(u.op, c.op) && matches(u.pattern, c.name))
      listed = &u, u.used = true;
  }
  if (result.outcome == Outcome::kUnsupported && listed == nullptr &&
      (!options_.expected.empty() || options_.built_in.count(impl) != 0)) {
    result.outcome = Outcome::kFail;
    result.message =
        "not supported, and not declared in " + options_.expected_file() + ": " + result.message;
  } else if (result.outcome == Outcome::kPass && listed != nullptr) {
    result.outcome = Outcome::kFail;
    result.message = "passes, but " + options_.expected_file() + " says: " + listed->reason;
  }
}

Result Runner::run_guarded(Prepared& prepared, const std::string& impl) const {
  const std::string key = prepared.problem().op_name + " " + impl;
  return run_between_margins(prepared, impl, deterministic_.count(key) != 0);
}

void Runner::one(const Case& c, Prepared& prepared, const std::string& impl) {
  if (options_.verbose) {
    std::printf("case  %s\n", c.name.c_str());
    std::fflush(stdout);  // before a crash could lose the line
  }
  Result result = prepared.run(impl);
  if (result.outcome == Outcome::kPass && options_.guards && !c.large &&
      prepared.problem().want_code == 0) {
    result = run_guarded(prepared, impl);
  }
  if (result.outcome == Outcome::kPass && options_.self_check) {
    const std::string unnoticed = prepared.self_check(impl);
    if (!unnoticed.empty())
      result.outcome = Outcome::kFail, result.message = "self-check: " + unnoticed;
  }
  settle(c, impl, result);
  Tally& tally = tallies_[{c.op, impl}];
  tally.milliseconds += result.milliseconds;
  ++(result.outcome == Outcome::kPass   ? tally.passed
     : result.outcome == Outcome::kFail ? tally.failed
                                        : tally.unsupported);
  static const char* const outcomes[] = {"pass", "fail", "unsupported"};
  results_.push_back({{"op", c.op},
                      {"impl", impl},
                      {"case", c.name},
                      {"ranks", c.ranks},
                      {"result", outcomes[static_cast<int>(result.outcome)]},
                      {"milliseconds", result.milliseconds},
                      {"message", result.message}});
  if (result.outcome != Outcome::kFail) return;
  std::printf("FAIL  %s  %s\n      %s\n      conformance --impl %s --op %s --case '%s'%s\n",
              impl.c_str(), c.name.c_str(), result.message.c_str(), impl.c_str(), c.op.c_str(),
              c.name.c_str(),
              (options_.sweep ? std::string(" --sweep")
               : drawn(c)     ? " --fuzz " + options_.fuzz
                              : std::string())
                  .c_str());
}

int Runner::run(const Table& table) {
  std::map<std::string, std::vector<std::string>> serves;  // op -> impls
  for (const OpImplInfo& info : OpRegistry::instance().snapshot()) {
    if (!options_.impl.empty() && info.impl_id != options_.impl) continue;
    impls_.insert(info.impl_id);
    // Collectives do not run staged (on host copies), since the other ranks would not stage the
    // call.
    const te_fl_op_schema* schema =
        OpRegistry::instance().schema(OpRegistry::instance().find(info.op).value());
    const bool native = device_.is_host() || (info.desc.device_types >> device_.type & 1) != 0;
    if ((schema->flags & TE_FL_SCHEMA_COLLECTIVE) != 0 && !native) continue;
    serves[info.op].push_back(info.impl_id);
    if ((info.desc.flags & TE_FL_OP_DETERMINISTIC) != 0)
      deterministic_.insert(info.op + " " + info.impl_id);
  }
  std::set<std::string> tested;
  for (const Case& c : table) {
    tested.insert(c.op);
    if (serves[c.op].empty()) continue;
    Prepared prepared(c, device_, false, processes_);
    for (const std::string& impl : serves[c.op]) one(c, prepared, impl);
  }
  if (!options_.filtered() && processes_ == nullptr) {
    for (const auto& [op, impls] : serves)
      if (!impls.empty() && tested.count(op) == 0 && op.find("::") == std::string::npos) {
        std::printf("FAIL  %s has an implementation and no case\n", op.c_str());
        ++tallies_[{op, impls[0]}].failed;
      }
  }
  return report_all();
}

void Runner::print_summary() const {
  std::printf("%-46s %-24s %7s %7s %12s %10s\n", "op", "implementation", "passed", "failed",
              "unsupported", "ms");
  for (const auto& [key, t] : tallies_)
    std::printf("%-46s %-24s %7d %7d %12d %10.1f\n", key.first.c_str(), key.second.c_str(),
                t.passed, t.failed, t.unsupported, t.milliseconds);
}

void Runner::print_report() const {
  std::set<std::string> ops;
  for (const auto& [key, t] : tallies_) ops.insert(key.first);
  std::printf("| op |");
  for (const std::string& impl : impls_) std::printf(" %s |", impl.c_str());
  std::printf("\n|---|");
  for (size_t i = 0; i < impls_.size(); ++i) std::printf("---|");
  std::printf("\n");
  for (const std::string& op : ops) {
    std::printf("| %s |", op.c_str());
    for (const std::string& impl : impls_) {
      const auto t = tallies_.find({op, impl});
      if (t == tallies_.end())
        std::printf(" - |");
      else if (t->second.failed > 0)
        std::printf(" %d failed |", t->second.failed);
      else if (t->second.unsupported > 0)
        std::printf(" %d, %d not supported |", t->second.passed, t->second.unsupported);
      else
        std::printf(" %d |", t->second.passed);
    }
    std::printf("\n");
  }
}

int Runner::report_all() {
  if (tallies_.empty()) {
    std::printf("nothing to run: no registered implementation matches\n");
    return kNothingToRun;
  }
  int passed = 0, failed = 0, unsupported = 0;
  for (const auto& [key, t] : tallies_)
    passed += t.passed, failed += t.failed, unsupported += t.unsupported;
  for (const Unsupported& u : expected_) {
    if (u.used || options_.filtered() || processes_ != nullptr || impls_.count(u.impl) == 0)
      continue;
    std::printf("FAIL  expected_unsupported.txt: no case matches %s | %s | %s\n", u.impl.c_str(),
                u.op.c_str(), u.pattern.c_str());
    ++failed;
  }
  if (options_.report)
    print_report();
  else
    print_summary();
  std::printf("%d passed, %d failed, %d not supported\n", passed, failed, unsupported);
  if (!options_.json.empty()) {
    std::ofstream file(options_.json);
    file << results_.dump(1) << "\n";
    if (!file.flush()) {
      std::fprintf(stderr, "conformance: cannot write %s (--json)\n", options_.json.c_str());
      return 2;
    }
  }
  return failed == 0 ? 0 : 1;
}

Table selected(const Options& o, bool only_collectives) {
  Table chosen;
  std::map<std::string, int> per_op;
  Table all;
  if (o.sweep) {
    for (const std::string& op : OpManager::instance().registry().op_names())
      for (Case& c : sweep_cases(op)) all.push_back(std::move(c));
  } else {
    all = all_cases();
  }
  if (!o.fuzz.empty())
    for (Case& c : fuzz_cases(std::stoull(o.fuzz), 20)) all.push_back(std::move(c));
  for (Case& c : all) {
    if (!o.op.empty() && c.op != o.op) continue;
    if (!o.family.empty() && c.family != o.family) continue;
    if (only_collectives && c.ranks == 0) continue;
    if (c.name.find(o.substring) == std::string::npos) continue;
    // Keeps at least some cases of each op.
    const int first = o.sparse ? 2 : 3, each = o.sparse ? 16 : 4;
    const bool keep = !c.large && (per_op[c.op] < first || (c.seed >> 32) % each == 0);
    if (((o.reduced || o.sparse) && !keep) || (o.skip_large && c.large)) continue;
    ++per_op[c.op];
    chosen.push_back(std::move(c));
  }
  return chosen;
}

// Prints the lines of uncovered() that are not exempt. Each exemption is a shell pattern with a
// reason.
int print_coverage(const Table& table, const std::string& exempt) {
  std::string error;
  std::vector<Unsupported> exemptions = read_expected(exempt, error);
  if (!error.empty()) {
    std::fprintf(stderr, "conformance: %s\n", error.c_str());
    return 2;
  }
  int missing = 0;
  for (const std::string& line : uncovered(table)) {
    bool listed = false;
    for (Unsupported& u : exemptions)
      if (fnmatch((u.op + " " + u.pattern).c_str(), line.c_str(), 0) == 0) listed = u.used = true;
    if (listed) continue;
    std::printf("not covered: %s\n", line.c_str());
    ++missing;
  }
  for (const Unsupported& u : exemptions) {
    if (u.used) continue;
    std::printf("%s: nothing is exempted by %s%s\n", exempt.c_str(), (u.op + " ").c_str(),
                u.pattern.c_str());
    ++missing;
  }
  std::printf("%d not covered\n", missing);
  return missing == 0 ? 0 : 1;
}

// Prints the lines of expected_unsupported.txt that match no case. Requires the complete list of
// cases.
int print_stale(const Table& table, const std::vector<Unsupported>& expected) {
  int stale = 0;
  for (const Unsupported& u : expected) {
    const bool matches = std::any_of(table.begin(), table.end(), [&](const Case& c) {
      return fnmatch(u.op.c_str(), c.op.c_str(), 0) == 0 &&
             fnmatch(u.pattern.c_str(), c.name.c_str(), 0) == 0;
    });
    if (matches) continue;
    std::printf("expected_unsupported.txt: no case matches %s | %s | %s\n", u.impl.c_str(),
                u.op.c_str(), u.pattern.c_str());
    ++stale;
  }
  return stale;
}

// The name of the active plugin that was loaded from this file; empty if there is none.
std::string active_name(const std::string& file) {
  for (const plugins::PluginInfo& info : plugins::list()) {
    std::error_code absent;
    if (info.state == plugins::State::kActive &&
        std::filesystem::equivalent(info.path, file, absent)) {
      return info.name;
    }
  }
  return {};
}

int run(int argc, char** argv, const std::string& folder) {
  Options o;
  o.folder = folder;
  std::string error = parse(argc, argv, o);
  if (o.help) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  std::vector<Unsupported> expected;
  if (error.empty() && o.fuzz.find_first_not_of("0123456789") != std::string::npos)
    error = "--fuzz " + o.fuzz + ": the seed is a whole number, 0 or more";
  if (error.empty()) error = unknown_name(o);
  if (error.empty()) expected = read_expected(o.expected_file(), error);
  if (!error.empty()) {
    std::fprintf(stderr, "conformance: %s\n", error.c_str());
    return 2;
  }
  OpManager::instance();                // registers the built-in backends
  std::set<std::string> found_already;  // plugins of a build tree, found without being named
  for (const std::string& plugin : o.plugins) found_already.insert(active_name(plugin));
  for (const OpImplInfo& info : OpRegistry::instance().snapshot()) {
    if (found_already.count(info.owner) == 0) o.built_in.insert(info.impl_id);
  }
  for (const std::string& plugin : o.plugins) {
    if (!active_name(plugin).empty()) continue;
    const auto loaded = plugins::load(plugin);
    if (loaded.ok()) continue;
    std::fprintf(stderr, "conformance: %s\n", loaded.status().to_string().c_str());
    return 2;
  }
  te_fl::Result<std::unique_ptr<Processes>> job = Processes::from_environment();
  if (job.ok() && *job != nullptr && (o.self_check || o.guards)) {
    job = Status(StatusCode::kInvalidArgument,
                 "--self-check and --guards are for one process, and this is one of " +
                     std::to_string((*job)->size()));
  }
  if (!job.ok()) {
    std::fprintf(stderr, "conformance: %s\n", job.status().to_string().c_str());
    return 2;
  }
  Processes* const processes = job->get();
  const Table table = selected(o, processes != nullptr);
  if (o.list) {
    for (const Case& c : table) std::printf("%s\n", c.name.c_str());
    std::printf("%zu cases\n", table.size());
    return 0;
  }
  if (o.coverage)
    return print_coverage(table, o.folder + "/not_covered.txt") + print_stale(table, expected) == 0
               ? 0
               : 1;
  const te_fl::Result<Device> device = parse_device(o.device);
  const Status found = device.ok() ? devices::find(*device).status() : device.status();
  if (!found.ok()) {
    std::fprintf(stderr, "conformance: --device %s: %s\n", o.device.c_str(),
                 found.to_string().c_str());
    return 2;
  }
  if (o.guards && device->is_host()) {
    std::fprintf(stderr,
                 "conformance: --guards is for the memory of a device (--device); `te-fl check` "
                 "has pages on both sides of a host's\n");
    return 2;
  }
  if (processes != nullptr && processes->rank() != 0) {  // only rank 0 reports
    o.json.clear();
    if (std::freopen("/dev/null", "w", stdout) == nullptr) return 2;
  }
  return Runner(o, std::move(expected), *device, processes).run(table);
}

}  // namespace

int run_program(int argc, char** argv, const std::string& folder) {
  try {
    return run(argc, argv, folder);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "conformance: %s\n", e.what());
    return 2;
  }
}

}  // namespace te_fl::conformance
