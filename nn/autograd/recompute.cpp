#include "nn/autograd/recompute.hpp"

#include <string>
#include <utility>

#include "nn/autograd/gradients.hpp"
#include "nn/base/run_log.hpp"
#include "nn/base/without_policy_scope.hpp"
#include "nn/fp8/autocast.hpp"
#include "te_fl/log.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::nn {
namespace detail {

class RecomputeMemory {
 public:
  RunLog log;
  // The thread's state at the beginning of the first run.
  CapturedPolicy policy = CapturedPolicy::capture();
  std::shared_ptr<AutocastFrame> autocast;
  std::shared_ptr<GradientUpdates> updates;
};

namespace {

// Restores the state of the first run on the calling thread for a second run.
struct Replay {
  explicit Replay(const RecomputeMemory& memory)
      : policy(memory.policy.enter()),
        frame(frame_like(memory.autocast)),
        updates(exchange_gradient_updates(memory.updates)) {
    push_frame(frame);
  }
  ~Replay() {
    if (Status status = pop_frame(frame); !status.ok()) {
      log::error("recomputation: " + status.to_string());
      current_gradient_updates()->defer(std::move(status));
    }
    exchange_gradient_updates(std::move(updates));
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  WithoutPolicyScope no_policy;
  std::unique_ptr<PolicyScope> policy;
  std::shared_ptr<AutocastFrame> frame;
  std::shared_ptr<GradientUpdates> updates;  // the thread's own, to be restored
};

}  // namespace

struct RecomputeRun {
  std::shared_ptr<RecomputeMemory> memory;
  std::unique_ptr<Replay> replay;  // null in a first run
  std::optional<RunScope> scope;   // declared last, so destroyed first
};

Status same_parameter(const Parameter* parameter) {
  if (parameter == nullptr || !running()) return {};
  const Device device = parameter->value.device();
  if (replaying()) {
    TE_FL_ASSIGN_OR_RETURN(const uint64_t version, replay_version(parameter, device));
    return check_unchanged(*parameter, version);
  }
  return note_version(parameter, device, parameter->version);
}

}  // namespace detail

RecomputeRecord::RecomputeRecord() : memory_(std::make_shared<detail::RecomputeMemory>()) {}
RecomputeRecord::~RecomputeRecord() = default;
RecomputeRecord::RecomputeRecord(const RecomputeRecord&) = default;
RecomputeRecord& RecomputeRecord::operator=(const RecomputeRecord&) = default;
RecomputeRecord::RecomputeRecord(RecomputeRecord&&) noexcept = default;
RecomputeRecord& RecomputeRecord::operator=(RecomputeRecord&&) noexcept = default;

RecomputeScope::RecomputeScope(const RecomputeRecord& record, RecomputePhase phase)
    : run_(std::make_unique<detail::RecomputeRun>()) {
  run_->memory = record.memory_;
  const bool second = phase == RecomputePhase::kSecond;
  if (second) {
    run_->replay = std::make_unique<detail::Replay>(*run_->memory);
  } else {
    run_->memory->policy = CapturedPolicy::capture();
    run_->memory->autocast = detail::current_frame();
    run_->memory->updates = detail::current_gradient_updates();
  }
  run_->scope.emplace(run_->memory->log, second);
}

RecomputeScope::~RecomputeScope() = default;

Status RecomputeScope::complete() const { return run_->scope->complete(); }

RecomputePhase recompute_phase() noexcept {
  if (!detail::running()) return RecomputePhase::kNone;
  return detail::noting() ? RecomputePhase::kFirst : RecomputePhase::kSecond;
}

Result<SegmentRun> checkpoint(Segment segment, const Tensor& x) {
  RecomputeRecord record;
  Tensor y;
  {
    const RecomputeScope scope(record, RecomputePhase::kFirst);
    TE_FL_ASSIGN_OR_RETURN(SegmentRun run, segment(x));
    y = std::move(run.y);
  }
  const std::string first = y.describe();
  return SegmentRun{
      std::move(y),
      [segment = std::move(segment), record, x, first](const Tensor& dy) -> Result<Tensor> {
        SegmentRun again;
        {
          const RecomputeScope scope(record, RecomputePhase::kSecond);
          TE_FL_ASSIGN_OR_RETURN(again, segment(x));
          TE_FL_RETURN_IF_ERROR(scope.complete());
        }
        if (const std::string second = again.y.describe(); second != first) {
          return detail::another_run("the second run's result is " + second +
                                     ", and the first's was " + first);
        }
        again.y = Tensor();
        return again.backward(dy);
      }};
}

}  // namespace te_fl::nn
