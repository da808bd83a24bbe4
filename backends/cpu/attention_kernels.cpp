#include "attention_kernels.hpp"

#include <cmath>

#include "te_fl/plugin.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "philox-inl.hpp"
#include "simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

// ---- products

// Computes a block of C of kRows rows by kVectors vectors, whose accumulators stay in registers.
template <int kRows, int kVectors>
HWY_INLINE void Block(const TileProduct& t, const float* HWY_RESTRICT a,
                      const float* HWY_RESTRICT b, float* HWY_RESTRICT c) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  VF acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::Zero(d);
  }
  for (int64_t l = 0; l < t.k; ++l, a += t.a_col, b += t.ldb) {
    VF bv[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) bv[v] = hn::LoadU(d, b + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const VF av = hn::Set(d, a[r * t.a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(av, bv[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r, c += t.ldc) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + v * lanes;
      hn::StoreU(t.accumulate ? hn::Add(hn::LoadU(d, to), acc[r][v]) : acc[r][v], d, to);
    }
  }
}

template <int kVectors>
void Panel(const TileProduct& t, int64_t column) {
  const float* b = t.b + column;
  float* c = t.c + column;
  int64_t i = 0;
  for (; i + 6 <= t.m; i += 6) Block<6, kVectors>(t, t.a + i * t.a_row, b, c + i * t.ldc);
  const float* a = t.a + i * t.a_row;
  c += i * t.ldc;
  switch (t.m - i) {
    case 5:
      return Block<5, kVectors>(t, a, b, c);
    case 4:
      return Block<4, kVectors>(t, a, b, c);
    case 3:
      return Block<3, kVectors>(t, a, b, c);
    case 2:
      return Block<2, kVectors>(t, a, b, c);
    case 1:
      return Block<1, kVectors>(t, a, b, c);
    default:
      return;
  }
}

void Product(const TileProduct& t) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  // Uses 24 accumulators if there are 32 registers, 12 if there are 16.
  constexpr int kWide = HWY_MAX_BYTES >= 64 ? 4 : 2;
  int64_t column = 0;
  for (; column + kWide * lanes <= t.n; column += kWide * lanes) Panel<kWide>(t, column);
  for (; column < t.n; column += lanes) Panel<1>(t, column);
}

// ---- scores

// exp(x) for x <= 0; 0 below -87. NaN gives NaN.
HWY_INLINE VF ExpNonPositive(VF x) {
  const auto tiny = hn::Lt(x, SetF(-87.0f));
  const VF result = ExpInRange(hn::IfThenElse(tiny, SetF(-87.0f), x));
  return hn::IfThenElse(tiny, SetF(0.0f), result);
}

// tanh(x) with an error of at most 2 ulp. NaN gives NaN.
HWY_INLINE VF Tanh(VF x) {
  // Near 0 the quotient below would cancel: uses x + x^3 p(x^2), with p fitted on |x| <= 0.625.
  const VF z = hn::Mul(x, x);
  VF p = SetF(-5.704042502e-3f);
  p = hn::MulAdd(p, z, SetF(2.063786238e-2f));
  p = hn::MulAdd(p, z, SetF(-5.373915657e-2f));
  p = hn::MulAdd(p, z, SetF(1.333143115e-1f));
  p = hn::MulAdd(p, z, SetF(-3.333328068e-1f));
  const VF near = hn::MulAdd(hn::Mul(x, z), p, x);
  // Elsewhere 1 - 2 / (e^(2 |x|) + 1), which is 1 in FP32 from 9.02 on.
  const VF absolute = hn::Abs(x), one = SetF(1.0f);
  const VF e = ExpInRange(hn::Min(hn::Add(absolute, absolute), SetF(20.0f)));
  const VF far = hn::Sub(one, hn::Div(SetF(2.0f), hn::Add(e, one)));
  const VF result = hn::IfThenElse(hn::Lt(absolute, SetF(0.625f)), near, hn::CopySign(far, x));
  return hn::IfThenElse(hn::Eq(x, x), result, x);
}

// Applies ScoreRules to columns [c, c + lanes), one query per lane, of a row of scores.
struct Rules {
  Rules(const ScoreRules& r, int64_t column) : rules(r), c(column) {
    if (r.begin != nullptr) {
      begin = hn::LoadU(DI(), r.begin + c);
      end = hn::LoadU(DI(), r.end + c);
    }
    if (r.alibi_from != nullptr) from = LoadF32(r.alibi_from + c);
  }
  HWY_INLINE VF Apply(VF s, int64_t row) const {
    const int64_t key = rules.first_key + row;
    if (rules.softcap > 0) s = Cap(s, row);
    if (rules.bias != nullptr) s = hn::Add(s, LoadF32(rules.bias + row * kQueries + c));
    if (rules.alibi_from != nullptr) {
      const VF distance = hn::Sub(SetF(static_cast<float>(key)), from);
      s = hn::MulAdd(SetF(rules.slope), distance, s);
    }
    const VF masked = SetF(-INFINITY);
    if (rules.begin != nullptr) {
      const VI position = hn::Set(DI(), static_cast<int32_t>(key));
      const auto before = hn::RebindMask(DF(), hn::Lt(position, begin));
      const auto inside = hn::RebindMask(DF(), hn::Lt(position, end));
      s = hn::IfThenElse(before, masked, hn::IfThenElse(inside, s, masked));
    }
    if (rules.hidden != nullptr) {
      const VF hidden = LoadF32(rules.hidden + row * kQueries + c);
      s = hn::IfThenElse(hn::Eq(hidden, SetF(0.0f)), s, masked);
    }
    return s;
  }

  HWY_INLINE VF Cap(VF s, int64_t row) const {
    const VF cap = SetF(rules.softcap), part = Tanh(hn::Div(s, cap));
    if (rules.cap_slope != nullptr) {
      // 1 - tanh^2 cancels where the cap saturates; 4 e / (1 + e)^2, e = exp(-2 |x|), does not.
      const VF one = SetF(1.0f), x = hn::Abs(hn::Div(s, cap));
      const VF e = ExpNonPositive(hn::Neg(hn::Add(x, x))), sum = hn::Add(one, e);
      const VF far = hn::Div(hn::Mul(SetF(4.0f), e), hn::Mul(sum, sum));
      const VF near = hn::NegMulAdd(part, part, one);
      StoreF32(hn::IfThenElse(hn::Gt(x, SetF(0.625f)), far, near),
               rules.cap_slope + row * kQueries + c);
    }
    return hn::Mul(cap, part);
  }

  const ScoreRules& rules;
  int64_t c;
  VI begin = hn::Zero(DI()), end = hn::Zero(DI());
  VF from = SetF(0.0f);
};

bool SoftmaxTile(const ScoreRules& r, const float* dropout, float* scores, SoftmaxState& state) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  const bool plain = r.begin == nullptr && r.bias == nullptr && r.hidden == nullptr &&
                     r.alibi_from == nullptr && r.softcap == 0;
  bool rescaled = false;
  for (int64_t c = 0; c < r.cols; c += lanes) {
    const Rules rules(r, c);
    const VF old_top = LoadF32(state.top + c);
    VF top = old_top;
    for (int64_t j = 0; j < r.keys; ++j) {
      float* at = scores + j * kQueries + c;
      VF s = LoadF32(at);
      if (!plain) {
        s = rules.Apply(s, j);
        StoreF32(s, at);
      }
      top = hn::Max(top, s);
    }
    StoreF32(top, state.top + c);
    // If all keys so far are hidden, subtracts 0, and every exponential is 0.
    const VF base = hn::IfThenElse(hn::Eq(top, SetF(-INFINITY)), SetF(0.0f), top);
    const VF rescale = ExpNonPositive(hn::Sub(old_top, base));
    VF sum = hn::Mul(LoadF32(state.sum + c), rescale);
    for (int64_t j = 0; j < r.keys; ++j) {
      float* at = scores + j * kQueries + c;
      VF p = ExpNonPositive(hn::Sub(LoadF32(at), base));
      sum = hn::Add(sum, p);
      if (dropout != nullptr) p = hn::Mul(p, LoadF32(dropout + j * kQueries + c));
      StoreF32(p, at);
    }
    StoreF32(sum, state.sum + c);
    StoreF32(rescale, state.rescale + c);
    rescaled = rescaled || !hn::AllTrue(DF(), hn::Eq(rescale, SetF(1.0f)));
  }
  return rescaled;
}

