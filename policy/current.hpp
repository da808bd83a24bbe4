#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/settings.hpp"
#include "te_fl/policy.hpp"

// Finds the policy that applies to the calling thread, by its id. For the hot path: takes no lock
// and compares no strings.
namespace te_fl::policy {

inline constexpr uint32_t kInvalidPolicy = UINT32_MAX;  // the environment's policy has an error

// The id plus one of the policy that the thread's innermost scope sets; 0: no scope.
extern constinit thread_local uint32_t t_scope [[gnu::tls_model("initial-exec")]];
extern std::atomic<uint32_t> g_global;
// The environment's policy in one word. High half: the low 32 bits of the environment generation at
// which the policy was read. Low half: the policy's id.
extern std::atomic<uint64_t> g_environment;

// Reads the environment's policy again. Returns its id or kInvalidPolicy.
uint32_t refresh_environment();

// The id of the policy that applies. If it is kInvalidPolicy, current_policy() returns the reason.
inline uint32_t current_id() {
  if (t_scope != 0) return t_scope - 1;
  if (const uint32_t global = g_global.load(std::memory_order_relaxed); global != 0)
    return global - 1;
  const uint64_t word = g_environment.load(std::memory_order_acquire);
  if (static_cast<uint32_t>(word >> 32) ==
      static_cast<uint32_t>(core::g_generation.load(std::memory_order_acquire))) {
    return static_cast<uint32_t>(word);
  }
  return refresh_environment();
}

// True if any interned policy has a list that applies to some call sizes only. Never reset.
extern std::atomic<bool> g_lists_by_size;

// The settings of an interned policy. The reference stays valid for the life of the process.
const PolicySettings& settings_of(uint32_t id);

// The names of ops that a policy may use, apart from "vendor::op": the ops of the catalogue and
// those that programs declared in any registry. This function and know_op() are thread-safe.
std::vector<std::string> known_ops();
// Adds the name of a declared op. Policies, the environment's included, know it from the next call
// on.
void know_op(const std::string& name);

// Checks the op names of settings that code made without the parser. Returns an error for an
// unknown op; calls under these settings then fail with this error.
Status settings_error(const PolicySettings& settings);

}  // namespace te_fl::policy
