#pragma once

#include <functional>
#include <memory>
#include <span>

#include "te_fl/comm.hpp"
#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

namespace detail {
class ReducedSites;
}

// Combines the amaxes of several ranks for delayed scaling: scales are computed from the maximum
// over the ranks. `reduce` replaces the values of each tensor, F32 [n] on one device, by their
// maximum over the ranks, on the thread's current stream. It is called once per device, as one
// collective, whenever the end of an autocast or backward_end() updates scales.
//
// All FP8 states of modules that were ever used with this object take part, in the order
// of their first use, even if this step did not use them. Ranks that skip a layer in a step
// therefore agree on the sizes; they only have to use their modules for the first time in the same
// order. In a capture, the states whose update is captured take part. The object keeps the FP8
// states alive, some KiB each. Thread-safe.
class TE_FL_API AmaxReduction {
 public:
  using Reduce = std::function<Status(std::span<const Tensor> amaxes)>;
  explicit AmaxReduction(Reduce reduce);
  // Uses the ranks of a communicator: calls the op all_reduce on one tensor of all amaxes.
  explicit AmaxReduction(std::shared_ptr<const Comm> ranks);
  ~AmaxReduction();
  AmaxReduction(const AmaxReduction&) = delete;
  AmaxReduction& operator=(const AmaxReduction&) = delete;

  // True if this reduction is known to combine the amaxes of all `ranks`, so that their scales stay
  // equal: it was made from a communicator that includes them. False for a `reduce` function.
  bool is_over(const Comm& ranks) const noexcept {
    return ranks_ != nullptr && ranks_->includes(ranks);
  }

  Status reduce(std::span<const Tensor> amaxes) const { return reduce_(amaxes); }
  detail::ReducedSites& sites() const noexcept { return *sites_; }

 private:
  std::shared_ptr<const Comm> ranks_;  // null if made from a `reduce` function
  Reduce reduce_;
  std::unique_ptr<detail::ReducedSites> sites_;
};

}  // namespace te_fl::nn
