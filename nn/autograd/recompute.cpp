#include "nn/autograd/recompute.hpp"

#include <string>
#include <utility>

#include "nn/autograd/gradients.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "nn/fp8/runtime.hpp"
#include "te_fl/log.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::nn {
namespace detail {

enum class Used : uint8_t { kScales, kDraw, kWeight, kParameter };

// One thing that the first run used.
struct Event {
  Used used = Used::kScales;
  const void* owner = nullptr;
  int64_t count = 0;     // kDraw
  te_fl_rng rng{};       // kDraw
  Tensor tensor{};       // kScales, kWeight; kDraw: where the numbers start, if a tensor says that
  uint64_t version = 0;  // kParameter
  uint64_t capture = 0;  // of the first run
};

class RecomputeMemory {
 public:
  std::vector<Event> events;
  // The thread's when the first run began.
  CapturedPolicy policy = CapturedPolicy::capture();
  std::shared_ptr<AutocastFrame> autocast;
  std::shared_ptr<GradientUpdates> updates;
};

namespace {

// What a second run takes from the first, on the calling thread.
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
  std::shared_ptr<GradientUpdates> updates;  // that the thread had
  size_t next = 0;                           // event
  std::unordered_map<const Fp8State*, Tensor> scales;
};

thread_local RecomputeRun* t_run = nullptr;

}  // namespace

struct RecomputeRun {
  std::shared_ptr<RecomputeMemory> memory;
  RecomputeRun* outer = nullptr;
  std::unique_ptr<Replay> replay;  // null: a first run
};

namespace {

RecomputeRun* replaying_run() noexcept {
  RecomputeRun* run = t_run;
  while (run != nullptr && run->replay == nullptr) run = run->outer;
  return run;
}

Status another_run(const std::string& what) {
  return failed_precondition("recomputation: " + what +
                             "; the second run of a piece must call the same forwards with the "
                             "same inputs in the same order as the first, in the same graph if one "
                             "is captured");
}

Status note(Event event, const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(event.capture, capture_of(device));
  for (RecomputeRun* run = t_run; run != nullptr && run->replay == nullptr; run = run->outer) {
    run->memory->events.push_back(event);
  }
  return {};
}

const char* name_of(Used used) {
  static constexpr const char* kNames[] = {"FP8 scales", "random numbers", "a weight",
                                           "a parameter"};
  return kNames[static_cast<size_t>(used)];
}

// The first run's next event, which must be like this one; noted for the runs inside.
Result<const Event*> replay(Used used, const void* owner, const Device& device) {
  RecomputeRun& run = *replaying_run();
  const std::vector<Event>& events = run.memory->events;
  const std::string what = name_of(used);
  if (run.replay->next == events.size()) {
    return another_run("the second run uses " + what + " after all that the first run used");
  }
  const Event& event = events[run.replay->next];
  if (event.used != used || event.owner != owner) {
    return another_run("the second run uses " + what + " where the first used " +
                       (event.used == used ? "another module's" : name_of(event.used)));
  }
  TE_FL_ASSIGN_OR_RETURN(const uint64_t capture, capture_of(device));
  if (event.capture != capture) {
    return another_run("only one of the two runs is captured into the graph");
  }
  ++run.replay->next;
  if (noting()) TE_FL_RETURN_IF_ERROR(note(event, device));
  return &event;
}

}  // namespace

bool replaying() noexcept { return replaying_run() != nullptr; }
bool noting() noexcept { return t_run != nullptr && t_run->replay == nullptr; }

Status replay_scales(const Fp8State& state) {
  TE_FL_ASSIGN_OR_RETURN(const Event* event, replay(Used::kScales, &state, state.device()));
  replaying_run()->replay->scales[&state] = event->tensor;
  return {};
}

Status note_scales(const Fp8State& state) {
  Event event{.used = Used::kScales, .owner = &state};
  TE_FL_ASSIGN_OR_RETURN(event.tensor, state.scale().clone());
  return note(std::move(event), state.device());
}

Result<Tensor> replayed_scale(const Fp8State& state, int64_t slot) {
  const RecomputeRun* run = replaying_run();
  if (run == nullptr) return Tensor();
  const auto found = run->replay->scales.find(&state);
  if (found == run->replay->scales.end()) return Tensor();
  return found->second.slice(0, slot, slot + 1);
}

Status replay_draw(int64_t count, const Device& device, CallOptions& options) {
  TE_FL_ASSIGN_OR_RETURN(const Event* event, replay(Used::kDraw, nullptr, device));
  if (event->count != count) {
    return another_run("the second run draws " + std::to_string(count) +
                       " random numbers where the first drew " + std::to_string(event->count));
  }
  options.rng = event->rng;
  return {};
}

Status note_draw(int64_t count, const Device& device, const CallOptions& options) {
  Event event{.used = Used::kDraw, .count = count, .rng = options.rng};
  // Numbers that start where a tensor says need that tensor in the second run.
  if (options.rng.seed_address != nullptr) event.tensor = Context::current().state().captured;
  return note(std::move(event), device);
}

Result<Tensor> replay_weight(const void* owner, const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const Event* event, replay(Used::kWeight, owner, device));
  return event->tensor;
}

Status note_weight(const void* owner, const Device& device, const Tensor& kept) {
  return note({.used = Used::kWeight, .owner = owner, .tensor = kept}, device);
}

Status same_parameter(const Parameter* parameter) {
  if (parameter == nullptr || t_run == nullptr) return {};
  const Device device = parameter->value.device();
  if (replaying()) {
    TE_FL_ASSIGN_OR_RETURN(const Event* event, replay(Used::kParameter, parameter, device));
    return check_unchanged(*parameter, event->version);
  }
  return note({.used = Used::kParameter, .owner = parameter, .version = parameter->version},
              device);
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
  run_->outer = detail::t_run;
  if (phase == RecomputePhase::kSecond) {
    run_->replay = std::make_unique<detail::Replay>(*run_->memory);
  } else {
    run_->memory->events.clear();
    run_->memory->policy = CapturedPolicy::capture();
    run_->memory->autocast = detail::current_frame();
    run_->memory->updates = detail::current_gradient_updates();
  }
  detail::t_run = run_.get();
}

RecomputeScope::~RecomputeScope() { detail::t_run = run_->outer; }

Status RecomputeScope::complete() const {
  const detail::Replay* replay = run_->replay.get();
  if (replay == nullptr || replay->next == run_->memory->events.size()) return {};
  return detail::another_run("the second run ends where the first used " +
                             std::string(detail::name_of(run_->memory->events[replay->next].used)));
}

RecomputePhase recompute_phase() noexcept {
  if (detail::t_run == nullptr) return RecomputePhase::kNone;
  return detail::noting() ? RecomputePhase::kFirst : RecomputePhase::kSecond;
}

Result<PieceRun> checkpoint(Piece piece, const Tensor& x) {
  RecomputeRecord record;
  Tensor y;
  {
    const RecomputeScope scope(record, RecomputePhase::kFirst);
    TE_FL_ASSIGN_OR_RETURN(PieceRun run, piece(x));
    y = std::move(run.y);
  }
  const std::string first = y.describe();
  return PieceRun{std::move(y),
                  [piece = std::move(piece), record, x, first](const Tensor& dy) -> Result<Tensor> {
                    PieceRun again;
                    {
                      const RecomputeScope scope(record, RecomputePhase::kSecond);
                      TE_FL_ASSIGN_OR_RETURN(again, piece(x));
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
