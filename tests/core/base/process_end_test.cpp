#include "core/base/process_end.hpp"

#include <gtest/gtest.h>
#include <malloc.h>

#include "support/sanitizers.hpp"

namespace te_fl::core {
namespace {

// Loading and deactivating plugins repeatedly must not add exit handlers: a single handler is
// registered for all loads.
TEST(ProcessEnd, OneHandlerForAllLoads) {
  if (TE_FL_ASAN || TE_FL_TSAN) GTEST_SKIP() << "their allocators count nothing here";
  for (int i = 0; i < 100; ++i) watch_exit();
  const size_t before = mallinfo2().uordblks;
  for (int i = 0; i < 10000; ++i) watch_exit();
  EXPECT_LT(mallinfo2().uordblks, before + 2048);
}

}  // namespace
}  // namespace te_fl::core
