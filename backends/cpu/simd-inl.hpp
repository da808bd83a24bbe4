// SIMD building blocks, compiled once per Highway target: conversions between element formats and
// FP32 vectors, bit-identical to te_fl/numeric.hpp, and exp and sigmoid.
//
// Include it in a file that uses hwy/foreach_target.h, after highway.h. Everything is in
// te_fl::cpu::HWY_NAMESPACE. Every function works lane by lane, so the result of an element does
// not depend on its position. The Part functions, which process fewer elements than a vector at the
// end of a row, give the same bits.
#if defined(TE_FL_CPU_SIMD_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef TE_FL_CPU_SIMD_INL_HPP_
#undef TE_FL_CPU_SIMD_INL_HPP_
#else
#define TE_FL_CPU_SIMD_INL_HPP_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "te_fl/numeric.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes (kPad of convert.hpp), so that padded buffers fit every target.
using DF = hn::CappedTag<float, 16>;
using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using VI = hn::Vec<DI>;

HWY_INLINE size_t NumLanes() { return hn::Lanes(DF()); }
HWY_INLINE VU Bits(VF v) { return hn::BitCast(DU(), v); }
HWY_INLINE VF FromBits(VU v) { return hn::BitCast(DF(), v); }
HWY_INLINE VU SetU(uint32_t value) { return hn::Set(DU(), value); }
HWY_INLINE VF SetF(float value) { return hn::Set(DF(), value); }
// Bit patterns below 2^31 have the same order as signed integers, which every target compares in
// one instruction.
HWY_INLINE auto LessU31(VU a, VU b) {
  return hn::RebindMask(DU(), hn::Lt(hn::BitCast(DI(), a), hn::BitCast(DI(), b)));
}
HWY_INLINE VU MinU31(VU a, VU b) {
  return hn::BitCast(DU(), hn::Min(hn::BitCast(DI(), a), hn::BitCast(DI(), b)));
}

// ---- formats with m mantissa bits and exponent bias b; codes are in the low bits of each lane

// Rounds magnitudes (FP32 bits without the sign) to the format's bits, to nearest even, without an
// upper limit of the exponent.
template <int kMantissa, int kBias>
HWY_INLINE VU RoundMagnitude(VU magnitude) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << kMantissa;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;
  // For subnormal results: adding a number whose last mantissa bit has the value of the format's
  // smallest subnormal makes the FPU round to a multiple of that subnormal.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 24 - kBias - kMantissa) << 23;
  const VU even = hn::And(hn::ShiftRight<kShift>(magnitude), SetU(1));
  const VU rounded = hn::Add(hn::Add(magnitude, SetU((1u << (kShift - 1)) - 1)), even);
  const VU normal = hn::Sub(hn::ShiftRight<kShift>(rounded), SetU(kRebias));
  const VU subnormal =
      hn::Sub(Bits(hn::Add(FromBits(magnitude), FromBits(SetU(kMagic)))), SetU(kMagic));
  return hn::IfThenElse(LessU31(magnitude, SetU(kMinNormal)), subnormal, normal);
}

template <int kMantissa, int kBias, uint32_t kMax>
HWY_INLINE VU EncodeFp8(VF v) {
  const VU bits = Bits(v);
  const VU magnitude = hn::And(bits, SetU(0x7FFFFFFFu));
  const VU code = MinU31(RoundMagnitude<kMantissa, kBias>(magnitude), SetU(kMax));
  const VU sign = hn::And(hn::ShiftRight<24>(bits), SetU(0x80));
  const auto nan = LessU31(SetU(0x7F800000u), magnitude);
  return hn::IfThenElse(nan, SetU(0x7F), hn::Or(code, sign));
}

template <int kMantissa, int kBias>
HWY_INLINE VF DecodeMagnitude(VU magnitude) {
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  constexpr uint32_t kStep = static_cast<uint32_t>(128 - kBias - kMantissa) << 23;
  const VU normal = hn::Add(hn::ShiftLeft<23 - kMantissa>(magnitude), SetU(kRebias));
  const VF subnormal =
      hn::Mul(hn::ConvertTo(DF(), hn::BitCast(DI(), magnitude)), FromBits(SetU(kStep)));
  return FromBits(
      hn::IfThenElse(LessU31(magnitude, SetU(1u << kMantissa)), Bits(subnormal), normal));
}

HWY_INLINE VU EncodeE4m3(VF v) { return EncodeFp8<3, 7, 0x7E>(v); }
HWY_INLINE VU EncodeE5m2(VF v) { return EncodeFp8<2, 15, 0x7B>(v); }

HWY_INLINE VF DecodeE4m3(VU code) {
  const VU magnitude = hn::And(code, SetU(0x7F));
  const VU sign = hn::ShiftLeft<24>(hn::And(code, SetU(0x80)));
  const VU value = hn::Or(Bits(DecodeMagnitude<3, 7>(magnitude)), sign);
  const auto nan = hn::Eq(magnitude, SetU(0x7F));
  return FromBits(hn::IfThenElse(nan, SetU(0x7FC00000u), value));
}

