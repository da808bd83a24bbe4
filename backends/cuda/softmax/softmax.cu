// The scaled softmax ops: unmasked, with a mask tensor, upper-triangular and aligned causal.
// choose_softmax() (softmax_choice.hpp) selects the kernel.
#include "te_fl/ops/softmax.h"

#include "common/overlap.hpp"
#include "device/device_attributes.hpp"
#include "device/shared_memory.hpp"
#include "plugin/families.hpp"
#include "softmax/softmax_choice.hpp"
#include "softmax/softmax_streamed.cuh"
#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {
namespace {

Visible make_visible(const te_fl_tensor& t, bool causal) {
  Visible v;
  v.queries = t.dl.shape[t.dl.ndim - 2];
  v.keys = t.dl.shape[t.dl.ndim - 1];
  v.heads = t.dl.ndim == 4 ? t.dl.shape[1] : 1;
  v.causal = causal;
  // Used for row indices below 2^31. Extents of 2^31 or more are clamped, which gives the same
  // quotient 0.
  v.by_queries = FastDiv(std::clamp<int64_t>(v.queries, 1, kFastDivLimit));
  v.by_heads = FastDiv(std::clamp<int64_t>(v.heads, 1, kFastDivLimit));
  return v;
}

SoftmaxDevice describe_device(const te_fl_context& ctx) {
  const int device = ctx.device.index;
  return {compute_capability(device),
          attribute_of<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device)};
}

template <class Args>
auto make_problem(const Args& a) {
  if constexpr (requires { a.output_grad; }) {
    return SoftmaxBackward{a.output_grad, a.softmax_results, a.input_grad};
  } else {
    return SoftmaxForward{a.input, a.output};
  }
}
template <class Args>
std::string describe_choice(const te_fl_context& ctx, const Args& a) {
  const DeviceGuard guard(ctx.device.index);
  return "softmax kernel " + choose_softmax(make_problem(a), describe_device(ctx)).text();
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls f with row.threads and the number of packs of T per thread as compile-time constants.
template <class T, class F>
void with_row(const SoftmaxRow& row, F&& f) {
  constexpr int kPer = kGroup / Pack<T>::kSize;
  const auto call_if = [&]<size_t kIndex>(std::integral_constant<size_t, kIndex>) {
    constexpr SoftmaxRow kRow = softmax_choice::kRows[kIndex];
    if constexpr (sizeof(T) == 2 || !(kRow == softmax_choice::kWidest)) {
      if (row == kRow) f(Constant<kRow.threads>{}, Constant<kRow.runs * kPer>{});
    }
  };
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (call_if(std::integral_constant<size_t, kIndices>{}), ...);
  }
  (std::make_index_sequence<std::size(softmax_choice::kRows)>{});
}
unsigned row_blocks(int64_t rows, int lanes, int threads) {
  return static_cast<unsigned>(ceil_div(rows, threads / lanes));
}

// Launches a cluster of kBlocks blocks per row.
template <unsigned kBlocks, class... Parameters, class... Args>
void launch_clusters(const te_fl_context& ctx, int64_t rows, unsigned threads,
                     void (*kernel)(Parameters...), const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kBlocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(rows) * kBlocks;
  config.blockDim = threads;
  config.stream = stream_of(ctx);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(args)...), "softmax_backward");
}

template <class T>
void launch_streamed(const te_fl_context& ctx, const T* x, T* y, const Visible& visible,
                     float scale, int64_t rows) {
  static_assert(kStreamedShared == softmax_choice::kStreamedShared);
  static SharedMemory shared;
  shared.require(ctx.device.index, softmax_streamed<T>, kStreamedShared, kStreamedShared);
  const int64_t resident = multiprocessors(ctx.device.index);
  softmax_streamed<T><<<static_cast<unsigned>(std::min(rows, resident)), kStreamedThreads,
                        kStreamedShared, stream_of(ctx)>>>(x, y, visible, scale, rows);
}
template <class T>
void launch_staged(const te_fl_context& ctx, const T* x, T* y, const Visible& visible, float scale,
                   int64_t rows, int64_t bytes) {
  static_assert(kWideThreads == softmax_choice::kWideThreads);
  static SharedMemory shared;
  shared.require(ctx.device.index, softmax_wide<T, true>, softmax_choice::kMostStaged);
  softmax_wide<T, true>
      <<<static_cast<unsigned>(rows), kWideThreads, static_cast<size_t>(bytes), stream_of(ctx)>>>(
          x, y, visible, scale);
}

