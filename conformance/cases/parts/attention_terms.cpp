#include "conformance/attention_case.hpp"

// Cases of attention with further terms (bias, ALiBi, sinks, mask tensors, dropout, softcap),
// mostly in half precision. The sizes exceed the tile sizes 64 and 128 of tensor-core kernels by a
// few elements, both with a multiple of the vector width in keys and without.
namespace te_fl::conformance::attention {
namespace {

constexpr int kBF = TE_FL_BF16, kHalf = TE_FL_F16;
constexpr int kNone = TE_FL_MASK_TYPE_NONE, kCausal = TE_FL_MASK_TYPE_CAUSAL,
              kCorner = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT, kPadded = TE_FL_MASK_TYPE_PADDING,
              kPaddedCausal = TE_FL_MASK_TYPE_PADDING_CAUSAL, kGiven = TE_FL_MASK_TYPE_ARBITRARY;
constexpr int kSink = TE_FL_SOFTMAX_TYPE_LEARNABLE, kOne = TE_FL_SOFTMAX_TYPE_OFF_BY_ONE;

// More than one tile of queries and of keys, with head size 64.
Variant crossing(int64_t sk) {
  return {.dtype = kBF, .b = 1, .sq = 135, .sk = sk, .h = 2, .g = 2, .d = 64, .dv = 64};
}
Variant of_two(int64_t sk) {
  Variant v = crossing(sk);
  v.b = 2, v.sq = 131, v.g = 1;
  return v;
}

void add_bias(std::vector<Variant>& all) {
  for (const Dims& bh : {Dims{1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
    Variant v = of_two(bh[0] == 1 ? 72 : 75);  // 75: the bias rows end within a vector
    v.bias = kBF, v.bias_bh = bh;
    all.push_back(v);
  }
  Variant v = crossing(200);
  v.bias = kBF, v.bias_bh = {1, 2}, v.mask = kCausal;
  all.push_back(v);
  v.layout = kS, v.mask = kNone, v.left = 30, v.right = 17;
  all.push_back(v);
  v = of_two(136);
  v.bias = kBF, v.mask = kPaddedCausal, v.len_q = {131, 70}, v.len_k = {65, 136};
  all.push_back(v);
  v = crossing(69);
  v.dtype = v.bias = kHalf, v.d = v.dv = 128, v.h = v.g = 1;
  all.push_back(v);
  // Sequences that share a bias in groups of two and four, including keys that no query sees.
  for (int64_t b : {2, 4, 6, 8}) {
    v = crossing(b == 4 ? 450 : 140);
    v.bias = kBF, v.bias_bh = {1, 2}, v.b = b, v.g = 1, v.mask = b == 8 ? kCausal : kNone;
    if (b == 4) v.left = 90, v.right = 20;
    all.push_back(v);
  }
  v = crossing(70);
  v.bias = kBF, v.bias_bh = {1, 2}, v.b = 4, v.mask = kCorner, v.sq = 260, v.d = v.dv = 128;
  v.dropout = 0.25f;
  all.push_back(v);
}

void add_alibi(std::vector<Variant>& all) {
  for (int mask : {kNone, kCausal, kCorner}) {
    Variant v = of_two(mask == kCorner ? 140 : 70);
    v.mask = mask, v.alibi = mask == kCausal ? 2 : 1;
    all.push_back(v);
  }
  Variant v = crossing(130);
  v.alibi = 1, v.mask = kPadded, v.b = 2, v.len_q = {135, 3}, v.len_k = {90, 130};
  all.push_back(v);
  v = crossing(72);
  v.dtype = kHalf, v.alibi = 1, v.d = v.dv = 128, v.layout = kS;
  all.push_back(v);
}

void add_sinks(std::vector<Variant>& all) {
  for (int softmax : {kOne, kSink}) {
    Variant v = of_two(72);
    v.softmax = softmax, v.mask = kCausal;
    all.push_back(v);
    v = crossing(135);
    v.softmax = softmax, v.packed = true;
    all.push_back(v);
    v = {.dtype = softmax == kOne ? kBF : kHalf,
         .layout = kT,
         .mask = kPaddedCausal,
         .softmax = softmax,
         .b = 4,
         .sq = 131,
         .sk = 131,
         .h = 2,
         .g = 1,
         .d = 64,
         .dv = 128,
         .len_q = {131, 1, 66, 0},
         .len_k = {70, 131, 66, 5},
         .max_given = true};
    all.push_back(v);
  }
}

void add_mask_tensors(std::vector<Variant>& all) {
  for (const Dims& bh : {Dims{1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
    Variant v = of_two(bh[1] == 1 ? 72 : 67);
    v.mask = kGiven, v.mask_bh = bh, v.mask_dtype = bh[0] == 1 ? TE_FL_BOOL : TE_FL_U8;
    all.push_back(v);
  }
  Variant v = crossing(200);
  v.mask = kGiven, v.layout = kS, v.left = 40, v.right = 20;
  all.push_back(v);
  v = crossing(130);
  v.dtype = kHalf, v.mask = kGiven, v.d = v.dv = 128;
  all.push_back(v);
}

void add_dropout(std::vector<Variant>& all) {
  for (int64_t sk : {72, 133, 134, 135}) {  // rows start at each of a counter's 4 words
    Variant v = crossing(sk);
    v.dropout = 0.25f, v.g = 1, v.mask = sk == 134 ? kCausal : kNone;
    all.push_back(v);
  }
  Variant v = of_two(70);
  v.dropout = 0.1f, v.layout = kS, v.d = v.dv = 128, v.mask = kGiven, v.mask_bh = {2, 2};
  all.push_back(v);
  for (int64_t sk : {72, 135}) {  // the counter's low word overflows within a row
    v = crossing(sk);
    v.dropout = 0.25f, v.g = 1, v.rng_offset = 0xffffff00u;
    all.push_back(v);
  }
  v = crossing(75);
  v.dtype = v.bias = kHalf, v.dropout = 0.25f, v.bias_bh = {1, 2};
  all.push_back(v);
  for (bool has_lengths : {false, true}) {
    v = {.dtype = kBF,
         .layout = kT,
         .mask = has_lengths ? kPaddedCausal : kPadded,
         .b = 3,
         .sq = 131,
         .sk = 131,
         .h = 2,
         .g = 2,
         .d = 64,
         .dv = 64,
         .dropout = 0.25f,
         .len_q = {131, 0, 40},
         .len_k = {131, 9, 40},
         .packed = false,
         .max_given = has_lengths};
    all.push_back(v);
  }
}

// Adds cases with scores of about 1 and three softcaps: one that hardly changes the scores, one
// that does, and one that flattens most of them.
void add_softcap(std::vector<Variant>& all) {
  for (float cap : {30.0f, 2.0f, 0.25f})
    all.push_back({.mask = cap == 2.0f ? kCausal : kNone, .softcap = cap});
  all.push_back({.mask = kNone, .scale = 20, .softcap = 50});
  for (int layout : {kS, kB}) {
    Variant v = crossing(layout == kS ? 140 : 75);
    v.layout = layout, v.mask = kCausal, v.softcap = 2;
    all.push_back(v);
  }
  // The bias is added after the cap, so its gradient lacks the factor of the cap's derivative.
  all.push_back({.sq = 70, .sk = 135, .bias = TE_FL_F32, .bias_bh = {2, 4}, .softcap = 1});
  all.push_back({.mask = kCausal, .sq = 9, .sk = 9, .alibi = 2, .softcap = 1});
  Variant v = of_two(139);
  v.dtype = v.bias = kHalf, v.bias_bh = {2, 2}, v.alibi = 2, v.softmax = kSink, v.dropout = 0.25f;
  v.mask = kGiven, v.mask_bh = {2, 1}, v.left = 50, v.right = 60, v.softcap = 1;
  all.push_back(v);
  // The most general case for kernels that derive the cap's slope from the score: without bias and
  // ALiBi.
  for (int64_t d : {64, 128}) {
    v = of_two(139);
    v.dtype = kHalf, v.d = v.dv = d, v.softmax = kSink, v.dropout = 0.25f;
    v.mask = kGiven, v.mask_bh = {2, 1}, v.left = 50, v.right = 60, v.softcap = 1;
    all.push_back(v);
  }
  for (float cap : {1e-35f, 0.004f, 256.0f, 1000.0f, 3e38f}) {
    v = crossing(75);
    v.softcap = cap;
    all.push_back(v);
  }
  all.push_back({.layout = kT,
                 .mask = kPaddedCausal,
                 .softmax = kOne,
                 .b = 3,
                 .sq = 8,
                 .sk = 9,
                 .g = 2,
                 .len_q = {8, 0, 3},
                 .len_k = {9, 5, 4},
                 .gap_q = {2, 3, 1},
                 .gap_k = {1, 0, 4},
                 .softcap = 2});
  for (bool unrounded : {false, true})
    all.push_back(
        {.dtype = kE4, .mask = kCausal, .sq = 16, .sk = 16, .unrounded = unrounded, .softcap = 2});
}

void add_together(std::vector<Variant>& all) {
  Variant v = of_two(139);
  v.bias = kBF, v.bias_bh = {1, 2}, v.alibi = 2, v.softmax = kSink, v.dropout = 0.25f;
  v.mask = kGiven, v.mask_bh = {2, 1}, v.left = 50, v.right = 60;
  all.push_back(v);
  for (const auto& [d, dv] :
       std::vector<std::pair<int64_t, int64_t>>{{8, 8}, {40, 24}, {72, 120}}) {
    v = crossing(72);
    v.d = d, v.dv = dv, v.alibi = 1, v.softmax = kOne, v.dropout = 0.25f, v.mask = kCorner;
    all.push_back(v);
  }
}

}  // namespace

void add_term_variants(std::vector<Variant>& all) {
  add_bias(all);
  add_alibi(all);
  add_sinks(all);
  add_mask_tensors(all);
  add_dropout(all);
  add_softcap(all);
  add_together(all);
}

}  // namespace te_fl::conformance::attention
