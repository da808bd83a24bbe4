#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/settings.hpp"
#include "te_fl/policy.hpp"

// Tells the hot path which policy is in force: an id, no lock, no string.
namespace te_fl::policy {

inline constexpr uint32_t kInvalidPolicy = UINT32_MAX;  // the environment's policy is in error

// A policy id plus one; 0: none. The scope belongs to the thread.
extern constinit thread_local uint32_t t_scope [[gnu::tls_model("initial-exec")]];
extern std::atomic<uint32_t> g_global;
// The environment's policy: low 32 bits of the generation it was read at, then its id.
extern std::atomic<uint64_t> g_environment;

// Reads the environment's policy again; its id or kInvalidPolicy.
uint32_t refresh_environment();

// current_policy() says why if this is kInvalidPolicy.
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

// True once any policy has had a list for calls of some sizes only.
extern std::atomic<bool> g_lists_by_size;

// Settings of an interned policy; valid forever.
const PolicySettings& settings_of(uint32_t id);

// The ops that a policy may name besides "vendor::op": the catalogue's, and those that a program
// has declared in any registry. Thread-safe, as the next.
std::vector<std::string> known_ops();
// Makes a declared op's name known from the next call on, to the environment's policy too.
void know_op(const std::string& name);

// An error for settings made in code, which passed no parser, that list an unknown op. Calls under
// them fail with it.
Status settings_error(const PolicySettings& settings);

}  // namespace te_fl::policy
