// Blocks signals around calls of Gloo, which writes to sockets without MSG_NOSIGNAL. Signal
// handlers stay unchanged (rule R8).
#pragma once

#include <signal.h>

#include <ctime>

namespace te_fl::gloo_ranks {

// Blocks all signals of this thread while it exists. Threads that Gloo starts inherit the mask.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// While an object of this class exists, a write of this thread to a connection that the peer has
// closed returns an error and raises no SIGPIPE.
class BrokenPipes {
 public:
  BrokenPipes() {
    const sigset_t pipe = one();
    pthread_sigmask(SIG_BLOCK, &pipe, &before_);
    if (sigismember(&before_, SIGPIPE) != 1) return;  // then none can be pending
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
  }
  ~BrokenPipes() {
    const sigset_t pipe = one();
    const timespec now{};
    if (!was_pending_) sigtimedwait(&pipe, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BrokenPipes(const BrokenPipes&) = delete;
  BrokenPipes& operator=(const BrokenPipes&) = delete;

 private:
  static sigset_t one() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    return set;
  }
  sigset_t before_;
  bool was_pending_ = false;
};

}  // namespace te_fl::gloo_ranks
