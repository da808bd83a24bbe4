#include "nn/autograd/context.hpp"

#include <mutex>
#include <utility>
#include <vector>

#include "core/device/current_stream.hpp"
#include "nn/base/without_policy_scope.hpp"
#include "nn/fp8/autocast.hpp"
#include "te_fl/log.hpp"

namespace te_fl::nn {
namespace {

Context& thread_context() {
  thread_local Context context;
  return context;
}

}  // namespace

Context::Context(uint64_t seed, void* stream)
    : stream_(stream), state_(std::make_shared<detail::RandomState>()) {
  state_->position.seed = seed;
}

Context Context::current() {
  const std::optional<core::OpenStream> open = core::innermost_stream();
  if (!open.has_value()) return thread_context().with_stream(nullptr);
  return open->has_device ? thread_context().with_stream(open->device, open->handle)
                          : thread_context().with_stream(open->handle);
}

Context Context::with_stream(void* stream) const {
  Context other = *this;
  other.stream_ = stream;
  other.device_.reset();
  return other;
}

Context Context::with_stream(const Device& device, void* stream) const {
  Context other = with_stream(stream);
  other.device_ = device;
  return other;
}

Result<Context> Context::with_random(Tensor seed_and_offset) {
  const Tensor& t = seed_and_offset;
  if (!t.defined() || t.dtype() != DType::kU64 || t.numel() != 2 || !t.contiguous()) {
    return invalid_argument("Context::with_random: the position is " + t.describe() +
                            "; it must be compact u64[2], a seed and an offset");
  }
  Context context;
  context.state_->captured = std::move(seed_and_offset);
  return context;
}

RandomPosition Context::random() const {
  std::lock_guard lock(state_->mutex);
  return state_->position;
}

void Context::set_random(RandomPosition position) {
  std::lock_guard lock(state_->mutex);
  state_->position = position;
}

ContextScope::ContextScope(Context context)
    : stream_(context.device_.has_value() ? StreamScope(*context.device_, context.stream())
                                          : StreamScope(context.stream())),
      previous_(std::exchange(thread_context(), std::move(context))) {}

ContextScope::~ContextScope() { thread_context() = std::move(previous_); }

struct CapturedContext::Streams {
  std::vector<core::OpenStream> open = core::open_streams();
};

namespace {

// Reopens the stream scopes of another thread on this thread.
class StreamScopes {
 public:
  explicit StreamScopes(const std::vector<core::OpenStream>& streams) {
    for (const core::OpenStream& s : streams) {
      scopes_.push_back(s.has_device ? std::make_unique<StreamScope>(s.device, s.handle)
                                     : std::make_unique<StreamScope>(s.handle));
    }
  }
  StreamScopes(const StreamScopes&) = delete;
  StreamScopes& operator=(const StreamScopes&) = delete;
  ~StreamScopes() {
    while (!scopes_.empty()) scopes_.pop_back();  // closes them in reverse order
  }

 private:
  std::vector<std::unique_ptr<StreamScope>> scopes_;
};

}  // namespace

struct CapturedContext::Scope::Impl {
  Impl(const CapturedPolicy& captured_policy, const std::vector<core::OpenStream>& open,
       Context context, std::shared_ptr<detail::AutocastFrame> autocast_frame,
       std::shared_ptr<detail::GradientUpdates> updates)
      : policy(captured_policy.enter()),
        streams(open),
        context_scope(std::move(context)),
        frame(std::move(autocast_frame)),
        previous(detail::exchange_gradient_updates(std::move(updates))) {
    detail::push_frame(frame);
  }
  ~Impl() {
    if (Status status = detail::pop_frame(frame); !status.ok()) {
      log::error("captured autocast: " + status.to_string());
      detail::current_gradient_updates()->defer(std::move(status));
    }
    detail::exchange_gradient_updates(std::move(previous));
  }
  // If no policy scope was captured, the thread has none while this object lives, whatever scopes
  // it has opened itself.
  detail::WithoutPolicyScope no_policy;
  std::unique_ptr<PolicyScope> policy;
  StreamScopes streams;
  ContextScope context_scope;
  std::shared_ptr<detail::AutocastFrame> frame;
  std::shared_ptr<detail::GradientUpdates> previous;
};

CapturedContext::Scope::Scope(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CapturedContext::Scope::Scope(Scope&&) noexcept = default;
CapturedContext::Scope::~Scope() = default;

CapturedContext::CapturedContext()
    : policy_(CapturedPolicy::capture()),
      streams_(std::make_shared<const Streams>()),
      context_(Context::current()),
      autocast_(detail::current_frame()),
      updates_(detail::current_gradient_updates()) {}

CapturedContext CapturedContext::capture() { return CapturedContext(); }

CapturedContext::Scope CapturedContext::enter() const {
  return Scope(std::make_unique<Scope::Impl>(policy_, streams_->open, context_,
                                             detail::frame_like(autocast_), updates_));
}

const void* CapturedContext::awaits_backward_end() const {
  return updates_->empty() ? nullptr : updates_.get();
}

}  // namespace te_fl::nn
