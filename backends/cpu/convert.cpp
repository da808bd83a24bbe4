#include "convert.hpp"

#include <type_traits>

#include "cache_size.hpp"
#include "te_fl/plugin.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "convert.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

template <class T>
void Load(const void* raw, int64_t n, float* dst) {
  const T* src = static_cast<const T*>(raw);
  const auto lanes = static_cast<int64_t>(NumLanes());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    // Prefetches the next chunk while this one is computed. Prefetching past the end has no effect.
    hwy::Prefetch(src + i + kChunk);
    StoreF32(LoadF32(src + i), dst + i);
  }
  if (i < n) {
    StoreF32(LoadPart(src + i, static_cast<size_t>(n - i)), dst + i);
    i += lanes;
  }
  for (; i < padded(n); i += lanes) StoreF32(SetF(0.0f), dst + i);
}

// Non-temporal stores, for destinations aligned to a vector.
HWY_INLINE void StreamF32(VF v, float* p) { hn::Stream(v, DF(), p); }
template <class Codes>
HWY_INLINE void StreamCodes(VU codes, Codes* p) {
  const hn::Rebind<Codes, DU> d;
  hn::Stream(hn::TruncateTo(d, codes), d, p);
}
HWY_INLINE void StreamF32(VF v, numeric::bfloat16* p) {
  StreamCodes(EncodeBf16(v), reinterpret_cast<uint16_t*>(p));
}
HWY_INLINE void StreamF32(VF v, numeric::half* p) {
  StreamCodes(EncodeFp16(v), reinterpret_cast<uint16_t*>(p));
}
HWY_INLINE void StreamF32(VF v, numeric::fp8e4m3* p) {
  StreamCodes(EncodeE4m3(v), reinterpret_cast<uint8_t*>(p));
}
HWY_INLINE void StreamF32(VF v, numeric::fp8e5m2* p) {
  StreamCodes(EncodeE5m2(v), reinterpret_cast<uint8_t*>(p));
}
template <class T>
HWY_INLINE bool IsAligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (NumLanes() * sizeof(T)) == 0;
}

template <class T, bool kStream>
void StoreVectors(const float* src, int64_t n, T* dst) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (std::is_same_v<T, numeric::bfloat16>) {
    const D16 d;
    auto* codes = reinterpret_cast<uint16_t*>(dst);
    const bool aligned = reinterpret_cast<uintptr_t>(dst) % (hn::Lanes(d) * sizeof(T)) == 0;
    for (; (aligned || !kStream) && i + 2 * lanes <= n; i += 2 * lanes) {
      const auto pair = EncodeBf16Pair(LoadF32(src + i), LoadF32(src + i + lanes));
      if constexpr (kStream) {
        hn::Stream(pair, d, codes + i);
      } else {
        hn::StoreU(pair, d, codes + i);
      }
    }
  }
#endif
  for (; i + lanes <= n; i += lanes) {
    if constexpr (kStream) {
      StreamF32(LoadF32(src + i), dst + i);
    } else {
      StoreF32(LoadF32(src + i), dst + i);
    }
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    StorePart(LoadPart(src + i, rest), dst + i, rest);
  }
}

template <class T>
void Store(const float* src, int64_t n, void* raw, bool stream) {
  T* dst = static_cast<T*>(raw);
  stream&& IsAligned(dst) ? StoreVectors<T, true>(src, n, dst)
                          : StoreVectors<T, false>(src, n, dst);
}

template <class T, bool kStream>
float QuantizeVectors(const float* src, int64_t n, float scale, T* dst) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VF factor = SetF(scale);
  VF amax = SetF(0.0f);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF v = LoadF32(src + i);
    amax = AmaxOf(amax, v);
    if constexpr (kStream) {
      StreamF32(hn::Mul(v, factor), dst + i);
    } else {
      StoreF32(hn::Mul(v, factor), dst + i);
    }
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    const VF v = LoadPart(src + i, rest);
    amax = AmaxOf(amax, v);
    StorePart(hn::Mul(v, factor), dst + i, rest);
  }
  return hn::GetLane(hn::MaxOfLanes(DF(), amax));
}

template <class T>
float Quantize(const float* src, int64_t n, float scale, void* raw, bool stream) {
  T* dst = static_cast<T*>(raw);
  return stream && IsAligned(dst) ? QuantizeVectors<T, true>(src, n, scale, dst)
                                  : QuantizeVectors<T, false>(src, n, scale, dst);
}

