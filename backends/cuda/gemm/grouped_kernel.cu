#include "gemm/grouped_kernel.hpp"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "common/hopper_launch.cuh"
#include "device/device.hpp"
#include "gemm/grouped_kernel.cuh"
#include "te_fl/backend/grouped_gemm.hpp"

namespace te_fl::cuda {
namespace {

using grouped::Scales;

constexpr int64_t kBoxA = 64;  // rows of a box of A, which is half of a tile's

template <class Type, Scales kScales>
void launch(const te_fl_context& ctx, const GroupedCall& call) {
  constexpr auto kKernel = grouped::grouped_gemm_kernel<Type, kScales>;
  const int clusters = std::min(
      max_active_clusters<kKernel>(ctx.device.index, grouped::kTileThreads, grouped::kShared),
      call.tiles);
  kKernel<<<2 * clusters, grouped::kTileThreads, grouped::kShared, stream_of(ctx)>>>(call);
  check_launch("grouped_gemm_kernel");
}

void launch(const te_fl_context& ctx, const GroupedCall& call, GroupedForm form) {
  switch (form) {
    case GroupedForm::kBf16:
      return launch<hopper::Bf16, Scales::kTensor>(ctx, call);
    case GroupedForm::kBf16AcrossB:
      return launch<hopper::Bf16AcrossB, Scales::kTensor>(ctx, call);
    case GroupedForm::kBf16Across:
      return launch<hopper::Bf16Across, Scales::kTensor>(ctx, call);
    case GroupedForm::kCodes:
      return launch<hopper::E4m3, Scales::kTensor>(ctx, call);
    case GroupedForm::kCodesSplit:
      return launch<hopper::E4m3, Scales::kTensorSplit>(ctx, call);
    case GroupedForm::kGradientCodes:
      return launch<hopper::E5m2E4m3, Scales::kTensorSplit>(ctx, call);
    case GroupedForm::kBlocks:
      return launch<hopper::E4m3, Scales::kBlocks>(ctx, call);
    case GroupedForm::kVectors:
      return launch<hopper::E4m3, Scales::kVectors>(ctx, call);
    case GroupedForm::kLibrary:
      break;
  }
}

struct Product {
  te_fl_generic_gemm_args args;
  Problem problem;
};

// Adds the GEMM as item number `i` of the launch.
void add(GroupedCall& call, int i, const Product& product) {
  const auto& [args, p] = product;
  const int64_t elements = p.fp8 ? 128 : 64;
  GroupedItem& item = call.items[i];
  item.d = backend::data<void>(*args.d);
  if (args.bias != nullptr) item.bias = backend::data<const bf16>(*args.bias);
  // Operands without elements have scales that nothing may have written.
  if (p.fp8 && p.k > 0) item.scale_a = p.a.scale_inv, item.scale_b = p.b.scale_inv;
  item.rows = static_cast<int>(p.m), item.cols = static_cast<int>(p.n);
  item.lines = static_cast<int>((p.k + elements - 1) / elements);
  const bool wide = call.wide != 0;
  const auto pieces = [](int extent, int size) { return (extent + size - 1) / size; };
  item.down = pieces(item.rows, grouped::tile_rows(wide));
  item.across = pieces(item.cols, grouped::tile_cols(wide));
  call.tiles += item.down * item.across;
  item.end = call.tiles;
  if (p.k == 0) return;
  const void* a = p.fp8 ? p.a.codes : backend::data<const void>(*args.a);
  const void* b = p.fp8 ? p.b.codes : backend::data<const void>(*args.b);
  // FP8 data has K contiguous, whichever way the tensor is stored.
  call.a[i] = p.fp8 || p.a.along ? boxes(a, p.fp8, p.m, p.k, kBoxA) : boxes(a, false, p.k, p.m, 64);
  call.b[i] = p.fp8 || p.b.along ? boxes(b, p.fp8, p.n, p.k, grouped::kCols / 2)
                                 : boxes(b, false, p.k, p.n, 64);
}

}  // namespace

void run_grouped_kernel(const te_fl_context& ctx, const te_fl_grouped_gemm_args& args,
                        const GroupedPath& path) {
  std::vector<Product> products;
  products.reserve(static_cast<size_t>(args.a_count));
  for (int64_t i = 0; i < args.a_count; ++i) {
    const te_fl_generic_gemm_args one = backend::product_of(args, i);
    const Problem problem = make_problem(one);
    if (problem.m > 0 && problem.n > 0) products.push_back({one, problem});
  }
  // The longest GEMMs start first, so that the last wave has short ones.
  std::ranges::stable_sort(products, std::greater(), [](const Product& p) { return p.problem.k; });
  const auto count = static_cast<int64_t>(products.size());
  const int64_t launches = (count + kMostItems - 1) / kMostItems;
  const auto call = std::make_unique<GroupedCall>();
  for (int64_t n = 0; n < launches; ++n) {
    *call = GroupedCall{};
    call->wide = path.wide;
    call->add_previous = args.accumulate != 0 && args.beta != 0.0f;
    call->d_float = dtype_of(*args.d[0]) == TE_FL_F32;
    call->alpha = args.alpha, call->beta = args.beta;
    int i = 0;
    for (int64_t at = n * count / launches; at < (n + 1) * count / launches; ++at, ++i) {
      add(*call, i, products[static_cast<size_t>(at)]);
    }
    launch(ctx, *call, path.form);
  }
}

}  // namespace te_fl::cuda