template <class T>
void forward_by(const SoftmaxChoice& choice, const te_fl_context& ctx, const te_fl_tensor& in,
                const te_fl_tensor& out, float scale, const Visible& visible) {
  const int64_t rows = backend::as_matrix(in).rows;
  const T* x = backend::data<const T>(in);
  T* y = backend::data<T>(out);
  switch (choice.kernel) {
    case SoftmaxKernel::kRows:
      return with_row<T>(choice.row,
                         [&]<int kLanes, int kPacks>(Constant<kLanes>, Constant<kPacks>) {
                           constexpr int kBlock = kRowThreads<kLanes>;
                           softmax_rows<T, kLanes, kPacks>
                               <<<row_blocks(rows, kLanes, kBlock), kBlock, 0, stream_of(ctx)>>>(
                                   x, y, visible, scale, rows);
                         });
    case SoftmaxKernel::kStreamed:
      return launch_streamed(ctx, x, y, visible, scale, rows);
    case SoftmaxKernel::kStaged:
      return launch_staged(ctx, x, y, visible, scale, rows,
                           softmax_choice::staged_bytes(softmax_choice::count_runs(in), sizeof(T)));
    default:
      softmax_wide<T, false>
          <<<static_cast<unsigned>(rows), kWideThreads, 0, stream_of(ctx)>>>(x, y, visible, scale);
  }
}
void forward(const te_fl_context& ctx, const te_fl_tensor& in, const te_fl_tensor& out, float scale,
             const Visible& visible) {
  const SoftmaxChoice choice = choose_softmax(SoftmaxForward{&in, &out}, describe_device(ctx));
  if (choice.kernel == SoftmaxKernel::kNone) return;
  with_type(dtype_of(in), [&]<class T>(T) { forward_by<T>(choice, ctx, in, out, scale, visible); });
  check_launch("softmax_forward");
}
template <bool kCausal, class Args>
void plain_forward(const te_fl_context& ctx, const Args& a) {
  forward(ctx, *a.input, *a.output, a.scale, make_visible(*a.input, kCausal));
}
void masked_forward(const te_fl_context& ctx, const te_fl_softmax_masked_args& a) {
  Visible visible = make_visible(*a.input, false);
  visible.mask = backend::data<const uint8_t>(*a.mask);
  for (int i = 0; i < 4; ++i) {
    visible.mask_strides[i] = a.mask->dl.shape[i] == 1 ? 0 : backend::stride(*a.mask, i);
  }
  forward(ctx, *a.input, *a.output, a.scale, visible);
}
template <class T, class Args>
void backward_by(const SoftmaxChoice& choice, const te_fl_context& ctx, const Args& a,
                 const Visible& visible) {
  const int64_t rows = backend::as_matrix(*a.output_grad).rows;
  const T* dy = backend::data<const T>(*a.output_grad);
  const T* y = backend::data<const T>(*a.softmax_results);
  T* dx = backend::data<T>(*a.input_grad);
  switch (choice.kernel) {
    case SoftmaxKernel::kRows:
      return with_row<T>(choice.row,
                         [&]<int kLanes, int kPacks>(Constant<kLanes>, Constant<kPacks>) {
                           constexpr int kBlock = kRowThreads<kLanes>;
                           softmax_gradient_rows<T, kLanes, kPacks, 1>
                               <<<row_blocks(rows, kLanes, kBlock), kBlock, 0, stream_of(ctx)>>>(
                                   dy, y, dx, visible, a.scale, rows);
                         });
    case SoftmaxKernel::kCluster:
      if constexpr (sizeof(T) == 2) {
        constexpr int kThreadsOf = softmax_choice::kClusterRow.threads;
        constexpr int kPacks = softmax_choice::kClusterRow.runs * kGroup / Pack<T>::kSize;
        constexpr int kBlocks = softmax_choice::kClusterBlocks;
        launch_clusters<kBlocks>(ctx, rows, kThreadsOf,
                                 softmax_gradient_rows<T, kThreadsOf, kPacks, kBlocks>, dy, y, dx,
                                 visible, a.scale, rows);
      }
      return;
    default:
      softmax_gradient_wide<T><<<static_cast<unsigned>(rows), kWideThreads, 0, stream_of(ctx)>>>(
          dy, y, dx, visible, a.scale);
  }
}
template <bool kCausal, class Args>
void backward(const te_fl_context& ctx, const Args& a) {
  const SoftmaxChoice choice = choose_softmax(make_problem(a), describe_device(ctx));
  if (choice.kernel == SoftmaxKernel::kNone) return;
  const Visible visible = make_visible(*a.output_grad, kCausal);
  with_type(dtype_of(*a.output_grad), [&]<class T>(T) { backward_by<T>(choice, ctx, a, visible); });
  check_launch("softmax_backward");
}

