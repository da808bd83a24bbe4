#include <array>

#include "conformance/case_file.hpp"
#include "conformance/drawn.hpp"
#include "conformance/gemm_case.hpp"
#include "conformance/huge/gemm.hpp"
#include "conformance/oracle_quantize.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;

using Variant = GemmCase;

void add_plain(std::vector<Variant>& all) {
  for (int d : kHigh)
    for (int ta = 0; ta < 2; ++ta)
      for (int tb = 0; tb < 2; ++tb)
        all.push_back({.a = d, .b = d, .d = d, .trans_a = ta == 1, .trans_b = tb == 1});
  all.push_back({.a = TE_FL_BF16, .b = TE_FL_BF16, .d = TE_FL_F32});
  all.push_back(
      {.a = TE_FL_F16, .b = TE_FL_F16, .d = TE_FL_F32, .trans_a = true, .trans_b = false});
  all.push_back({.a = TE_FL_F32, .b = TE_FL_BF16, .d = TE_FL_F32});
  all.push_back({.a = TE_FL_F32, .b = TE_FL_F32, .d = TE_FL_BF16});
  const int64_t shapes[][3] = {{1, 1, 1},    {0, 5, 3},     {5, 0, 3},    {5, 3, 0},
                               {1, 257, 31}, {257, 1, 31},  {2, 3, 1021}, {130, 65, 67},
                               {64, 64, 64}, {97, 101, 103}};
  for (const auto& s : shapes)
    for (bool tb : {true, false}) all.push_back({.m = s[0], .n = s[1], .k = s[2], .trans_b = tb});
  all.push_back({.a = TE_FL_BF16,
                 .b = TE_FL_BF16,
                 .d = TE_FL_BF16,
                 .m = 256,
                 .n = 512,
                 .k = 384,
                 .large = true});
  all.push_back({.m = 300, .n = 200, .k = 700, .trans_a = true, .trans_b = false, .large = true});
}

