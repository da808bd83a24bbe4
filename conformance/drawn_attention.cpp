#include "conformance/attention_case.hpp"
#include "conformance/drawn.hpp"

// Random attention cases: sizes next to kernels' tile sizes, odd head sizes, grouped heads, all
// masks and layouts, windows, lengths and gaps of sequences, and further terms of the score, in all
// combinations that the op allows. FP8 is tested only by the fixed cases
// (cases/parts/attention_fp8.cpp), because its tolerances were derived for the sizes of those
// cases.
namespace te_fl::conformance::attention {
namespace {

// The amount of work that the oracle, which computes pair by pair, does in about ten milliseconds.
constexpr int64_t kLargestWork = 4'000'000;

void draw_sizes(Draw& r, Variant& v) {
  if (r.swept != nullptr) {  // head size and score rows of the swept length
    v.b = r.swept->large ? 1 : 1 + r.below(2), v.g = 1, v.h = 2,
    v.d = v.dv = std::min<int64_t>(r.swept->columns, 256);
    v.sq = r.swept->rows, v.sk = std::min<int64_t>(r.swept->columns, 2048);
    if (r.swept->large) v.d = v.dv = 8;
    return;
  }
  v.b = 1 + r.below(3), v.g = 1 + r.below(3), v.h = v.g * (1 + r.below(3));
  v.d = Drawn::extent(r, 136), v.dv = Drawn::chance(r, 3) ? Drawn::extent(r, 136) : v.d;
  v.sq = Drawn::extent(r, 300), v.sk = Drawn::chance(r, 3) ? v.sq : Drawn::extent(r, 300);
  const auto work = [&] { return v.b * v.h * v.sq * v.sk * (v.d + v.dv); };
  const bool whole = Drawn::chance(r, 2);  // multiples of 16-byte vectors, which matrix units need
  const auto widen = [whole](int64_t& extent) {
    if (whole) extent = (extent + 7) / 8 * 8;
  };
  while (work() > kLargestWork) {
    const bool same = v.sq == v.sk;
    int64_t& longer = v.sq >= v.sk ? v.sq : v.sk;
    int64_t& wider = v.d >= v.dv ? v.d : v.dv;
    int64_t& largest = longer > wider ? longer : wider;
    largest = (largest + 1) / 2;
    if (same) v.sq = v.sk = std::min(v.sq, v.sk);
  }
  widen(v.d), widen(v.dv);
}

// Random lengths of at most `longest`; one of them is `longest`.
std::vector<int64_t> draw_lengths(Draw& r, int64_t b, int64_t longest) {
  std::vector<int64_t> lengths(static_cast<size_t>(b));
  for (int64_t& n : lengths) n = Drawn::chance(r, 6) ? 0 : r.below(longest + 1);
  lengths[static_cast<size_t>(r.below(b))] = longest;
  return lengths;
}

void draw_sequences(Draw& r, Variant& v) {
  const bool padding = v.mask == TE_FL_MASK_TYPE_PADDING ||
                       v.mask == TE_FL_MASK_TYPE_PADDING_CAUSAL ||
                       v.mask == TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
  if (!padding && v.layout != kT) return;
  v.len_q = draw_lengths(r, v.b, v.sq);
  v.len_k = v.sq == v.sk ? v.len_q : draw_lengths(r, v.b, v.sk);
  if (v.layout != kT) return;
  v.max_given = Drawn::chance(r, 2);
  if (!Drawn::chance(r, 3)) return;
  for (int64_t n = 0; n < v.b; ++n) v.gap_q.push_back(r.below(4)), v.gap_k.push_back(r.below(4));
}

void draw_terms(Draw& r, Variant& v) {
  const Dims some = {Drawn::chance(r, 2) ? 1 : v.b, Drawn::chance(r, 2) ? 1 : v.h};
  v.mask_bh = some, v.mask_dtype = Drawn::chance(r, 2) ? TE_FL_U8 : TE_FL_BOOL;
  if (Drawn::chance(r, 4)) v.left = r.below(v.sk + 1);
  if (Drawn::chance(r, 4)) v.right = r.below(v.sk + 1);
  if (Drawn::chance(r, 5)) {
    v.softmax = Drawn::chance(r, 2) ? TE_FL_SOFTMAX_TYPE_OFF_BY_ONE : TE_FL_SOFTMAX_TYPE_LEARNABLE;
  }
  if (v.layout != kT && Drawn::chance(r, 5)) v.bias = Drawn::high(r), v.bias_bh = some;
  if (v.layout != kT && Drawn::chance(r, 6)) v.alibi = 1 + static_cast<int>(r.below(2));
  if (Drawn::chance(r, 6)) v.dropout = 0.25f;
  const double scales[] = {0.25, 0.125, -0.5};
  v.scale = scales[r.below(3)];
  v.packed = v.h == v.g && v.d == v.dv && v.sq == v.sk && v.gap_q.empty() && Drawn::chance(r, 2);
  if (Drawn::chance(r, 6)) v.softcap = Drawn::chance(r, 2) ? 1.0f : 30.0f;
}

Variant draw(Draw& r) {
  Variant v;
  v.dtype = Drawn::high(r), v.layout = static_cast<int>(r.below(3));
  do {
    v.mask = static_cast<int>(r.below(TE_FL_MASK_TYPE_ARBITRARY + 1));
  } while (v.layout == kT && v.mask == TE_FL_MASK_TYPE_ARBITRARY);
  draw_sizes(r, v), draw_sequences(r, v), draw_terms(r, v);
  return v;
}

}  // namespace

void draw_cases(Drawn& drawn) {
  drawn.cases("attention", "fused_attn_fwd", [](Draw& r) -> DrawnCase {
    const Variant v = draw(r);
    return {variant_name(v), [v](Problem& p) { forward(p, v); }};
  });
  drawn.cases("attention", "fused_attn_bwd", [](Draw& r) -> DrawnCase {
    const Variant v = draw(r);
    return {variant_name(v), [v](Problem& p) { backward(p, v); }};
  });
}

}  // namespace te_fl::conformance::attention
