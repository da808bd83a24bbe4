#include "check_child.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <vector>

#include "conformance/check/output.hpp"

namespace te_fl_tool::check {
namespace {

std::vector<std::string> make_command_line(const CheckOptions& o) {
  std::vector<std::string> words = {"te-fl", "check", "--worker", "--seed", std::to_string(o.seed)};
  const auto add = [&](const char* option, const std::string& value) {
    if (!value.empty()) words.insert(words.end(), {option, value});
  };
  add("--builtin", o.builtin), add("--op", o.op), add("--family", o.family);
  add("--impl", o.impl), add("--case", o.name);
  if (o.quick) words.push_back("--quick");
  if (o.thorough) words.push_back("--long");
  if (!o.plugin.empty()) words.insert(words.end(), {"--", o.plugin});
  return words;
}

// Returns the command line that starts a worker in Python: the package's te_fl._check passes these
// options to serve_json().
std::vector<std::string> make_python_command_line(const CheckOptions& o) {
  const nlohmann::json options = {{"plugin", o.plugin}, {"op", o.op},         {"family", o.family},
                                  {"impl", o.impl},     {"case", o.name},     {"seed", o.seed},
                                  {"quick", o.quick},   {"long", o.thorough}, {"python", o.python}};
  return {o.python, "-m", "te_fl._check", json_text(options, -1)};
}

}  // namespace

std::vector<std::string> environment_of_children() {
  static const char* const dropped[] = {
      "TE_FL_PREFER",        "TE_FL_PREFER_VENDOR", "TE_FL_STRICT",
      "TE_FL_ALLOW_VENDORS", "TE_FL_DENY_VENDORS",  "TE_FL_PLUGIN_MODULES",
      "TE_FL_PER_OP",        "TE_FL_DETERMINISTIC", "TE_FL_SKIP_MODULES"};
  std::vector<std::string> kept;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    bool drop = name == "TEFL_LOG_LEVEL";
    for (const char* d : dropped) drop = drop || name == d;
    if (!drop) kept.push_back(text);
  }
  kept.push_back("TE_FL_PLUGIN_MODULES=");
  kept.push_back("TE_FL_SKIP_MODULES=*");
  kept.push_back("TEFL_LOG_LEVEL=ERROR");
  // unbuffered, so that a Python module's prints appear with the call that prints them
  kept.push_back("PYTHONUNBUFFERED=1");
  return kept;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& t : texts) all.push_back(t.data());
  all.push_back(nullptr);
  return all;
}

bool Child::start() {
  pending_.clear();
  if (output_ >= 0) close(output_);
  output_ = memfd_create("te-fl-check", MFD_CLOEXEC);
  int orders[2], answers[2];
  if (output_ < 0 || pipe2(orders, O_CLOEXEC) != 0) return false;
  if (pipe2(answers, O_CLOEXEC) != 0) return close(orders[0]), close(orders[1]), false;
  const bool python = !options_.python.empty();
  auto words = python ? make_python_command_line(options_) : make_command_line(options_),
       environment = environment_of_children();
  auto argv = pointers(words), envp = pointers(environment);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // Duplicates via high descriptors that are free, because an end of a pipe may itself be 3 or 4.
  posix_spawn_file_actions_adddup2(&actions, orders[0], 103);
  posix_spawn_file_actions_adddup2(&actions, answers[1], 104);
  posix_spawn_file_actions_adddup2(&actions, output_, 1);
  posix_spawn_file_actions_adddup2(&actions, output_, 2);
  posix_spawn_file_actions_adddup2(&actions, 103, 3);
  posix_spawn_file_actions_adddup2(&actions, 104, 4);
  posix_spawn_file_actions_addclose(&actions, 103);
  posix_spawn_file_actions_addclose(&actions, 104);
  const int error = posix_spawnp(&pid_, python ? argv[0] : "/proc/self/exe", &actions, nullptr,
                                 argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  close(orders[0]), close(answers[1]);
  orders_ = orders[1], answers_ = answers[0];
  if (error == 0) return true;
  pid_ = -1;
  close(orders_), close(answers_);
  errno = error;
  return false;
}

void Child::send(const nlohmann::json& order) {
  const std::string line = json_text(order, -1) + "\n";
  for (size_t at = 0; at < line.size();) {
    const ssize_t n = write(orders_, line.data() + at, line.size() - at);
    if (n <= 0) return;  // the child has ended; receive() reports it
    at += static_cast<size_t>(n);
  }
}

Child::Got Child::receive(double seconds, nlohmann::json& message) {
  for (;;) {
    if (const size_t end = pending_.find('\n'); end != std::string::npos) {
      message = nlohmann::json::parse(pending_.substr(0, end), nullptr, false);
      pending_.erase(0, end + 1);
      if (!message.is_discarded()) return Got::kMessage;
      continue;
    }
    pollfd waiting{answers_, POLLIN, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(seconds * 1000));
    if (ready == 0) return Got::kSilence;
    char bytes[4096];
    const ssize_t n = ready < 0 ? -1 : read(answers_, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Got::kEnd;
    pending_.append(bytes, static_cast<size_t>(n));
  }
}

std::string Child::stop(bool at_once) {
  if (pid_ <= 0) return {};
  if (at_once) kill(pid_, SIGKILL);
  close(orders_);
  int status = 0;
  // A healthy child ends when its pipe of orders is closed.
  for (int i = 0; i < 50; ++i) {
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      break;
    }
    usleep(20'000);
  }
  const bool stuck = pid_ > 0;
  if (stuck) {
    kill(pid_, SIGKILL);
    waitpid(pid_, &status, 0);
    pid_ = -1;
  }
  close(answers_);
  if (stuck) return "was stuck and had to be killed";
  if (WIFSIGNALED(status)) return std::string("ended by SIG") + sigabbrev_np(WTERMSIG(status));
  return "exited with " + std::to_string(WEXITSTATUS(status));
}

std::string Child::printed() const { return last_lines(output_); }

std::string last_lines(int file) {
  const off_t size = lseek(file, 0, SEEK_END);
  const off_t from = size > 600 ? size - 600 : 0;
  std::string text(static_cast<size_t>(size > 0 ? size - from : 0), '\0');
  if (pread(file, text.data(), text.size(), from) < 0) return {};
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace te_fl_tool::check
