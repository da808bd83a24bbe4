#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "te_fl/status.hpp"

namespace te_fl::nn::detail {

// The number of backward passes that have deferred a parameter's gradient to Module::backward_dw().
using DelayedCount = std::shared_ptr<int64_t>;

// A backward pass that has deferred the gradients of some parameters. It is counted for each of
// these parameters until end() or until it is destroyed, since a dropped gradient is no longer
// deferred. Not thread-safe.
class LeftGradients {
 public:
  explicit LeftGradients(std::vector<DelayedCount> counts) : counts_(std::move(counts)) {
    for (const DelayedCount& count : counts_) ++*count;
  }
  ~LeftGradients() { end(); }
  LeftGradients(const LeftGradients&) = delete;
  LeftGradients& operator=(const LeftGradients&) = delete;
  void end() noexcept {
    for (const DelayedCount& count : counts_) --*count;
    counts_.clear();
  }

 private:
  std::vector<DelayedCount> counts_;
};

// The weight gradients that the backward passes of a linear map have deferred to
// Module::backward_dw(). Not thread-safe, like its module.
class DelayedWgrad {
 public:
  using Run = std::function<Status()>;
  bool enabled() const noexcept { return enabled_; }
  void enable(bool delays) noexcept { enabled_ = delays; }
  void add(Run run) { runs_.push_back(std::move(run)); }
  // Sets a function that wraps each computation, for example for parameters that are split over
  // ranks.
  void surround(std::function<Status(const Run& run)> around) { around_ = std::move(around); }
  // Removes and returns the deferred computations, in the order of their backward passes, for
  // run().
  std::vector<Run> take() { return std::exchange(runs_, {}); }
  Status run(const std::vector<Run>& runs) const {
    for (const Run& one : runs) {
      TE_FL_RETURN_IF_ERROR(around_ != nullptr ? around_(one) : one());
    }
    return {};
  }

 private:
  bool enabled_ = false;
  std::vector<Run> runs_;
  std::function<Status(const Run& run)> around_;
};

}  // namespace te_fl::nn::detail
