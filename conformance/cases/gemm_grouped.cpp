// Cases of grouped_gemm; part of the gemm family.
#include "conformance/case_file.hpp"
#include "conformance/drawn.hpp"
#include "conformance/gemm_case.hpp"
#include "te_fl/ops/gemm.h"

namespace te_fl::conformance {
namespace {

using Sizes = std::vector<std::array<int64_t, 3>>;
constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;

// The sizes of the experts' GEMMs in a forward: each expert has a number of tokens and a weight [n,
// k].
Sizes of_tokens(const std::vector<int64_t>& tokens, int64_t n, int64_t k) {
  Sizes sizes;
  for (const int64_t m : tokens) sizes.push_back({m, n, k});
  return sizes;
}
// The sizes of the GEMMs for the experts' weight gradients, where the tokens are the contracted
// dimension.
Sizes over_tokens(const std::vector<int64_t>& tokens, int64_t m, int64_t n) {
  Sizes sizes;
  for (const int64_t k : tokens) sizes.push_back({m, n, k});
  return sizes;
}

// Token numbers of 64 experts, some of which are 0.
std::vector<int64_t> many() {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 64; ++i) tokens.push_back(i % 5 == 3 ? 0 : 1 + i * 7 % 13);
  return tokens;
}

Spec codes(int dtype, int scaling = TE_FL_SCALING_TENSOR, bool row = true, bool col = true) {
  return Spec(dtype, scaling, row, col,
              scaling == TE_FL_SCALING_TENSOR ? TE_FL_QUANT_COMPUTE_SCALE : TE_FL_QUANT_POW2_SCALE);
}

void add_plain(std::vector<GroupCase>& all) {
  const std::vector<int64_t> odd = {5, 0, 17, 1};
  for (int t : kHigh)
    for (bool ta : {false, true})
      for (bool tb : {false, true})
        all.push_back({{.a = t, .b = t, .d = t, .trans_a = ta, .trans_b = tb},
                       {{5, 21, 13}, {0, 21, 13}, {17, 3, 40}, {1, 1, 1}},
                       "4_odd"});
  for (int t : kHigh) {
    const GemmCase forward{.a = t, .b = t, .d = t}, other{.a = t, .b = t, .d = TE_FL_F32};
    GemmCase gradient{.a = t, .b = t, .d = t, .trans_a = true, .trans_b = false};
    all.push_back({forward, of_tokens(many(), 24, 32), "64_experts"});
    all.push_back({forward, of_tokens({33}, 24, 32), "1_expert"});
    all.push_back({forward, of_tokens({0, 0}, 24, 32), "no_tokens"});
    all.push_back({other, of_tokens({9, 33}, 24, 32), "2_experts"});
    all.push_back({gradient, over_tokens(odd, 21, 13), "over_4_odd"});
    all.push_back({gradient, over_tokens(many(), 16, 24), "over_64_experts"});
    gradient.d = TE_FL_F32, gradient.accumulate = true;
    all.push_back({gradient, over_tokens(odd, 21, 13), "over_4_odd"});
    all.push_back({gradient, over_tokens({32, 64, 0}, 16, 24), "over_3_experts"});
  }
  all.push_back({{}, {}, "none"});
  const GemmCase mixed{.a = TE_FL_F32, .b = TE_FL_BF16, .d = TE_FL_BF16};
  all.push_back({mixed, of_tokens({3, 8}, 24, 32), "2_experts"});
  // More rows than one tile of a kernel for whole groups, none, and one more or less than a tile.
  const std::vector<int64_t> uneven = {0, 1, 7, 127, 128, 129, 0, 300};
  for (int d : {TE_FL_BF16, TE_FL_F32})
    for (bool accumulate : {false, true}) {
      GemmCase v{.a = TE_FL_BF16, .b = TE_FL_BF16, .d = d};
      v.accumulate = accumulate, v.beta = accumulate ? 0.5 : 1, v.alpha = 1.5;
      all.push_back({v, of_tokens(uneven, 520, 136), "8_uneven"});
      v.trans_b = false;
      all.push_back({v, of_tokens(uneven, 264, 200), "8_uneven"});
      v.trans_a = true;
      all.push_back({v, over_tokens(uneven, 264, 520), "over_8_uneven"});
    }
  GemmCase large{.a = TE_FL_BF16, .b = TE_FL_BF16, .d = TE_FL_BF16};
  large.large = true;
  all.push_back({large, of_tokens({128, 0, 256, 77}, 256, 192), "4_experts"});
}

void add_epilogues(std::vector<GroupCase>& all) {
  const std::vector<int64_t> tokens = {6, 0, 19};
  for (int t : {TE_FL_F32, TE_FL_F16, TE_FL_BF16}) {
    const auto forward = [&](auto change) {
      GemmCase v{.a = t, .b = t, .d = t};
      change(v);
      all.push_back({v, of_tokens(tokens, 40, 24), "3_experts"});
      all.push_back({v, {{6, 40, 24}, {3, 17, 0}, {5, 9, 11}}, "3_sizes"});
    };
    forward([t](GemmCase& v) { v.bias = t; });
    forward([](GemmCase& v) { v.bias = TE_FL_F32, v.alpha = -0.5; });
    forward([](GemmCase& v) { v.accumulate = true, v.beta = 0.5, v.alpha = 2; });
    forward([](GemmCase& v) { v.accumulate = true, v.beta = 0; });
    forward([t](GemmCase& v) { v.accumulate = true, v.bias = t; });
    forward([](GemmCase& v) { v.alpha = 0; });
    const auto gradient = [&](auto change) {
      GemmCase v{.a = t, .b = t, .d = t, .trans_a = true, .trans_b = false};
      change(v);
      all.push_back({v, over_tokens(tokens, 40, 24), "over_3_experts"});
    };
    gradient([t](GemmCase& v) { v.bias_grad = t; });
    gradient([](GemmCase& v) { v.bias_grad = TE_FL_F32, v.accumulate_bias_grad = true; });
    gradient([](GemmCase& v) { v.bias_grad = TE_FL_BF16, v.trans_a = false; });
    gradient([](GemmCase& v) { v.bias_grad = TE_FL_F16, v.d = TE_FL_F32, v.accumulate = true; });
  }
  GemmCase without;
  without.accumulate_bias_grad = true, without.refusal = "bias_grad", without.error = true;
  all.push_back({without, of_tokens({3}, 4, 5), "no_bias_grad"});
}

void add_codes(std::vector<GroupCase>& all) {
  const std::vector<int64_t> tokens = {48, 0, 16, 160};
  for (bool ta : {false, true})
    for (bool tb : {false, true})
      for (bool split : {false, true}) {
        GemmCase v{.a = codes(kE4), .b = codes(kE4), .d = TE_FL_BF16};
        v.trans_a = ta, v.trans_b = tb, v.split = split;
        all.push_back({v, of_tokens(tokens, 80, 64), "4_experts"});
        v.a = codes(kE5), v.d = TE_FL_F32;
        all.push_back({v, over_tokens(tokens, 80, 64), "over_4_experts"});
      }
  const std::vector<int64_t> uneven = {0, 16, 112, 128, 144, 0, 304};
  for (int a : {kE4, kE5})
    for (int d : {TE_FL_BF16, TE_FL_F32})
      for (bool split : {false, true}) {
        GemmCase v{.a = codes(a), .b = codes(kE4), .d = d, .split = split};
        all.push_back({v, of_tokens(uneven, 528, 272), "7_uneven"});
        v.trans_a = true, v.trans_b = false, v.accumulate = true;
        all.push_back({v, over_tokens(uneven, 272, 528), "over_7_uneven"});
      }
  GemmCase v{.a = codes(kE4), .b = codes(kE4), .d = TE_FL_BF16};
  v.bias = TE_FL_BF16, v.split = true;
  all.push_back({v, of_tokens(many(), 48, 64), "64_experts"});
  v.bias = TE_FL_F32, v.a = codes(kE4, TE_FL_SCALING_TENSOR, true, false);
  v.b = v.a;
  all.push_back({v, of_tokens(tokens, 48, 64), "4_experts"});
  all.push_back({v, {{5, 21, 17}, {0, 3, 16}, {7, 1, 40}}, "3_odd"});
  GemmCase gradient{.a = codes(kE5), .b = codes(kE4), .d = TE_FL_F32};
  gradient.trans_a = true, gradient.trans_b = false, gradient.accumulate = true;
  all.push_back({gradient, over_tokens(tokens, 48, 64), "over_4_experts"});
  gradient.bias_grad = TE_FL_BF16;
  all.push_back({gradient, over_tokens(tokens, 48, 64), "over_4_experts"});
  all.push_back({gradient, over_tokens({13, 0, 1}, 24, 40), "over_3_odd"});
  GemmCase gradients{.a = codes(kE5), .b = codes(kE5), .d = TE_FL_BF16};
  all.push_back({gradients, of_tokens({32, 0}, 48, 64), "2_experts"});
  GemmCase plain{.a = codes(kE4), .b = TE_FL_BF16, .d = TE_FL_BF16};
  all.push_back({plain, of_tokens({32, 0}, 48, 64), "2_experts"});
}

void add_blocks(std::vector<GroupCase>& all) {
  const auto one = [](bool col) { return codes(kE4, TE_FL_SCALING_BLOCK_1X128, !col, col); };
  const auto two = [](bool col) { return codes(kE4, TE_FL_SCALING_BLOCK_128X128, !col, col); };
  const auto mx = [](bool col) { return codes(kE4, TE_FL_SCALING_MXFP8, !col, col); };
  const std::vector<int64_t> tokens = {136, 0, 8};
  for (bool ta : {false, true})
    for (bool tb : {false, true}) {
      // Selects the data whose blocks lie along K: row-wise data, unless A is stored as [K, M] or B
      // as [K, N].
      GemmCase v{.d = TE_FL_BF16, .trans_a = ta, .trans_b = tb, .split = true};
      v.a = one(ta), v.b = two(!tb);
      all.push_back({v, of_tokens(tokens, 144, 256), "3_experts"});
      v.b = one(!tb), v.d = TE_FL_F32;
      all.push_back({v, of_tokens(tokens, 144, 256), "3_experts"});
      v.a = mx(ta), v.b = mx(!tb);
      all.push_back({v, of_tokens({64, 0, 32}, 96, 128), "3_experts"});
    }
  GemmCase v{.a = one(false), .b = two(false), .d = TE_FL_BF16, .split = true};
  v.bias = TE_FL_BF16;
  all.push_back({v, of_tokens({16, 0, 24}, 32, 128), "3_experts"});
  v.bias = -1;
  all.push_back({v, {{13, 37, 131}, {0, 16, 128}, {1, 5, 260}}, "3_odd"});
  GemmCase gradient{.a = one(true), .b = one(true), .d = TE_FL_F32, .split = true};
  gradient.trans_a = true, gradient.trans_b = false, gradient.accumulate = true;
  all.push_back({gradient, over_tokens({128, 0, 256}, 16, 32), "over_3_experts"});
  all.push_back({gradient, over_tokens({48, 0, 7}, 16, 32), "over_3_odd"});
  v.a = two(false), v.refusal = "128 x 128";
  all.push_back({v, of_tokens({128}, 128, 128), "1_expert"});
}

void add_cases(Table& table) {
  std::vector<GroupCase> all;
  add_plain(all);
  add_epilogues(all);
  add_codes(all);
  add_blocks(all);
  for (const GroupCase& v : all)
    add(
        table, "gemm", "grouped_gemm", name_of_case(v), [v](Problem& p) { set_up(p, v); },
        v.product.large);
}

void draw_cases(Drawn& drawn) {
  drawn.cases("gemm", "grouped_gemm", [](Draw& r) -> DrawnCase {
    const int dtype = Drawn::high(r);
    GroupCase v{{.a = dtype, .b = dtype, .d = dtype}, {}, {}};
    v.product.trans_a = r.below(2) == 1, v.product.trans_b = r.below(2) == 1;
    const int64_t n = Drawn::extent(r, 70), k = Drawn::extent(r, 130);
    int64_t count = Drawn::chance(r, 6) ? 64 : r.below(9);
    if (r.swept != nullptr) count = 1 + r.swept->rows;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t tokens = Drawn::chance(r, 5) ? 0 : Drawn::extent(r, 40);
      v.sizes.push_back({tokens, n, r.swept != nullptr ? std::min<int64_t>(k, 24) : k});
      v.what += (i == 0 ? "" : "+") + std::to_string(tokens);
    }
    v.what += "x" + std::to_string(n) + "x" + std::to_string(k);
    if (count > 9) v.what = std::to_string(count) + "_experts_" + std::to_string(r.below(1 << 20));
    if (r.below(2) == 1) v.product.bias = dtype;
    static constexpr double kAlphas[] = {1, -0.37, 2}, kBetas[] = {1, 0.5, 0, -2};
    if (Drawn::chance(r, 3)) v.product.d = Drawn::high(r);
    if (Drawn::chance(r, 3)) v.product.alpha = kAlphas[r.below(3)];
    if (Drawn::chance(r, 3)) v.product.accumulate = true, v.product.beta = kBetas[r.below(4)];
    if (count > 0 && Drawn::chance(r, 4)) v.product.bias_grad = Drawn::high(r);
    v.product.accumulate_bias_grad = v.product.bias_grad >= 0 && Drawn::chance(r, 2);
    return {name_of_case(v), [v](Problem& p) { set_up(p, v); }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

// Runs a small GEMM and one with a tensor of more than 2^31 elements: D [m, n] = A [m, k] B^T with
// a large D, or with `across` D = A^T B with a large A.
void group(Run& run, bool across) {
  const Pattern left(1), right(2);
  constexpr int64_t kWide = 32768, kNarrow = 32;
  struct Product {
    int64_t m, n, k;
  };
  const Product products[] = {
      across ? Product{kWide, 16, 24} : Product{24, kWide, kNarrow},
      across ? Product{kWide, 16, run.rows(kWide)} : Product{run.rows(kWide), kWide, kNarrow}};
  std::vector<Tensor> a, b, d;
  for (const Product& s : products) {
    a.push_back(run.input(across ? Shape{s.k, s.m} : Shape{s.m, s.k}, left));
    b.push_back(run.input(across ? Shape{s.k, s.n} : Shape{s.n, s.k}, right));
    d.push_back(run.output({s.m, s.n}, across ? DType::kF32 : DType::kBF16));
  }
  const te_fl_tensor* const as[] = {a[0], a[1]};
  const te_fl_tensor* const bs[] = {b[0], b[1]};
  const te_fl_tensor* const ds[] = {d[0], d[1]};
  te_fl_grouped_gemm_args args{};
  args.a = as, args.b = bs, args.d = ds, args.a_count = args.b_count = args.d_count = 2;
  args.trans_a = across, args.trans_b = !across;
  run.call("grouped_gemm", &args);
  for (size_t p = 0; p < 2; ++p) {
    const Product& s = products[p];
    const auto term = [&](int64_t i, int64_t k) {
      const int64_t row = i / s.n, col = i % s.n;
      return across ? double{left.at(k * s.m + row)} * double{right.at(k * s.n + col)}
                    : double{left.at(row * s.k + k)} * double{right.at(col * s.k + k)};
    };
    const auto value = [&](int64_t i) {
      Near v{0, 0};
      for (int64_t k = 0; k < s.k; ++k) v.value += term(i, k), v.tolerance += std::fabs(term(i, k));
      v.tolerance = 1e-5 * v.tolerance + (across ? 0 : 0x1p-8 * std::fabs(v.value));
      return v;
    };
    run.expect_near(d[p], p == 0 ? "d[0]" : "d[1]", value);
  }
}

void add_cases(Cases& cases) {
  cases.push_back({"grouped_gemm", "", [](Run& r) { group(r, false); }});
  cases.push_back({"grouped_gemm", "over many rows", [](Run& r) { group(r, true); }});
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

// The forward of a layer of 8 experts: y_i[m / 8, n] = x_i[m / 8, k] W_i[n, k]^T.
void add_cases(Cases& cases) {
  const size_t first = cases.size();
  constexpr int64_t kExperts = 8;
  const auto experts = [](Case& c, int64_t m, const auto& left, const auto& right, int dtype) {
    auto& args = c.args<te_fl_grouped_gemm_args>();
    const int64_t n = c.extent(1), k = c.extent(2), rows = std::max<int64_t>(m / kExperts, 1);
    std::vector<const te_fl_tensor*> a, b, d;
    for (int64_t i = 0; i < kExperts; ++i) {
      a.push_back(left(Shape{rows, k})), b.push_back(right(Shape{n, k}));
      d.push_back(c.out({rows, n}, dtype));
    }
    args.a = c.list(a), args.b = c.list(b), args.d = c.list(d);
    args.a_count = args.b_count = args.d_count = kExperts, args.trans_b = 1;
    c.flops = 2.0 * kExperts * static_cast<double>(rows) * static_cast<double>(n) *
              static_cast<double>(k);
  };
  both_dtypes(cases, "grouped_gemm", [experts](Case& c, int64_t m, int dtype) {
    const auto plain = [&](const Shape& s) -> const te_fl_tensor* { return c.in(s, dtype); };
    experts(c, m, plain, plain, dtype);
  });
  cases.push_back({"grouped_gemm", "fp8, bf16 out", [experts](Case& c, int64_t m) {
                     const auto codes = [&](const Shape& s) -> const te_fl_tensor* {
                       return c.fp8(s, TE_FL_F8E4M3);
                     };
                     experts(c, m, codes, codes, TE_FL_BF16);
                   }});
  for (size_t i = first; i < cases.size(); ++i) {
    cases[i].memory_bound = false, cases[i].fixed_rows = 2048;
  }
  describe(cases, first, "m, n, k", {2048, 2048, 1024}, {8192, 4096, 7168});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile gemm_grouped_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