void ScaleColumns(float* tile, int64_t rows, int64_t cols, const float* factor) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t c = 0; c < cols; c += lanes) {
    const VF f = LoadF32(factor + c);
    for (int64_t i = 0; i < rows; ++i) {
      float* at = tile + i * kQueries + c;
      StoreF32(hn::Mul(LoadF32(at), f), at);
    }
  }
}

void Probabilities(const ScoreRules& r, const float* lse, float* scores) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t c = 0; c < r.cols; c += lanes) {
    const Rules rules(r, c);
    const VF base = LoadF32(lse + c);
    for (int64_t j = 0; j < r.keys; ++j) {
      float* at = scores + j * kQueries + c;
      StoreF32(Exp(hn::Sub(rules.Apply(LoadF32(at), j), base)), at);
    }
  }
}

void ScoreGradients(int64_t keys, int64_t cols, const float* delta, const float* dropout, float* p,
                    float* d_p) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t c = 0; c < cols; c += lanes) {
    const VF row = LoadF32(delta + c);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * kQueries + c;
      const VF pv = LoadF32(p + at);
      VF dp = LoadF32(d_p + at);
      if (dropout != nullptr) {
        const VF factor = LoadF32(dropout + at);
        dp = hn::Mul(dp, factor);
        StoreF32(hn::Mul(pv, factor), p + at);
      }
      StoreF32(hn::Mul(pv, hn::Sub(dp, row)), d_p + at);
    }
  }
}

