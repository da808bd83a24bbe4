// A Comm that is destroyed or aborted while another thread runs a collective on it.
#include <gtest/gtest.h>

#include "support/ending_comms.hpp"

namespace te_fl {
namespace {

TEST(EndingComms, OfThreadsEndWithAStatus) { testing::check_ending("threads"); }

}  // namespace
}  // namespace te_fl
