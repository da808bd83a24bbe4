#include "gemm/gemm_plan_cache.hpp"

namespace te_fl::cuda {

std::shared_ptr<const Plan> PlanCache::get(const te_fl_context& ctx,
                                           const te_fl_generic_gemm_args& args, const Problem& p) {
  if (!runs_library(p)) return nullptr;
  const PlanKey key(ctx.device.index, args, p);
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  }
  auto made = std::make_shared<const Plan>(make_plan(ctx, args, p));
  const std::lock_guard lock(mutex_);
  if (plans_.size() >= kMost) plans_.clear();
  return plans_.try_emplace(key, std::move(made)).first->second;
}

}  // namespace te_fl::cuda
