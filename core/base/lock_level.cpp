#include "core/base/lock_level.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace te_fl::core {
namespace {

// Prints to stderr instead of the log, since the log takes a mutex too.
[[noreturn]] void fail(LockRank rank, const char* what, LockRank other) noexcept {
  std::fprintf(
      stderr,
      "te-fl: lock order: this thread %s: '%s' (level %d, order %d), '%s' (level %d, order "
      "%d); core/base/lock_level.hpp has the order\n",
      what, name(rank.level), static_cast<int>(rank.level), rank.order, name(other.level),
      static_cast<int>(other.level), other.order);
  std::abort();
}

}  // namespace

const char* name(LockLevel level) noexcept {
  switch (level) {
    case LockLevel::kFp8Session:
      return "FP8 session";
    case LockLevel::kReducedSites:
      return "sites of an amax reduction";
    case LockLevel::kGradientUpdates:
      return "gradient updates";
    case LockLevel::kRandomPosition:
      return "random position";
    case LockLevel::kComms:
      return "communicators";
    case LockLevel::kCommWatchdog:
      return "the watchdog of communicators";
    case LockLevel::kBuiltins:
      return "built-in backends";
    case LockLevel::kServing:
      return "serving implementation";
    case LockLevel::kSerialWaits:
      return "serial waits";
    case LockLevel::kEnvironment:
      return "environment";
    case LockLevel::kDeviceList:
      return "device list";
    case LockLevel::kStreams:
      return "streams";
    case LockLevel::kAllocations:
      return "allocations";
    case LockLevel::kCommProviders:
      return "the providers of collectives";
    case LockLevel::kAllocators:
      return "allocators";
    case LockLevel::kPolicies:
      return "policies";
    case LockLevel::kRegistry:
      return "registry";
    case LockLevel::kThreadRecords:
      return "thread records";
    case LockLevel::kPlans:
      return "plans";
    case LockLevel::kInternedStrings:
      return "interned strings";
    case LockLevel::kScratch:
      return "scratch";
    case LockLevel::kStagingPool:
      return "staging pool";
    case LockLevel::kPluginSettings:
      return "plugin settings";
    case LockLevel::kPluginRecords:
      return "plugin records";
    case LockLevel::kWaitingPlugins:
      return "waiting plugins";
    case LockLevel::kTimeLimit:
      return "time limit";
    case LockLevel::kManagers:
      return "managers";
    case LockLevel::kQuarantine:
      return "quarantine";
    case LockLevel::kVerification:
      return "verification";
    case LockLevel::kTrace:
      return "trace";
    case LockLevel::kProviderNames:
      return "provider names";
    case LockLevel::kVendorAliases:
      return "vendor aliases";
    case LockLevel::kStores:
      return "stores";
    case LockLevel::kLog:
      return "log";
  }
  return "unknown";
}

void HeldLocks::take(LockRank rank) noexcept {
  for (size_t i = 0; i < count_; ++i) {
    if (!(held_[i] < rank)) fail(rank, "locks the first while it holds the second", held_[i]);
  }
  take_free(rank);
}

void HeldLocks::take_free(LockRank rank) noexcept {
  if (count_ == kMost) fail(rank, "holds more mutexes than are tracked", held_[0]);
  held_[count_++] = rank;
}

void HeldLocks::give_up(LockRank rank) noexcept {
  LockRank* const end = held_ + count_;
  LockRank* const at = std::find(held_, end, rank);
  if (at == end) fail(rank, "unlocks a mutex that it does not hold", rank);
  std::copy(at + 1, end, at);
  --count_;
}

#if !defined(NDEBUG) || defined(TE_FL_CHECK_LOCKS)
namespace {
constinit thread_local HeldLocks t_held;
}  // namespace
void check_taken(LockRank rank) noexcept { t_held.take(rank); }
void check_taken_free(LockRank rank) noexcept { t_held.take_free(rank); }
void check_given_up(LockRank rank) noexcept { t_held.give_up(rank); }
#endif

}  // namespace te_fl::core
