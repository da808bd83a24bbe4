// The ops quantize, bgrad_quantize, cast_to_fp8 (a plain conversion to FP8 without scales) and
// compute_amax.
#include "te_fl/ops/quantize.h"

#include "quantize/quantize.cuh"

namespace te_fl::cuda {

void quantize_rows(const te_fl_context& ctx, const te_fl_tensor& input, int64_t first_row,
                   const te_fl_tensor& output, const float* noop) {
  store_elementwise<false>(ctx, output, make_copy(input, first_row, output), nullptr, noop,
                           largest_finite_of(dtype_of(input)));
}

namespace {

void quantize(const te_fl_context& ctx, const te_fl_quantize_args& args) {
  quantize_rows(ctx, *args.input, 0, *args.output, find_noop(args.noop_flag));
}
Refusal refuse_quantize(const te_fl_quantize_args& args) {
  return refuse_pair(*args.input, *args.output);
}

// ---- quantisation with a bias gradient

void bgrad_quantize(const te_fl_context& ctx, const te_fl_bgrad_quantize_args& args) {
  store_elementwise<true>(ctx, *args.output, make_copy(*args.input, 0, *args.output), args.bias_grad,
                          nullptr, largest_finite_of(dtype_of(*args.input)));
}
Refusal refuse_bgrad_quantize(const te_fl_bgrad_quantize_args& args) {
  return dense(args.bias_grad) ? refuse_pair(*args.input, *args.output) : kNotContiguous;
}
size_t bgrad_workspace(const te_fl_context&, const te_fl_bgrad_quantize_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.output);
  return kStoreWorkspace + column_sums_bytes(matrix.rows, matrix.cols);
}

// ---- conversion to FP8 without scales

void cast_to_fp8(const te_fl_context& ctx, const te_fl_cast_to_fp8_args& args) {
  quantize_rows(ctx, *args.input, 0, BareCodes(args).tensor, nullptr);
}
Refusal refuse_cast(const te_fl_cast_to_fp8_args& args) {
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.input) ? kInPlace : nullptr;
}

// ---- amax

// Computes the amax of a contiguous tensor with 16-byte loads; each thread has four in flight.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    flat_amax_kernel(const uint4* x, int64_t pieces, bool is_half, float* amax) {
  constexpr int kCount = Piece<kBytes>::kCount, kAtOnce = 4;
  const int64_t step = int64_t{gridDim.x} * kThreads * kAtOnce;
  float most = 0.0f;
  for (int64_t first = blockIdx.x * int64_t{kThreads * kAtOnce} + threadIdx.x; first < pieces;
       first += step) {
    uint4 raw[kAtOnce / kCount][kCount];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = first + i * kThreads;
      raw[i / kCount][i % kCount] = x[at < pieces ? at : first];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce / kCount; ++i) {
      float v[8];
      unpack<kBytes>(raw[i], is_half, v);
#pragma unroll
      for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v[e]));
    }
  }
  __shared__ float shared[kWarps];
  most = block_amax(most, shared);
  if (threadIdx.x == 0) atomic_amax(amax, most);
}

void compute_amax(const te_fl_context& ctx, const te_fl_compute_amax_args& args) {
  const cudaStream_t stream = stream_of(ctx);
  float* amax = backend::data<float>(*args.amax);
  check(cudaMemsetAsync(amax, 0, sizeof(float), stream), "cudaMemsetAsync");
  const int64_t n = backend::numel(*args.input);
  if (n == 0) return;
  const int dtype = dtype_of(*args.input);
  const int64_t bytes = bytes_of(dtype), pieces = n * bytes / 16;
  const auto* x = backend::data<const uint4>(*args.input);
  if (choose_quantize(args).whole) {
    const auto kernel = bytes == 4 ? flat_amax_kernel<4> : flat_amax_kernel<2>;
    kernel<<<blocks_for(ceil_div(pieces, 4)), kThreads, 0, stream>>>(x, pieces, dtype == TE_FL_F16,
                                                                     amax);
    return check_launch("flat_amax_kernel");
  }
  amax_kernel<<<blocks_for(ceil_div(n, kGroup)), kThreads, 0, stream>>>(
      nullptr, amax, 1, n, Anywhere<Copy>{{{{Source(*args.input), 0, n}}, {}}, n});
  check_launch("amax_kernel");
}
Refusal refuse_amax(const te_fl_compute_amax_args& args) {
  return all_dense(args.input, args.amax) ? nullptr : kNotContiguous;
}

using Ops = std::vector<te_fl_op_desc>;
template <class Args, auto F, auto Refuses>
void append_quantize(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().describe = kDescribe<Args>;
  ops.back().workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
    *bytes = kStoreWorkspace;
    return te_fl_status{TE_FL_OK};
  };
}

}  // namespace

void append_quantize(Ops& ops) {
  append_quantize<te_fl_quantize_args, quantize, refuse_quantize>(ops, "quantize");
  append_quantize<te_fl_bgrad_quantize_args, bgrad_quantize, refuse_bgrad_quantize>(
      ops, "bgrad_quantize");
  ops.back().workspace = backend::workspace_thunk<te_fl_bgrad_quantize_args, bgrad_workspace>;
  append_quantize<te_fl_cast_to_fp8_args, cast_to_fp8, refuse_cast>(ops, "cast_to_fp8");
  append_quantize<te_fl_compute_amax_args, compute_amax, refuse_amax>(ops, "compute_amax");
}

}  // namespace te_fl::cuda