HWY_INLINE VF DecodeE5m2(VU code) {
  const VU magnitude = hn::And(code, SetU(0x7F));
  const VU sign = hn::ShiftLeft<24>(hn::And(code, SetU(0x80)));
  const VU finite = Bits(DecodeMagnitude<2, 15>(magnitude));
  const VU value =
      hn::Or(hn::IfThenElse(LessU31(magnitude, SetU(0x7C)), finite, SetU(0x7F800000u)), sign);
  return FromBits(hn::IfThenElse(LessU31(SetU(0x7C), magnitude), SetU(0x7FC00000u), value));
}

HWY_INLINE VU EncodeFp16(VF v) {
  const VU bits = Bits(v);
  const VU magnitude = hn::And(bits, SetU(0x7FFFFFFFu));
  const VU code = MinU31(RoundMagnitude<10, 15>(magnitude), SetU(0x7C00));
  const VU sign = hn::And(hn::ShiftRight<16>(bits), SetU(0x8000));
  const VU payload = hn::And(hn::ShiftRight<13>(magnitude), SetU(0x3FF));
  const auto nan = LessU31(SetU(0x7F800000u), magnitude);
  return hn::Or(hn::IfThenElse(nan, hn::Or(payload, SetU(0x7E00)), code), sign);
}

HWY_INLINE VF DecodeFp16(VU code) {
  const VU magnitude = hn::And(code, SetU(0x7FFF));
  const VU sign = hn::ShiftLeft<16>(hn::And(code, SetU(0x8000)));
  const VU finite = Bits(DecodeMagnitude<10, 15>(magnitude));
  const VU payload = hn::ShiftLeft<13>(hn::And(code, SetU(0x3FF)));
  const VU quiet = hn::IfThenElseZero(LessU31(SetU(0x7C00), magnitude), SetU(0x00400000u));
  const VU special = hn::Or(hn::Or(payload, quiet), SetU(0x7F800000u));
  return FromBits(hn::Or(hn::IfThenElse(LessU31(magnitude, SetU(0x7C00)), finite, special), sign));
}

// Rounds to BF16, whose bits are in the upper half of each lane.
HWY_INLINE VU RoundToBf16(VF v) {
  const VU bits = Bits(v);
  const VU even = hn::And(hn::ShiftRight<16>(bits), SetU(1));
  const VU rounded = hn::Add(hn::Add(bits, SetU(0x7FFF)), even);
  const auto nan = hn::RebindMask(DU(), hn::IsNaN(v));
  return hn::IfThenElse(nan, hn::Or(bits, SetU(0x00400000u)), rounded);
}
HWY_INLINE VU EncodeBf16(VF v) { return hn::ShiftRight<16>(RoundToBf16(v)); }
#if HWY_TARGET != HWY_SCALAR
// Converts two FP32 vectors to one vector of BF16, which halves the shuffles and stores.
using D16 = hn::Repartition<uint16_t, DU>;
HWY_INLINE hn::Vec<D16> EncodeBf16Pair(VF first, VF second) {
  const D16 d;
  return hn::ConcatOdd(d, hn::BitCast(d, RoundToBf16(second)), hn::BitCast(d, RoundToBf16(first)));
}
#endif

// ---- loads and stores by element type

HWY_INLINE VF LoadF32(const float* p) { return hn::LoadU(DF(), p); }
HWY_INLINE VU LoadCodes(const uint16_t* p) {
  return hn::PromoteTo(DU(), hn::LoadU(hn::Rebind<uint16_t, DU>(), p));
}
HWY_INLINE VU LoadCodes(const uint8_t* p) {
  return hn::PromoteTo(DU(), hn::LoadU(hn::Rebind<uint8_t, DU>(), p));
}
HWY_INLINE VF LoadF32(const numeric::bfloat16* p) {
  return FromBits(hn::ShiftLeft<16>(LoadCodes(reinterpret_cast<const uint16_t*>(p))));
}
HWY_INLINE VF LoadF32(const numeric::half* p) {
  return DecodeFp16(LoadCodes(reinterpret_cast<const uint16_t*>(p)));
}
HWY_INLINE VF LoadF32(const numeric::fp8e4m3* p) {
  return DecodeE4m3(LoadCodes(reinterpret_cast<const uint8_t*>(p)));
}
HWY_INLINE VF LoadF32(const numeric::fp8e5m2* p) {
  return DecodeE5m2(LoadCodes(reinterpret_cast<const uint8_t*>(p)));
}

