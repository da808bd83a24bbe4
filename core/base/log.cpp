#include "te_fl/log.hpp"

// Uses spdlog and fmt header-only, whatever the packages' CMake targets define, so that both stay
// private to this file.
#undef FMT_SHARED
#undef SPDLOG_COMPILED_LIB
#undef SPDLOG_SHARED_LIB
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY 1
#endif
#ifndef SPDLOG_HEADER_ONLY
#define SPDLOG_HEADER_ONLY
#endif
#include <spdlog/logger.h>
#include <spdlog/sinks/ansicolor_sink.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <string>

#include "core/base/fork.hpp"
#include "core/base/settings.hpp"
#include "core/base/text.hpp"

namespace te_fl::log {
namespace {

struct NamedLevel {
  std::string_view name;
  Level level;
};

// The names of Level, then those that only Python's logging has. No message of te-fl is critical.
constexpr NamedLevel kNames[] = {
    {"TRACE", Level::kTrace},     {"DEBUG", Level::kDebug},  {"INFO", Level::kInfo},
    {"WARNING", Level::kWarning}, {"ERROR", Level::kError},  {"OFF", Level::kOff},
    {"NOTSET", Level::kTrace},    {"WARN", Level::kWarning}, {"CRITICAL", Level::kOff},
    {"FATAL", Level::kOff},
};

constinit core::ForkMutex mutex(core::LockLevel::kLog);
const core::ForkMutex::Registration registration(mutex);

constexpr int kUnread = -1;  // the environment has not been read yet
std::atomic<int> current_level{kUnread};
std::atomic<bool> level_by_code{false};

// The logger is never destroyed, so that destructors of other static objects may still log. It is
// not in spdlog's registry, which another copy of spdlog in the process may share.
spdlog::logger& logger() {
  static spdlog::logger* const instance = [] {
    auto sink = std::make_shared<spdlog::sinks::ansicolor_stderr_sink_st>();
    auto* made = new spdlog::logger("te-fl", std::move(sink));
    made->set_level(spdlog::level::trace);
    made->set_pattern("%Y-%m-%d %H:%M:%S.%e %n %^%l%$: %v");
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *instance;
}

std::set<std::string, std::less<>>& keys_seen() {
  static auto* const keys = new std::set<std::string, std::less<>>;
  return *keys;
}

int level_now() noexcept {
  int level = current_level.load(std::memory_order_relaxed);
  if (level != kUnread) return level;
  try {
    core::ensure_environment();  // calls apply_log_level
  } catch (...) {
  }
  level = current_level.load(std::memory_order_relaxed);
  return level != kUnread ? level : static_cast<int>(Level::kInfo);
}

}  // namespace

bool enabled(Level level) noexcept {
  return level != Level::kOff && static_cast<int>(level) >= level_now();
}

void write(Level level, std::string_view text) {
  if (!enabled(level)) return;
  const std::lock_guard lock(mutex);
  logger().log(static_cast<spdlog::level::level_enum>(level),
               spdlog::string_view_t(text.data(), text.size()));
}

void once(Level level, std::string_view key, std::string_view text) {
  if (!enabled(level)) return;
  {
    const std::lock_guard lock(mutex);
    if (!keys_seen().emplace(key).second) return;
  }
  write(level, text);
}

void set_level(Level level) noexcept {
  level_by_code.store(true, std::memory_order_relaxed);
  current_level.store(static_cast<int>(level), std::memory_order_relaxed);
}

Level level() noexcept { return static_cast<Level>(level_now()); }

}  // namespace te_fl::log

namespace te_fl::core {

void apply_log_level(std::string_view value, bool from_code) noexcept {
  if (from_code) log::level_by_code.store(false, std::memory_order_relaxed);
  if (log::level_by_code.load(std::memory_order_relaxed)) return;
  for (const auto& [name, level] : log::kNames) {
    if (equal_ignoring_case(value, name)) {
      log::current_level.store(static_cast<int>(level), std::memory_order_relaxed);
    }
  }
}

}  // namespace te_fl::core
