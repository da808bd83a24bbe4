// The loop nest that copies or fills strided tensors: dimensions are merged to as few as possible,
// and elements are moved in the widest words that the innermost dimension allows.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "common/pack.cuh"

namespace te_fl::cuda {

// The shared shape of an input and an output, and the strides of both in elements: `from` of the
// input, `to` of the output. The last dimension is the output's innermost. `wide`: there are 2^31
// elements or more, so offsets need 64-bit divisions.
struct Nest {
  int rank = 0;
  int64_t shape[8], from[8], to[8];
  FastDiv by[8];
  bool wide = false;

  int64_t size() const {
    int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= shape[d];
    return n;
  }
  __device__ void offsets(int64_t i, int64_t& in, int64_t& out) const {
    in = out = 0;
    if (wide) {
      for (int d = rank - 1; d > 0; --d) {
        const int64_t next = i / shape[d];
        in += (i - next * shape[d]) * from[d];
        out += (i - next * shape[d]) * to[d];
        i = next;
      }
    } else {
      auto n = static_cast<uint32_t>(i);
#pragma unroll
      for (int d = 7; d > 0; --d) {
        if (d >= rank) continue;
        uint32_t at = 0;
        n = by[d](n, at);
        in += at * from[d];
        out += at * to[d];
      }
      if (rank > 1) i = n;
    }
    in += i * from[0];
    out += i * to[0];
  }
};

// Returns the nest of `out` and `in`, with dimensions ordered by the output's strides. Drops
// dimensions of extent 1 and merges adjacent dimensions that are contiguous in both tensors. Rank 0
// means one element, so the caller must test for an empty tensor first.
inline Nest make_nest(const te_fl_tensor& out, const te_fl_tensor* in) {
  struct Dim {
    int64_t size, from, to;
  };
  std::vector<Dim> dims;
  for (int d = 0; d < out.dl.ndim; ++d) {
    if (out.dl.shape[d] == 1) continue;
    dims.push_back(
        {out.dl.shape[d], in != nullptr ? backend::stride(*in, d) : 0, backend::stride(out, d)});
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [](const Dim& a, const Dim& b) { return std::abs(a.to) > std::abs(b.to); });
  Nest nest;
  for (const Dim& dim : dims) {
    const int last = nest.rank - 1;
    if (last >= 0 && nest.to[last] == dim.to * dim.size &&
        (in == nullptr || nest.from[last] == dim.from * dim.size)) {
      nest.shape[last] *= dim.size;
      nest.from[last] = dim.from, nest.to[last] = dim.to;
    } else {
      nest.shape[nest.rank] = dim.size;
      nest.from[nest.rank] = dim.from, nest.to[nest.rank] = dim.to;
      ++nest.rank;
    }
  }
  if (nest.rank == 0) {
    nest.rank = 1;
    nest.shape[0] = 1, nest.from[0] = nest.to[0] = 0;
  }
  return nest;
}
inline void prepare(Nest& nest) {
  nest.wide = nest.size() >= kFastDivLimit;
  for (int d = 0; d < nest.rank && !nest.wide; ++d) nest.by[d] = FastDiv(nest.shape[d]);
}

// Rewrites the nest in units of the widest word (up to 16 bytes) in which both tensors can be
// accessed. Returns the bytes of that word.
inline int widen(Nest& nest, int bytes, const void* in, const void* out) {
  const int last = nest.rank - 1;
  if (nest.to[last] != 1 || (in != nullptr && nest.from[last] != 1)) return bytes;
  const auto fits = [&](int word) {
    const int64_t each = word / bytes;
    bool fine = nest.shape[last] % each == 0 && reinterpret_cast<uintptr_t>(out) % word == 0 &&
                reinterpret_cast<uintptr_t>(in) % word == 0;
    for (int d = 0; d < last; ++d) {
      fine = fine && nest.to[d] % each == 0 && (in == nullptr || nest.from[d] % each == 0);
    }
    return fine;
  };
  int word = 16;
  while (word > bytes && !fits(word)) word /= 2;
  const int64_t each = word / bytes;
  nest.shape[last] /= each;
  for (int d = 0; d < last; ++d) nest.from[d] /= each, nest.to[d] /= each;
  return word;
}

constexpr int kAtOnce = 4;  // loads that a thread has in flight, in words

inline unsigned block_count(int64_t words) {
  return static_cast<unsigned>(ceil_div(words, int64_t{kThreads} * kAtOnce));
}

// Calls f with a value of the word type of `bytes` bytes.
template <class F>
void with_word(int bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    case 8:
      return f(uint64_t{});
    default:
      return f(uint4{});
  }
}

}  // namespace te_fl::cuda
