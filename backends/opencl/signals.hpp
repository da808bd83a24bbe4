// Protects signal handlers from drivers, some of which install handlers when they start (LLVM in
// PoCL, for crashes and interrupts).
#pragma once

#include <csignal>
#include <vector>

namespace te_fl::opencl {

// Saves the process's signal handlers, and restores them at the end of the scope (rule R8). The
// drivers' handlers are not needed, because this plugin's kernels raise no signals.
class SignalHandlersKept {
 public:
  SignalHandlersKept() : before_(NSIG) {
    for (int signal = 1; signal < NSIG; ++signal) sigaction(signal, nullptr, &before_[signal]);
  }
  ~SignalHandlersKept() {
    for (int signal = 1; signal < NSIG; ++signal) {
      struct sigaction now {};
      if (sigaction(signal, nullptr, &now) != 0) continue;  // reserved by the C library
      if (now.sa_sigaction != before_[signal].sa_sigaction)
        sigaction(signal, &before_[signal], nullptr);
    }
  }
  SignalHandlersKept(const SignalHandlersKept&) = delete;
  SignalHandlersKept& operator=(const SignalHandlersKept&) = delete;

 private:
  std::vector<struct sigaction> before_;
};

}  // namespace te_fl::opencl
