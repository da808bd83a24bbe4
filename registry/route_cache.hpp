#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/op/call_memo.hpp"
#include "core/op/op_table.hpp"
#include "registry/known_call.hpp"

namespace te_fl::registry {

struct Implementation;

// The key of a cached route. It contains everything except the registry's table that the choice of
// implementations depends on: op, signature masks, device and policy, but no shapes. If the policy
// has implementation lists for certain call sizes, the key also contains the number of the list
// that applies.
struct RouteKey {
  uint64_t w[4] = {0, 0, 0, 0};
  RouteKey() = default;
  RouteKey(uint32_t op, const core::Signature& s, uint32_t policy, bool capturing) noexcept {
    w[0] = s.dtypes;
    w[1] = uint64_t{policy} | uint64_t{s.scalings & 0xffff} << 32 | uint64_t{s.later} << 48;
    w[2] = static_cast<uint32_t>(s.device.type) | uint64_t{static_cast<uint32_t>(s.device.index)}
                                                      << 32;
    w[3] = uint64_t{s.device.provider & 0xffff} | uint64_t{s.maker & 0xffff} << 16 |
           uint64_t{capturing} << 32 | uint64_t{op} << 33;
  }
  // A policy may have different implementation lists for calls of different sizes. Stores the
  // 1-based index of the list for this call's size in w[2], above the device type, which is below
  // 64.
  void set_list(uint32_t list) noexcept { w[2] |= uint64_t{list & 0xffffff} << 8; }
  uint64_t hash() const noexcept {
    uint64_t h = w[0] * 0x9e3779b97f4a7c15u ^ w[1] * 0xc2b2ae3d27d4eb4fu ^
                 w[2] * 0x165667b19e3779f9u ^ w[3] * 0xd6e8feb86659fd93u;
    return h ^ h >> 29;
  }
  friend bool operator==(const RouteKey& a, const RouteKey& b) noexcept {
    return ((a.w[0] ^ b.w[0]) | (a.w[1] ^ b.w[1]) | (a.w[2] ^ b.w[2]) | (a.w[3] ^ b.w[3])) == 0;
  }
};

// One implementation to try for a call.
struct Step {
  const Implementation* impl = nullptr;
  bool staged = false;  // runs on copies in host memory
};

// A resolved choice: the implementations to try, in this order.
struct Route {
  std::vector<Step> order;  // the implementations that pass static constraints and the policy
  bool strict = false;
  bool deterministic = false;
};

// One cached choice.
struct alignas(64) RouteEntry {
  uint64_t table = 0;  // Table::id; the pointers are valid only for that table
  RouteKey key;
  // The first implementation, if it may run such calls without staging; otherwise null.
  const Implementation* first = nullptr;
  std::atomic<uint64_t>* counter = nullptr;  // call counter of `first`
  std::unique_ptr<const Route> route;
};
static_assert(sizeof(RouteEntry) == 64);

// A thread's cache of routes: four-way set-associative, bounded, used without a lock.
class RouteCache {
 public:
  static constexpr uint32_t kSets = 128;
  static constexpr uint32_t kWays = 4;

  RouteEntry* find(uint64_t table, const RouteKey& key) noexcept {
    if (sets_ == nullptr) return nullptr;
    RouteEntry* set = sets_[key.hash() % kSets].data();
    for (uint32_t way = 0; way < kWays; ++way) {
      if (set[way].table == table && set[way].key == key) return &set[way];
    }
    return nullptr;
  }
  // The entry to overwrite: one of an old table if there is one, else the ways in turn.
  RouteEntry& victim(uint64_t table, const RouteKey& key) {
    if (sets_ == nullptr) sets_ = std::make_unique<Set[]>(kSets);
    RouteEntry* set = sets_[key.hash() % kSets].data();
    for (uint32_t way = 0; way < kWays; ++way) {
      if (set[way].table != table) return set[way];
    }
    return set[next_++ % kWays];
  }

 private:
  using Set = std::array<RouteEntry, kWays>;
  std::unique_ptr<Set[]> sets_;
  uint32_t next_ = 0;
};

// A thread's cached choice for a prepared handle, identified by the handle's number.
struct alignas(64) HandleEntry {
  uint64_t handle = 0;
  KnownCall known;       // data about the call `last`
  core::ExactMemo last;  // a valid call of the handle
  uint32_t misses = 0;   // number of calls that differed from `last` since it was stored
  uint32_t rivals = 0;   // look-ups by other handles

  // Decides whether another handle may take this entry. Only one in 16 look-ups evicts, so that
  // handles which share an entry and alternate do not pay for an eviction on every call.
  bool yields_to(uint64_t number) noexcept {
    return handle == number || handle == 0 || ++rivals % 16 == 0;
  }
  void take(uint64_t number) noexcept {
    handle = number;
    misses = 0;
    last.forget();
  }
  // False for most calls of a caller that never repeats a call, which saves it the cost of
  // remembering.
  bool worth_remembering() noexcept { return ++misses < 4 || misses % 64 == 0; }
};

class HandleCache {
 public:
  static constexpr uint32_t kEntries = 32;
  HandleCache() : entries_(std::make_unique<HandleEntry[]>(kEntries)) {}
  HandleEntry& at(uint64_t handle) noexcept { return entries_[handle % kEntries]; }

 private:
  std::unique_ptr<HandleEntry[]> entries_;
};

}  // namespace te_fl::registry