void Scale(float* x, int64_t n, float factor) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) {
    StoreF32(hn::Mul(LoadF32(x + i), SetF(factor)), x + i);
  }
}

void AddTo(const float* x, int64_t n, float* acc) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t i = 0; i < n; i += lanes) {
    StoreF32(hn::Add(LoadF32(acc + i), LoadF32(x + i)), acc + i);
  }
}

template <class T>
float Amax(const void* raw, int64_t n) {
  const T* src = static_cast<const T*>(raw);
  const auto lanes = static_cast<int64_t>(NumLanes());
  VF amax0 = SetF(0.0f), amax1 = amax0;
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    amax0 = AmaxOf(amax0, LoadF32(src + i));
    amax1 = AmaxOf(amax1, LoadF32(src + i + lanes));
  }
  for (; i + lanes <= n; i += lanes) amax0 = AmaxOf(amax0, LoadF32(src + i));
  if (i < n) amax1 = AmaxOf(amax1, LoadPart(src + i, static_cast<size_t>(n - i)));
  return hn::GetLane(hn::MaxOfLanes(DF(), hn::Max(amax0, amax1)));
}

void LoadByDtype(int dtype, const void* src, int64_t n, float* dst) {
  switch (dtype) {
    case TE_FL_F32:
      return Load<float>(src, n, dst);
    case TE_FL_F16:
      return Load<numeric::half>(src, n, dst);
    case TE_FL_BF16:
      return Load<numeric::bfloat16>(src, n, dst);
    case TE_FL_F8E4M3:
      return Load<numeric::fp8e4m3>(src, n, dst);
    default:
      return Load<numeric::fp8e5m2>(src, n, dst);
  }
}

void StoreByDtype(int dtype, const float* src, int64_t n, void* dst, bool stream) {
  switch (dtype) {
    case TE_FL_F32:
      return Store<float>(src, n, dst, stream);
    case TE_FL_F16:
      return Store<numeric::half>(src, n, dst, stream);
    case TE_FL_BF16:
      return Store<numeric::bfloat16>(src, n, dst, stream);
    case TE_FL_F8E4M3:
      return Store<numeric::fp8e4m3>(src, n, dst, stream);
    default:
      return Store<numeric::fp8e5m2>(src, n, dst, stream);
  }
}

float QuantizeByDtype(int dtype, const float* src, int64_t n, float scale, void* dst, bool stream) {
  return dtype == TE_FL_F8E4M3 ? Quantize<numeric::fp8e4m3>(src, n, scale, dst, stream)
                               : Quantize<numeric::fp8e5m2>(src, n, scale, dst, stream);
}

float AmaxByDtype(int dtype, const void* src, int64_t n) {
  switch (dtype) {
    case TE_FL_F32:
      return Amax<float>(src, n);
    case TE_FL_F16:
      return Amax<numeric::half>(src, n);
    default:
      return Amax<numeric::bfloat16>(src, n);
  }
}

void AddToSums(const float* src, int64_t n, double* sums) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<float, decltype(d)> df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::PromoteTo(d, hn::LoadU(df, src + i));
    hn::StoreU(hn::Add(hn::LoadU(d, sums + i), v), d, sums + i);
  }
  for (; i < n; ++i) sums[i] += src[i];
}

template <class T>
void ToBf16(const void* raw, int64_t n, uint16_t* dst) {
  const T* src = static_cast<const T*>(raw);
  const auto lanes = static_cast<int64_t>(NumLanes());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    StoreCodes(hn::ShiftRight<16>(Bits(LoadF32(src + i))), dst + i);
  }
  for (; i < n; ++i) {
    dst[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(numeric::to_float(src[i])) >> 16);
  }
}

void Fp8ToBf16(int dtype, const void* src, int64_t n, uint16_t* dst) {
  dtype == TE_FL_F8E4M3 ? ToBf16<numeric::fp8e4m3>(src, n, dst)
                        : ToBf16<numeric::fp8e5m2>(src, n, dst);
}

// Transposes 16 x 16 bytes in four rounds, each of which interleaves row i with row i + 8.
#if HWY_TARGET != HWY_SCALAR
HWY_INLINE void Transpose16x16(const uint8_t* src, int64_t src_stride, uint8_t* dst,
                               int64_t dst_stride) {
  const hn::FixedTag<uint8_t, 16> d;
  hn::Vec<decltype(d)> a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = hn::LoadU(d, src + i * src_stride);
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = hn::InterleaveLower(d, a[i], a[i + 8]);
      b[2 * i + 1] = hn::InterleaveUpper(d, a[i], a[i + 8]);
    }
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = hn::InterleaveLower(d, b[i], b[i + 8]);
      a[2 * i + 1] = hn::InterleaveUpper(d, b[i], b[i + 8]);
    }
  }
  for (int i = 0; i < 16; ++i) hn::StoreU(a[i], d, dst + i * dst_stride);
}
#endif

