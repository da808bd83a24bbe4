// te-fl check: runs a provider's collectives with each rank in its own process, as in real jobs.
// For each op, child processes run `te-fl conformance` as the ranks, and rank 0 reports the
// findings of all.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <thread>

#include "check_child.hpp"
#include "check_parent.hpp"
#include "commands.hpp"

namespace te_fl_tool::check {
namespace {

using nlohmann::json;
using std::chrono::steady_clock;

constexpr int kRanks = 4;  // the largest number of ranks of a conformance case
// Time for the other ranks to end after one rank has ended: kGrace, or kGraceOfLost if that rank
// failed.
constexpr std::chrono::seconds kGrace{10}, kGraceOfLost{3};
// Limit for all cases of one op together. A hanging collective ends after its communicator's
// time-out, which is a third of this limit.
constexpr double kLeastLimitS = 60;

std::vector<std::string> make_environment(int rank, const std::string& store) {
  std::vector<std::string> all = environment_of_children();
  std::erase_if(all, [](const std::string& entry) {
    static const char* const dropped[] = {"TE_FL_RANK=", "TE_FL_WORLD_SIZE=", "TE_FL_LOCAL_RANK=",
                                          "TE_FL_STORE=", "TE_FL_NUM_THREADS="};
    return std::any_of(std::begin(dropped), std::end(dropped),
                       [&](const char* name) { return entry.rfind(name, 0) == 0; });
  });
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency() / kRanks);
  all.push_back("TE_FL_RANK=" + std::to_string(rank));
  all.push_back("TE_FL_LOCAL_RANK=" + std::to_string(rank));
  all.push_back("TE_FL_WORLD_SIZE=" + std::to_string(kRanks));
  all.push_back("TE_FL_STORE=file:" + store);
  all.push_back("TE_FL_NUM_THREADS=" + std::to_string(threads));
  return all;
}

// The process of one rank.
struct Rank {
  pid_t pid = -1;   // -1: ended, or not started
  int output = -1;  // in-memory file that receives the rank's output
  int status = 0;   // status from waitpid(), after the end

