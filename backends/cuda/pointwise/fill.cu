// The op fill: sets every element of a tensor with any strides.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/nest.cuh"
#include "plugin/families.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/ops/tensor.h"

namespace te_fl::cuda {
namespace {

template <class Word>
__global__ void __launch_bounds__(kThreads)
    fill_kernel(Word* out, Nest nest, int64_t size, Word value) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kAtOnce} + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t i = first + u * kThreads;
    if (i >= size) continue;
    int64_t from = 0, to = 0;
    nest.offsets(i, from, to);
    out[to] = value;
  }
}
// Returns the bits of `value`, rounded towards zero, as integer type T. The op's rules keep the value
// in T's range.
template <class T>
uint64_t integer_bits(double value) {
  return static_cast<uint64_t>(static_cast<T>(value));
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
      return integer_bits<int8_t>(value);
    case TE_FL_I16:
      return integer_bits<int16_t>(value);
    case TE_FL_I32:
      return integer_bits<int32_t>(value);
    case TE_FL_I64:
      return integer_bits<int64_t>(value);
    case TE_FL_U16:
      return integer_bits<uint16_t>(value);
    case TE_FL_U32:
      return integer_bits<uint32_t>(value);
    case TE_FL_U64:
      return integer_bits<uint64_t>(value);
    default:  // u8 and bool
      return integer_bits<uint8_t>(value);
  }
}

// Returns a word that consists of repeated copies of `value`, an element of `bytes` bytes.
template <class Word>
Word repeated(uint64_t value, int bytes) {
  Word word;
  for (size_t at = 0; at < sizeof word; at += static_cast<size_t>(bytes)) {
    std::memcpy(reinterpret_cast<char*>(&word) + at, &value, static_cast<size_t>(bytes));
  }
  return word;
}
void fill(const te_fl_context& ctx, const te_fl_fill_args& args) {
  const uint64_t bits = bits_of(dtype_of(*args.output), args.value);
  if (backend::numel(*args.output) == 0) return;
  const int bytes = args.output->dl.dtype.bits / 8;
  Nest nest = make_nest(*args.output, nullptr);
  const int word = widen(nest, bytes, nullptr, backend::data<void>(*args.output));
  prepare(nest);
  const int64_t size = nest.size();
  with_word(word, [&]<class Word>(Word) {
    fill_kernel<Word><<<block_count(size), kThreads, 0, stream_of(ctx)>>>(
        backend::data<Word>(*args.output), nest, size, repeated<Word>(bits, bytes));
  });
  check_launch("fill");
}
Refusal refuse_fill(const te_fl_fill_args& args) {
  return args.output->dl.dtype.bits < 8 ? "fills whole bytes" : nullptr;
}

std::string words_of_fill(const te_fl_context&, const te_fl_fill_args& args) {
  if (backend::numel(*args.output) == 0) return "kernel none: a tensor without elements";
  Nest nest = make_nest(*args.output, nullptr);
  const int word =
      widen(nest, args.output->dl.dtype.bits / 8, nullptr, backend::data<void>(*args.output));
  return "kernel fill: words of " + std::to_string(word) + " bytes";
}

}  // namespace

void append_fills(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_fill_args, fill, refuse_fill>("fill"));
  ops.back().describe = backend::describe_thunk<te_fl_fill_args, words_of_fill>;
}

}  // namespace te_fl::cuda
