#pragma once

#include <string>
#include <vector>

#include "conformance/oracle_attention.hpp"

// The attention cases' sizes and options, their inputs, and forward and backward in double
// precision with the slack of every element.
//
// Slack: an error e of a score is a relative error e of a probability; products of low-precision
// tensors may round probabilities and score gradients to the tensors' type once on the way to the
// second product. FP8:
// - Sums of products of codes get the slack of FP8 GEMMs (kFp8Sums).
// - Where a value that is quantised inside may have an error, its code is any between those of the
//   value less and plus the error.
// - The forward quantises exp(score - the row's largest), and one that goes over the keys once
//   exp(score - the largest so far). Both are rounded by up to half a step of their own, uniformly:
//   the slack is six standard deviations of the sum of those errors over the row, but not more than
//   all of them.
namespace te_fl::conformance::attention {

constexpr int kS = TE_FL_LAYOUT_SBHD, kB = TE_FL_LAYOUT_BSHD, kT = TE_FL_LAYOUT_THD;
constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;
// FP8: the given scales of the probabilities and of the scores' gradient.
constexpr float kScaleP = 256, kScaleDs = 64;
// Factor of sum_slack() for products of codes: the matrix unit keeps 14 bits of its sums
// (gemm_case.cpp, accumulation()).
constexpr double kFp8Sums = 128;

constexpr uint64_t kOtherSeed = 0xfedcba987654321u;

struct Variant {
  int dtype = TE_FL_F32;  // FP8: the forward's type
  int out = -1;           // of o and dq, dk, dv; -1: dtype
  int layout = kB, mask = TE_FL_MASK_TYPE_NONE, softmax = TE_FL_SOFTMAX_TYPE_VANILLA;
  int64_t b = 2, sq = 7, sk = 9, h = 4, g = 4, d = 16, dv = 16;
  int64_t left = -1, right = -1;
  float dropout = 0;
  uint64_t rng_seed = 0xfeedu, rng_offset = 3;
  bool rng_in_memory = false;
  int bias = -1;  // dtype
  Dims bias_bh = {1, 1};
  int alibi = 0;  // 1: [H], 2: [B, H]
  Dims mask_bh = {1, 1};
  int mask_dtype = TE_FL_U8;
  std::vector<int64_t> len_q = {}, len_k = {};
  std::vector<int64_t> gap_q = {}, gap_k = {};  // thd: unused tokens after each sequence
  bool packed = false, max_given = false, no_lse = false, saved = false, large = false;
  double scale = 0.25;
  float scale_p = kScaleP;
  // FP8: P and dS stay FP32; o and the gradients under computed scales, with column-wise copies.
  bool unrounded = false, current = false, columns = false;
  float softcap = 0;

  bool rounds() const { return is_fp8(dtype) && !unrounded; }
};

std::string variant_name(const Variant& v);

// Shared by forward and backward: the input tensors, and the oracle's problem made from them.
struct Inputs {
  Tensor *q, *k, *v;
  Tensor *bias = nullptr, *alibi = nullptr, *mask = nullptr, *sink = nullptr;
  Dims o_shape, q_shape, k_shape, v_shape, lse_shape;
  std::shared_ptr<Attention> a = std::make_shared<Attention>();
};
Inputs make_inputs(Problem& p, const Variant& v);
// q, k, v (or their gradients) as slices of one [.., 3, H, D] tensor in `storage`.
void packed_inputs(Problem& p, const Spec& spec, const Variant& v, Inputs& in,
                   const char* const names[3], Role role, std::shared_ptr<Buffer> storage,
                   Tensor** out);

struct Forward {
  std::vector<double> o, slack, lse, lse_slack;
  std::vector<uint8_t> skip_o, skip_lse;  // tokens outside every sequence
  double p_max = 0;
};
Forward attend(const Variant& v, const Inputs& in);

struct Gradients {
  std::vector<double> dq, dk, dv, dbias, dsink;
  std::vector<double> dq_slack, dk_slack, dv_slack, dbias_slack, dsink_slack;
  std::vector<uint8_t> skip_q, skip_k, skip_v;
  double ds_max = 0;
};

struct BackwardInputs {
  std::vector<double> d_o, o, lse;
};
Gradients differentiate(const Variant& v, const Inputs& in, const BackwardInputs& x);

// The sizes and options of the cases in FP8.
void add_fp8_variants(std::vector<Variant>& all);
// Bias, ALiBi, sinks, mask tensors and dropout in half precision, beside the tiles of kernels.
void add_term_variants(std::vector<Variant>& all);
// One call each, with its expectations.
void forward(Problem& p, const Variant& v);
void backward(Problem& p, const Variant& v);

}  // namespace te_fl::conformance::attention