void MultiplyTile(int64_t keys, int64_t cols, const float* factors, float* tile) {
  const auto lanes = static_cast<int64_t>(NumLanes());
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = j * kQueries; c < j * kQueries + cols; c += lanes) {
      StoreF32(hn::Mul(LoadF32(tile + c), LoadF32(factors + c)), tile + c);
    }
  }
}

// ---- dropout

// Returns in lane l the random word k + shift[l] of the eight words of two consecutive Philox
// blocks.
HWY_INLINE VU Shifted(const VU words[8], int k, VU shift) {
  VU out = words[k];
  for (uint32_t s = 1; s < 4; ++s) {
    out = hn::IfThenElse(hn::Eq(shift, SetU(s)), words[k + static_cast<int>(s)], out);
  }
  return out;
}

void DropoutTile(const DropoutRules& rules, const uint64_t* elements, int64_t keys, int64_t cols,
                 float* factors) {
  const PhiloxKey key{static_cast<uint32_t>(rules.seed), static_cast<uint32_t>(rules.seed >> 32)};
  const auto lanes = static_cast<int64_t>(NumLanes());
  const VU threshold = SetU(rules.threshold);
  const VF kept = SetF(rules.kept);
  for (int64_t c = 0; c < cols; c += lanes) {
    HWY_ALIGN uint32_t low[16], high[16], shift[16];
    bool aligned = true;
    for (int64_t l = 0; l < lanes; ++l) {
      const uint64_t block = rules.offset + elements[c + l] / 4;
      low[l] = static_cast<uint32_t>(block);
      high[l] = static_cast<uint32_t>(block >> 32);
      shift[l] = static_cast<uint32_t>(elements[c + l] % 4);
      aligned = aligned && shift[l] == 0;
    }
    const VU shifts = hn::LoadU(DU(), shift), one = SetU(1), zero = hn::Zero(DU());
    VU counter_low = hn::LoadU(DU(), low), counter_high = hn::LoadU(DU(), high);
    const auto advance = [&]() HWY_ATTR {
      counter_low = hn::Add(counter_low, one);
      counter_high =
          hn::IfThenElse(hn::Eq(counter_low, zero), hn::Add(counter_high, one), counter_high);
    };
    VU words[8];
    PhiloxBlocks(counter_low, counter_high, key, words);
    for (int64_t j = 0; j < keys; j += 4) {
      advance();
      const bool more = !aligned || j + 4 < keys;
      if (more) PhiloxBlocks(counter_low, counter_high, key, words + 4);
      for (int k = 0; k < 4 && j + k < keys; ++k) {
        const VU word = aligned ? words[k] : Shifted(words, k, shifts);
        const VF factor = hn::IfThenElseZero(KeepMask(word, threshold), kept);
        StoreF32(factor, factors + (j + k) * kQueries + c);
      }
      if (more) {
        for (int k = 0; k < 4; ++k) words[k] = words[k + 4];
      }
    }
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {

HWY_EXPORT(Product);
HWY_EXPORT(SoftmaxTile);
HWY_EXPORT(ScaleColumns);
HWY_EXPORT(Probabilities);
HWY_EXPORT(ScoreGradients);
HWY_EXPORT(MultiplyTile);
HWY_EXPORT(DropoutTile);

void tile_product(const TileProduct& product) { HWY_DYNAMIC_DISPATCH(Product)(product); }
bool softmax_step(const ScoreRules& rules, const float* dropout, float* scores,
                  SoftmaxState& state) {
  return HWY_DYNAMIC_DISPATCH(SoftmaxTile)(rules, dropout, scores, state);
}
void scale_columns(float* tile, int64_t rows, int64_t cols, const float* factor) {
  HWY_DYNAMIC_DISPATCH(ScaleColumns)(tile, rows, cols, factor);
}
void probabilities(const ScoreRules& rules, const float* lse, float* scores) {
  HWY_DYNAMIC_DISPATCH(Probabilities)(rules, lse, scores);
}
void score_gradients(int64_t keys, int64_t cols, const float* delta, const float* dropout, float* p,
                     float* d_p) {
  HWY_DYNAMIC_DISPATCH(ScoreGradients)(keys, cols, delta, dropout, p, d_p);
}
void multiply_tile(int64_t keys, int64_t cols, const float* factors, float* tile) {
  HWY_DYNAMIC_DISPATCH(MultiplyTile)(keys, cols, factors, tile);
}
void dropout_tile(const DropoutRules& rules, const uint64_t* elements, int64_t keys, int64_t cols,
                  float* factors) {
  HWY_DYNAMIC_DISPATCH(DropoutTile)(rules, elements, keys, cols, factors);
}

}  // namespace te_fl::cpu
#endif
