// grouped_gemm: the products of a group on cuBLASLt, one after the other on the call's stream, each
// by the way that generic_gemm would go. Plans are kept by the products' sizes.
#include <algorithm>
#include <memory>
#include <string>

#include "gemm/gemm_call.hpp"
#include "gemm/gemm_choice.hpp"
#include "gemm/gemm_plan_cache.hpp"
#include "plugin/families.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/backend/grouped_gemm.hpp"

namespace te_fl::cuda {
namespace {

using Args = te_fl_grouped_gemm_args;

PlanCache& plan_cache() {
  static PlanCache cache;
  return cache;
}

Refusal refuse(const te_fl_context& ctx, const Args& args) {
  if (args.a_count == 0) return "grouped_gemm: no tensor says which device is meant";
  for (int64_t i = 0; i < args.a_count; ++i) {
    const te_fl_generic_gemm_args product = backend::product_of(args, i);
    if (const Refusal why = refuse_product(ctx, product)) return why;
    const bool squares = backend::scaling(*product.a) == TE_FL_SCALING_BLOCK_128X128 &&
                         backend::scaling(*product.b) == TE_FL_SCALING_BLOCK_128X128;
    if (squares) return "grouped_gemm: blocks of 128 x 128 on both sides";
  }
  return nullptr;
}

size_t workspace(const te_fl_context&, const Args& args) {
  size_t bytes = 0;
  for (int64_t i = 0; i < args.a_count; ++i) {
    const te_fl_generic_gemm_args product = backend::product_of(args, i);
    bytes = std::max(bytes, product_scratch(product, problem_of(product)));
  }
  return bytes;
}

void grouped_gemm(const te_fl_context& ctx, const Args& args) {
  for (int64_t i = 0; i < args.a_count; ++i) {
    const te_fl_generic_gemm_args product = backend::product_of(args, i);
    if (backend::writes_nothing(product)) continue;
    const Problem p = problem_of(product);
    const std::shared_ptr<const Plan> plan = plan_cache().get(ctx, product, p);
    enqueue_product(ctx, product, p, plan.get());
  }
}

std::string words_of(const te_fl_context& ctx, const Args& args) {
  const te_fl_generic_gemm_args first = backend::product_of(args, 0);
  GemmPath path = choose_gemm(first, {});
  path.algorithm = algorithm_of(ctx, first, path.problem);
  return std::to_string(args.a_count) + " products one after the other; the first: " + path.text();
}

}  // namespace

void append_grouped_gemm(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<Args, grouped_gemm, refuse>("grouped_gemm"));
  te_fl_op_desc& desc = ops.back();
  desc.workspace = backend::workspace_thunk<Args, workspace>;
  desc.describe = backend::describe_thunk<Args, words_of>;
}

}  // namespace te_fl::cuda
