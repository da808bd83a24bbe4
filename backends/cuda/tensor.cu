// Residual addition, copies and fills, embedding and cross-entropy.
#include "te_fl/ops/tensor.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "families.hpp"
#include "overlap.hpp"
#include "store.cuh"
#include "te_fl/numeric.hpp"

namespace te_fl::cuda {
namespace {

using backend::invalid;

// ---- strided_copy, fill

struct Layout {
  int rank = 0;
  int64_t shape[8], strides[8];
  explicit Layout(const te_fl_tensor& t) : rank(t.dl.ndim) {
    for (int i = 0; i < rank; ++i) shape[i] = t.dl.shape[i], strides[i] = backend::stride(t, i);
  }
  // Offset in elements of the element with logical index i.
  __device__ int64_t offset(int64_t i) const {
    int64_t at = 0;
    for (int d = rank - 1; d >= 0; --d) {
      const int64_t next = i / shape[d];
      at += (i - next * shape[d]) * strides[d];
      i = next;
    }
    return at;
  }
};

template <class Bits>
__global__ void copy_kernel(const Bits* in, Layout from, Bits* out, Layout to, int64_t size) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    out[to.offset(i)] = in[from.offset(i)];
  }
}
template <class Bits>
__global__ void fill_kernel(Bits* out, Layout to, int64_t size, Bits value) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    out[to.offset(i)] = value;
  }
}

__device__ double load_double(const void* data, int dtype, int64_t i) {
  if (dtype == TE_FL_F64) return static_cast<const double*>(data)[i];
  if (dtype == TE_FL_F8E8M0) {
    const uint32_t code = static_cast<const uint8_t*>(data)[i];
    return code == 0xFF ? static_cast<double>(NAN) : ldexp(1.0, static_cast<int>(code) - 127);
  }
  Source source;
  source.data = data;
  source.dtype = dtype;
  return source.at(i);
}
// One rounding, by the bit rules that the host has too.
__device__ void store_double(void* data, int dtype, int64_t i, double v) {
  switch (dtype) {
    case TE_FL_F64:
      static_cast<double*>(data)[i] = v;
      return;
    case TE_FL_F32:
      static_cast<float*>(data)[i] = static_cast<float>(v);
      return;
    case TE_FL_F16:
      static_cast<uint16_t*>(data)[i] = numeric::from_double<numeric::half>(v).bits;
      return;
    case TE_FL_BF16:
      static_cast<uint16_t*>(data)[i] = numeric::from_double<numeric::bfloat16>(v).bits;
      return;
    case TE_FL_F8E4M3:
      static_cast<uint8_t*>(data)[i] = numeric::from_double<numeric::fp8e4m3>(v).bits;
      return;
    case TE_FL_F8E5M2:
      static_cast<uint8_t*>(data)[i] = numeric::from_double<numeric::fp8e5m2>(v).bits;
      return;
    default:
      static_cast<uint8_t*>(data)[i] = numeric::from_double<numeric::e8m0>(v).bits;
  }
}
__global__ void convert_kernel(const void* in, int from_dtype, Layout from, void* out, int to_dtype,
                               Layout to, int64_t size) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    store_double(out, to_dtype, to.offset(i), load_double(in, from_dtype, from.offset(i)));
  }
}

bool is_float(int dtype) { return dtype <= TE_FL_F8E8M0; }
bool is_fast(int dtype) { return dtype >= TE_FL_F32 && dtype <= TE_FL_F8E5M2; }

struct Flat {
  Source input;
  __device__ void operator()(int64_t, int64_t col, int n, float* v) const { input.load(col, n, v); }
};

template <class Bits>
void copy_bits(const te_fl_context& ctx, const te_fl_strided_copy_args& args, int64_t size) {
  copy_kernel<Bits><<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(
      backend::data<const Bits>(*args.input), Layout(*args.input),
      backend::data<Bits>(*args.output), Layout(*args.output), size);
  check_launch("strided_copy");
}

