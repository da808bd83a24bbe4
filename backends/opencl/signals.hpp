// Signal handlers that a driver installs when it starts (LLVM in PoCL: for crashes and
// interrupts).
#pragma once

#include <csignal>
#include <vector>

namespace te_fl::opencl {

// The handlers that the process had are put back at the end of the scope (rule R8). The kernels of
// this plugin raise no signals, so nothing of the driver's is needed.
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
