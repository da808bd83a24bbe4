#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

// Settings that are read too often for a look-up by name. environment.cpp keeps them current.
namespace te_fl::core {

// TE_FL_VALIDATE: checks that read pointers or cost more than a few nanoseconds.
inline constinit std::atomic<bool> g_validate{false};

// environment::generation(), for those who ask on every call.
inline constinit std::atomic<uint64_t> g_generation{0};

// Called by the environment whenever TEFL_LOG_LEVEL may have changed. `from_code`: set or unset by
// code, which replaces an earlier log::set_level(); a reload does not.
void apply_log_level(std::string_view value, bool from_code) noexcept;

// Makes sure that the process environment has been read once.
void ensure_environment();

}  // namespace te_fl::core
