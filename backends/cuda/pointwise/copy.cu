// Copies between tensors of any strides, with conversion.
#include <cmath>

#include "common/transpose.cuh"
#include "plugin/families.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/ops/tensor.h"

namespace te_fl::cuda {
namespace {

using backend::invalid;

template <class Word>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Word* in, Word* out, Nest nest, int64_t size) {
  Word held[kAtOnce];
  int64_t to[kAtOnce];
  const int64_t first = blockIdx.x * int64_t{kThreads * kAtOnce} + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t i = first + u * kThreads;
    if (i >= size) continue;
    int64_t from = 0;
    nest.offsets(i, from, to[u]);
    held[u] = in[from];
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (first + u * kThreads < size) out[to[u]] = held[u];
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
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const void* in, int from_dtype, void* out, int to_dtype, Nest nest,
                   int64_t size) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    int64_t from = 0, to = 0;
    nest.offsets(i, from, to);
    store_double(out, to_dtype, to, load_double(in, from_dtype, from));
  }
}
// Runs of eight elements of the last dimension, which is dense in both; through FP32.
__global__ void __launch_bounds__(kThreads)
    convert_runs_kernel(Source in, Target out, Nest runs, int64_t size, int64_t length) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= size) return;
  int64_t from = 0, to = 0;
  runs.offsets(i, from, to);
  const int last = runs.rank - 1;
  int64_t col = i;  // of the row
  if (last > 0) {
    uint32_t rest = static_cast<uint32_t>(i);
    if (runs.wide) {
      col = i % runs.shape[last];
    } else {
      runs.by[last](static_cast<uint32_t>(i), rest);
      col = rest;
    }
  }
  const int64_t left = length - col * kGroup;
  const int n = left < kGroup ? static_cast<int>(left) : kGroup;
  float v[kGroup];
  in.load(from, n, v);
  out.store(to, n, v);
}

bool is_float(int dtype) { return dtype <= TE_FL_F8E8M0; }
bool is_fast(int dtype) { return dtype >= TE_FL_F32 && dtype <= TE_FL_F8E5M2; }

void convert(const te_fl_context& ctx, const te_fl_strided_copy_args& args, Nest nest) {
  const int from = dtype_of(*args.input), to = dtype_of(*args.output);
  const int last = nest.rank - 1;
  if (is_fast(from) && is_fast(to) && nest.to[last] == 1 && nest.from[last] == 1) {
    const int64_t length = nest.shape[last];
    nest.shape[last] = ceil_div(length, kGroup);
    nest.from[last] = nest.to[last] = kGroup;
    prepare(nest);
    const int64_t size = nest.size();
    convert_runs_kernel<<<static_cast<unsigned>(ceil_div(size, kThreads)), kThreads, 0,
                          stream_of(ctx)>>>(Source(*args.input), Target(*args.output), nest, size,
                                            length);
    return;
  }
  prepare(nest);
  const int64_t size = nest.size();
  convert_kernel<<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(
      backend::data<void>(*args.input), from, backend::data<void>(*args.output), to, nest, size);
}

void move(const te_fl_context& ctx, Nest nest, int bytes, const void* in, void* out) {
  if (nest.rank == 1 && nest.from[0] == 1 && nest.to[0] == 1) {
    return check(cudaMemcpyAsync(out, in, static_cast<size_t>(nest.shape[0] * bytes),
                                 cudaMemcpyDeviceToDevice, stream_of(ctx)),
                 "cudaMemcpyAsync");
  }
  int dense = 0;
  if (is_transposition(nest, dense)) {
    bool done = false;
    with_word(bytes, [&]<class Bits>(Bits) {
      if constexpr (sizeof(Bits) < 16) done = transpose<Bits>(ctx, nest, dense, in, out);
    });
    if (done) return;
  }
  const int word = widen(nest, bytes, in, out);
  prepare(nest);
  const int64_t size = nest.size();
  with_word(word, [&]<class Word>(Word) {
    copy_kernel<Word><<<blocks_of(size), kThreads, 0, stream_of(ctx)>>>(
        static_cast<const Word*>(in), static_cast<Word*>(out), nest, size);
  });
}

void strided_copy(const te_fl_context& ctx, const te_fl_strided_copy_args& args) {
  const int from = dtype_of(*args.input), to = dtype_of(*args.output);
  if (from != to && (!is_float(from) || !is_float(to))) {
    invalid(
        std::string("input and output have different dtypes; only float types convert into each "
                    "other, others copy to themselves"));
  }
  if (backend::numel(*args.input) == 0) return;
  const Nest nest = nest_of(*args.output, args.input);
  if (from != to) {
    convert(ctx, args, nest);
  } else {
    move(ctx, nest, args.input->dl.dtype.bits / 8, backend::data<const void>(*args.input),
         backend::data<void>(*args.output));
  }
  check_launch("strided_copy");
}
Refusal refuse_strided_copy(const te_fl_strided_copy_args& args) {
  if (args.input->dl.dtype.bits < 8 || args.output->dl.dtype.bits < 8) return "copies whole bytes";
  return nullptr;
}

}  // namespace

void append_copies(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(
      descriptor<te_fl_strided_copy_args, strided_copy, refuse_strided_copy>("strided_copy"));
}

}  // namespace te_fl::cuda