void add_epilogues(std::vector<Variant>& all) {
  // Residual and bias together: result, residual and bias must be added before the single rounding.
  // The sizes are multiples of the vector width.
  for (int t : {TE_FL_F16, TE_FL_BF16})
    for (int64_t n : {64, 256})
      for (bool in_place : {false, true})
        all.push_back({.a = t,
                       .b = t,
                       .d = t,
                       .m = 128,
                       .n = n,
                       .k = 192,
                       .bias = t,
                       .residual = t,
                       .in_place = in_place});
  for (int t : {TE_FL_F32, TE_FL_BF16}) {
    Variant v{.a = t, .b = t, .d = t, .m = 19, .n = 34, .k = 50};
    auto with = [&](auto change) {
      Variant c = v;
      change(c);
      all.push_back(c);
    };
    with([](Variant& c) { c.alpha = -0.37; });
    with([](Variant& c) {
      c.alpha = 0;
      c.bias = TE_FL_F32;
    });
    with([](Variant& c) { c.accumulate = true; });
    with([](Variant& c) {
      c.accumulate = true;
      c.beta = 0.5;
      c.alpha = 2;
    });
    with([](Variant& c) {
      c.accumulate = true;
      c.beta = 0;
    });
    with([](Variant& c) {
      c.accumulate = true;
      c.k = 0;
      c.beta = 0.25;
    });
    with([](Variant& c) {
      c.accumulate = true;
      c.d = TE_FL_F32;
      c.trans_a = true;
      c.trans_b = false;
    });  // as for a weight gradient
    with([](Variant& c) { c.bias = TE_FL_F32; });
    with([](Variant& c) {
      c.bias = TE_FL_BF16;
      c.alpha = 0.5;
    });
    with([](Variant& c) {
      c.bias = TE_FL_F32;
      c.k = 0;
    });
    with([](Variant& c) {
      c.bias = TE_FL_F32;
      c.accumulate = true;
    });
    if (t != TE_FL_F32) {
      with([t](Variant& c) {
        c.bias = t;
        c.accumulate = true;
      });
    }
    with([](Variant& c) { c.gelu = true; });
    with([](Variant& c) {
      c.gelu = true;
      c.bias = TE_FL_BF16;
    });
    with([t](Variant& c) {
      c.gelu = true;
      c.bias = TE_FL_F32;
      c.pre_gelu_out = {t};
    });
    with([](Variant& c) {
      c.gelu = true;
      c.pre_gelu_out = {TE_FL_F16};
    });
    with([](Variant& c) {
      c.gelu = true;
      c.accumulate = true;
    });
    with([](Variant& c) {
      c.gelu = true;
      c.pre_gelu_out = {Spec(kE4, TE_FL_SCALING_TENSOR, true, false)};
    });
    with([t](Variant& c) {
      c.pre_gelu_in = {t};
      c.trans_b = false;
    });
    with([t](Variant& c) {
      c.pre_gelu_in = {t};
      c.accumulate = true;
      c.beta = 0.5;
      c.alpha = 1.5;
    });
    with([](Variant& c) { c.pre_gelu_in = {Spec(kE4, TE_FL_SCALING_TENSOR, true, false)}; });
    with([t](Variant& c) { c.residual = t; });
    with([t](Variant& c) {
      c.residual = t;
      c.in_place = true;
      c.bias = t;
    });
    with([t](Variant& c) {
      c.residual = t == TE_FL_F32 ? TE_FL_BF16 : TE_FL_F32;
      c.gelu = true;
      c.bias = TE_FL_F32;
    });
    with([](Variant& c) {
      c.residual = TE_FL_F16;
      c.accumulate = true;
      c.beta = 0.5;
    });
    with([](Variant& c) {
      c.residual = TE_FL_BF16;
      c.k = 0;
    });
    with([](Variant& c) {
      c.residual = TE_FL_BF16;
      c.d = Spec(kE4, TE_FL_SCALING_TENSOR, true, false);
    });
    with([](Variant& c) { c.split = true; });
    with([](Variant& c) {
      c.bias = TE_FL_F16;
      c.gelu = true;
      c.pre_gelu_out = {Spec(kE5, TE_FL_SCALING_TENSOR, true, false)};
    });
    with([](Variant& c) {
      c.pre_gelu_in = {TE_FL_F16};
      c.bias_grad = TE_FL_F16;
    });
    with([](Variant& c) { c.pre_gelu_in = {Spec(kE5, TE_FL_SCALING_TENSOR, true, false)}; });
    for (bool ta : {false, true}) {
      with([ta, t](Variant& c) {
        c.bias_grad = t;
        c.trans_a = ta;
        c.trans_b = false;
      });
      with([ta](Variant& c) {
        c.bias_grad = TE_FL_F32;
        c.accumulate_bias_grad = true;
        c.trans_a = ta;
        c.trans_b = false;
      });
    }
    with([t](Variant& c) {
      c.bias_grad = t;
      c.accumulate = true;
      c.trans_a = true;
      c.trans_b = false;
    });
    with([t](Variant& c) {
      c.bias_grad = t;
      c.trans_a = true;
      c.trans_b = false;
      c.k = 0;
    });
    for (const Spec& s :
         {quantised_specs()[0], quantised_specs()[1], quantised_specs()[3], quantised_specs()[7]}) {
      with([&](Variant& c) { c.d = s; });
      with([&](Variant& c) {
        c.d = s;
        c.bias = TE_FL_F32;
        c.gelu = true;
      });
    }
  }
}

