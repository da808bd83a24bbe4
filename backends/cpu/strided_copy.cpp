#include "strided_copy.hpp"

#include <array>
#include <cstring>
#include <utility>

#include "convert.hpp"
#include "quant_store.hpp"

namespace te_fl::cpu {
namespace {

constexpr int kMaxDims = 16;

struct Dim {
  int64_t size, in, out;  // extent, and strides in elements
};

// The dimensions of a copy, outermost first. Dimensions of extent 1 are dropped, and adjacent
// dimensions that are contiguous in both tensors are merged. There is always at least one
// dimension.
struct Walk {
  std::array<Dim, kMaxDims + 1> dims;
  int count = 0;

  Walk(const te_fl_tensor& input, const te_fl_tensor& output) {
    for (int i = 0; i < input.dl.ndim; ++i) {
      const Dim d{input.dl.shape[i], backend::stride(input, i), backend::stride(output, i)};
      if (d.size == 1) continue;
      if (count > 0) {
        Dim& outer = dims[count - 1];
        if (outer.in == d.in * d.size && outer.out == d.out * d.size) {
          outer = {outer.size * d.size, d.in, d.out};
          continue;
        }
      }
      dims[count++] = d;
    }
    if (count == 0) dims[count++] = {1, 1, 1};
  }
};

bool converts(int dtype) {
  return dtype == TE_FL_F32 || dtype == TE_FL_F16 || dtype == TE_FL_BF16 || is_fp8_dtype(dtype);
}

template <class T>
void move(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t n) {
  const T* src = reinterpret_cast<const T*>(from);
  T* dst = reinterpret_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) dst[i * to_stride] = src[i * from_stride];
}

void move(int64_t bytes, const char* from, int64_t from_stride, char* to, int64_t to_stride,
          int64_t n) {
  if (from_stride == 1 && to_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(n * bytes));
    return;
  }
  switch (bytes) {
    case 1:
      return move<uint8_t>(from, from_stride, to, to_stride, n);
    case 2:
      return move<uint16_t>(from, from_stride, to, to_stride, n);
    case 4:
      return move<uint32_t>(from, from_stride, to, to_stride, n);
    default:
      return move<uint64_t>(from, from_stride, to, to_stride, n);
  }
}

// Copies runs along one dimension.
struct Copier {
  int from, to;  // dtypes of the source and the destination
  int64_t from_bytes, to_bytes;

  void run(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t n) const {
    if (from == to) return move(from_bytes, src, src_stride, dst, dst_stride, n);
    Chunk values, packed;
    for (int64_t i = 0; i < n; i += kChunk) {
      const int64_t m = std::min(kChunk, n - i);
      const char* piece = src + i * src_stride * from_bytes;
      if (src_stride != 1) {
        move(from_bytes, piece, src_stride, reinterpret_cast<char*>(packed.data), 1, m);
        piece = reinterpret_cast<const char*>(packed.data);
      }
      load_f32(from, piece, m, values.data);
      char* place = dst + i * dst_stride * to_bytes;
      if (dst_stride == 1) {
        store_f32(to, values.data, m, place);
      } else {
        store_f32(to, values.data, m, packed.data);
        move(to_bytes, reinterpret_cast<const char*>(packed.data), 1, place, dst_stride, m);
      }
    }
  }
};

// Copies rows [begin, end) along the last dimension.
void copy_rows(const Walk& walk, const Copier& copier, const char* src, char* dst, int64_t begin,
               int64_t end) {
  const Dim last = walk.dims[walk.count - 1];
  std::array<int64_t, kMaxDims + 1> at{};
  int64_t in = 0, out = 0, rest = begin;
  for (int d = walk.count - 2; d >= 0; --d) {
    at[d] = rest % walk.dims[d].size;
    rest /= walk.dims[d].size;
    in += at[d] * walk.dims[d].in, out += at[d] * walk.dims[d].out;
  }
  for (int64_t row = begin; row < end; ++row) {
    copier.run(src + in * copier.from_bytes, last.in, dst + out * copier.to_bytes, last.out,
               last.size);
    for (int d = walk.count - 2; d >= 0; --d) {
      in += walk.dims[d].in, out += walk.dims[d].out;
      if (++at[d] < walk.dims[d].size) break;
      in -= at[d] * walk.dims[d].in, out -= at[d] * walk.dims[d].out;
      at[d] = 0;
    }
  }
}

