#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "te_fl/device.hpp"
#include "te_fl/export.hpp"
#include "te_fl/policy.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

namespace detail {
class GradientUpdates;
struct RandomState;
struct AutocastFrame;
}  // namespace detail

// A position in the Philox 4x32-10 random stream that dropout draws from. Drawing n random numbers
// advances the offset by ceil(n/4) counters. Thread-safe: two threads that share a random state get
// disjoint ranges, but in no fixed order. For bit-identical runs give each thread its own Context.
struct RandomPosition {
  uint64_t seed = 0;
  uint64_t offset = 0;  // in Philox counters of four 32-bit words each
  friend bool operator==(const RandomPosition&, const RandomPosition&) = default;
};

// The stream and the random state that module calls on a thread use. A Context is a handle: copies
// share the random state. Every thread starts with its own context (default stream, seed 0);
// ContextScope replaces it temporarily. FP8 state is not part of it: a module may run its dropout
// in a Context of its own, and backward_end() still finds every gradient scale.
class TE_FL_API Context {
 public:
  explicit Context(uint64_t seed = 0, void* stream = nullptr);
  // The calling thread's context, with the stream of its innermost StreamScope. A module runs on
  // the stream of the innermost scope for the module's own device, even if a scope for another
  // device is nested inside; without such a scope, on the device's default stream.
  static Context current();

  void* stream() const noexcept { return stream_; }
  // A context on another stream that shares the random state. A stream belongs to one device. The
  // overload without `device` determines the device as StreamScope(stream) does.
  Context with_stream(void* stream) const;
  Context with_stream(const Device& device, void* stream) const;
  // A context with its own random stream, whose position is read from device memory when the work
  // runs. `seed_and_offset` is U64 [2] {seed, offset} on the modules' device, for example drawn by
  // a framework's generator. The forward starts drawing at this position and its backward reads the
  // position again, so the values must not change until then. INVALID_ARGUMENT for a tensor of
  // another form.
  static Result<Context> with_random(Tensor seed_and_offset);
  RandomPosition random() const;
  void set_random(RandomPosition position);
  detail::RandomState& state() const noexcept { return *state_; }

 private:
  friend class ContextScope;
  void* stream_ = nullptr;
  std::optional<Device> device_;  // the stream's device, if it was given
  std::shared_ptr<detail::RandomState> state_;
};

// Makes `context` the calling thread's context until the scope is destroyed, and its stream the
// thread's current stream. Ops of modules run on that stream, and memory of their tensors is
// allocated on it. Scopes nest; destroy them in reverse order.
class TE_FL_API ContextScope {
 public:
  explicit ContextScope(Context context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  StreamScope stream_;
  Context previous_;
};

// Captures all thread-local scopes that module calls depend on: the policy scope, the context
// (stream and random state), the autocast scope and the thread's FP8 state (the gradient scales
// that await their update). Capture on one thread and enter on another, for example on a
// framework's backward threads:
//   auto captured = nn::CapturedContext::capture();
//   std::thread([captured] { auto scope = captured.enter(); layer.backward(...); });
// A captured context may outlive the scopes it was captured in. An entered autocast counts as
// nested in the captured one: forward scales are updated when the last of them exits. enter() opens
// an RAII scope for the calling thread. Destroy it on that thread, before scopes opened earlier.
class TE_FL_API CapturedContext {
 public:
  class TE_FL_API Scope {
   public:
    ~Scope();
    Scope(Scope&&) noexcept;
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class CapturedContext;
    struct Impl;
    explicit Scope(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
  };

  static CapturedContext capture();
  [[nodiscard]] Scope enter() const;
  // Identifies the captured thread's gradient scales that await backward_end(), or an error that it
  // has to return: equal for contexts captured on one thread. Null if nothing awaits it now.
  const void* awaits_backward_end() const;

 private:
  struct Streams;
  CapturedContext();
  CapturedPolicy policy_;
  std::shared_ptr<const Streams> streams_;  // of all devices; context_ has the innermost stream
  Context context_;
  std::shared_ptr<detail::AutocastFrame> autocast_;
  std::shared_ptr<detail::GradientUpdates> updates_;
};

}  // namespace te_fl::nn