// Adds the GEMM epilogues of an MLP: in the forward, the 16-bit pre-activation stored beside a
// quantised result; in the backward, the gradient with its column sums.
void add_activations(std::vector<Variant>& all) {
  const auto codes = [](int dtype, bool row, bool col, uint32_t flags = 0) {
    return Spec(dtype, TE_FL_SCALING_TENSOR, row, col, flags);
  };
  const int64_t shapes[][3] = {{32, 48, 64}, {128, 256, 192}, {129, 80, 96}, {37, 53, 29}};
  for (int t : {TE_FL_F16, TE_FL_BF16})
    for (const auto& shape : shapes)
      all.push_back(
          {.a = t, .b = t, .d = t, .m = shape[0], .n = shape[1], .k = shape[2], .bias = t});
  for (int t : {TE_FL_F16, TE_FL_BF16})
    for (const auto& shape : shapes)
      for (bool fp8 : {false, true}) {
        const bool odd = shape[1] % 16 != 0 || shape[2] % 16 != 0;
        Variant forward{.a = t, .b = t, .d = t, .m = shape[0], .n = shape[1], .k = shape[2]};
        if (fp8) {
          forward.a = forward.b = codes(kE4, true, true, TE_FL_QUANT_COMPUTE_SCALE);
          if (odd) forward.refusal = "multiple";
        }
        Variant backward = forward;
        if (fp8) backward.a = codes(kE5, true, true, TE_FL_QUANT_COMPUTE_SCALE);
        backward.trans_b = false, backward.split = true, backward.pre_gelu_in = {t};
        forward.gelu = true, forward.pre_gelu_out = {t};
        const std::vector<Spec> forms = {t, codes(kE4, true, true), codes(kE4, true, false),
                                         codes(kE4, true, true, TE_FL_QUANT_COMPUTE_SCALE)};
        for (Spec d : forms)
          for (bool more : {true, false}) {
            forward.d = d, forward.bias = more ? t : -1;
            all.push_back(forward);
            if (d.quantised()) d.dtype = kE5;
            backward.d = d, backward.d_sum = more ? t : -1;
            all.push_back(backward);
          }
        backward.d = codes(kE5, true, true), backward.d_sum = TE_FL_F32;
        all.push_back(backward);
        backward.d = codes(kE5, false, true);
        all.push_back(backward);
      }
  // Sizes for kernels that need complete tiles. The first has more tiles than a GPU runs at once.
  for (bool fp8 : {false, true})
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{512, 17664, 128}, {8192, 512, 384}}) {
      Variant forward{.a = TE_FL_BF16, .b = TE_FL_BF16, .d = TE_FL_BF16, .m = m, .n = n, .k = k};
      forward.large = true;
      if (fp8) forward.a = forward.b = codes(kE4, true, true, TE_FL_QUANT_COMPUTE_SCALE);
      Variant backward = forward;
      if (fp8) {
        forward.d = codes(kE4, true, true);
        backward.a = codes(kE5, true, true, TE_FL_QUANT_COMPUTE_SCALE);
        backward.d = codes(kE5, true, true);
      }
      forward.gelu = true, forward.bias = TE_FL_BF16, forward.pre_gelu_out = {TE_FL_BF16};
      forward.alpha = 0.75;
      all.push_back(forward);
      backward.trans_b = false, backward.split = true, backward.pre_gelu_in = {TE_FL_BF16};
      backward.d_sum = TE_FL_BF16;
      all.push_back(backward);
      if (k > 128) continue;
      forward.bias = -1, backward.d_sum = -1;
      if (fp8) {
        forward.d = codes(kE4, true, false);
        all.push_back(forward);
        forward.d = codes(kE4, false, true), backward.d = codes(kE5, true, false);
        Variant scaled = forward;  // with a computed scale
        scaled.d = codes(kE4, true, true, TE_FL_QUANT_COMPUTE_SCALE), scaled.bias = TE_FL_BF16;
        all.push_back(scaled);
      }
      all.push_back(forward);
      all.push_back(backward);
    }
  Variant v{.m = 19, .n = 34, .k = 50};
  const auto with = [&](auto change) {
    Variant c = v;
    c.d_sum = TE_FL_F32;
    change(c);
    all.push_back(c);
  };
  with([](Variant&) {});
  with([](Variant& c) { c.d_sum = TE_FL_BF16, c.alpha = -0.5; });
  with([](Variant& c) { c.pre_gelu_in = {TE_FL_F32}; });
  with([](Variant& c) { c.pre_gelu_in = {TE_FL_BF16}; });
  with([](Variant& c) { c.pre_gelu_in = {Spec(kE4, TE_FL_SCALING_TENSOR, true, false)}; });
  with([](Variant& c) { c.gelu = true, c.bias = TE_FL_BF16, c.pre_gelu_out = {TE_FL_F32}; });
  with([](Variant& c) { c.residual = TE_FL_F32; });
  with([](Variant& c) { c.residual = TE_FL_F32, c.in_place = true, c.bias = TE_FL_F32; });
  with([](Variant& c) { c.bias_grad = TE_FL_F32, c.trans_a = true; });
  with([](Variant& c) { c.a = c.b = c.d = TE_FL_BF16, c.bias_grad = TE_FL_BF16; });
  with([](Variant& c) { c.a = c.b = c.d = TE_FL_BF16; });
  with([](Variant& c) { c.m = 0; });
  with([](Variant& c) { c.m = 0, c.pre_gelu_in = {TE_FL_F32}; });
  with([](Variant& c) { c.n = 0; });
  with([](Variant& c) { c.k = 0, c.bias = TE_FL_F32; });
  with([](Variant& c) { c.m = 700, c.n = 257; });
  with([](Variant& c) { c.accumulate = true, c.refusal = "d_sum", c.error = true; });
}

