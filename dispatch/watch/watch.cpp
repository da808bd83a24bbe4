#include "dispatch/watch/watch.hpp"

#include <memory>
#include <optional>

#include "dispatch/manager_impl.hpp"
#include "dispatch/watch/quarantine.hpp"
#include "dispatch/watch/trace.hpp"
#include "dispatch/watch/verify.hpp"
#include "te_fl/watch.hpp"

namespace te_fl {
namespace dispatch {

Status run_watched(Call& call, const Failure* first, uint64_t switches) {
  std::unique_ptr<Verification> check;
  if ((switches & OpManager::Impl::kVerify) != 0) {
    TE_FL_ASSIGN_OR_RETURN(check, Verification::begin(call));
  }
  const bool verifies = (switches & OpManager::Impl::kVerify) != 0;
  if (verifies && call.capturing) note_capture(call.signature.device, call.options.stream);
  Execution execution;
  std::optional<TracedCall> traced;
  if ((switches & OpManager::Impl::kTrace) != 0) {
    TE_FL_RETURN_IF_ERROR(begin_trace());
    traced.emplace(call);
  }
  const Status status = run_order(call, first, execution);
  if (traced) traced->record(status, execution);
  Status answer = status;
  if (check != nullptr) {
    const int64_t start = traced ? trace_now() : 0;
    answer = check->conclude(status, execution);
    if (traced) traced->record_verification(start, execution, check->outcome());
  }
  if (verifies && call.thread.slot.depth == 1) take_held();
  return answer;
}

}  // namespace dispatch

Status watch_status() {
  TE_FL_RETURN_IF_ERROR(dispatch::verify_status());
  return dispatch::trace_status();
}

}  // namespace te_fl
