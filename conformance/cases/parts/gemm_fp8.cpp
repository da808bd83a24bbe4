// Cases with FP8 operands, per-tensor and block scaled; part of the gemm family.
#include "conformance/gemm_case.hpp"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;
constexpr uint32_t kPow2 = TE_FL_QUANT_POW2_SCALE;

using Variant = GemmCase;

void add_fp8(std::vector<Variant>& all) {
  auto tensor = [](int dtype, bool row, bool col) {
    return Spec(dtype, TE_FL_SCALING_TENSOR, row, col, TE_FL_QUANT_COMPUTE_SCALE);
  };
  const Spec both4 = tensor(kE4, true, true), both5 = tensor(kE5, true, true);
  for (int ta = 0; ta < 2; ++ta)
    for (int tb = 0; tb < 2; ++tb)
      for (bool split : {false, true}) {
        all.push_back({.a = both4,
                       .b = both4,
                       .d = TE_FL_BF16,
                       .m = 48,
                       .n = 80,
                       .k = 64,
                       .trans_a = ta == 1,
                       .trans_b = tb == 1,
                       .split = split});
        all.push_back({.a = both5,
                       .b = both4,
                       .d = TE_FL_F32,
                       .m = 48,
                       .n = 80,
                       .k = 64,
                       .trans_a = ta == 1,
                       .trans_b = tb == 1,
                       .split = split});
      }
  const Variant base{
      .a = both4, .b = both4, .d = TE_FL_BF16, .m = 32, .n = 48, .k = 64, .split = true};
  auto with = [&](auto change) {
    Variant c = base;
    change(c);
    all.push_back(c);
  };
  for (bool bias : {false, true}) {
    with([bias](Variant& c) {
      c.residual = TE_FL_BF16;
      c.bias = bias ? TE_FL_BF16 : -1;
    });
    with([bias](Variant& c) {
      c.residual = TE_FL_BF16;
      c.in_place = true;
      c.bias = bias ? TE_FL_BF16 : -1;
    });
  }
  with([](Variant& c) { c.residual = TE_FL_F32; });
  for (int64_t n : {64, 256}) {
    with([n](Variant& c) {
      c.m = 128, c.n = n, c.k = 192, c.split = false;
      c.residual = c.bias = TE_FL_BF16;
    });
  }
  // If both operands have K along their rows, only row-wise data are needed; otherwise column-wise
  // data.
  with([&](Variant& c) { c.a = tensor(kE4, true, false), c.b = tensor(kE4, true, false); });
  with([&](Variant& c) {
    c.a = tensor(kE4, false, true), c.b = tensor(kE4, false, true), c.trans_a = true,
    c.trans_b = false;
  });
  with([&](Variant& c) {
    c.a = tensor(kE4, true, false), c.b = tensor(kE4, true, false), c.trans_a = true,
    c.trans_b = false, c.refusal = "column-wise data missing";
  });
  with([&](Variant& c) {
    c.a = tensor(kE5, true, false), c.b = tensor(kE4, true, false), c.trans_b = false,
    c.refusal = "column-wise data missing";
  });
  with([](Variant& c) { c.m = 13, c.n = 21, c.k = 17, c.refusal = "multiple"; });
  with([](Variant& c) { c.m = 1, c.n = 1, c.k = 1, c.refusal = "multiple"; });
  with([&](Variant& c) { c.b = both5; });
  with([](Variant& c) { c.m = 0; });
  with([](Variant& c) { c.m = 0, c.pre_gelu_in = {TE_FL_F32}; });
  with([](Variant& c) { c.k = 0; });
  with([](Variant& c) { c.b = TE_FL_BF16; });  // one operand is not quantised
  with([](Variant& c) { c.bias = TE_FL_BF16; });
  with([](Variant& c) { c.bias = TE_FL_BF16, c.gelu = true, c.pre_gelu_out = {TE_FL_BF16}; });
  with([](Variant& c) { c.pre_gelu_in = {TE_FL_BF16}; });
  with([&](Variant& c) {
    c.a = both5, c.d = TE_FL_F32, c.accumulate = true, c.trans_a = true, c.trans_b = false;
  });
  with([&](Variant& c) {
    c.a = both5, c.bias_grad = TE_FL_BF16, c.trans_a = true, c.trans_b = false;
  });
  with([](Variant& c) { c.alpha = 0.5, c.beta = 0.25, c.accumulate = true; });
  with([](Variant& c) { c.d = quantised_specs()[0]; });
  with([](Variant& c) { c.d = quantised_specs()[7], c.bias = TE_FL_F32; });
  with([](Variant& c) { c.m = 256, c.n = 256, c.k = 512, c.large = true; });
}

