// A cache of the plans of single GEMMs. The host caches plans by the signature of a call, which
// does not help an op with many GEMMs per call: the combination of sizes changes from call to call,
// but most single sizes recur.
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

  // Returns the plan of the GEMM, and makes it if it is not cached. Returns NULL if cuBLASLt is not
  // called. `p`: the result of make_problem(args). Throws what make_plan() throws.
  std::shared_ptr<const Plan> get(const te_fl_context& ctx, const te_fl_generic_gemm_args& args,
                                  const Problem& p);

 private:
  std::mutex mutex_;  // held for look-ups only, not while a plan is made
  std::unordered_map<PlanKey, std::shared_ptr<const Plan>, PlanKey::Hash> plans_;
};

}  // namespace te_fl::cuda