void add_cases(Table& table) {
  std::vector<Variant> all;
  add_plain(all);
  add_epilogues(all);
  add_activations(all);
  add_fp8_gemm_cases(all);
  for (const Variant& v : all) {
    add(
        table, "gemm", "generic_gemm", name_of_case(v), [v](Problem& p) { set_up(p, v); }, v.large);
    table.back().for_devices = v.m * v.n * v.k > int64_t{1} << 28;
  }
}

// Draws the arguments besides the matrices, in every combination that the op allows.
void draw_terms(Draw& r, Variant& v) {
  const auto some = [&](int one_in) { return Drawn::chance(r, one_in) ? Drawn::high(r) : -1; };
  if (Drawn::chance(r, 3)) v.d = Drawn::high(r);
  static constexpr double kAlphas[] = {1, -0.37, 2}, kBetas[] = {1, 0.5, 0, -2};
  if (Drawn::chance(r, 3)) v.alpha = kAlphas[r.below(3)];
  if (Drawn::chance(r, 3)) v.accumulate = true, v.beta = kBetas[r.below(4)];
  if (Drawn::chance(r, 4)) {
    v.pre_gelu_in = {Drawn::high(r)};
  } else {
    v.bias = some(2), v.gelu = Drawn::chance(r, 3);
    if (v.gelu && Drawn::chance(r, 2)) v.pre_gelu_out = {Drawn::high(r)};
  }
  v.residual = some(4), v.bias_grad = some(4);
  v.accumulate_bias_grad = v.bias_grad >= 0 && Drawn::chance(r, 2);
  if (!v.accumulate) v.d_sum = some(4);
}

