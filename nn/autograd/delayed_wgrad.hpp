#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "te_fl/status.hpp"

namespace te_fl::nn::detail {

// The weight gradients that the backwards of a linear map have deferred to Module::backward_dw().
// Not thread-safe, like its module.
class DelayedWgrad {
 public:
  using Run = std::function<Status()>;
  bool enabled() const noexcept { return enabled_; }
  void enable(bool delays) noexcept { enabled_ = delays; }
  void add(Run run) { runs_.push_back(std::move(run)); }
  // Sets a function that wraps each computation, for example for parameters that are split over
  // ranks.
  void surround(std::function<Status(const Run& run)> around) { around_ = std::move(around); }
  // Removes and returns the deferred computations, in the order of the backwards, for run().
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
