// A child of te-fl check, as its parent sees it.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "conformance/check/check.hpp"

namespace te_fl_tool::check {

// The environment of processes in which a plugin is checked: the policy is the check's own, and
// only the plugin under test is loaded. Its own settings stay.
std::vector<std::string> environment_of_children();
// Those of texts, and NULL, as exec takes them; valid while the texts are.
std::vector<char*> pointers(std::vector<std::string>& texts);
// The last lines of a file that a process prints into; empty if it cannot be read.
std::string last_lines(int file);

class Child {
 public:
  explicit Child(const CheckOptions& options) : options_(options) {}
  ~Child() { stop(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool running() const { return pid_ > 0; }
  bool start();  // false: no process could be made
  void send(const nlohmann::json& order);

  enum class Got { kMessage, kSilence, kEnd };
  // The next message; kSilence if there is none for `seconds`, kEnd if the child has gone.
  Got receive(double seconds, nlohmann::json& message);
  // Ends it. Returns how it ended by itself: "ended by SIGSEGV", "exited with 1".
  std::string stop();
  // The last lines that it or the plugin printed.
  std::string printed() const;

 private:
  const CheckOptions& options_;
  pid_t pid_ = -1;
  int orders_ = -1, answers_ = -1, output_ = -1;
  std::string pending_;
};

}  // namespace te_fl_tool::check
