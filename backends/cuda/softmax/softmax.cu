// Scaled softmax: unmasked, with a mask tensor, upper-triangular and aligned causal.
#include "te_fl/ops/softmax.h"

#include "common/overlap.hpp"
#include "device/device_attributes.hpp"
#include "device/shared_memory.hpp"
#include "plugin/families.hpp"
#include "softmax/softmax_streamed.cuh"

namespace te_fl::cuda {
namespace {

Visible visible_of(const te_fl_tensor& t, bool causal) {
  Visible v;
  v.queries = t.dl.shape[t.dl.ndim - 2];
  v.keys = t.dl.shape[t.dl.ndim - 1];
  v.heads = t.dl.ndim == 4 ? t.dl.shape[1] : 1;
  v.causal = causal;
  // Rows below 2^31 are divided so: by 2^31 and more the quotient is 0.
  v.by_queries = FastDiv(std::clamp<int64_t>(v.queries, 1, kFastDivLimit));
  v.by_heads = FastDiv(std::clamp<int64_t>(v.heads, 1, kFastDivLimit));
  return v;
}

// Beyond this, two blocks whose rows wait in shared memory overlap better than one in registers.
constexpr int64_t kWidestForward = 2048;
constexpr int kMostStaged = 96 << 10;  // bytes of a row

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls f with the threads and packs of T that hold a row of `runs` times eight elements, as
// constants; false if no block does.
template <class T, class F>
bool with_width(int64_t runs, F&& f) {
  constexpr int kPer = kGroup / Pack<T>::kSize;
  if (runs <= 8) {
    f(Constant<8>{}, Constant<kPer>{});
  } else if (runs <= 32) {
    f(Constant<32>{}, Constant<kPer>{});
  } else if (runs <= 64) {
    f(Constant<32>{}, Constant<2 * kPer>{});
  } else if (runs <= 128) {
    f(Constant<32>{}, Constant<4 * kPer>{});
  } else if (runs <= 256) {
    f(Constant<128>{}, Constant<2 * kPer>{});
  } else if (runs <= 512) {
    f(Constant<128>{}, Constant<4 * kPer>{});
  } else if (runs <= 1024) {
    f(Constant<256>{}, Constant<4 * kPer>{});
  } else if (runs <= 2048) {
    f(Constant<512>{}, Constant<4 * kPer>{});
  } else if (runs <= 4096 && sizeof(T) == 2) {
    if constexpr (sizeof(T) == 2) f(Constant<1024>{}, Constant<4>{});
  } else {
    return false;
  }
  return true;
}
unsigned row_blocks(int64_t rows, int lanes, int threads) {
  return static_cast<unsigned>(ceil_div(rows, threads / lanes));
}

// A cluster of kBlocks blocks for each row.
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

void forward(const te_fl_context& ctx, const te_fl_tensor& in, const te_fl_tensor& out, float scale,
             const Visible& visible) {
  const int64_t rows = backend::as_matrix(in).rows;
  if (rows == 0 || visible.keys == 0) return;
  with_type(dtype_of(in), [&]<class T>(T) {
    const T* x = backend::data<const T>(in);
    T* y = backend::data<T>(out);
    const auto held = [&]<int kLanes, int kPacks>(Constant<kLanes>, Constant<kPacks>) {
      constexpr int kBlock = kRowThreads<kLanes>;
      softmax_rows<T, kLanes, kPacks>
          <<<row_blocks(rows, kLanes, kBlock), kBlock, 0, stream_of(ctx)>>>(x, y, visible, scale,
                                                                            rows);
    };
    const int64_t runs = runs_of(x, visible.keys);
    if (runs <= kWidestForward && with_width<T>(runs, held)) return;
    const int64_t row_bytes = visible.keys * static_cast<int64_t>(sizeof(T));
    if (row_bytes <= kStreamedBytes && row_bytes % 16 == 0 &&
        reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0 &&
        compute_capability(ctx.device.index) >= 90) {
      static SharedMemory streamed;
      if (streamed.allow(ctx.device.index, softmax_streamed<T>, kStreamedShared, kStreamedShared)) {
        const int64_t resident = multiprocessors(ctx.device.index);
        softmax_streamed<T><<<static_cast<unsigned>(std::min(rows, resident)), kStreamedThreads,
                              kStreamedShared, stream_of(ctx)>>>(x, y, visible, scale, rows);
        return;
      }
    }
    constexpr int kPer = kGroup / Pack<T>::kSize;
    const int64_t bytes = ceil_div(runs * kPer, kWideThreads) * kWideThreads * 16;
    const auto blocks = static_cast<unsigned>(rows);
    if (bytes > kMostStaged) {
      softmax_wide<T, false><<<blocks, kWideThreads, 0, stream_of(ctx)>>>(x, y, visible, scale);
      return;
    }
    static SharedMemory shared;
    shared.require(ctx.device.index, softmax_wide<T, true>, kMostStaged);
    softmax_wide<T, true><<<blocks, kWideThreads, static_cast<size_t>(bytes), stream_of(ctx)>>>(
        x, y, visible, scale);
  });
  check_launch("softmax_forward");
}
template <bool kCausal, class Args>
void plain_forward(const te_fl_context& ctx, const Args& a) {
  forward(ctx, *a.input, *a.output, a.scale, visible_of(*a.input, kCausal));
}
void masked_forward(const te_fl_context& ctx, const te_fl_softmax_masked_args& a) {
  Visible visible = visible_of(*a.input, false);
  visible.mask = backend::data<const uint8_t>(*a.mask);
  for (int i = 0; i < 4; ++i) {
    visible.mask_strides[i] = a.mask->dl.shape[i] == 1 ? 0 : backend::stride(*a.mask, i);
  }
  forward(ctx, *a.input, *a.output, a.scale, visible);
}
template <bool kCausal, class Args>
void backward(const te_fl_context& ctx, const Args& a) {
  const int64_t rows = backend::as_matrix(*a.output_grad).rows;
  const Visible visible = visible_of(*a.output_grad, kCausal);
  if (rows == 0 || visible.keys == 0) return;
  with_type(dtype_of(*a.output_grad), [&]<class T>(T) {
    const T* dy = backend::data<const T>(*a.output_grad);
    const T* y = backend::data<const T>(*a.softmax_results);
    T* dx = backend::data<T>(*a.input_grad);
    const auto held = [&]<int kLanes, int kPacks>(Constant<kLanes>, Constant<kPacks>) {
      constexpr int kBlock = kRowThreads<kLanes>;
      softmax_gradient_rows<T, kLanes, kPacks, 1>
          <<<row_blocks(rows, kLanes, kBlock), kBlock, 0, stream_of(ctx)>>>(dy, y, dx, visible,
                                                                            a.scale, rows);
    };
    const int64_t runs = runs_of(dy, visible.keys);
    if constexpr (sizeof(T) == 2) {
      if (runs > 2048 && runs <= 4096 && compute_capability(ctx.device.index) >= 90) {
        return launch_clusters<4>(ctx, rows, 256, softmax_gradient_rows<T, 256, 4, 4>, dy, y, dx,
                                  visible, a.scale, rows);
      }
    }
    if (with_width<T>(runs, held)) return;
    softmax_gradient_wide<T><<<static_cast<unsigned>(rows), kWideThreads, 0, stream_of(ctx)>>>(
        dy, y, dx, visible, a.scale);
  });
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

template <class Args, bool kCausal>
te_fl_op_desc forward_descriptor(const char* name) {
  return descriptor<Args, plain_forward<kCausal, Args>, refuse_forward<Args>>(name);
}
template <class Args, bool kCausal>
te_fl_op_desc backward_descriptor(const char* name) {
  return descriptor<Args, backward<kCausal, Args>, refuse_backward<Args>>(name);
}

}  // namespace

void append_softmax(std::vector<te_fl_op_desc>& ops) {
  using Fwd4 = te_fl_softmax_fwd4_args;
  using Bwd4 = te_fl_softmax_bwd4_args;
  using Masked = te_fl_softmax_masked_args;
  using Fwd3 = te_fl_scaled_upper_triang_masked_softmax_forward_args;
  using Bwd3 = te_fl_scaled_upper_triang_masked_softmax_backward_args;
  ops.push_back(forward_descriptor<Fwd4, false>("scaled_softmax_forward"));
  ops.push_back(backward_descriptor<Bwd4, false>("scaled_softmax_backward"));
  ops.push_back(
      descriptor<Masked, masked_forward, refuse_forward<Masked>>("scaled_masked_softmax_forward"));
  ops.push_back(backward_descriptor<Bwd4, false>("scaled_masked_softmax_backward"));
  ops.push_back(forward_descriptor<Fwd3, true>("scaled_upper_triang_masked_softmax_forward"));
  ops.push_back(backward_descriptor<Bwd3, true>("scaled_upper_triang_masked_softmax_backward"));
  ops.push_back(forward_descriptor<Fwd4, true>("scaled_aligned_causal_masked_softmax_forward"));
  ops.push_back(backward_descriptor<Bwd4, true>("scaled_aligned_causal_masked_softmax_backward"));
}

}  // namespace te_fl::cuda
