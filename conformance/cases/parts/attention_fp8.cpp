// The attention cases in FP8.
#include "conformance/attention_case.hpp"

namespace te_fl::conformance::attention {
namespace {

// Heads of 128, which fused FP8 kernels support, and sizes at the limits of these kernels.
void add_fp8(std::vector<Variant>& all) {
  for (int layout : {kS, kB}) {
    for (int mask : {TE_FL_MASK_TYPE_NONE, TE_FL_MASK_TYPE_CAUSAL})
      all.push_back({.dtype = kE4,
                     .layout = layout,
                     .mask = mask,
                     .sq = 64,
                     .sk = 64,
                     .d = 128,
                     .dv = 128,
                     .scale = 0.125});
    for (int64_t sq : {70, 192})
      all.push_back({.dtype = kE4,
                     .layout = layout,
                     .b = 1,
                     .sq = sq,
                     .sk = 130,
                     .g = 2,
                     .d = 128,
                     .dv = 128,
                     .scale = 0.125});
    all.push_back({.dtype = kE4,
                   .layout = layout,
                   .mask = TE_FL_MASK_TYPE_CAUSAL,
                   .sq = 64,
                   .sk = 64,
                   .d = 128,
                   .dv = 128,
                   .packed = true,
                   .scale = 0.125});
    // Small probabilities with the scale that delayed scaling computes for them. With this scale,
    // probabilities near 1 would overflow.
    all.push_back({.dtype = kE4,
                   .layout = layout,
                   .b = 1,
                   .sq = 64,
                   .sk = 300,
                   .d = 128,
                   .dv = 128,
                   .scale = 0.03125,
                   .scale_p = 4096});
    // The initial scale of delayed scaling, with which these probabilities round to 0.
    all.push_back({.dtype = kE4,
                   .layout = layout,
                   .b = 1,
                   .sq = 64,
                   .sk = 1600,
                   .h = 1,
                   .g = 1,
                   .d = 128,
                   .dv = 128,
                   .scale = 0.03125,
                   .scale_p = 1});
  }
  constexpr int kNone = TE_FL_MASK_TYPE_NONE, kCausal = TE_FL_MASK_TYPE_CAUSAL;
  for (const auto& [sq, sk] : std::vector<std::pair<int64_t, int64_t>>{{64, 130}, {128, 70}})
    all.push_back(
        {.dtype = kE4, .mask = kCausal, .sq = sq, .sk = sk, .d = 128, .dv = 128, .scale = 0.125});
  for (int64_t d : {64, 96, 256})
    all.push_back({.dtype = kE4,
                   .mask = kCausal,
                   .sq = 70,
                   .sk = 70,
                   .g = 1,
                   .d = d,
                   .dv = d,
                   .scale = 0.125});
  all.push_back({.dtype = kE4, .sq = 1, .sk = 131, .d = 128, .dv = 128, .scale = 0.125});
  for (int mask : {kNone, kCausal})
    all.push_back({.dtype = kE4,
                   .layout = kS,
                   .mask = mask,
                   .b = 1,
                   .sq = 320,
                   .sk = 520,
                   .h = 2,
                   .g = 1,
                   .d = 128,
                   .dv = 128,
                   .large = true,
                   .scale = 0.125});
}

// Adds FP8 cases that only general kernels support: lengths and gaps of sequences, windows, odd
// head sizes, empty extents, computed scales and column-wise data.
void add_fp8_shapes(std::vector<Variant>& all) {
  for (int layout : {kS, kB}) {
    for (int mask : {TE_FL_MASK_TYPE_PADDING, TE_FL_MASK_TYPE_PADDING_CAUSAL,
                     TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT})
      all.push_back({.dtype = kE4,
                     .layout = layout,
                     .mask = mask,
                     .b = 4,
                     .sq = 40,
                     .sk = 72,
                     .g = 2,
                     .d = 64,
                     .dv = 64,
                     .len_q = {40, 17, 0, 5},
                     .len_k = {20, 72, 9, 0},
                     .scale = 0.125});
    for (const auto& [sq, sk] : std::vector<std::pair<int64_t, int64_t>>{{33, 70}, {13, 5}})
      all.push_back({.dtype = kE4,
                     .layout = layout,
                     .mask = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT,
                     .sq = sq,
                     .sk = sk,
                     .g = 2,
                     .d = 32,
                     .dv = 32});
    all.push_back({.dtype = kE4,
                   .layout = layout,
                   .mask = TE_FL_MASK_TYPE_CAUSAL,
                   .sq = 40,
                   .sk = 40,
                   .g = 2,
                   .d = 24,
                   .dv = 40});
    for (int mask : {TE_FL_MASK_TYPE_NONE, TE_FL_MASK_TYPE_CAUSAL})
      all.push_back({.dtype = kE4,
                     .layout = layout,
                     .mask = mask,
                     .sq = 70,
                     .sk = 70,
                     .g = 2,
                     .left = 9,
                     .right = 5});
    all.push_back({.dtype = kE4, .layout = layout, .unrounded = true, .columns = true});
    all.push_back({.dtype = kE4, .layout = layout, .g = 1, .unrounded = true, .current = true});
    all.push_back(
        {.dtype = kE4, .layout = layout, .unrounded = true, .current = true, .columns = true});
  }
  for (int mask = TE_FL_MASK_TYPE_NONE; mask <= TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
       ++mask) {
    all.push_back({.dtype = kE4,
                   .layout = kT,
                   .mask = mask,
                   .b = 4,
                   .sq = 70,
                   .sk = 80,
                   .g = 2,
                   .d = 32,
                   .dv = 32,
                   .len_q = {70, 1, 33, 0},
                   .len_k = {80, 33, 20, 6},
                   .max_given = true});
    all.push_back({.dtype = kE4,
                   .layout = kT,
                   .mask = mask,
                   .b = 3,
                   .sq = 40,
                   .sk = 40,
                   .len_q = {40, 7, 0},
                   .len_k = {40, 21, 9},
                   .gap_q = {2, 3, 1},
                   .gap_k = {1, 0, 4}});
  }
  all.push_back({.dtype = kE4,
                 .layout = kT,
                 .mask = TE_FL_MASK_TYPE_PADDING_CAUSAL,
                 .b = 2,
                 .sq = 40,
                 .sk = 40,
                 .left = 6,
                 .right = 0,
                 .len_q = {40, 23},
                 .len_k = {40, 23},
                 .packed = true});
  for (const auto& [d, dv] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {18, 10}, {136, 200}})
    all.push_back({.dtype = kE4, .g = 2, .d = d, .dv = dv, .scale = 0.125});
  all.push_back({.dtype = kE4, .b = 0});
  all.push_back({.dtype = kE4, .sq = 0});
  all.push_back({.dtype = kE4, .sk = 0});
  all.push_back({.dtype = kE4, .sk = 0, .unrounded = true, .current = true});
  all.push_back({.dtype = kE4, .unrounded = true});
  all.push_back({.dtype = kE4, .mask = TE_FL_MASK_TYPE_CAUSAL, .g = 2, .unrounded = true});
}

// Adds FP8 cases with further terms of the score (bias, ALiBi, masks, sinks), and with dropout.
void add_fp8_terms(std::vector<Variant>& all) {
  all.push_back({.dtype = kE4, .mask = TE_FL_MASK_TYPE_ARBITRARY, .mask_bh = {2, 4}});
  all.push_back({.dtype = kE4, .layout = kS, .mask = TE_FL_MASK_TYPE_ARBITRARY, .g = 2});
  all.push_back({.dtype = kE4, .bias = TE_FL_F32, .bias_bh = {1, 4}});
  all.push_back({.dtype = kE4, .g = 2, .bias = TE_FL_BF16, .bias_bh = {2, 4}});
  all.push_back({.dtype = kE4, .mask = TE_FL_MASK_TYPE_CAUSAL, .alibi = 1});
  all.push_back({.dtype = kE4, .mask = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT, .sk = 12, .alibi = 2});
  for (int softmax : {TE_FL_SOFTMAX_TYPE_OFF_BY_ONE, TE_FL_SOFTMAX_TYPE_LEARNABLE}) {
    all.push_back({.dtype = kE4, .mask = TE_FL_MASK_TYPE_CAUSAL, .softmax = softmax, .g = 2});
    all.push_back({.dtype = kE4,
                   .layout = kT,
                   .mask = TE_FL_MASK_TYPE_PADDING,
                   .softmax = softmax,
                   .b = 2,
                   .len_q = {7, 3},
                   .len_k = {9, 2}});
  }
  all.push_back({.dtype = kE4, .dropout = 0.25f});
  all.push_back({.dtype = kE4, .dropout = 0.5f, .scale_p = 4096});
  all.push_back({.dtype = kE4, .sk = 1600, .h = 1, .g = 1, .scale = 0.03125, .scale_p = 1});
  all.push_back({.dtype = kE4, .mask = TE_FL_MASK_TYPE_CAUSAL, .g = 2, .dropout = 0.1f});
  all.push_back({.dtype = kE4, .scale = -0.5});
  all.push_back({.dtype = kE4, .saved = true});
}

}  // namespace

void add_fp8_variants(std::vector<Variant>& all) {
  add_fp8(all);
  add_fp8_shapes(all);
  add_fp8_terms(all);
}

}  // namespace te_fl::conformance::attention
