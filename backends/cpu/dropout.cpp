// The dropout ops, with a saved mask of one bit per element.
#include "te_fl/ops/dropout.h"

#include <string>
#include <vector>

#include "convert.hpp"
#include "dropout_kernels.hpp"
#include "families.hpp"
#include "te_fl/numeric/philox.hpp"
#include "tensor_view.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "dropout.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// Multiplies x[i] by `kept` if bit i is set, else sets x[i] to 0, even if it is NaN. x must be
// padded; `bits` has n bits.
void DropByBits(const uint8_t* bits, float kept, int64_t n, float* x) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF factor = SetF(kept);
  const int64_t last = (n - 1) / 8;
  for (int64_t i = 0; i < n; i += lanes) {
    const int64_t byte = i / 8;
    const uint32_t both =
        (uint32_t{bits[byte]} | uint32_t{bits[byte < last ? byte + 1 : last]} << 8) >> (i % 8);
    uint8_t part[8] = {};
    const auto bits16 = static_cast<uint16_t>(both);
    std::memcpy(part, &bits16, sizeof bits16);  // one store, so that the load below can use store
                                                // forwarding
    const VF v = hn::Mul(LoadF32(x + i), factor);
    StoreF32(hn::IfThenElseZero(hn::LoadMaskBits(DF(), part), v), x + i);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {
namespace {

HWY_EXPORT(DropByBits);

// Writes in[i] / (1 - p) for kept elements and 0 for dropped ones. Calls make_bits(first, n) for
// each chunk, which returns the mask bits of elements [first, first + n).
template <class Bits>
void drop(const te_fl_tensor& in, const te_fl_tensor& out, float p, Bits&& make_bits) {
  const int64_t n = backend::numel(in), bytes = element_bytes(in);
  const int dtype = dtype_of(in);
  const char* from = backend::data<char>(in);
  char* to = backend::data<char>(out);
  const auto kept = static_cast<float>(1.0 / (1.0 - double{p}));
  const bool stream = from != to && exceeds_cache(n * bytes);
  const auto kernel = HWY_DYNAMIC_DISPATCH(DropByBits);
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  Parts(chunks, kGrain / kChunk).run([&](int64_t, int64_t begin, int64_t end) {
    Chunk x;
    for (int64_t first = begin * kChunk; first < std::min(n, end * kChunk); first += kChunk) {
      const int64_t count = std::min(kChunk, n - first);
      load_f32(dtype, from + first * bytes, count, x.data);
      kernel(make_bits(first, count), kept, count, x.data);
      store_f32(dtype, x.data, count, to + first * bytes, stream);
    }
    if (stream) store_fence();
  });
}

void dropout_fwd(const te_fl_context& ctx, const te_fl_dropout_fwd_args& a) {
  const backend::RandomState random(*ctx.rng);
  const uint64_t seed = random.seed, offset = random.offset;
  const uint64_t threshold = numeric::dropout_threshold(a.p);
  uint8_t* mask = backend::data<uint8_t>(*a.mask);
  drop(*a.input, *a.output, a.p, [&](int64_t first, int64_t n) {
    uint8_t* bits = mask + first / 8;
    keep_bits(seed, offset + static_cast<uint64_t>(first / 4), threshold, n, bits);
    return bits;
  });
}

void dropout_bwd(const te_fl_context&, const te_fl_dropout_bwd_args& a) {
  const uint8_t* mask = backend::data<const uint8_t>(*a.mask);
  drop(*a.grad_output, *a.grad_input, a.p,
       [&](int64_t first, int64_t) { return mask + first / 8; });
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
