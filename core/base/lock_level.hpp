#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

// The order in which a thread takes the mutexes of the library. A thread that holds a mutex takes
// only mutexes of a later level, so that threads cannot deadlock. Builds without NDEBUG and builds
// with a sanitizer check this: a violation prints both names and aborts. Other builds contain no
// check.
namespace te_fl::core {

// Levels in locking order: a mutex of an earlier line is taken first. Each comment names the data
// that the mutex of this level guards. Each new mutex gets its own level here.
enum class LockLevel : int {
  kFp8Session,       // nn: guards the pending updates of an autocast session
  kReducedSites,     // nn: guards the sites of an AmaxReduction
  kGradientUpdates,  // nn: guards the gradient scales that are updated at the end of a backward
  kRandomPosition,   // nn: guards the RNG state of a Context
  kServing,          // held while an implementation runs: see LockRank
  kSerialWaits,      // guards the threads that wait for implementations that are not thread-safe
  kCommWatchdog,     // guards the watchdog thread of the communicators
  kComms,            // guards the communicators
  kBuiltins,         // guards the built-in backends, while one of them is being loaded
  kEnvironment,      // guards te-fl's and the plugins' environment variables
  kDeviceList,       // guards the devices
  kStreams,          // guards the records of streams
  kAllocations,      // guards memory that te-fl holds on each device
  kAllocators,       // guards the allocators that programs installed
  kCommProviders,    // guards the providers of collectives
  kPolicies,         // guards the interned policies
  kRegistry,         // guards the tables of implementations, and the list of registries
  kThreadRecords,    // guards dispatch's records of each thread
  kPlans,            // guards every PlanCache
  kInternedStrings,  // guards the strings that outlive their implementations
  kScratch,          // guards the map of every DeviceArenas
  kStagingPool,      // guards the idle staging buffers
  kPluginSettings,   // guards the values of settings that plugins were given
  kPluginRecords,    // guards the state of each plugin
  kWaitingPlugins,   // guards the plugins that are loaded on demand
  kTimeLimit,        // guards the state of one call into a plugin that has a time limit
  kManagers,         // guards the list of managers and their usage bases
  kQuarantine,       // guards the quarantines
  kVerification,     // guards the settings and counts of TE_FL_VERIFY
  kTrace,            // guards the recorded calls
  kProviderNames,    // guards the interned names of providers
  kVendorAliases,    // guards the aliases of vendors that manifests declared
  kStores,           // guards the stores that this process has opened
  kLog,              // guards the log's sink
};
const char* name(LockLevel level) noexcept;

// The place of a mutex in the order. Mutexes of kServing are held while plugin code runs. Plugin
// code may call further ops, so several of these mutexes nest: `order` sorts them by the nesting
// depth of the op.
struct LockRank {
  LockLevel level;
  int order = 0;
  friend constexpr bool operator<(LockRank a, LockRank b) noexcept {
    return a.level != b.level ? a.level < b.level : a.order < b.order;
  }
  friend constexpr bool operator==(LockRank a, LockRank b) noexcept {
    return a.level == b.level && a.order == b.order;
  }
};

// The mutexes that one op takes, in the order in which it takes them. `depth`: the number of ops in
// which the call is nested. The kScratch and kState mutexes exist once per depth. The kSerial mutex
// of an implementation is shared by all depths, so two threads can deadlock although each takes its
// mutexes in the order of depth (registry/serial_lock.cpp detects that). kScratch comes first
// because every op may take it: no thread waits for it while it holds another mutex of its depth.
enum class Serving : int { kScratch, kSerial, kState, kCount };
constexpr int serving_order(uint32_t depth, Serving what) noexcept {
  return static_cast<int>(depth) * static_cast<int>(Serving::kCount) + static_cast<int>(what);
}

#if !defined(NDEBUG) || defined(TE_FL_CHECK_LOCKS)
inline constexpr bool kLocksChecked = true;
#else
inline constexpr bool kLocksChecked = false;
#endif

// The mutexes that one thread holds. Not thread-safe.
class HeldLocks {
 public:
  // Records a mutex. Aborts and prints both names unless `rank` is later than every held rank.
  void take(LockRank rank) noexcept;
  // Records a mutex that try_lock() took. It did not wait, so every order is allowed.
  void take_free(LockRank rank) noexcept;
  // Removes a mutex from the record. Aborts if it is not held.
  void give_up(LockRank rank) noexcept;

 private:
  static constexpr size_t kMost = 32;
  LockRank held_[kMost]{};
  size_t count_ = 0;
};

// Check the calling thread. These functions do nothing in builds without lock checks.
void check_taken(LockRank rank) noexcept;
void check_taken_free(LockRank rank) noexcept;
void check_given_up(LockRank rank) noexcept;
inline void check_lock([[maybe_unused]] LockRank rank) noexcept {
  if constexpr (kLocksChecked) check_taken(rank);
}
inline void check_unlock([[maybe_unused]] LockRank rank) noexcept {
  if constexpr (kLocksChecked) check_given_up(rank);
}

// A std::mutex with a rank in the locking order.
class Mutex {
 public:
  constexpr explicit Mutex(LockLevel level, int order = 0) noexcept : rank_{level, order} {}
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() {
    check_lock(rank_);
    mutex_.lock();
  }
  // Does not wait, so it may be called whatever mutexes the thread holds.
  bool try_lock() {
    if (!mutex_.try_lock()) return false;
    if constexpr (kLocksChecked) check_taken_free(rank_);
    return true;
  }
  void unlock() {
    check_unlock(rank_);
    mutex_.unlock();
  }
  LockRank rank() const noexcept { return rank_; }

 private:
  std::mutex mutex_;
  LockRank rank_;
};

}  // namespace te_fl::core
