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

// Amaxes of several ranks (delayed scaling): scales are computed from the largest that any rank
// has. `reduce` writes that into each of the tensors, F32 [n] on one device, on the thread's
// current stream; it is one collective, called once for each device when an autocast's end or
// backward_end() updates scales. All sites that were ever used under this object take part,
// in the order of their first use, whether this step used them or not, so ranks that leave out a
// layer in a step agree on the sizes: ranks need only use their modules for the first time in one
// order. In a capture those take part whose update is captured. Keeps the FP8 state of the sites,
// some KiB each, while it lives. Thread-safe.
class TE_FL_API AmaxReduction {
 public:
  using Reduce = std::function<Status(std::span<const Tensor> amaxes)>;
  explicit AmaxReduction(Reduce reduce);
  // Over the ranks of a communicator: the op all_reduce on a tensor of all amaxes.
  explicit AmaxReduction(std::shared_ptr<const Comm> ranks);
  ~AmaxReduction();
  AmaxReduction(const AmaxReduction&) = delete;
  AmaxReduction& operator=(const AmaxReduction&) = delete;

  // True if it is known to take the amaxes of all these ranks, whose scales it thus keeps the same:
  // it is over a communicator that includes them. Of a function that is not known.
  bool is_over(const Comm& ranks) const noexcept {
    return ranks_ != nullptr && ranks_->includes(ranks);
  }

  Status reduce(std::span<const Tensor> amaxes) const { return reduce_(amaxes); }
  detail::ReducedSites& sites() const noexcept { return *sites_; }

 private:
  std::shared_ptr<const Comm> ranks_;  // null: not known
  Reduce reduce_;
  std::unique_ptr<detail::ReducedSites> sites_;
};

}  // namespace te_fl::nn
