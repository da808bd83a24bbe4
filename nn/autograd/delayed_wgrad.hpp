#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "te_fl/status.hpp"

namespace te_fl::nn::detail {

// The weight gradients that a linear map's backwards have left for Module::backward_dw(). Not
// thread-safe, like its module.
class DelayedWgrad {
 public:
  using Run = std::function<Status()>;
  bool enabled() const noexcept { return enabled_; }
  void enable(bool delays) noexcept { enabled_ = delays; }
  void add(Run run) { runs_.push_back(std::move(run)); }
  // Takes a function that has to surround the computing, e.g. of parameters in parts.
  void surround(std::function<Status(const Run& run)> around) { around_ = std::move(around); }
  // Takes out what was left, in the order of the backwards, to be given to run().
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