void strided_copy(const te_fl_context& ctx, const te_fl_strided_copy_args& args) {
  const int from = dtype_of(*args.input), to = dtype_of(*args.output);
  if (from != to && (!is_float(from) || !is_float(to))) {
    invalid(
        std::string("input and output have different dtypes; only float types convert into each "
                    "other, others copy to themselves"));
  }
  const int64_t size = backend::numel(*args.input);
  if (size == 0) return;
  const bool compact = backend::is_contiguous(*args.input) && backend::is_contiguous(*args.output);
  if (from == to && compact) {
    return check(
        cudaMemcpyAsync(backend::data<void>(*args.output), backend::data<void>(*args.input),
                        static_cast<size_t>(size) * args.input->dl.dtype.bits / 8,
                        cudaMemcpyDeviceToDevice, stream_of(ctx)),
        "cudaMemcpyAsync");
  }
  if (from != to && compact && is_fast(from) && is_fast(to)) {
    store_kernel<<<blocks_for(ceil_div(size, kGroup)), kThreads, 0, stream_of(ctx)>>>(
        Target(*args.output), int64_t{1}, size, Flat{Source(*args.input)});
    return check_launch("strided_copy");
  }
  if (from != to) {
    convert_kernel<<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(
        backend::data<void>(*args.input), from, Layout(*args.input),
        backend::data<void>(*args.output), to, Layout(*args.output), size);
    return check_launch("strided_copy");
  }
  switch (args.input->dl.dtype.bits) {
    case 8:
      return copy_bits<uint8_t>(ctx, args, size);
    case 16:
      return copy_bits<uint16_t>(ctx, args, size);
    case 32:
      return copy_bits<uint32_t>(ctx, args, size);
    default:
      return copy_bits<uint64_t>(ctx, args, size);
  }
}
Refusal refuse_strided_copy(const te_fl_strided_copy_args& args) {
  if (args.input->dl.dtype.bits < 8 || args.output->dl.dtype.bits < 8) return "copies whole bytes";
  return nullptr;
}

// The bits of `value` in an integer type; invalid() if it cannot hold it.
template <class T>
uint64_t integer_bits(double value, const char* type, double low, double above_high) {
  const double whole = std::trunc(value);
  if (!(whole >= low && whole < above_high)) {
    invalid("value is " + std::to_string(value) + ", which " + type + " cannot hold; it takes " +
            std::to_string(low) + " to " + std::to_string(above_high - 1));
  }
  return static_cast<uint64_t>(static_cast<T>(whole));
}
template <class T>
uint64_t integer_bits(double value, const char* type) {
  return integer_bits<T>(value, type, static_cast<double>(std::numeric_limits<T>::min()),
                         std::ldexp(1.0, std::numeric_limits<T>::digits));
}

uint64_t bits_of(int dtype, double value) {
  switch (dtype) {
    case TE_FL_F64:
      return std::bit_cast<uint64_t>(value);
    case TE_FL_F32:
      return std::bit_cast<uint32_t>(numeric::from_double<float>(value));
    case TE_FL_F16:
      return numeric::from_double<numeric::half>(value).bits;
    case TE_FL_BF16:
      return numeric::from_double<numeric::bfloat16>(value).bits;
    case TE_FL_F8E4M3:
      return numeric::from_double<numeric::fp8e4m3>(value).bits;
    case TE_FL_F8E5M2:
      return numeric::from_double<numeric::fp8e5m2>(value).bits;
    case TE_FL_F8E8M0:
      return numeric::from_double<numeric::e8m0>(value).bits;
    case TE_FL_I8:
      return integer_bits<int8_t>(value, "i8");
    case TE_FL_I16:
      return integer_bits<int16_t>(value, "i16");
    case TE_FL_I32:
      return integer_bits<int32_t>(value, "i32");
    case TE_FL_I64:
      return integer_bits<int64_t>(value, "i64");
    case TE_FL_U8:
      return integer_bits<uint8_t>(value, "u8");
    case TE_FL_U16:
      return integer_bits<uint16_t>(value, "u16");
    case TE_FL_U32:
      return integer_bits<uint32_t>(value, "u32");
    case TE_FL_U64:
      return integer_bits<uint64_t>(value, "u64");
    default:
      return integer_bits<uint8_t>(value, "bool", 0.0, 2.0);
  }
}

