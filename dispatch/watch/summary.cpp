// Prints a summary of the run when the process ends, under TE_FL_USAGE or TEFL_LOG_LEVEL=DEBUG.

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "core/base/job_rank.hpp"
#include "dispatch/watch/watch.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/watch.hpp"

namespace te_fl::dispatch {
namespace {

void say() {
  const Result<bool> wanted = environment::get_bool("TE_FL_USAGE");
  const bool asked = wanted.ok() && *wanted;
  if (!asked && !log::enabled(log::Level::kDebug)) return;
  const std::optional<int> rank = core::job_rank();
  std::string text =
      "summary of the run" + (rank ? " of rank " + std::to_string(*rank) : std::string()) + ":";
  for (const OpUsage& u : OpManager::instance().usage()) {
    text += "\n  " + u.op + " by " + u.impl_id + ": " + std::to_string(u.calls) + " calls";
    if (u.staged_calls > 0) {
      text += ", " + std::to_string(u.staged_calls) + " staged (" + std::to_string(u.staged_bytes) +
              " bytes, " + std::to_string(u.staged_microseconds) + " us, after " +
              std::to_string(u.staged_wait_microseconds) + " us of waiting)";
    }
  }
  const VerifyCounts v = verify_counts();
  if (v.agreed + v.differed + v.captured + v.skipped + v.failed > 0) {
    text += "\n  TE_FL_VERIFY: " + std::to_string(v.agreed) + " calls agreed, " +
            std::to_string(v.differed) + " differed, " + std::to_string(v.saved) + " saved, " +
            std::to_string(v.captured) + " in captures, " + std::to_string(v.skipped) +
            " left out, " + std::to_string(v.failed) + " failed";
  }
  if (asked) {
    std::fprintf(stderr, "te-fl %s\n", text.c_str());
  } else {
    log::debug(text);
  }
}

}  // namespace

void summarise_at_exit() { std::atexit(&say); }

}  // namespace te_fl::dispatch
