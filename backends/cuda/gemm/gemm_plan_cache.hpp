// A cache of plans by product. The host keeps plans per whole call, which does not help an op with
// many products per call: their sizes change from call to call, but most of them recur.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "gemm/gemm_plan.hpp"
#include "gemm/gemm_plan_key.hpp"

namespace te_fl::cuda {

// A thread-safe cache of plans by PlanKey.
class PlanCache {
 public:
  static constexpr size_t kMost = 2048;  // plans; when it is full, all are dropped

  // The plan of the product, made if it is not cached. NULL if the library is not called. `p` is
  // problem_of(args). Throws what make_plan() throws.
  std::shared_ptr<const Plan> get(const te_fl_context& ctx, const te_fl_generic_gemm_args& args,
                                  const Problem& p);

 private:
  std::mutex mutex_;  // held for look-ups only, not while a plan is made
  std::unordered_map<PlanKey, std::shared_ptr<const Plan>, PlanKey::Hash> plans_;
};

}  // namespace te_fl::cuda
