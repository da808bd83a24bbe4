#include "te_fl/nn/context.hpp"

#include <utility>

#include "nn/runtime.hpp"
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

Context Context::current() { return thread_context().with_stream(devices::current_stream()); }

Context Context::with_stream(void* stream) const {
  Context other = *this;
  other.stream_ = stream;
  return other;
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
    : stream_(context.stream()), previous_(std::exchange(thread_context(), std::move(context))) {}

ContextScope::~ContextScope() { thread_context() = std::move(previous_); }

struct CapturedContext::Scope::Impl {
  Impl(std::unique_ptr<PolicyScope> policy_scope, Context context,
       std::shared_ptr<detail::AutocastFrame> autocast_frame,
       std::shared_ptr<detail::GradientUpdates> updates)
      : policy(std::move(policy_scope)),
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
  std::unique_ptr<PolicyScope> policy;
  ContextScope context_scope;
  std::shared_ptr<detail::AutocastFrame> frame;
  std::shared_ptr<detail::GradientUpdates> previous;
};

CapturedContext::Scope::Scope(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CapturedContext::Scope::Scope(Scope&&) noexcept = default;
CapturedContext::Scope::~Scope() = default;

CapturedContext::CapturedContext()
    : policy_(CapturedPolicy::capture()),
      context_(Context::current()),
      autocast_(detail::current_frame()),
      updates_(detail::current_gradient_updates()) {}

CapturedContext CapturedContext::capture() { return CapturedContext(); }

CapturedContext::Scope CapturedContext::enter() const {
  auto frame = std::make_shared<detail::AutocastFrame>();
  if (autocast_ != nullptr) {
    frame->options = autocast_->options;
    frame->recipe = autocast_->recipe;
    frame->invalid = autocast_->invalid;
    frame->session = autocast_->session;
  } else {  // no autocast there means none here, whatever this thread has open
    frame->options = {.enabled = false};
    frame->recipe = std::make_shared<const Recipe>(DelayedScaling{});
    frame->session = std::make_shared<detail::Session>();
  }
  return Scope(
      std::make_unique<Scope::Impl>(policy_.enter(), context_, std::move(frame), updates_));
}

}  // namespace te_fl::nn