void draw_cases(Drawn& drawn) {
  drawn.cases("gemm", "generic_gemm", [](Draw& r) -> DrawnCase {
    const int dtype = Drawn::high(r);
    Variant v{.a = dtype, .b = dtype, .d = dtype};
    v.trans_a = r.below(2) == 1, v.trans_b = r.below(2) == 1;
    v.m = Drawn::extent(r, 130), v.n = Drawn::extent(r, 130), v.k = Drawn::extent(r, 260);
    if (r.swept != nullptr) {  // rows of A have length k, those of B and D length n
      v.m = r.swept->rows, v.n = v.k = r.swept->columns;
      if (r.swept->columns > 300) (r.below(2) == 0 ? v.n : v.k) = 24;
    }
    if (r.swept != nullptr && r.swept->large) {
      if (v.n > 20'000) v.n = 1 + r.below(9);
      if (v.k > 20'000 && v.m > 100) v.k = 24;
    }
    draw_terms(r, v);
    return {name_of_case(v), [v](Problem& p) { set_up(p, v); }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace gemm_calls;
  const auto add = [&](const char* what, int64_t n, int64_t k, const Epilogue& e) {
    cases.push_back(
        {"generic_gemm", what, [=](Run& r) { product(r, wide_result(r, n, k, e.tiles), e); }});
  };
  add("", 32768, 32, {});
  add("bias, residual", 32768, 32, {.bias = true, .residual = true});
  add("bias, GELU", 32768, 128, {.bias = true, .gelu = true});
  add("GELU's gradient, sums", 32768, 128, {.pre_gelu_in = true, .d_sum = true});
  add("bias, GELU, whole tiles", 32768, 128, {.bias = true, .gelu = true, .tiles = true});
  add("GELU's gradient, sums, whole tiles", 32768, 128,
      {.pre_gelu_in = true, .d_sum = true, .across = true, .tiles = true});
  add("accumulated", 32768, 32, {.accumulate = true});
  add("odd extents", 32771, 33, {.bias = true, .residual = true});
  add("mixed dtypes", 32768, 32, {.bias = true, .b = DType::kF32});
  const Cases more = {
      {"generic_gemm", "a long contraction", long_contraction},
      {"generic_gemm", "FP8",
       [](Run& r) { codes(r, wide_result(r, 32768, 64), Scaling::kTensor, Into::kNumbers); }},
      {"generic_gemm", "FP8, odd extents",
       [](Run& r) { codes(r, wide_result(r, 32771, 33), Scaling::kTensor, Into::kNumbers); }},
      {"generic_gemm", "FP8, a long operand",
       [](Run& r) {
         codes(r, {r.rows(256), 64, 256}, Scaling::kTensor, Into::kNumbers);
       }},
      {"generic_gemm", "FP8 into codes",
       [](Run& r) { codes(r, wide_result(r, 32768, 64), Scaling::kTensor, Into::kCodes); }},
      {"generic_gemm", "FP8 with GELU into codes, whole tiles",
       [](Run& r) {
         codes(r, wide_result(r, 32768, 128, true), Scaling::kTensor, Into::kGeluCodes);
       }},
      {"generic_gemm", "FP8 in blocks",
       [](Run& r) { codes(r, wide_result(r, 32768, 256), Scaling::kBlock1x128, Into::kNumbers); }},
  };
  cases.insert(cases.end(), more.begin(), more.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

// y[m, n] = x[m, k] W[n, k]^T, the forward of a linear layer.
void add_cases(Cases& cases) {
  const size_t first = cases.size();
  const auto linear = [](Case& c, int64_t m, bool bf16) {
    const int64_t n = c.extent(1), k = c.extent(2);
    c.flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    c.product = {m, n, k, true, bf16};
  };
  both_dtypes(cases, "generic_gemm", [linear](Case& c, int64_t m, int dtype) {
    auto& a = c.args<te_fl_generic_gemm_args>();
    const int64_t n = c.extent(1), k = c.extent(2);
    a.a = c.in({m, k}, dtype), a.b = c.in({n, k}, dtype), a.d = c.out({m, n}, dtype);
    a.trans_b = 1;
    linear(c, m, dtype == TE_FL_BF16);
  });
  cases.push_back({"generic_gemm", "fp8, bf16 out", [linear](Case& c, int64_t m) {
                     auto& a = c.args<te_fl_generic_gemm_args>();
                     const int64_t n = c.extent(1), k = c.extent(2);
                     a.a = c.fp8({m, k}, TE_FL_F8E4M3), a.b = c.fp8({n, k}, TE_FL_F8E4M3);
                     a.d = c.out({m, n}, TE_FL_BF16), a.trans_b = 1;
                     linear(c, m, true);
                   }});
  for (size_t i = first; i < cases.size(); ++i) {
    cases[i].memory_bound = false, cases[i].fixed_rows = 2048;
  }
  describe(cases, first, "m, n, k", {2048, 4096, 1024}, {8192, 4096, 4096});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile gemm_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
