// Plans that are kept by what they were made for. An op with many products in a call has no use for
// the host's plans, which are kept for whole calls: the products' sizes change from call to call,
// and most of them come again.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "gemm/gemm_plan.hpp"
#include "gemm/gemm_plan_key.hpp"

namespace te_fl::cuda {

// Thread-safe.
class PlanCache {
 public:
  static constexpr size_t kMost = 2048;  // then it begins anew

  // The plan of such a product, made if it is not kept yet. nullptr where the library is not
  // called. `p` is problem_of(args). Throws what make_plan() throws.
  std::shared_ptr<const Plan> get(const te_fl_context& ctx, const te_fl_generic_gemm_args& args,
                                  const Problem& p);

 private:
  std::mutex mutex_;  // held for look-ups only
  std::unordered_map<PlanKey, std::shared_ptr<const Plan>, PlanKey::Hash> plans_;
};

}  // namespace te_fl::cuda
