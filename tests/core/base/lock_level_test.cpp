#include "core/base/lock_level.hpp"

#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>

#include "core/base/fork.hpp"

// In checked builds, a thread that locks te-fl's mutexes out of order aborts with a message that
// names both mutexes.
namespace te_fl::core {
namespace {

TEST(LockLevel, AscendingLevelsAreTaken) {
  HeldLocks held;
  held.take({LockLevel::kRegistry});
  held.take({LockLevel::kPlans});
  held.take({LockLevel::kLog});
  held.give_up({LockLevel::kPlans});  // in any order of release
  held.give_up({LockLevel::kLog});
  held.take({LockLevel::kPlans});
}

TEST(LockLevel, AnEarlierLevelAborts) {
  HeldLocks held;
  held.take({LockLevel::kRegistry});
  held.take({LockLevel::kLog});
  EXPECT_DEATH(held.take({LockLevel::kPlans}), "'plans'.*'log'");
  held.give_up({LockLevel::kLog});
  held.take({LockLevel::kPlans});  // only mutexes that are held are checked
}

TEST(LockLevel, TheSameLevelAborts) {
  HeldLocks held;
  held.take({LockLevel::kTrace});
  EXPECT_DEATH(held.take({LockLevel::kTrace}), "'trace'.*'trace'");
}

TEST(LockLevel, OneLevelIsSortedByItsOrder) {
  HeldLocks held;
  held.take({LockLevel::kServing, 1});
  held.take({LockLevel::kServing, 2});
  EXPECT_DEATH(held.take({LockLevel::kServing, 0}), "'serving implementation'.*order 0");
}

TEST(LockLevel, WhatWasFreeMayBeTakenAtAnyTime) {
  HeldLocks held;
  held.take({LockLevel::kServing, 2});
  held.take_free({LockLevel::kServing, 0});
  held.take({LockLevel::kServing, 3});
  EXPECT_DEATH(held.take({LockLevel::kServing, 1}), "'serving implementation'");
  for (const int order : {0, 2, 3}) held.give_up({LockLevel::kServing, order});
}

TEST(LockLevel, GivingUpWhatIsNotHeldAborts) {
  HeldLocks held;
  held.take({LockLevel::kTrace});
  EXPECT_DEATH(held.give_up({LockLevel::kLog}), "'log'");
}

TEST(LockLevel, EveryLevelHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(LockLevel::kLog); ++i) {
    const std::string text = name(static_cast<LockLevel>(i));
    EXPECT_NE(text, "unknown") << i;
    EXPECT_TRUE(names.insert(text).second) << text;
  }
}

constinit ForkMutex fork_mutex(LockLevel::kQuarantine);

// Tests te-fl's mutex classes, in builds that check the lock order.
TEST(LockLevel, MutexesAreChecked) {
  if (!kLocksChecked) GTEST_SKIP() << "this build does not check the order of mutexes";
  Mutex late(LockLevel::kLog), early(LockLevel::kRegistry);
  {
    const std::lock_guard first(early);
    const std::lock_guard then(late);
  }
  // Called only inside the death test's child process, because fork() itself locks mutexes.
  const auto inverted = [&](auto& then) {
    const std::lock_guard first(late);
    then.lock();
  };
  EXPECT_DEATH(inverted(early), "'registry'.*'log'");
  EXPECT_DEATH(inverted(fork_mutex), "'quarantine'.*'log'");
}

}  // namespace
}  // namespace te_fl::core
