// Dropout with a saved mask of one bit per element. A part of the work begins at a multiple of 64
// elements, so that parts share neither bytes of the mask nor blocks of the random stream.
#include "te_fl/ops/dropout.h"

#include <string>
#include <vector>

#include "convert.hpp"
#include "families.hpp"
#include "tensor_view.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "dropout.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "philox-inl.hpp"
#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// bits[i / 8] bit i % 8: whether word i of the stream from block `block` is at least threshold, for
// 64 elements.
void KeepBits64(uint64_t seed, uint64_t block, uint64_t threshold, uint8_t* bits) {
  if (threshold == 0) {
    std::memset(bits, 0xFF, 8);
    return;
  }
  const DU d;
  const PhiloxKey key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const VU limit = SetU(static_cast<uint32_t>(threshold));
  const auto lanes = static_cast<int64_t>(NumLanes());
  HWY_ALIGN uint32_t stream[64];
  for (int64_t b = 0; b < 16; b += lanes) {
    const uint64_t first = block + static_cast<uint64_t>(b);
    const VU start = SetU(static_cast<uint32_t>(first));
    const VU low = hn::Add(start, hn::Iota(d, 0));
    const VU high = SetU(static_cast<uint32_t>(first >> 32));
    const VU carried = hn::IfThenElse(hn::Lt(low, start), hn::Add(high, SetU(1)), high);
    VU words[4];
    PhiloxBlocks(low, carried, key, words);
#if HWY_TARGET == HWY_SCALAR
    for (int k = 0; k < 4; ++k) stream[4 * b + k] = hn::GetLane(words[k]);
#else
    hn::StoreInterleaved4(words[0], words[1], words[2], words[3], d, stream + 4 * b);
#endif
  }
  uint64_t mask = 0;
  for (int64_t i = 0; i < 64; i += lanes) {
    uint8_t part[8] = {};
    hn::StoreMaskBits(DF(), KeepMask(hn::LoadU(d, stream + i), limit), part);
    mask |= (uint64_t{part[0]} | uint64_t{part[1]} << 8) << i;
  }
  for (int byte = 0; byte < 8; ++byte) bits[byte] = static_cast<uint8_t>(mask >> (8 * byte));
}

// y = x * kept where the bit is set, else 0. A NaN that is dropped leaves 0.
template <class T>
void ApplyBits(const void* raw, const uint8_t* bits, float kept, int64_t n, void* raw_out) {
  const T* x = static_cast<const T*>(raw);
  T* y = static_cast<T*>(raw_out);
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF factor = SetF(kept);
  const auto mask = [&](int64_t i) HWY_ATTR {
    const int64_t byte = i / 8;
    const int64_t last = (n + 7) / 8 - 1;
    const uint32_t both =
        (uint32_t{bits[byte]} | uint32_t{bits[byte < last ? byte + 1 : last]} << 8) >> (i % 8);
    const uint8_t part[8] = {static_cast<uint8_t>(both), static_cast<uint8_t>(both >> 8)};
    return hn::LoadMaskBits(DF(), part);
  };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    StoreF32(hn::IfThenElseZero(mask(i), hn::Mul(LoadF32(x + i), factor)), y + i);
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    StorePart(hn::IfThenElseZero(mask(i), hn::Mul(LoadPart(x + i, rest), factor)), y + i, rest);
  }
}

void DropByBits(int dtype, const void* x, const uint8_t* bits, float kept, int64_t n, void* y) {
  switch (dtype) {
    case TE_FL_F32:
      return ApplyBits<float>(x, bits, kept, n, y);
    case TE_FL_F16:
      return ApplyBits<numeric::half>(x, bits, kept, n, y);
    default:
      return ApplyBits<numeric::bfloat16>(x, bits, kept, n, y);
  }
}

