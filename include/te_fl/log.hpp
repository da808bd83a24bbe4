#pragma once

#include <string_view>

#include "te_fl/export.hpp"
#include "te_fl/plugin.h"

namespace te_fl::log {

// Log levels, as in TEFL_LOG_LEVEL. All messages go to stderr. Thread-safe.
enum class Level { kTrace, kDebug, kInfo, kWarning, kError, kOff };

TE_FL_API void write(Level level, std::string_view text);
// True if a message of this level would be written. Costs one relaxed atomic load.
TE_FL_API bool enabled(Level level) noexcept;
TE_FL_API void set_level(Level level) noexcept;
TE_FL_API Level level() noexcept;
// Writes the text only the first time this process calls once() with this key.
TE_FL_API void once(Level level, std::string_view key, std::string_view text);

inline void warning(std::string_view text) { write(Level::kWarning, text); }
inline void info(std::string_view text) { write(Level::kInfo, text); }
inline void debug(std::string_view text) {
  if (enabled(Level::kDebug)) write(Level::kDebug, text);
}
inline void error(std::string_view text) { write(Level::kError, text); }

}  // namespace te_fl::log