// Returns the dimension in which the input is contiguous if that is not the last dimension, so that
// the copy is a transposition; otherwise -1.
int transposed_dim(const Walk& walk) {
  if (walk.count < 2 || walk.dims[walk.count - 1].in == 1) return -1;
  for (int d = walk.count - 2; d >= 0; --d) {
    if (walk.dims[d].in == 1) return d;
  }
  return -1;
}

// Copies square tiles of the two transposed dimensions, so that each cache line is read once.
void copy_transposed(Walk walk, int pair, const Copier& copier, const char* src, char* dst) {
  constexpr int64_t kTile = 64, kPitch = kTile + 1;
  const Dim last = walk.dims[walk.count - 1];
  std::swap(walk.dims[pair], walk.dims[walk.count - 2]);
  const Dim other = walk.dims[walk.count - 2];
  Walk outer = walk;
  outer.count = walk.count - 2;
  int64_t planes = 1;
  for (int d = 0; d < outer.count; ++d) planes *= outer.dims[d].size;
  const int64_t down = ceil_div(other.size, kTile), across = ceil_div(last.size, kTile);
  ThreadPool::instance().parallel_for(planes * down * across, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t in = 0, out = 0, plane = t / (down * across);
      for (int d = outer.count - 1; d >= 0; --d) {
        const int64_t i = plane % outer.dims[d].size;
        plane /= outer.dims[d].size;
        in += i * outer.dims[d].in, out += i * outer.dims[d].out;
      }
      const int64_t row = t / across % down * kTile, col = t % across * kTile;
      const int64_t cols = std::min(kTile, last.size - col);
      // Copies through a small buffer, so that reads and writes are long runs regardless of how the
      // strides map to cache sets.
      alignas(64) char square[kTile * kPitch * 8];
      const int64_t rows = std::min(kTile, other.size - row), bytes = copier.from_bytes;
      for (int64_t c = 0; c < cols; ++c) {
        move(bytes, src + (in + row * other.in + (col + c) * last.in) * bytes, other.in,
             square + c * kPitch * bytes, 1, rows);
      }
      for (int64_t r = 0; r < rows; ++r) {
        copier.run(square + r * bytes, kPitch,
                   dst + (out + (row + r) * other.out + col * last.out) * copier.to_bytes, last.out,
                   cols);
      }
    }
  });
}

}  // namespace

const char* refuse_copy(const te_fl_tensor& input, const te_fl_tensor& output) noexcept {
  const int from = dtype_of(input), to = dtype_of(output);
  if (input.dl.ndim > kMaxDims) return "copies tensors of up to 16 dimensions";
  if (from == to ? input.dl.dtype.bits % 8 != 0 : !converts(from) || !converts(to)) {
    return "converts between F32, F16, BF16 and FP8 and copies whole bytes only";
  }
  return nullptr;
}

void copy_tensor(const te_fl_tensor& input, const te_fl_tensor& output) {
  const int64_t size = backend::numel(input);
  if (size == 0) return;
  const Walk walk(input, output);
  const Copier copier{dtype_of(input), dtype_of(output), element_bytes(input),
                      element_bytes(output)};
  const char* src = backend::data<const char>(input);
  char* dst = backend::data<char>(output);
  const Dim last = walk.dims[walk.count - 1];
  if (walk.count == 1) {
    return ThreadPool::instance().parallel_for(size, kGrain, [&](int64_t begin, int64_t end) {
      copier.run(src + begin * last.in * copier.from_bytes, last.in,
                 dst + begin * last.out * copier.to_bytes, last.out, end - begin);
    });
  }
  const int pair = transposed_dim(walk);
  if (pair >= 0) return copy_transposed(walk, pair, copier, src, dst);
  ThreadPool::instance().parallel_for(
      size / last.size, grain_of_rows(last.size),
      [&](int64_t begin, int64_t end) { copy_rows(walk, copier, src, dst, begin, end); });
}

}  // namespace te_fl::cpu