template <class Args>
Refusal refuse_forward(const Args& a) {
  if (!all_dense(a.input, a.output)) return kNotContiguous;
  return overlaps_askew(*a.output, *a.input) ? kOverlaps : nullptr;
}
template <class Args>
Refusal refuse_backward(const Args& a) {
  if (!all_dense(a.output_grad, a.softmax_results, a.input_grad)) return kNotContiguous;
  const bool askew = overlaps_askew(*a.input_grad, *a.output_grad) ||
                     overlaps_askew(*a.input_grad, *a.softmax_results);
  return askew ? kOverlaps : nullptr;
}

template <class Args, auto F, auto Refuses>
void append(std::vector<te_fl_op_desc>& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().describe = backend::describe_thunk<Args, describe_choice<Args>>;
}
template <class Args, bool kCausal>
void append_forward(std::vector<te_fl_op_desc>& ops, const char* name) {
  append<Args, plain_forward<kCausal, Args>, refuse_forward<Args>>(ops, name);
}
template <class Args, bool kCausal>
void append_backward(std::vector<te_fl_op_desc>& ops, const char* name) {
  append<Args, backward<kCausal, Args>, refuse_backward<Args>>(ops, name);
}

}  // namespace

void append_softmax(std::vector<te_fl_op_desc>& ops) {
  using Fwd4 = te_fl_softmax_fwd4_args;
  using Bwd4 = te_fl_softmax_bwd4_args;
  using Masked = te_fl_softmax_masked_args;
  using Fwd3 = te_fl_scaled_upper_triang_masked_softmax_forward_args;
  using Bwd3 = te_fl_scaled_upper_triang_masked_softmax_backward_args;
  append_forward<Fwd4, false>(ops, "scaled_softmax_forward");
  append_backward<Bwd4, false>(ops, "scaled_softmax_backward");
  append<Masked, masked_forward, refuse_forward<Masked>>(ops, "scaled_masked_softmax_forward");
  append_backward<Bwd4, false>(ops, "scaled_masked_softmax_backward");
  append_forward<Fwd3, true>(ops, "scaled_upper_triang_masked_softmax_forward");
  append_backward<Bwd3, true>(ops, "scaled_upper_triang_masked_softmax_backward");
  append_forward<Fwd4, true>(ops, "scaled_aligned_causal_masked_softmax_forward");
  append_backward<Bwd4, true>(ops, "scaled_aligned_causal_masked_softmax_backward");
}

}  // namespace te_fl::cuda
