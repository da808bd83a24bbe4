// The Gloo plugin leaves SIGPIPE to the program: no write of the plugin raises SIGPIPE,
// and a SIGPIPE that the program has blocked and not yet handled stays pending.
#include "backends/gloo/signals.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

namespace te_fl::gloo_ranks {
namespace {

bool is_pending() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGPIPE) == 1;
}
bool is_blocked() {
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  return sigismember(&mask, SIGPIPE) == 1;
}
// Writes to a closed pipe; by default, SIGPIPE would end this program.
void write_to_nobody() {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ::close(ends[0]);
  EXPECT_EQ(::write(ends[1], "x", 1), -1);
  ::close(ends[1]);
}

TEST(BrokenPipes, ComeAsErrorsAndLeaveNoSignal) {
  for (int time = 0; time < 2; ++time) {
    {
      const BrokenPipes pipes;
      write_to_nobody();
      EXPECT_TRUE(is_pending());
    }
    EXPECT_FALSE(is_pending());
    EXPECT_FALSE(is_blocked());
  }
}

TEST(BrokenPipes, LeaveASignalThatTheProgramHasBlocked) {
  sigset_t pipe_signal, before;
  sigemptyset(&pipe_signal);
  sigaddset(&pipe_signal, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe_signal, &before);
  {
    const BrokenPipes pipes;
    write_to_nobody();
  }
  EXPECT_FALSE(is_pending()) << "the plugin's own";
  EXPECT_TRUE(is_blocked());
  pthread_kill(pthread_self(), SIGPIPE);
  {
    const BrokenPipes pipes;
    write_to_nobody();
  }
  EXPECT_TRUE(is_pending()) << "the program's";
  EXPECT_TRUE(is_blocked());
  const timespec now{};
  EXPECT_EQ(sigtimedwait(&pipe_signal, nullptr, &now), SIGPIPE);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace
}  // namespace te_fl::gloo_ranks
