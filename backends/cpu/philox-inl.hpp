// Philox 4x32-10 for a vector of counters. Produces the words of te_fl/numeric/philox.hpp. Include
// it in a file that uses hwy/foreach_target.h, after simd-inl.hpp.
#if defined(TE_FL_CPU_PHILOX_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef TE_FL_CPU_PHILOX_INL_HPP_
#undef TE_FL_CPU_PHILOX_INL_HPP_
#else
#define TE_FL_CPU_PHILOX_INL_HPP_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// Computes the high and low halves of the 64-bit products a * m.
HWY_INLINE void MulWide(VU a, uint32_t m, VU& high, VU& low) {
#if HWY_TARGET == HWY_SCALAR
  const uint64_t product = uint64_t{hn::GetLane(a)} * m;
  high = SetU(static_cast<uint32_t>(product >> 32));
  low = SetU(static_cast<uint32_t>(product));
#else
  const hn::Repartition<uint64_t, DU> d64;
  const VU factor = SetU(m);
  const auto even = hn::MulEven(a, factor);
  const VU odd_lanes = hn::BitCast(DU(), hn::ShiftRight<32>(hn::BitCast(d64, a)));
  const auto odd = hn::MulEven(odd_lanes, factor);
  high = hn::OddEven(hn::BitCast(DU(), odd), hn::BitCast(DU(), hn::ShiftRight<32>(even)));
  low = hn::OddEven(hn::BitCast(DU(), hn::ShiftLeft<32>(odd)), hn::BitCast(DU(), even));
#endif
}

struct PhiloxKey {
  uint32_t low;
  uint32_t high;
};

// Computes one Philox block per lane: lane l of words[k] is word k of the block whose 64-bit
// counter consists of lane l of counter_low and counter_high.
HWY_INLINE void PhiloxBlocks(VU counter_low, VU counter_high, PhiloxKey key, VU words[4]) {
  VU c0 = counter_low, c1 = counter_high, c2 = hn::Zero(DU()), c3 = hn::Zero(DU());
  for (int round = 0; round < 10; ++round) {
    VU high0, low0, high1, low1;
    MulWide(c0, 0xD2511F53u, high0, low0);
    MulWide(c2, 0xCD9E8D57u, high1, low1);
    c0 = hn::Xor(hn::Xor(high1, c1), SetU(key.low));
    c1 = low1;
    c2 = hn::Xor(hn::Xor(high0, c3), SetU(key.high));
    c3 = low0;
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

#if HWY_TARGET != HWY_SCALAR
using D64 = hn::Repartition<uint64_t, DU>;

// The keys of the ten rounds, which do not depend on the counter.
struct PhiloxKeys {
  explicit PhiloxKeys(PhiloxKey key) {
    for (int i = 0; i < 10; ++i) {
      low[i] = key.low + static_cast<uint32_t>(i) * 0x9E3779B9u;
      high[i] = key.high + static_cast<uint32_t>(i) * 0xBB67AE85u;
    }
  }
  uint64_t low[10], high[10];
};

// Like PhiloxBlocks(), but with one block per 64-bit lane, whose lower half holds the state, so a
// wide product is one instruction. pairs[0]: words 0 and 1 of each block; pairs[1]: words 2 and 3.
HWY_INLINE void PhiloxBlocks64(hn::Vec<D64> counter, const PhiloxKeys& keys,
                               hn::Vec<D64> pairs[2]) {
  const D64 d;
  const VU factor0 = SetU(0xD2511F53u), factor1 = SetU(0xCD9E8D57u);
  auto c0 = counter, c1 = hn::ShiftRight<32>(counter), c2 = hn::Zero(d), c3 = c2;
  for (int round = 0; round < 10; ++round) {
    const auto product0 = hn::MulEven(hn::BitCast(DU(), c0), factor0);
    const auto product1 = hn::MulEven(hn::BitCast(DU(), c2), factor1);
    // The upper halves are left unmasked, because the products ignore them.
    c0 = hn::Xor3(hn::ShiftRight<32>(product1), c1, hn::Set(d, keys.low[round]));
    c1 = product1;
    c2 = hn::Xor3(hn::ShiftRight<32>(product0), c3, hn::Set(d, keys.high[round]));
    c3 = product0;
  }
  const auto pair = [&](auto even, auto odd) HWY_ATTR {
    return hn::BitCast(
        d, hn::OddEven(hn::BitCast(DU(), hn::ShiftLeft<32>(odd)), hn::BitCast(DU(), even)));
  };
  pairs[0] = pair(c0, c1);
  pairs[1] = pair(c2, c3);
}
#endif

// True in lanes whose word is kept. `threshold`: a dropout_threshold() above 0 and below 2^32.
HWY_INLINE auto KeepMask(VU words, VU threshold) {
  return hn::RebindMask(DF(), hn::Not(hn::Lt(words, threshold)));
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