void add_blocks(std::vector<Variant>& all) {
  auto one = [](bool col, uint32_t flags = kPow2, int codes = kE4) {
    return Spec(codes, TE_FL_SCALING_BLOCK_1X128, !col, col, flags);
  };
  auto two = [](bool col, int codes = kE4) {
    return Spec(codes, TE_FL_SCALING_BLOCK_128X128, !col, col, kPow2);
  };
  for (int ta = 0; ta < 2; ++ta)
    for (int tb = 0; tb < 2; ++tb) {
      // Selects the data whose blocks lie along K: row-wise data, unless A is stored as [K, M] or B
      // as [K, N].
      const bool a_col = ta == 1, b_col = tb == 0;
      all.push_back({.a = one(a_col),
                     .b = two(b_col),
                     .d = TE_FL_BF16,
                     .m = 136,
                     .n = 144,
                     .k = 256,
                     .trans_a = ta == 1,
                     .trans_b = tb == 1,
                     .split = true});
      all.push_back({.a = one(a_col),
                     .b = one(b_col),
                     .d = TE_FL_F32,
                     .m = 136,
                     .n = 144,
                     .k = 256,
                     .trans_a = ta == 1,
                     .trans_b = tb == 1,
                     .split = true});
      all.push_back({.a = Spec(kE4, TE_FL_SCALING_MXFP8, !a_col, a_col),
                     .b = Spec(kE4, TE_FL_SCALING_MXFP8, !b_col, b_col),
                     .d = TE_FL_BF16,
                     .m = 64,
                     .n = 96,
                     .k = 128,
                     .trans_a = ta == 1,
                     .trans_b = tb == 1,
                     .split = true});
    }
  all.push_back({.a = two(false),
                 .b = one(false),
                 .d = TE_FL_BF16,
                 .m = 136,
                 .n = 144,
                 .k = 256,
                 .split = true});
  all.push_back({.a = one(false, 0),
                 .b = two(false),
                 .d = TE_FL_F32,
                 .m = 8,
                 .n = 16,
                 .k = 128,
                 .split = true});
  all.push_back({.a = one(false),
                 .b = two(false),
                 .d = TE_FL_BF16,
                 .m = 13,
                 .n = 37,
                 .k = 131,
                 .split = true,
                 .refusal = "multiple"});
  all.push_back({.a = one(false),
                 .b = two(false),
                 .d = TE_FL_BF16,
                 .m = 16,
                 .n = 32,
                 .k = 128,
                 .split = true,
                 .bias = TE_FL_BF16});
  all.push_back({.a = one(false),
                 .b = two(true),
                 .d = TE_FL_BF16,
                 .m = 16,
                 .n = 32,
                 .k = 128,
                 .trans_b = false,
                 .split = true,
                 .pre_gelu_in = {TE_FL_BF16}});
  all.push_back({.a = one(true),
                 .b = one(true),
                 .d = TE_FL_F32,
                 .m = 16,
                 .n = 32,
                 .k = 128,
                 .trans_a = true,
                 .trans_b = false,
                 .accumulate = true,
                 .split = true});
  // An incomplete last block along K, and operands of both FP8 formats.
  for (const int64_t k : {int64_t{64}, int64_t{208}})
    for (const auto& [a, b] : {std::pair{kE4, kE4}, std::pair{kE5, kE4}, std::pair{kE4, kE5}}) {
      for (const int d : {TE_FL_BF16, TE_FL_F32}) {
        all.push_back({.a = one(false, kPow2, a),
                       .b = two(false, b),
                       .d = d,
                       .m = 136,
                       .n = 144,
                       .k = k,
                       .split = true});
        all.push_back({.a = two(false, a),
                       .b = one(false, kPow2, b),
                       .d = d,
                       .m = 55,
                       .n = 144,
                       .k = k,
                       .split = true});
      }
      all.push_back({.a = one(true, kPow2, a),
                     .b = one(true, kPow2, b),
                     .d = TE_FL_BF16,
                     .m = 24,
                     .n = 48,
                     .k = k,
                     .trans_a = true,
                     .trans_b = false,
                     .accumulate = true,
                     .split = true,
                     .bias = TE_FL_BF16});
    }
  all.push_back({.a = two(false),
                 .b = two(false),
                 .d = TE_FL_BF16,
                 .m = 128,
                 .n = 128,
                 .k = 128,
                 .split = true,
                 .refusal = "128",
                 .error = true});
}

}  // namespace

void add_fp8_gemm_cases(std::vector<GemmCase>& all) {
  add_fp8(all);
  add_blocks(all);
}

}  // namespace te_fl::conformance