// Elements [0, n) of a stream that begins with block `block`; bits beyond n are 0.
void MakeBits(uint64_t seed, uint64_t block, uint64_t threshold, int64_t n, uint8_t* bits) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64, block += 16) KeepBits64(seed, block, threshold, bits + i / 8);
  if (i == n) return;
  uint8_t last[8];
  KeepBits64(seed, block, threshold, last);
  for (int64_t byte = 0; byte < (n - i + 7) / 8; ++byte) {
    const int64_t valid = n - i - 8 * byte;
    bits[i / 8 + byte] = static_cast<uint8_t>(last[byte] & (valid >= 8 ? 0xFF : (1 << valid) - 1));
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {
namespace {

HWY_EXPORT(MakeBits);
HWY_EXPORT(DropByBits);

void check_mask(const te_fl_tensor& mask, int64_t elements) {
  const int64_t bytes = (elements + 7) / 8;
  if (mask.dl.ndim == 1 && mask.dl.shape[0] == bytes) return;
  backend::invalid("mask has " + std::to_string(backend::numel(mask)) + " bytes, expected shape [" +
                   std::to_string(bytes) + "]: one bit for each of the " +
                   std::to_string(elements) + " elements");
}

// Calls f(first, n) for pieces that begin at multiples of a chunk, on the pool.
template <class F>
void for_each_piece(int64_t n, F&& f) {
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  Parts(chunks, kGrain / kChunk).run([&](int64_t, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) f(c * kChunk, std::min(kChunk, n - c * kChunk));
  });
}

float kept_factor(float p) { return static_cast<float>(1.0 / (1.0 - double{p})); }

void dropout_fwd(const te_fl_context& ctx, const te_fl_dropout_fwd_args& a) {
  const int64_t n = backend::numel(*a.input);
  check_mask(*a.mask, n);
  const te_fl_rng& rng = ctx.rng;
  const uint64_t seed = rng.state != nullptr ? rng.state[0] : rng.seed;
  const uint64_t offset = rng.state != nullptr ? rng.state[1] : rng.offset;
  const uint64_t threshold = numeric::dropout_threshold(a.p);
  const int dtype = dtype_of(*a.input);
  const int64_t bytes = element_bytes(*a.input);
  uint8_t* mask = backend::data<uint8_t>(*a.mask);
  const auto make = HWY_DYNAMIC_DISPATCH(MakeBits);
  const auto drop = HWY_DYNAMIC_DISPATCH(DropByBits);
  for_each_piece(n, [&](int64_t first, int64_t count) {
    uint8_t* bits = mask + first / 8;
    make(seed, offset + static_cast<uint64_t>(first / 4), threshold, count, bits);
    drop(dtype, element(backend::data<void>(*a.input), first, bytes), bits, kept_factor(a.p), count,
         element(backend::data<void>(*a.output), first, bytes));
  });
}

void dropout_bwd(const te_fl_context&, const te_fl_dropout_bwd_args& a) {
  const int64_t n = backend::numel(*a.grad_output);
  check_mask(*a.mask, n);
  const int dtype = dtype_of(*a.grad_output);
  const int64_t bytes = element_bytes(*a.grad_output);
  const uint8_t* mask = backend::data<const uint8_t>(*a.mask);
  const auto drop = HWY_DYNAMIC_DISPATCH(DropByBits);
  for_each_piece(n, [&](int64_t first, int64_t count) {
    drop(dtype, element(backend::data<void>(*a.grad_output), first, bytes), mask + first / 8,
         kept_factor(a.p), count, element(backend::data<void>(*a.grad_input), first, bytes));
  });
}

Refusal fwd_refusal(const te_fl_dropout_fwd_args& a) {
  if (!all_dense(a.input, a.output, a.mask)) return kNotContiguous;
  return overlaps_askew(*a.output, *a.input) ? kOverlaps : nullptr;
}
Refusal bwd_refusal(const te_fl_dropout_bwd_args& a) {
  if (!all_dense(a.grad_output, a.grad_input, a.mask)) return kNotContiguous;
  return overlaps_askew(*a.grad_input, *a.grad_output) ? kOverlaps : nullptr;
}

}  // namespace

void append_dropout(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_dropout_fwd_args, dropout_fwd, fwd_refusal>("dropout_fwd"));
  ops.push_back(descriptor<te_fl_dropout_bwd_args, dropout_bwd, bwd_refusal>("dropout_bwd"));
}

}  // namespace te_fl::cpu
#endif