HWY_INLINE void StoreCodes(VU codes, uint16_t* p) {
  const hn::Rebind<uint16_t, DU> d;
  hn::StoreU(hn::TruncateTo(d, codes), d, p);
}
HWY_INLINE void StoreCodes(VU codes, uint8_t* p) {
  const hn::Rebind<uint8_t, DU> d;
  hn::StoreU(hn::TruncateTo(d, codes), d, p);
}
HWY_INLINE void StoreF32(VF v, float* p) { hn::StoreU(v, DF(), p); }
HWY_INLINE void StoreF32(VF v, numeric::bfloat16* p) {
  StoreCodes(EncodeBf16(v), reinterpret_cast<uint16_t*>(p));
}
HWY_INLINE void StoreF32(VF v, numeric::half* p) {
  StoreCodes(EncodeFp16(v), reinterpret_cast<uint16_t*>(p));
}
HWY_INLINE void StoreF32(VF v, numeric::fp8e4m3* p) {
  StoreCodes(EncodeE4m3(v), reinterpret_cast<uint8_t*>(p));
}
HWY_INLINE void StoreF32(VF v, numeric::fp8e5m2* p) {
  StoreCodes(EncodeE5m2(v), reinterpret_cast<uint8_t*>(p));
}

// Loads n elements, fewer than a vector; the other lanes are zero.
template <class T>
HWY_INLINE VF LoadPart(const T* p, size_t n) {
  HWY_ALIGN T part[16] = {};
  std::memcpy(static_cast<void*>(part), p, n * sizeof(T));
  return LoadF32(part);
}
template <class T>
HWY_INLINE void StorePart(VF v, T* p, size_t n) {
  HWY_ALIGN T part[16];
  StoreF32(v, part);
  std::memcpy(static_cast<void*>(p), part, n * sizeof(T));
}

// ---- functions

// max(a, |v|), ignoring NaN as numeric::amax_accumulate does.
HWY_INLINE VF AmaxOf(VF amax, VF v) {
  const VF absolute = hn::Abs(v);
  return hn::IfThenElse(hn::Gt(absolute, amax), absolute, amax);
}

// 2^exponent, for exponents of normal numbers and for 128 (infinity).
HWY_INLINE VF PowerOfTwo(VI exponent) {
  return hn::BitCast(DF(), hn::ShiftLeft<23>(hn::Add(exponent, hn::Set(DI(), 127))));
}

// Returns e and stores an integer q such that exp(x) = e * 2^q.
HWY_INLINE VF ExpReduced(VF x, VF& q) {
  q = hn::Round(hn::Mul(x, SetF(1.44269504f)));
  const VF r = hn::NegMulAdd(q, SetF(-2.12194440e-4f), hn::NegMulAdd(q, SetF(0.693359375f), x));
  // e^r = 1 + r + r^2 p(r), with p fitted on |r| <= ln(2)/2; the relative error of e^r is 1e-8.
  VF p = SetF(0x1.6d117cp-10f);
  p = hn::MulAdd(p, r, SetF(0x1.120be2p-7f));
  p = hn::MulAdd(p, r, SetF(0x1.555518p-5f));
  p = hn::MulAdd(p, r, SetF(0x1.5554dcp-3f));
  p = hn::MulAdd(p, r, SetF(0.5f));
  return hn::Add(hn::MulAdd(hn::Mul(p, r), r, r), SetF(1.0f));
}

// True if AVX-512 instructions without a Highway name may be used.
#undef TE_FL_CPU_AVX512
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define TE_FL_CPU_AVX512 1
#else
#define TE_FL_CPU_AVX512 0
#endif

// exp(x) for x in [-87, 89]; x must not be NaN. The result may be infinite above 88.37.
HWY_INLINE VF ExpInRange(VF x) {
  VF q;
  const VF e = ExpReduced(x, q);
#if TE_FL_CPU_AVX512
  return VF{_mm512_maskz_scalef_ps(__mmask16{0xFFFF}, e.raw, q.raw)};
#else
  return hn::Mul(e, PowerOfTwo(hn::ConvertTo(DI(), q)));
#endif
}

// exp(x) for every x, with an error of at most 2 ulp where the result is normal. Underflows to 0,
// overflows to +inf, and keeps NaN.
HWY_INLINE VF Exp(VF x) {
  const VF clamped = hn::Min(hn::Max(x, SetF(-105.0f)), SetF(89.0f));
#if TE_FL_CPU_AVX512
  const VF result = ExpInRange(clamped);
#else
  VF q;
  const VF e = ExpReduced(clamped, q);
  const VI exponent = hn::ConvertTo(DI(), q);
  // Scales in two steps, because 2^q may overflow FP32 though the result does not.
  const VI half = hn::ShiftRight<1>(exponent);
  const VF result = hn::Mul(hn::Mul(e, PowerOfTwo(half)), PowerOfTwo(hn::Sub(exponent, half)));
#endif
  return hn::IfThenElse(hn::Eq(x, x), result, x);
}

// 1 / (1 + exp(-x)). The result for NaN is unspecified.
HWY_INLINE VF SigmoidOfNumber(VF x) {
  const VF minus = hn::Min(hn::Max(hn::Neg(x), SetF(-87.0f)), SetF(89.0f));
  return hn::Div(SetF(1.0f), hn::Add(SetF(1.0f), ExpInRange(minus)));
}
HWY_INLINE VF Sigmoid(VF x) { return hn::IfThenElse(hn::Eq(x, x), SigmoidOfNumber(x), x); }

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
