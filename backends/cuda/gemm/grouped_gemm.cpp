// grouped_gemm: the GEMMs of a group in one kernel of the plugin (grouped_kernel.hpp), or on
// cuBLASLt. On cuBLASLt each uses the path that generic_gemm would use, on the call's stream or on
// side streams. Plans are cached by the sizes of a GEMM.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "device/device_attributes.hpp"
#include "device/driver.hpp"
#include "device/side_streams.hpp"
#include "gemm/gemm_call.hpp"
#include "gemm/gemm_choice.hpp"
#include "gemm/gemm_plan_cache.hpp"
#include "gemm/grouped_gemm_choice.hpp"
#include "gemm/grouped_kernel.hpp"
#include "plugin/families.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/backend/grouped_gemm.hpp"

namespace te_fl::cuda {
namespace {

using GroupedArgs = te_fl_grouped_gemm_args;

PlanCache& plan_cache() {
  static PlanCache cache;
  return cache;
}

Refusal refuse(const te_fl_context& ctx, const GroupedArgs& args) {
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

std::atomic<int> g_streams{kGroupedStreams};
std::atomic<bool> g_kernel{true};

// The work of one call, derived from metadata.
struct Group {
  struct Item {
    te_fl_generic_gemm_args product;
    Problem problem;
  };
  std::vector<Item> items;  // the products that write something
  int lanes = 1;
  size_t scratch = 0;  // bytes per lane, a multiple of 256

  Group(const te_fl_context& ctx, const GroupedArgs& args) {
    items.reserve(static_cast<size_t>(args.a_count));
    GroupSize size;
    for (int64_t i = 0; i < args.a_count; ++i) {
      const te_fl_generic_gemm_args product = backend::product_of(args, i);
      if (backend::writes_nothing(product)) continue;
      const Problem& p = items.emplace_back(product, make_problem(product)).problem;
      scratch = std::max(scratch, product_scratch(product, p));
      if (runs_library(p)) size.add(p.m, p.n);
    }
    lanes = choose_lanes(size, multiprocessors(ctx.device.index), g_streams.load());
  }
  // Returns the number of streams. During a capture only the caller's stream is used, because side
  // streams that have forked into a capture must be joined to it even if enqueuing a GEMM fails.
  int lanes_on(cudaStream_t stream) const {
    cudaStreamCaptureStatus status{};
    if (lanes == 1 || stream_capture_status(stream, &status) != cudaSuccess) return 1;
    return status == cudaStreamCaptureStatusNone ? lanes : 1;
  }
  size_t bytes() const { return static_cast<size_t>(lanes) * scratch; }
};

GroupedPath choose_path(const te_fl_context& ctx, const GroupedArgs& args) {
  if (!g_kernel.load()) return {.unfit = "TE_FL_CUDA_GROUPED_KERNEL is 0"};
  GemmDevice device{architecture(ctx.device.index), 0, false};
  if (device.architecture == kFusedArchitecture) {
    device.has_tensor_maps = driver().encode_tensor_map != nullptr;
  }
  return choose_grouped_gemm(args, device);
}

size_t workspace(const te_fl_context& ctx, const GroupedArgs& args) {
  if (choose_path(ctx, args).form != GroupedForm::kLibrary) return 0;
  return Group(ctx, args).bytes();
}

void grouped_gemm(const te_fl_context& ctx, const GroupedArgs& args) {
  const GroupedPath path = choose_path(ctx, args);
  if (path.form != GroupedForm::kLibrary) return run_grouped_kernel(ctx, args, path);
  const Group group(ctx, args);
  if (ctx.workspace_bytes < group.bytes()) {
    backend::invalid("the workspace has " + std::to_string(ctx.workspace_bytes) +
                     " bytes; workspace() requested " + std::to_string(group.bytes()));
  }
  auto* const stream = static_cast<cudaStream_t>(ctx.stream);
  SpreadWork work(ctx.device.index, stream, group.lanes_on(stream));
  te_fl_context lane_context = ctx;
  lane_context.workspace_bytes = group.scratch;
  int lane = 0;
  for (const auto& [product, problem] : group.items) {
    const std::shared_ptr<const Plan> plan = plan_cache().get(ctx, product, problem);
    lane_context.stream = work.stream(lane);
    lane_context.workspace =
        static_cast<char*>(ctx.workspace) + static_cast<size_t>(lane) * group.scratch;
    enqueue_product(lane_context, product, problem, plan.get());
    lane = (lane + 1) % work.lanes();
  }
  work.join();
}

std::string describe_choice(const te_fl_context& ctx, const GroupedArgs& args) {
  const GroupedPath grouped = choose_path(ctx, args);
  if (grouped.form != GroupedForm::kLibrary) {
    return "grouped_gemm_kernel: " + std::to_string(args.a_count) +
           " products in one kernel of the plugin, " + form_name(grouped.form) +
           (grouped.wide ? ", pairs of tiles side by side"
                         : ", pairs of tiles one below the other");
  }
  const te_fl_generic_gemm_args first = backend::product_of(args, 0);
  GemmPath path = choose_gemm(first, {});
  path.algorithm = describe_algorithm(ctx, first, path.problem);
  const int lanes = Group(ctx, args).lanes_on(static_cast<cudaStream_t>(ctx.stream));
  return std::to_string(args.a_count) + " products " +
         (lanes == 1 ? "one after the other" : "over " + std::to_string(lanes) + " streams") +
         "; the first: " + path.text() + "; not grouped_gemm_kernel: " + grouped.unfit;
}

}  // namespace

void configure_grouped_gemm(bool kernel, const char* streams) {
  g_kernel = kernel;
  g_streams = streams != nullptr ? std::atoi(streams) : kGroupedStreams;
}

void append_grouped_gemm(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<GroupedArgs, grouped_gemm, refuse>("grouped_gemm"));
  te_fl_op_desc& desc = ops.back();
  desc.workspace = backend::workspace_thunk<GroupedArgs, workspace>;
  desc.describe = backend::describe_thunk<GroupedArgs, describe_choice>;
}

}  // namespace te_fl::cuda
