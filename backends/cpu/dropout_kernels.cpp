#include "dropout_kernels.hpp"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "dropout_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "philox-inl.hpp"
#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// The random words of 64 elements, which are the output of 16 consecutive Philox blocks.
#if HWY_TARGET == HWY_SCALAR
using Keys = PhiloxKey;
using Words = uint32_t;
HWY_INLINE VU WordsAt(const uint32_t* stream, int64_t i) { return hn::LoadU(DU(), stream + i); }
HWY_INLINE void Words64(const Keys& key, uint64_t block, uint32_t* stream) {
  for (uint64_t b = 0; b < 16; ++b) {
    VU words[4];
    PhiloxBlocks(SetU(static_cast<uint32_t>(block + b)),
                 SetU(static_cast<uint32_t>((block + b) >> 32)), key, words);
    for (int k = 0; k < 4; ++k) stream[4 * b + k] = hn::GetLane(words[k]);
  }
}
#else
using Keys = PhiloxKeys;
using Words = uint64_t;  // each holds two words
HWY_INLINE VU WordsAt(const uint64_t* stream, int64_t i) {
  return hn::BitCast(DU(), hn::Load(D64(), stream + i / 2));
}
HWY_INLINE void Words64(const Keys& keys, uint64_t block, uint64_t* stream) {
  const D64 d;
  for (uint64_t b = 0; b < 16; b += hn::Lanes(d)) {
    hn::Vec<D64> pairs[2];
    PhiloxBlocks64(hn::Add(hn::Set(d, block + b), hn::Iota(d, 0)), keys, pairs);
    hn::StoreInterleaved2(pairs[0], pairs[1], d, stream + 2 * b);
  }
}
#endif

HWY_INLINE uint64_t KeepMask64(const Keys& keys, uint64_t block, VU threshold) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  HWY_ALIGN Words stream[256 / sizeof(Words)];
  Words64(keys, block, stream);
  uint64_t mask = 0;
  for (int64_t i = 0; i < 64; i += lanes) {
    uint8_t part[8] = {};
    hn::StoreMaskBits(DF(), KeepMask(WordsAt(stream, i), threshold), part);
    mask |= (uint64_t{part[0]} | uint64_t{part[1]} << 8) << i;
  }
  return mask;
}

void KeepBits(uint64_t seed, uint64_t block, uint64_t threshold, int64_t n, uint8_t* bits) {
  const Keys keys(PhiloxKey{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const VU limit = SetU(static_cast<uint32_t>(threshold));
  for (int64_t i = 0; i < n; i += 64, block += 16) {
    uint64_t mask = threshold == 0 ? ~uint64_t{0} : KeepMask64(keys, block, limit);
    const int64_t valid = n - i < 64 ? n - i : 64;
    if (valid < 64) mask &= (uint64_t{1} << valid) - 1;
    for (int64_t byte = 0; byte < (valid + 7) / 8; ++byte) {
      bits[i / 8 + byte] = static_cast<uint8_t>(mask >> (8 * byte));
    }
  }
}

void AddKept(const float* x, const uint8_t* bits, float factor_, int64_t n, float* acc) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF factor = SetF(factor_);
  for (int64_t i = 0; i < n; i += lanes) {
    const int64_t byte = i / 8, last = (n - 1) / 8;
    const uint32_t both =
        (uint32_t{bits[byte]} | uint32_t{bits[byte < last ? byte + 1 : last]} << 8) >> (i % 8);
    const uint8_t part[8] = {static_cast<uint8_t>(both), static_cast<uint8_t>(both >> 8)};
    const VF old = LoadF32(acc + i);
    const VF sum = hn::MulAdd(LoadF32(x + i), factor, old);
    StoreF32(hn::IfThenElse(hn::LoadMaskBits(DF(), part), sum, old), acc + i);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {

HWY_EXPORT(KeepBits);
HWY_EXPORT(AddKept);

void keep_bits(uint64_t seed, uint64_t block, uint64_t threshold, int64_t n, uint8_t* bits) {
  HWY_DYNAMIC_DISPATCH(KeepBits)(seed, block, threshold, n, bits);
}
void add_kept(const float* x, const uint8_t* bits, float factor, int64_t n, float* acc) {
  HWY_DYNAMIC_DISPATCH(AddKept)(x, bits, factor, n, acc);
}

}  // namespace te_fl::cpu
#endif
