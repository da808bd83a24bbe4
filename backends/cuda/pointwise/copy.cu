// The op strided_copy: copies between tensors with any strides, with dtype conversion.
#include <cmath>

#include "common/transpose.cuh"
#include "plugin/families.hpp"
#include "te_fl/backend/describe.hpp"
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
// Stores v at element i, rounded once to `dtype` with the same conversion code as on the host.
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
// Converts runs of eight elements through FP32. The last dimension must be contiguous in both
// tensors.
__global__ void __launch_bounds__(kThreads)
    convert_runs_kernel(Source in, Target out, Nest runs, int64_t size, int64_t length) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= size) return;
  int64_t from = 0, to = 0;
  runs.offsets(i, from, to);
  const int last = runs.rank - 1;
  int64_t col = i;  // index of the run in its row
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

// The kernel of a copy. If dtypes differ: kConvertRuns or kConvert (single elements). If they are
// equal, bytes are copied: kMemory, kTranspose or kWords.
enum class CopyWay { kNone, kConvertRuns, kConvert, kMemory, kTranspose, kWords };
struct CopyChoice {
  CopyWay way = CopyWay::kNone;
  Nest nest;      // the loop nest for this kernel
  int word = 0;   // kTranspose, kWords: bytes per word
  int dense = 0;  // kTranspose: the input's contiguous dimension

  std::string text() const {
    const std::string bytes = std::to_string(word) + " bytes";
    switch (way) {
      case CopyWay::kNone:
        return "none: a tensor without elements";
      case CopyWay::kConvertRuns:
        return "convert_runs: eight elements of a dense dimension at once, through FP32";
      case CopyWay::kConvert:
        return "convert: element by element, through FP64";
      case CopyWay::kMemory:
        return "none: cudaMemcpyAsync of one run";
      case CopyWay::kTranspose:
        return "transpose: tiles of elements of " + bytes;
      default:
        return "copy: words of " + bytes;
    }
  }
};

CopyChoice choose_copy(const te_fl_strided_copy_args& args) {
  CopyChoice c;
  if (backend::numel(*args.input) == 0) return c;
  const int from = dtype_of(*args.input), to = dtype_of(*args.output);
  Nest& nest = c.nest = make_nest(*args.output, args.input);
  const int last = nest.rank - 1;
  if (from != to) {
    const bool runs = is_fast(from) && is_fast(to) && nest.to[last] == 1 && nest.from[last] == 1;
    c.way = runs ? CopyWay::kConvertRuns : CopyWay::kConvert;
    return c;
  }
  c.word = args.input->dl.dtype.bits / 8;
  if (nest.rank == 1 && nest.from[0] == 1 && nest.to[0] == 1) {
    c.way = CopyWay::kMemory;
  } else if (c.word < 16 && is_transposition(nest, c.dense)) {
    c.way = CopyWay::kTranspose;
  } else {
    c.way = CopyWay::kWords;
    c.word = widen(nest, c.word, backend::data<const void>(*args.input),
                   backend::data<void>(*args.output));
  }
  return c;
}

void convert(const te_fl_context& ctx, const te_fl_strided_copy_args& args, Nest nest, bool runs) {
  if (runs) {
    const int last = nest.rank - 1;
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
      backend::data<void>(*args.input), dtype_of(*args.input), backend::data<void>(*args.output),
      dtype_of(*args.output), nest, size);
}

void copy_words(const te_fl_context& ctx, Nest nest, int word, const void* in, void* out) {
  prepare(nest);
  const int64_t size = nest.size();
  with_word(word, [&]<class Word>(Word) {
    copy_kernel<Word><<<block_count(size), kThreads, 0, stream_of(ctx)>>>(
        static_cast<const Word*>(in), static_cast<Word*>(out), nest, size);
  });
}

void copy_transposed(const te_fl_context& ctx, const CopyChoice& c, const void* in, void* out) {
  bool done = false;
  with_word(c.word, [&]<class Bits>(Bits) {
    if constexpr (sizeof(Bits) < 16) done = transpose<Bits>(ctx, c.nest, c.dense, in, out);
  });
  // A launch has fewer than 2^31 tiles. A tensor with more tiles, which no GPU's memory can hold,
  // is copied in words.
  if (done) return;
  Nest nest = c.nest;
  const int word = widen(nest, c.word, in, out);
  copy_words(ctx, nest, word, in, out);
}

void strided_copy(const te_fl_context& ctx, const te_fl_strided_copy_args& args) {
  const int from = dtype_of(*args.input), to = dtype_of(*args.output);
  if (from != to && (!is_float(from) || !is_float(to))) {
    invalid(
        std::string("input and output have different dtypes; only float types convert into each "
                    "other, others copy to themselves"));
  }
  const CopyChoice choice = choose_copy(args);
  const void* in = backend::data<const void>(*args.input);
  void* out = backend::data<void>(*args.output);
  switch (choice.way) {
    case CopyWay::kNone:
      return;
    case CopyWay::kConvertRuns:
    case CopyWay::kConvert:
      convert(ctx, args, choice.nest, choice.way == CopyWay::kConvertRuns);
      break;
    case CopyWay::kMemory:
      check(cudaMemcpyAsync(out, in, static_cast<size_t>(choice.nest.shape[0] * choice.word),
                            cudaMemcpyDeviceToDevice, stream_of(ctx)),
            "cudaMemcpyAsync");
      break;
    case CopyWay::kTranspose:
      copy_transposed(ctx, choice, in, out);
      break;
    case CopyWay::kWords:
      copy_words(ctx, choice.nest, choice.word, in, out);
  }
  check_launch("strided_copy");
}
std::string words_of_copy(const te_fl_context&, const te_fl_strided_copy_args& args) {
  return "kernel " + choose_copy(args).text();
}
Refusal refuse_strided_copy(const te_fl_strided_copy_args& args) {
  if (args.input->dl.dtype.bits < 8 || args.output->dl.dtype.bits < 8) return "copies whole bytes";
  return nullptr;
}

}  // namespace

void append_copies(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(
      descriptor<te_fl_strided_copy_args, strided_copy, refuse_strided_copy>("strided_copy"));
  ops.back().describe = backend::describe_thunk<te_fl_strided_copy_args, words_of_copy>;
}

}  // namespace te_fl::cuda
