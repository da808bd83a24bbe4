#include "nn/base/run_log.hpp"

#include <string>
#include <utility>

#include "nn/base/capture.hpp"

namespace te_fl::nn::detail {
namespace {

thread_local RunScope* t_run = nullptr;

const char* name_of(Used used) {
  static constexpr const char* kNames[] = {"FP8 scales", "random numbers", "a weight",
                                           "a parameter"};
  return kNames[static_cast<size_t>(used)];
}

}  // namespace

RunScope* RunScope::replaying_run() noexcept {
  RunScope* run = t_run;
  while (run != nullptr && !run->replays_) run = run->outer_;
  return run;
}

Status RunScope::note(RunEvent event, const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(event.capture, find_capture(device));
  for (RunScope* run = t_run; run != nullptr && !run->replays_; run = run->outer_) {
    run->log_.push_back(event);
  }
  return {};
}

Result<const RunEvent*> RunScope::replay(Used used, const void* owner, const Device& device) {
  RunScope& run = *replaying_run();
  const std::string name = name_of(used);
  if (run.next_ == run.log_.size()) {
    return another_run("the second run uses " + name + " after all that the first run used");
  }
  const RunEvent& event = run.log_[run.next_];
  if (event.used != used || event.owner != owner) {
    return another_run("the second run uses " + name + " where the first used " +
                       (event.used == used ? "another module's" : name_of(event.used)));
  }
  TE_FL_ASSIGN_OR_RETURN(const uint64_t capture, find_capture(device));
  if (event.capture != capture) {
    return another_run("only one of the two runs is captured into the graph");
  }
  ++run.next_;
  if (noting()) TE_FL_RETURN_IF_ERROR(note(event, device));
  return &event;
}

RunScope::RunScope(RunLog& log, bool replays) : log_(log), replays_(replays), outer_(t_run) {
  if (!replays) log_.clear();
  t_run = this;
}

RunScope::~RunScope() { t_run = outer_; }

Status RunScope::complete() const {
  if (!replays_ || next_ == log_.size()) return {};
  return another_run("the second run ends where the first used " +
                     std::string(name_of(log_[next_].used)));
}

Status another_run(const std::string& reason) {
  return failed_precondition("recomputation: " + reason +
                             "; the second run of a segment must call the same forwards with the "
                             "same inputs in the same order as the first, in the same graph if one "
                             "is captured");
}

bool running() noexcept { return t_run != nullptr; }
bool replaying() noexcept { return RunScope::replaying_run() != nullptr; }
bool noting() noexcept { return t_run != nullptr && !t_run->replays(); }

Status replay_scales(const void* owner, const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const RunEvent* event, RunScope::replay(Used::kScales, owner, device));
  RunScope::replaying_run()->scales()[owner] = event->tensor;
  return {};
}

Status note_scales(const void* owner, const Device& device, const Tensor& scales) {
  RunEvent event{.used = Used::kScales, .owner = owner};
  TE_FL_ASSIGN_OR_RETURN(event.tensor, scales.clone());
  return RunScope::note(std::move(event), device);
}

Result<Tensor> replayed_scale(const void* owner, int64_t slot) {
  RunScope* run = RunScope::replaying_run();
  if (run == nullptr) return Tensor();
  const auto& scales = run->scales();
  const auto found = scales.find(owner);
  if (found == scales.end()) return Tensor();
  return found->second.slice(0, slot, slot + 1);
}

Status replay_draw(int64_t count, const Device& device, CallOptions& options) {
  TE_FL_ASSIGN_OR_RETURN(const RunEvent* event, RunScope::replay(Used::kDraw, nullptr, device));
  if (event->count != count) {
    return another_run("the second run draws " + std::to_string(count) +
                       " random numbers where the first drew " + std::to_string(event->count));
  }
  options.rng = event->rng;
  return {};
}

Status note_draw(int64_t count, const Device& device, const CallOptions& options,
                 const Tensor& start) {
  RunEvent event{.used = Used::kDraw, .count = count, .rng = options.rng};
  // If a tensor defines where the random numbers start, the second run needs that tensor.
  if (options.rng.seed_address != nullptr) event.tensor = start;
  return RunScope::note(std::move(event), device);
}

Result<Tensor> replay_weight(const void* owner, const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const RunEvent* event, RunScope::replay(Used::kWeight, owner, device));
  return event->tensor;
}

Status note_weight(const void* owner, const Device& device, const Tensor& kept) {
  return RunScope::note({.used = Used::kWeight, .owner = owner, .tensor = kept}, device);
}

Result<uint64_t> replay_version(const void* owner, const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const RunEvent* event, RunScope::replay(Used::kParameter, owner, device));
  return event->version;
}

Status note_version(const void* owner, const Device& device, uint64_t version) {
  return RunScope::note({.used = Used::kParameter, .owner = owner, .version = version}, device);
}

}  // namespace te_fl::nn::detail
