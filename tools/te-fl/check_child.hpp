// A child process of te-fl check, seen from its parent.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "conformance/check/check.hpp"

namespace te_fl_tool::check {

// Returns the environment for processes in which a plugin is checked: it removes the user's policy
// and loads only the plugin under test. The plugin's own settings stay.
std::vector<std::string> environment_of_children();
// Returns pointers to the texts and a final NULL, as exec expects them; valid as long as the texts.
std::vector<char*> pointers(std::vector<std::string>& texts);
// Returns the last lines of the file that a process's output goes to; empty if it cannot be read.
std::string last_lines(int file);

class Child {
 public:
  explicit Child(const CheckOptions& options) : options_(options) {}
  ~Child() { stop(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool running() const { return pid_ > 0; }
  bool start();  // Starts the process; false if that fails.
  void send(const nlohmann::json& order);

  enum class Got { kMessage, kSilence, kEnd };
  // Receives the next message; kSilence if none arrives within `seconds`, kEnd if the child has
  // ended.
  Got receive(double seconds, nlohmann::json& message);
  // Ends the child. If the child had already ended, returns how: "ended by SIGSEGV", "exited with
  // 1".
  std::string stop(bool at_once = false);
  // Returns the last lines that the child or the plugin printed.
  std::string printed() const;

 private:
  const CheckOptions& options_;
  pid_t pid_ = -1;
  int orders_ = -1, answers_ = -1, output_ = -1;
  std::string pending_;
};

}  // namespace te_fl_tool::check
