#pragma once

#include <atomic>
#include <string>

#include "te_fl/plugin.h"

// The host looks at what a plugin's function answered before it relies on that (R6, R20).
namespace te_fl::core {

// True if `raw` is a te_fl_code, marked clean or not. OK has nothing to mark.
constexpr bool is_status(te_fl_status raw) noexcept {
  const te_fl_status code = raw & ~te_fl_status{TE_FL_CLEAN};
  return raw == TE_FL_OK || (code > TE_FL_OK && code <= TE_FL_COMM_FAILED);
}

// The status that the host goes on with. A code that it does not know is INTERNAL; the mark counts
// only where no bit is set that has no meaning, as in a negative number every high one is.
constexpr te_fl_status known_status(te_fl_status raw) noexcept {
  if (is_status(raw)) return raw;
  const te_fl_status code = raw & ~te_fl_status{TE_FL_CLEAN};
  if (code == TE_FL_OK) return TE_FL_OK;  // it says of a success that nothing was written
  const bool newer = code > 0 && code == TE_FL_STATUS_CODE(code);
  return newer ? TE_FL_INTERNAL | (raw & TE_FL_CLEAN) : TE_FL_INTERNAL;
}

// "it answered status -1 (0xffffffff), which is ...".
std::string odd_status_text(te_fl_status raw);

// The last answer of any plugin that is no status, for who judges plugins; 0: none.
extern std::atomic<te_fl_status> g_odd_status;
inline void note_odd_status(te_fl_status raw) noexcept {
  g_odd_status.store(raw, std::memory_order_relaxed);
}

}  // namespace te_fl::core
