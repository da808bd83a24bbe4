// A child of te-fl check, as its parent sees it.
#pragma once

#include <sys/types.h>

#include <string>

#include "conformance/check/check.hpp"

namespace te_fl_tool::check {

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
