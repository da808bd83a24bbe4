#pragma once

#include <atomic>
#include <string>

#include "te_fl/plugin.h"

// Checks of the status values that plugin functions return (R6, R20).
namespace te_fl::core {

// True if `raw` is a known te_fl_code, with or without the TE_FL_CLEAN flag. OK never has the flag.
constexpr bool is_status(te_fl_status raw) noexcept {
  const te_fl_status code = raw & ~te_fl_status{TE_FL_CLEAN};
  return raw == TE_FL_OK || (code > TE_FL_OK && code <= TE_FL_COMM_FAILED);
}

// Maps a plugin's raw status to one that the host knows. An unknown code becomes INTERNAL.
// TE_FL_CLEAN is kept only if `raw` has no undefined bits: a negative number has all high bits set,
// which says nothing about TE_FL_CLEAN.
constexpr te_fl_status known_status(te_fl_status raw) noexcept {
  if (is_status(raw)) return raw;
  const te_fl_status code = raw & ~te_fl_status{TE_FL_CLEAN};
  if (code == TE_FL_OK) return TE_FL_OK;  // a success with TE_FL_CLEAN set
  const bool newer = code > 0 && code == TE_FL_STATUS_CODE(code);
  return newer ? TE_FL_INTERNAL | (raw & TE_FL_CLEAN) : TE_FL_INTERNAL;
}

// The error text for an invalid status: "it answered status -1 (0xffffffff), which is ...".
std::string odd_status_text(te_fl_status raw);

// The last invalid status that any plugin returned, for the tools that check plugins; 0: none.
extern std::atomic<te_fl_status> g_odd_status;
inline void note_odd_status(te_fl_status raw) noexcept {
  g_odd_status.store(raw, std::memory_order_relaxed);
}

}  // namespace te_fl::core
