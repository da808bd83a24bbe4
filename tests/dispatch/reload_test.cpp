// OpManager::reload() may be called any number of times.
#include <gtest/gtest.h>
#include <malloc.h>

#include "dispatch/watch/quarantine.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveCall;

TEST(Reload, KeepsNoMemory) {
  if (TE_FL_ASAN || TE_FL_TSAN) GTEST_SKIP() << "a sanitizer's heap does not say what is in use";
  OpRegistry registry;
  OpManager manager(registry);
  Fake fake("default.x");
  ASSERT_OK(registry.register_op(fake.desc, "test"));
  FiveCall call;
  const auto reload = [&](int times) {
    for (int i = 0; i < times; ++i) {
      ASSERT_OK(manager.reload());
      ASSERT_OK(manager.call("test::five", &call.args));
    }
  };
  reload(100);
  const size_t before = mallinfo2().uordblks;
  reload(1000);
  EXPECT_LT(mallinfo2().uordblks, before + 100'000) << "100 bytes a call";
}

}  // namespace
}  // namespace te_fl
