#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

// Settings that are read too often for a look-up by name. environment.cpp updates them.
namespace te_fl::core {

// TE_FL_VALIDATE: enables checks that dereference pointers or cost more than a few nanoseconds.
inline constinit std::atomic<bool> g_validate{false};

// The value of environment::generation(), for code that reads it on every call.
inline constinit std::atomic<uint64_t> g_generation{0};

// The environment calls this whenever TEFL_LOG_LEVEL may have changed. `from_code`: code set or
// unset the variable, which overrides an earlier log::set_level(); a reload does not override it.
void apply_log_level(std::string_view value, bool from_code) noexcept;

// Reads the process environment unless that was done before.
void ensure_environment();

}  // namespace te_fl::core