template <class Bits>
void fill_bits(const te_fl_context& ctx, const te_fl_tensor& output, uint64_t bits) {
  const int64_t size = backend::numel(output);
  if (size == 0) return;
  fill_kernel<Bits><<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(
      backend::data<Bits>(output), Layout(output), size, static_cast<Bits>(bits));
  check_launch("fill");
}
void fill(const te_fl_context& ctx, const te_fl_fill_args& args) {
  const uint64_t bits = bits_of(dtype_of(*args.output), args.value);
  switch (args.output->dl.dtype.bits) {
    case 8:
      return fill_bits<uint8_t>(ctx, *args.output, bits);
    case 16:
      return fill_bits<uint16_t>(ctx, *args.output, bits);
    case 32:
      return fill_bits<uint32_t>(ctx, *args.output, bits);
    default:
      return fill_bits<uint64_t>(ctx, *args.output, bits);
  }
}
Refusal refuse_fill(const te_fl_fill_args& args) {
  return args.output->dl.dtype.bits < 8 ? "fills whole bytes" : nullptr;
}

// ---- embedding, cross-entropy

struct Integers {
  const void* data;
  bool wide;
  explicit Integers(const te_fl_tensor& t)
      : data(backend::data<const void>(t)), wide(dtype_of(t) == TE_FL_I64) {}
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// bad[0]: the first position whose value lies outside, INT64_MAX if there is none; bad[1]: its
// value.
__global__ void range_kernel(Integers values, int64_t size, int64_t extent, bool has_ignored,
                             int64_t ignored, unsigned long long* bad) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t v = values[i];
    if ((v >= 0 && v < extent) || (has_ignored && v == ignored)) continue;
    atomicMin(bad, static_cast<unsigned long long>(i));
  }
}

