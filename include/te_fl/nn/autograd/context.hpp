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

// Seed and position of the Philox 4x32-10 stream that dropout draws from. Each use of n random
// numbers takes ceil(n/4) counters. Thread-safe; two threads that share one state get disjoint
// ranges in an order that is not fixed, so give each its own Context where bit-identical runs
// matter.
struct RandomPosition {
  uint64_t seed = 0;
  uint64_t offset = 0;  // in Philox counters, four 32-bit words each
  friend bool operator==(const RandomPosition&, const RandomPosition&) = default;
};

// Holds what module calls on a thread run with: the stream for their ops and the random stream. A
// handle: copies share the random state. Every thread starts with a context of its own (default
// stream, seed 0); ContextScope replaces it for a while. FP8 bookkeeping is no part of it: a module
// may run its dropout in a Context of its own, and backward_end() still finds every gradient scale.
class TE_FL_API Context {
 public:
  explicit Context(uint64_t seed = 0, void* stream = nullptr);
  // The calling thread's context, on the stream of its innermost StreamScope. Modules run on the
  // stream of the innermost scope of their own device, whichever other device's scope is inside it;
  // outside of all, on its default stream.
  static Context current();

  void* stream() const noexcept { return stream_; }
  // A context on another stream that shares the random state. A stream belongs to one device; where
  // it is not said, it is found as StreamScope(stream) does.
  Context with_stream(void* stream) const;
  Context with_stream(const Device& device, void* stream) const;
  // A context with a random stream of its own, whose position lies on the device, U64 [2] {seed,
  // offset} on that of the modules, and is read there when their work runs: what a framework's
  // generator drew. The forward's random numbers start there; its backward reads the position
  // again, so the values stay as they are until then. INVALID_ARGUMENT for another tensor.
  static Result<Context> with_random(Tensor seed_and_offset);
  RandomPosition random() const;
  void set_random(RandomPosition position);
  detail::RandomState& state() const noexcept { return *state_; }

 private:
  friend class ContextScope;
  void* stream_ = nullptr;
  std::optional<Device> device_;  // whose the stream is, if that has been said
  std::shared_ptr<detail::RandomState> state_;
};

// Makes `context` the calling thread's until destroyed, and its stream the thread's current one:
// the ops of modules and the memory of their tensors go there. Scopes nest; destroy in reverse
// order.
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

// Everything scoped that a thread's module calls depend on: the policy scope, the context (stream,
// random state), the autocast scope and the thread's FP8 bookkeeping (which gradient scales wait
// for their update). Captured on one thread, entered on
// another, e.g. by a framework's backward threads:
//   auto captured = nn::CapturedContext::capture();
//   std::thread([captured] { auto scope = captured.enter(); layer.backward(...); });
// May outlive the scopes it was captured in. An entered autocast counts as nested in the captured
// one: the forward scales are updated when the last of them exits. Entering creates an RAII scope
// for the calling thread; destroy it there, before scopes opened earlier.
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

 private:
  struct Streams;
  CapturedContext();
  CapturedPolicy policy_;
  std::shared_ptr<const Streams> streams_;  // of all devices; the context has the innermost
  Context context_;
  std::shared_ptr<detail::AutocastFrame> autocast_;
  std::shared_ptr<detail::GradientUpdates> updates_;
};

}  // namespace te_fl::nn