HWY_INLINE void StreamLine(const uint8_t* src, uint8_t* dst) {
  const hn::CappedTag<uint8_t, 64> d;
  for (size_t i = 0; i < 64; i += hn::Lanes(d)) hn::Stream(hn::Load(d, src + i), d, dst + i);
}

void TransposeBytes(const uint8_t* src, int64_t src_stride, int64_t rows, int64_t cols,
                    uint8_t* dst, int64_t dst_stride, [[maybe_unused]] bool stream) {
  int64_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  for (; c + 16 <= cols; c += 16) {
    int64_t r = 0;
    for (; r + 64 <= rows; r += 64) {
      // Writes complete cache lines of the destination, because lines that are far apart may map to
      // the same cache set.
      HWY_ALIGN uint8_t lines[16 * 64];
      for (int64_t part = 0; part < 64; part += 16) {
        Transpose16x16(src + (r + part) * src_stride + c, src_stride, lines + part, 64);
      }
      for (int64_t j = 0; j < 16; ++j) {
        uint8_t* line = dst + (c + j) * dst_stride + r;
        if (stream && reinterpret_cast<uintptr_t>(line) % 64 == 0) {
          StreamLine(lines + 64 * j, line);
        } else {
          std::memcpy(line, lines + 64 * j, 64);
        }
      }
    }
    for (; r + 16 <= rows; r += 16) {
      Transpose16x16(src + r * src_stride + c, src_stride, dst + c * dst_stride + r, dst_stride);
    }
    for (; r < rows; ++r) {
      for (int64_t j = c; j < c + 16; ++j) dst[j * dst_stride + r] = src[r * src_stride + j];
    }
  }
#endif
  for (; c < cols; ++c) {
    for (int64_t r = 0; r < rows; ++r) dst[c * dst_stride + r] = src[r * src_stride + c];
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {

HWY_EXPORT(LoadByDtype);
HWY_EXPORT(StoreByDtype);
HWY_EXPORT(QuantizeByDtype);
HWY_EXPORT(AmaxByDtype);
HWY_EXPORT(Scale);
HWY_EXPORT(AddTo);
HWY_EXPORT(AddToSums);
HWY_EXPORT(Fp8ToBf16);
HWY_EXPORT(TransposeBytes);

void load_f32(int dtype, const void* src, int64_t n, float* dst) {
  HWY_DYNAMIC_DISPATCH(LoadByDtype)(dtype, src, n, dst);
}
void store_f32(int dtype, const float* src, int64_t n, void* dst, bool stream) {
  HWY_DYNAMIC_DISPATCH(StoreByDtype)(dtype, src, n, dst, stream);
}
float quantize_f32(int dtype, const float* src, int64_t n, float scale, void* dst, bool stream) {
  return HWY_DYNAMIC_DISPATCH(QuantizeByDtype)(dtype, src, n, scale, dst, stream);
}
void store_fence() { hwy::FlushStream(); }
bool exceeds_cache(int64_t bytes) { return bytes > last_level_cache_bytes(); }
void scale_f32(float* x, int64_t n, float factor) { HWY_DYNAMIC_DISPATCH(Scale)(x, n, factor); }
void add_f32(const float* x, int64_t n, float* acc) { HWY_DYNAMIC_DISPATCH(AddTo)(x, n, acc); }
float amax_f32(const float* src, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(AmaxByDtype)(TE_FL_F32, src, n);
}
float amax_of(int dtype, const void* src, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(AmaxByDtype)(dtype, src, n);
}
void add_to_sums(const float* src, int64_t n, double* sums) {
  HWY_DYNAMIC_DISPATCH(AddToSums)(src, n, sums);
}
void fp8_to_bf16(int dtype, const void* src, int64_t n, uint16_t* dst) {
  HWY_DYNAMIC_DISPATCH(Fp8ToBf16)(dtype, src, n, dst);
}
void transpose_bytes(const uint8_t* src, int64_t src_stride, int64_t rows, int64_t cols,
                     uint8_t* dst, int64_t dst_stride, bool stream) {
  HWY_DYNAMIC_DISPATCH(TransposeBytes)(src, src_stride, rows, cols, dst, dst_stride, stream);
}

}  // namespace te_fl::cpu
#endif