// Refuses values outside [0, extent) before anything is written. That needs the values on the host,
// so the stream is waited for; while it is captured that cannot be done, and rows of values outside
// become NaN.
void check_range(const te_fl_context& ctx, const te_fl_tensor& values, int64_t extent,
                 const int64_t* ignored, const char* name, const char* more) {
  const int64_t size = backend::numel(values);
  if (size == 0 || (ctx.flags & TE_FL_CALL_CAPTURING) != 0) return;
  const cudaStream_t stream = stream_of(ctx);
  auto* bad = static_cast<unsigned long long*>(ctx.workspace);
  check(cudaMemsetAsync(bad, 0xFF, sizeof *bad, stream), "cudaMemsetAsync");
  range_kernel<<<blocks_for(size), kThreads, 0, stream>>>(
      Integers(values), size, extent, ignored != nullptr, ignored != nullptr ? *ignored : 0, bad);
  check_launch("range_kernel");
  unsigned long long position = 0;
  check(cudaMemcpyAsync(&position, bad, sizeof position, cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (position == ~0ull) return;
  int64_t wide = 0;
  int32_t narrow = 0;
  const bool is_wide = dtype_of(values) == TE_FL_I64;
  const char* at = backend::data<const char>(values) + position * (is_wide ? 8 : 4);
  check(cudaMemcpyAsync(is_wide ? static_cast<void*>(&wide) : &narrow, at, is_wide ? 8 : 4,
                        cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  invalid(std::string(name) + "[" + std::to_string(position) + "] is " +
          std::to_string(is_wide ? wide : narrow) + "; it must lie in [0, " +
          std::to_string(extent) + ")" + more);
}

struct Lookup {
  Source weight;
  Integers indices;
  int64_t rows, cols;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    const int64_t index = indices[row];
    if (index >= 0 && index < rows) return weight.load(index * cols + col, n, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = NAN;
  }
};
void embedding_fwd(const te_fl_context& ctx, const te_fl_embedding_fwd_args& args) {
  const backend::Matrix table = backend::as_matrix(*args.weight);
  check_range(ctx, *args.indices, table.rows, nullptr, "indices", ", the rows of weight");
  store_output(ctx, *args.output,
               Lookup{Source(*args.weight), Integers(*args.indices), table.rows, table.cols});
}
Refusal refuse_embedding_fwd(const te_fl_embedding_fwd_args& args) {
  if (!all_dense(args.indices, args.weight, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.weight) ? kOverlaps : nullptr;
}

// One row of the table for each blockIdx.x; its positions are added in order.
__global__ void __launch_bounds__(kThreads)
    embedding_bwd_kernel(Integers indices, int64_t positions, Source grad, Source previous,
                         Target out, int64_t cols, bool accumulate) {
  __shared__ bool mine[kThreads];
  const int64_t row = blockIdx.x;
  const int64_t col = (blockIdx.y * int64_t{kThreads} + threadIdx.x) * kGroup;
  const int n = static_cast<int>(cols - col < kGroup ? cols - col : kGroup);
  float sum[kGroup] = {};
  if (accumulate && n > 0) previous.load(row * cols + col, n, sum);
  for (int64_t first = 0; first < positions; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const bool is_mine = i < positions && indices[i] == row;
    if (__syncthreads_or(is_mine) == 0) continue;
    mine[threadIdx.x] = is_mine;
    __syncthreads();
    const int64_t count = positions - first < kThreads ? positions - first : kThreads;
    for (int j = 0; j < count && n > 0; ++j) {
      if (!mine[j]) continue;
      float v[kGroup];
      grad.load((first + j) * cols + col, n, v);
#pragma unroll
      for (int k = 0; k < kGroup; ++k) sum[k] += v[k];
    }
    __syncthreads();
  }
  if (n > 0) out.store(row * cols + col, n, sum);
}
void embedding_bwd(const te_fl_context& ctx, const te_fl_embedding_bwd_args& args) {
  const backend::Matrix table = backend::as_matrix(*args.grad_weight);
  check_range(ctx, *args.indices, table.rows, nullptr, "indices", ", the rows of weight");
  if (table.rows == 0 || table.cols == 0) return;
  const dim3 grid(static_cast<unsigned>(table.rows),
                  static_cast<unsigned>(ceil_div(table.cols, kThreads * kGroup)));
  embedding_bwd_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(
      Integers(*args.indices), backend::numel(*args.indices), Source(*args.grad_output),
      Source(*args.grad_weight), Target(*args.grad_weight), table.cols, args.accumulate != 0);
  check_launch("embedding_bwd");
}
Refusal refuse_embedding_bwd(const te_fl_embedding_bwd_args& args) {
  if (!all_dense(args.indices, args.grad_output, args.grad_weight)) return kNotContiguous;
  return overlaps(*args.grad_weight, *args.grad_output) ? kOverlaps : nullptr;
}

__device__ float block_sum(float v) {
  __shared__ float parts[kThreads / 32];
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < kThreads / 32; ++i) total += parts[i];
  return total;
}
// The largest; NaN if there is one.
__device__ float block_max(float v) {
  __shared__ float parts[kThreads / 32];
  const auto larger = [](float a, float b) { return b > a || isnan(b) ? b : a; };
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, v, step);
    v = isnan(v) ? v : larger(v, other);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float top = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) top = isnan(top) ? top : larger(top, parts[i]);
  return top;
}

// One row for each block.
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(Source logits, Integers targets, float* loss, float* lse, int64_t classes,
                         float smoothing, int64_t ignored) {
  const int64_t row = blockIdx.x;
  float top = -INFINITY, plain = 0.0f;
  for (int64_t c = threadIdx.x; c < classes; c += kThreads) {
    const float v = logits.at(row * classes + c);
    if (v > top || isnan(v)) top = v;
    plain += v;
  }
  top = block_max(top);
  float sum = 0.0f;
  if (!isinf(top)) {
    for (int64_t c = threadIdx.x; c < classes; c += kThreads) {
      sum += expf(logits.at(row * classes + c) - top);
    }
  }
  sum = block_sum(sum);
  plain = smoothing != 0.0f ? block_sum(plain) : 0.0f;
  if (threadIdx.x != 0) return;
  const float total = isinf(top) ? top : top + logf(sum);
  lse[row] = total;
  const int64_t target = targets[row];
  float value = 0.0f;
  if (target != ignored) {
    if (target < 0 || target >= classes) {
      value = NAN;
    } else {
      value = total;
      if (smoothing != 1.0f) value -= (1.0f - smoothing) * logits.at(row * classes + target);
      if (smoothing != 0.0f) value -= smoothing * (plain / static_cast<float>(classes));
    }
  }
  loss[row] = value;
}
void cross_entropy_fwd(const te_fl_context& ctx, const te_fl_cross_entropy_fwd_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.logits);
  check_range(ctx, *args.targets, matrix.cols, &args.ignore_index, "targets",
              ", the classes, or be ignore_index");
  if (matrix.rows == 0) return;
  cross_entropy_kernel<<<static_cast<unsigned>(matrix.rows), kThreads, 0, stream_of(ctx)>>>(
      Source(*args.logits), Integers(*args.targets), backend::data<float>(*args.loss),
      backend::data<float>(*args.lse), matrix.cols, args.label_smoothing, args.ignore_index);
  check_launch("cross_entropy_fwd");
}
Refusal refuse_cross_entropy_fwd(const te_fl_cross_entropy_fwd_args& args) {
  return all_dense(args.logits, args.targets, args.loss, args.lse) ? nullptr : kNotContiguous;
}

struct LossGradient {
  Source logits;
  Integers targets;
  const float* grad;
  const float* lse;
  int64_t classes;
  float smoothing;
  int64_t ignored;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    const int64_t target = targets[row];
    logits.load(row * classes + col, n, v);
    const float g = grad[row], row_lse = lse[row], less = smoothing / static_cast<float>(classes);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float value = expf(v[i] - row_lse) - less;
      if (col + i == target) value -= 1.0f - smoothing;
      v[i] = target == ignored ? 0.0f : target < 0 || target >= classes ? NAN : g * value;
    }
  }
};
void cross_entropy_bwd(const te_fl_context& ctx, const te_fl_cross_entropy_bwd_args& args) {
  const int64_t classes = backend::as_matrix(*args.logits).cols;
  check_range(ctx, *args.targets, classes, &args.ignore_index, "targets",
              ", the classes, or be ignore_index");
  store_output(ctx, *args.grad_logits,
               LossGradient{Source(*args.logits), Integers(*args.targets),
                            backend::data<const float>(*args.grad_loss),
                            backend::data<const float>(*args.lse), classes, args.label_smoothing,
                            args.ignore_index});
}
Refusal refuse_cross_entropy_bwd(const te_fl_cross_entropy_bwd_args& args) {
  if (!all_dense(args.logits, args.targets, args.grad_loss, args.lse, args.grad_logits)) {
    return kNotContiguous;
  }
  return overlaps_askew(*args.grad_logits, *args.logits) ? kOverlaps : nullptr;
}

using Ops = std::vector<te_fl_op_desc>;
template <class Args, auto F, auto Refuses>
void append(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
    *bytes = kStoreWorkspace;
    return te_fl_status{TE_FL_OK};
  };
}

}  // namespace

void append_tensor(Ops& ops) {
  ops.push_back(
      descriptor<te_fl_strided_copy_args, strided_copy, refuse_strided_copy>("strided_copy"));
  ops.push_back(descriptor<te_fl_fill_args, fill, refuse_fill>("fill"));
  append<te_fl_embedding_fwd_args, embedding_fwd, refuse_embedding_fwd>(ops, "embedding_fwd");
  append<te_fl_embedding_bwd_args, embedding_bwd, refuse_embedding_bwd>(ops, "embedding_bwd");
  append<te_fl_cross_entropy_fwd_args, cross_entropy_fwd, refuse_cross_entropy_fwd>(
      ops, "cross_entropy_fwd");
  append<te_fl_cross_entropy_bwd_args, cross_entropy_bwd, refuse_cross_entropy_bwd>(
      ops, "cross_entropy_bwd");
}

}  // namespace te_fl::cuda