  // te-fl conformance exits with 0, with 1 if a case failed, and with 77 if no case applies.
  bool failed() const {
    return !WIFEXITED(status) || (WEXITSTATUS(status) > 1 && WEXITSTATUS(status) != 77);
  }
  std::string end() const {
    return WIFSIGNALED(status) ? std::string("ended by SIG") + sigabbrev_np(WTERMSIG(status))
                               : "exited with " + std::to_string(WEXITSTATUS(status));
  }
};

// The rank processes of one op.
class Job {
 public:
  explicit Job(const std::vector<std::string>& words) {
    std::error_code error;
    std::string folder = std::filesystem::temp_directory_path(error) / "te-fl-check-XXXXXX";
    if (error || mkdtemp(folder.data()) == nullptr) return;
    folder_ = folder;
    for (int r = 0; r < kRanks; ++r) start(r, words);
  }
  ~Job() {
    for (Rank& rank : ranks_) {
      if (rank.pid > 0) kill(rank.pid, SIGKILL), waitpid(rank.pid, nullptr, 0);
      if (rank.output >= 0) close(rank.output);
    }
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Waits for all ranks. Returns "" or an error: a rank that died, or cases that did not end.
  std::string wait(double seconds) {
    if (folder_.empty())
      return "no folder for temporary files (TMPDIR), in which the ranks would meet, could be made";
    for (const Rank& rank : ranks_)
      if (rank.pid < 0) return "no process could be started";
    wait_for_ends(seconds);
    if (lost_ >= 0) return describe_failure(lost_, ranks_[static_cast<size_t>(lost_)].end());
    for (int r = 0; r < kRanks; ++r) {
      if (ranks_[static_cast<size_t>(r)].pid < 0) continue;
      if (first_ >= 0) return describe_failure(first_, "ended before the others had run all cases");
      return describe_failure(r, "did not end within " + std::to_string(static_cast<int>(seconds)) +
                                     " s (three times --time-limit, at least a minute)");
    }
    if (WEXITSTATUS(ranks_[0].status) <= 1 && !rows().is_array())
      return describe_failure(0, "ended before it had written what the ranks found");
    return {};
  }

  // Returns the result rows of `te-fl conformance` that rank 0 wrote; empty if no case ran.
  json rows() const {
    std::ifstream file(folder_ + "/results.json");
    return file ? json::parse(file, nullptr, false) : json();
  }
  // Returns the case that the ranks began last; empty if there was none.
  std::string last_case() const {
    const std::string text = last_lines(ranks_[0].output);
    const size_t at = text.rfind("case  ");
    if (at == std::string::npos) return {};
    return text.substr(at + 6, text.find('\n', at) - at - 6);
  }

 private:
  // Returns when all ranks have ended or the limit is over. Ranks normally end together, so after
  // the first end the others have only a short grace period.
  void wait_for_ends(double seconds) {
    auto end = steady_clock::now() + std::chrono::duration<double>(seconds);
    const auto within = [&](std::chrono::duration<double> grace) {
      end = std::min(end, steady_clock::now() + grace);
    };
    for (int running = kRanks; running > 0 && steady_clock::now() < end;) {
      for (int r = 0; r < kRanks; ++r) {
        Rank& rank = ranks_[static_cast<size_t>(r)];
        if (rank.pid < 0 || waitpid(rank.pid, &rank.status, WNOHANG) != rank.pid) continue;
        rank.pid = -1;
        --running;
        if (first_ < 0) first_ = r, within(kGrace);
        if (lost_ < 0 && rank.failed()) lost_ = r, within(kGraceOfLost);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  void start(int r, std::vector<std::string> words) {
    Rank& rank = ranks_[static_cast<size_t>(r)];
    rank.output = memfd_create("te-fl-check", MFD_CLOEXEC);
    words.insert(words.end(), {"--json", folder_ + "/results.json"});
    std::vector<std::string> environment = make_environment(r, folder_ + "/store");
    const std::vector<char*> argv = pointers(words), envp = pointers(environment);
    const pid_t parent = getpid();
    rank.pid = rank.output < 0 ? -1 : fork();
    if (rank.pid != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // kills the rank if the check is killed
    if (getppid() != parent) _exit(127);
    dup2(rank.output, 1), dup2(rank.output, 2);
    execve("/proc/self/exe", argv.data(), envp.data());
    _exit(127);
  }

  std::string describe_failure(int r, const std::string& what) const {
    const std::string printed = last_lines(ranks_[static_cast<size_t>(r)].output);
    return "the process of rank " + std::to_string(r) + " " + what +
           (printed.empty() ? "" : "; it printed: " + printed);
  }

  std::string folder_;
  std::array<Rank, kRanks> ranks_;
  int first_ = -1, lost_ = -1;  // number of the rank that ended first, and of the first rank that
                                // failed; -1: none
};

Finding found(const Target& t, Outcome outcome, std::string message) {
  Finding f;
  f.check = "processes", f.op = t.op, f.impl = t.impl, f.device = t.device, f.dtype = "-";
  f.outcome = outcome, f.message = std::move(message);
  return f;
}

// Runs the ranks of one op and returns their findings. If a case with more than one rank ran, sets
// `several`; otherwise sets `refusal` to the reason why none ran.
std::vector<Finding> check_op(const CheckOptions& options, const Target& t,
                              const std::string& plugin, bool& several, std::string& refusal) {
  std::vector<std::string> words = {"te-fl",    "conformance", "--plugin", plugin,
                                    "--impl",   t.impl,        "--op",     t.op,
                                    "--device", t.device,      "--verbose"};
  if (options.quick) words.push_back("--reduced");
  if (!options.name.empty()) words.insert(words.end(), {"--case", options.name});
  Job job(words);
  if (std::string wrong = job.wait(std::max(kLeastLimitS, 3 * options.time_limit));
      !wrong.empty()) {
    several = true;
    Finding f = found(t, Outcome::kFail, std::move(wrong));
    f.name = job.last_case();
    return {f};
  }
  std::vector<Finding> all;
  for (const json& row : job.rows()) {
    const std::string result = row.at("result");
    Finding f = found(t,
                      result == "pass"   ? Outcome::kPass
                      : result == "fail" ? Outcome::kFail
                                         : Outcome::kUnsupported,
                      row.at("message"));
    f.name = row.at("case"), f.milliseconds = row.at("milliseconds");
    if (row.at("ranks").get<int>() > 1) {
      several = several || f.outcome != Outcome::kUnsupported;
      if (f.outcome == Outcome::kUnsupported && refusal.empty()) refusal = f.message;
    }
    all.push_back(std::move(f));
  }
  return all;
}

}  // namespace

std::vector<Finding> check_processes(const CheckOptions& options, Report& report) {
  std::vector<Finding> all;
  bool several = false;
  std::string refusal;
  for (const Target& t : report.targets) {
    if (t.family != "collective") continue;
    for (Finding& f : check_op(options, t, report.path, several, refusal))
      all.push_back(std::move(f));
  }
  if (several) return all;
  const bool chosen = !options.op.empty() || !options.family.empty() || !options.impl.empty() ||
                      !options.name.empty();
  report.not_run["processes"] = !refusal.empty() ? refusal
                                : !all.empty()   ? "no case of several ranks was chosen"
                                : chosen         ? "no collective was chosen"
                                                 : "the plugin has no collectives";
  return {};
}

}  // namespace te_fl_tool::check
