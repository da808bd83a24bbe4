#include "gemm/gemm_problem.hpp"

#include "common/column_sums.hpp"
#include "common/dtype_bytes.hpp"

namespace te_fl::cuda {
namespace {

using Args = te_fl_generic_gemm_args;

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// True if the library can write the FP8 output D: FP8 operands, a supplied scale, row-wise data
// only. E5M2 results require an E5M2 operand, which is a gradient.
bool direct_codes(const Args& args, bool fp8) {
  if (args.d->quant == nullptr || backend::numel(*args.d) == 0) return false;
  const te_fl_quant& quant = *args.d->quant;
  const int d = dtype_of(*args.d);
  const bool gradient = dtype_of(*args.a) == TE_FL_F8E5M2 || dtype_of(*args.b) == TE_FL_F8E5M2;
  const int bias = args.bias != nullptr ? dtype_of(*args.bias) : TE_FL_BF16;
  return fp8 && quant.scaling == TE_FL_SCALING_TENSOR && !is_block(*args.a) &&
         (quant.flags & TE_FL_QUANT_COMPUTE_SCALE) == 0 && quant.scale != nullptr &&
         args.d->dl.data != nullptr && quant.columnwise_data == nullptr &&
         gradient == (d == TE_FL_F8E5M2) && (bias == TE_FL_BF16 || bias == TE_FL_F16) &&
         !args.gelu && args.pre_gelu_in == nullptr && args.residual == nullptr && !args.accumulate;
}

// Returns why the library cannot apply the epilogue; NULL if it can.
const char* refuse_epilogue(const Args& args, const Problem& p) {
  const int d = dtype_of(*args.d);
  const bool fp8 = p.fp8;
  if (args.d_sum != nullptr) return "d_sum is requested";
  if (is_fp8(d)) {
    return direct_codes(args, fp8) ? nullptr : "the library writes no such codes of such a call";
  }
  const bool half = d == TE_FL_F16 || d == TE_FL_BF16;
  if (args.bias != nullptr && (dtype_of(*args.bias) != d || (fp8 && !half))) {
    return "the bias is of a dtype that the library does not add";
  }
  // If has_whole_rows() is false for a matrix, cuBLASLt 13.1 rounds the result of the GEMM before
  // it adds the bias.
  if (args.bias != nullptr && half && !fp8 &&
      !(has_whole_rows(*args.a) && has_whole_rows(*args.b) && has_whole_rows(*args.d))) {
    return "with a bias, rows that are not whole pieces of 16 bytes";
  }
  // The library adds only one matrix, which must have D's dtype.
  if (args.residual != nullptr && (args.accumulate || dtype_of(*args.residual) != d ||
                                   !aligned16(backend::data<const void>(*args.residual)))) {
    return "a residual that the library does not add";
  }
  // If the added matrix C is in D's memory, cuBLASLt 13.1 rounds to D's type before it adds the
  // bias; with C elsewhere it rounds once. For block-scaled GEMMs that accumulate into D, cuBLASLt
  // rounds before the addition even without a bias; the plugin still uses cuBLASLt for them, so
  // that results equal those of Transformer Engine.
  const bool in_place = args.accumulate || adds_in_place(args);
  if (half && in_place && args.bias != nullptr && !(p.block && args.accumulate)) {
    return "a bias on a sum that D holds";
  }
  // The library's GELU uses the approximate tanh instruction: its error is 6e-4 on an H200
  // (cuBLASLt 13), beyond the tolerance of BF16. The error of its GELU gradient exceeds F16's
  // tolerance, and it is slower than a separate kernel (bench/README.md).
  if (args.gelu || args.pre_gelu_in != nullptr) return "the library's GELU is not exact enough";
  return nullptr;
}

const char* refuse_direct(const Args& args, const Problem& p) {
  const int d = dtype_of(*args.d);
  const bool bf16 = p.convert == Convert::kBf16;
  const bool fits = p.convert == Convert::kNone || bf16
                        ? !(p.fp8 || bf16) || aligned16(backend::data<void>(*args.d))
                        : p.convert == Convert::kWiden && d == TE_FL_F32;
  const int a_dtype = p.library_dtype(p.a);
  const bool types = p.fp8 || p.convert == Convert::kWiden || d == a_dtype ||
                     (d == TE_FL_F32 && (a_dtype == TE_FL_F16 || a_dtype == TE_FL_BF16));
  if (p.k == 0) return "there is nothing to contract";
  if (!fits) return "D is not where, or of no dtype in which, the library could write it";
  if (!types) return "D is of a dtype that the library does not make of such operands";
  return refuse_epilogue(args, p);
}

}  // namespace

Operand make_operand(const te_fl_tensor& t, bool along) {
  Operand o;
  o.tensor = &t;
  o.dtype = dtype_of(t);
  o.along = along;
  if (backend::scaling(t) == TE_FL_SCALING_NONE) return o;
  const te_fl_quant& quant = *t.quant;
  o.codes = along ? backend::data<const void>(t) : quant.columnwise_data;
  const void* scale = along ? quant.scale_inv : quant.columnwise_scale_inv;
  if (scale == nullptr && quant.scaling == TE_FL_SCALING_TENSOR) {
    scale = along ? quant.columnwise_scale_inv : quant.scale_inv;
  }
  o.scale_inv = static_cast<const float*>(scale);
  return o;
}

Problem make_problem(const Args& args) {
  Problem p;
  const backend::Matrix d = backend::as_matrix(*args.d), a = backend::as_matrix(*args.a);
  p.m = d.rows;
  p.n = d.cols;
  p.k = args.trans_a ? a.rows : a.cols;
  p.a = make_operand(*args.a, args.trans_a == 0);
  p.b = make_operand(*args.b, args.trans_b != 0);
  p.padded_n = p.n;
  p.padded_k = p.k;
  const bool a_plain = backend::scaling(*args.a) == TE_FL_SCALING_NONE;
  const bool b_plain = backend::scaling(*args.b) == TE_FL_SCALING_NONE;
  const bool a_block = is_block(*args.a), b_block = is_block(*args.b);
  if (a_plain && b_plain) {
    if (p.a.dtype != p.b.dtype) p.convert = Convert::kWiden;
  } else if (is_mxfp8(*args.a) && is_mxfp8(*args.b)) {
    p.convert = Convert::kBf16;
  } else if (is_mxfp8(*args.a) || is_mxfp8(*args.b)) {
    p.convert = Convert::kWiden;
  } else if (a_plain || b_plain || a_block != b_block ||
             (p.a.dtype == TE_FL_F8E5M2 && p.b.dtype == TE_FL_F8E5M2)) {
    p.convert = Convert::kWiden;
  } else if (a_block) {
    // K may end with a partial block. M, the number of rows of cuBLASLt's right operand A, must be
    // a multiple of 8 unless A has 128x128 block scaling.
    const bool squares = backend::scaling(*args.a) == TE_FL_SCALING_BLOCK_128X128;
    const bool whole = p.k % 16 == 0 && p.n % 16 == 0 && (squares || p.m % 8 == 0);
    const bool present = p.a.codes != nullptr && p.b.codes != nullptr && aligned16(p.a.codes) &&
                         aligned16(p.b.codes) && aligned16(p.a.scale_inv) &&
                         aligned16(p.b.scale_inv);
    if (whole && present) {
      p.fp8 = p.block = true;
    } else {
      p.convert = Convert::kWiden;
    }
  } else {
    p.fp8 = true;
    p.padded_n = round_up(p.n, 16);
    p.padded_k = round_up(p.k, 16);
    if (p.padded_n != p.n || p.padded_k != p.k || !aligned16(p.a.codes) || !aligned16(p.b.codes)) {
      p.convert = Convert::kPad;
    }
  }
  const int d_dtype = dtype_of(*args.d);
  p.indirect = refuse_direct(args, p);
  p.direct = p.indirect == nullptr;
  p.codes = p.direct && is_fp8(d_dtype);
  const bool half = d_dtype == TE_FL_F16 || d_dtype == TE_FL_BF16;
  p.bias_grad = p.direct && p.convert == Convert::kNone && !p.fp8 && half &&
                args.bias_grad != nullptr && !args.accumulate_bias_grad && args.bias == nullptr &&
                args.residual == nullptr && dtype_of(*args.bias_grad) == d_dtype && p.m > 0 &&
                p.n > 0 && !(args.trans_a && has_fast_column_sums(*args.a));
  return p;
}

}  // namespace te_fl::cuda
