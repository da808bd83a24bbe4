// A Gloo Comm that is destroyed or aborted while another thread runs a collective on it.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/ending_comms.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

// Runs in a forked child, because the test process itself must not load the plugin: other tests
// fork their ranks from it.
TEST(GlooEndingComms, EndWithAStatus) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    EXPECT_OK(environment::set("TE_FL_PLUGIN_MODULES", TE_FL_GLOO_PLUGIN));
    testing::check_ending("gloo");
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_EQ(state, 0);
}

}  // namespace
}  // namespace te_fl
