#pragma once

#include <string>
#include <vector>

#include "conformance/oracle_attention.hpp"

// The sizes and options of the attention cases, their inputs, and forward and backward in double
// precision with an error tolerance for each element.
//
// Tolerances: an error e of a score is a relative error e of a probability. Products of
// low-precision tensors may round probabilities and score gradients to the tensors' type once,
// before the second product. For FP8:
// - Sums of products of FP8 values get the tolerance of FP8 GEMMs (kFp8Sums).
// - If a value that is quantised internally may have an error, every code between those of (value -
// error) and (value + error) is correct.
// - The forward quantises exp(score - the row's maximum); an implementation with a single pass over
// the keys quantises exp(score - the maximum so far). Each has an independent rounding error,
// uniform within half a step. The tolerance is six standard deviations of the sum of these errors
// over the row, but at most the sum of their bounds.
namespace te_fl::conformance::attention {

constexpr int kS = TE_FL_LAYOUT_SBHD, kB = TE_FL_LAYOUT_BSHD, kT = TE_FL_LAYOUT_THD;
constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;
// FP8: the scales of the probabilities and of the scores' gradient, which are inputs of the op.
constexpr float kScaleP = 256, kScaleDs = 64;
// The factor on the tolerance sum_tolerance() for sums of products of FP8 values: Hopper's tensor
// cores keep only 14 bits of their sums (see accumulation() in gemm_case.cpp).
constexpr double kFp8Sums = 128;

constexpr uint64_t kOtherSeed = 0xfedcba987654321u;

struct Variant {
  int dtype = TE_FL_F32;  // FP8: the type of the forward
  int out = -1;           // dtype of o, dq, dk and dv; -1: dtype
  int layout = kB, mask = TE_FL_MASK_TYPE_NONE, softmax = TE_FL_SOFTMAX_TYPE_VANILLA;
  int64_t b = 2, sq = 7, sk = 9, h = 4, g = 4, d = 16, dv = 16;
  int64_t left = -1, right = -1;
  float dropout = 0;
  uint64_t rng_seed = 0xfeedu, rng_offset = 3;
  bool rng_in_memory = false;
  int bias = -1;  // dtype of the bias; -1: no bias
  Dims bias_bh = {1, 1};
  int alibi = 0;  // 1: [H], 2: [B, H]
  Dims mask_bh = {1, 1};
  int mask_dtype = TE_FL_U8;
  std::vector<int64_t> len_q = {}, len_k = {};
  std::vector<int64_t> gap_q = {}, gap_k = {};  // thd: unused tokens after each sequence
  bool packed = false, max_given = false, no_lse = false, saved = false, large = false;
  double scale = 0.25;
  float scale_p = kScaleP;
  // FP8. unrounded: P and dS stay in FP32. current: o and the gradients use current scaling.
  // columns: tensors also have column-wise data.
  bool unrounded = false, current = false, columns = false;
  float softcap = 0;

  bool rounds() const { return is_fp8(dtype) && !unrounded; }
};

std::string variant_name(const Variant& v);

// The input tensors that forward and backward share, and the oracle's problem made from them.
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
  std::vector<double> o, tolerance, lse, lse_tolerance;
  std::vector<uint8_t> skip_o, skip_lse;  // tokens outside all sequences
  double p_max = 0;
};
Forward attend(const Variant& v, const Inputs& in);

struct Gradients {
  std::vector<double> dq, dk, dv, dbias, dsink;
  std::vector<double> dq_tolerance, dk_tolerance, dv_tolerance, dbias_tolerance, dsink_tolerance;
  std::vector<uint8_t> skip_q, skip_k, skip_v;
  double ds_max = 0;
};

struct BackwardInputs {
  std::vector<double> d_o, o, lse;
};
Gradients differentiate(const Variant& v, const Inputs& in, const BackwardInputs& x);

// Draws random cases of the forward and the backward.
void draw_cases(Drawn& drawn);
// The sizes and options of the cases in FP8.
void add_fp8_variants(std::vector<Variant>& all);
// Adds cases with bias, ALiBi, sinks, mask tensors and dropout in half precision, with sizes close
// to kernels' tile sizes.
void add_term_variants(std::vector<Variant>& all);
// Build the problem of one call, with its expectations.
void forward(Problem& p, const Variant& v);
void backward(Problem& p, const Variant& v);

}  // namespace te_fl::conformance::attention
