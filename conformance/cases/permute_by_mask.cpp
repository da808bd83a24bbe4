#include <algorithm>
#include <numeric>

#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::conformance {
namespace {

struct MaskVariant {
  int dtype = TE_FL_F32, mask = TE_FL_BOOL;
  int probs = TE_FL_F32;  // dtype of the routing probabilities; -1: none
  int pad = -1;           // dtype of pad_offsets; -1: none
  int64_t tokens = 7, experts = 5, width = 33;
  int64_t every = 2;       // one in `every` (token, expert) pairs is routed, at random; 0: none
  int64_t more = 0;        // rows after those of pairs and padding
  Dims pads = {};          // padding; random if it is empty and requested
  std::string wrong = {};  // not empty: part of the expected error text
  bool large = false;
};

std::string mask_name(const MaskVariant& v) {
  std::string name = std::string(name_of(v.dtype)) + "/" + name_of(v.mask) + "/" +
                     dims_name({v.tokens, v.experts, v.width}) + "/1_of_" + std::to_string(v.every);
  name += v.probs < 0 ? "/no_probs" : std::string("/probs=") + name_of(v.probs);
  if (v.pad >= 0) name += std::string("/pad=") + name_of(v.pad);
  if (!v.pads.empty()) name += "@" + dims_name(v.pads);
  return name +
         (v.more != 0 ? "/rows" + std::string(v.more > 0 ? "+" : "") + std::to_string(v.more) : "");
}

Fill row_numbers(const Dims& values) {
  return
      [values](Random&, int64_t i) { return static_cast<double>(values[static_cast<size_t>(i)]); };
}

void permute_by_mask(Problem& p, const MaskVariant& v) {
  // Every byte of a mask other than 0 means true.
  Dims mask(static_cast<size_t>(v.tokens * v.experts), 0);
  for (int64_t& is : mask) {
    if (v.every > 0 && p.random.below(v.every) == 0)
      is = v.mask == TE_FL_BOOL ? 1 : 1 + p.random.below(200);
  }
  Dims pads(static_cast<size_t>(v.experts), 0);
  if (!v.pads.empty()) {
    pads = v.pads;
  } else if (v.pad >= 0) {
    for (int64_t e = 0, sum = 0; e < v.experts; ++e) pads[e] = sum += p.random.below(4);
  }
  const int64_t pairs = mask.size() - std::count(mask.begin(), mask.end(), 0);
  const int64_t rows =
      std::max<int64_t>(pairs + ((v.experts > 0 ? pads[v.experts - 1] : 0) + v.more), 0);
  Tensor* x = p.in("input", v.dtype, {v.tokens, v.width},
                   v.dtype == TE_FL_U8 ? integers(200) : gaussian(3));
  p.in("routing_map", v.mask, {v.tokens, v.experts}, row_numbers(mask));
  // One in four (token, expert) pairs has the probability 0 or -0, so it has no row.
  Tensor* probs = v.probs >= 0 ? p.in("probs", v.probs, {v.tokens, v.experts},
                                      [](Random& r, int64_t) {
                                        if (r.below(4) == 0) return r.below(2) == 0 ? 0.0 : -0.0;
                                        return 0.01 + static_cast<double>(r.below(100));
                                      })
                               : nullptr;
  if (v.pad >= 0) p.in("pad_offsets", v.pad, {v.experts}, row_numbers(pads));
  Tensor* y = p.out("output", v.dtype, {rows, v.width});
  Tensor* moved = v.probs >= 0 ? p.out("permuted_probs", v.probs, {rows}) : nullptr;
  Tensor* map = p.out("row_id_map", TE_FL_I32, {v.experts, v.tokens});
  if (!v.wrong.empty()) p.expect_error(TE_FL_INVALID_ARGUMENT, v.wrong), p.late_error = true;
  p.oracle([&p, v, mask, pads, rows, x, probs, y, moved, map] {
    if (!v.wrong.empty()) return p.expect_unchanged(y);
    std::vector<double> want(static_cast<size_t>(rows * v.width), 0), want_moved(rows, 0);
    std::vector<double> want_map(mask.size(), -1);
    int64_t number = 0;
    for (int64_t e = 0; e < v.experts; ++e)
      for (int64_t t = 0; t < v.tokens; ++t) {
        if (mask[t * v.experts + e] == 0) continue;
        const int64_t row = number++ + pads[e];
        want_map[e * v.tokens + t] = static_cast<double>(row);
        const double prob = probs != nullptr ? probs->get(t * v.experts + e) : 1.0;
        if (probs != nullptr) want_moved[row] = prob;
        if (prob == 0) continue;
        for (int64_t c = 0; c < v.width; ++c) want[row * v.width + c] = x->get(t * v.width + c);
      }
    p.expect_exact(y, want, v.dtype);
    p.expect_exact(map, want_map, TE_FL_F32);
    if (probs != nullptr) p.expect_exact(moved, want_moved, v.probs);
  });
}

std::vector<MaskVariant> mask_variants() {
  std::vector<MaskVariant> all;
  for (int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16, TE_FL_F8E4M3, TE_FL_F8E5M2, TE_FL_U8})
    for (int mask : {TE_FL_BOOL, TE_FL_U8}) all.push_back({.dtype = dtype, .mask = mask});
  for (int probs : {-1, int{TE_FL_F32}, int{TE_FL_F16}, int{TE_FL_BF16}})
    for (int pad : {int{TE_FL_I32}, int{TE_FL_I64}})
      all.push_back({.dtype = TE_FL_BF16, .probs = probs, .pad = pad, .width = 64});
  for (int64_t width : {0, 1, 2, 4, 8, 1030, 4096})
    all.push_back({.dtype = TE_FL_BF16, .width = width});
  for (int64_t more : {1, 9}) all.push_back({.pad = TE_FL_I32, .more = more});
  for (int64_t every : {0, 1})
    all.push_back({.every = every}), all.push_back({.every = every, .more = 3});
  all.push_back({.tokens = 0}), all.push_back({.tokens = 0, .more = 3});
  all.push_back({.pad = TE_FL_I64, .tokens = 0}), all.push_back({.experts = 0, .more = 2});
  all.push_back({.tokens = 1, .experts = 1, .every = 1});
  // Sizes at the limits of kernels. Tokens: an incomplete tile, and many tiles. Experts: more than
  // the threads of a block, and more slots per token than the lanes of a warp. Widths: rows for one
  // lane and for more than a warp.
  for (int64_t tokens : {63, 64, 65, 200})
    all.push_back({.tokens = tokens, .experts = 8, .width = 4});
  for (int64_t experts : {9, 31, 64, 100, 257, 300})
    for (int64_t width : {8, 1024})
      all.push_back({.dtype = TE_FL_BF16,
                     .pad = TE_FL_I64,
                     .tokens = 90,
                     .experts = experts,
                     .width = width,
                     .every = 8});
  all.push_back(
      {.dtype = TE_FL_BF16, .tokens = 40000, .experts = 8, .width = 8, .every = 4, .large = true});
  all.push_back({.dtype = TE_FL_BF16,
                 .tokens = 33000,
                 .experts = 3,
                 .width = 2,
                 .every = 2,
                 .more = 70,
                 .large = true});
  all.push_back({.tokens = 3, .experts = 2040, .width = 2, .every = 64});
  // Invalid calls: an output with one row fewer than there are pairs and padding rows, and invalid
  // padding offsets.
  all.push_back({.tokens = 3,
                 .experts = 2,
                 .every = 1,
                 .more = -1,
                 .wrong = "has row 5, but the output has 5"});
  all.push_back({.pad = TE_FL_I32,
                 .tokens = 3,
                 .experts = 2,
                 .every = 1,
                 .more = -2,
                 .pads = {0, 2},
                 .wrong = "has row 6, but the output has 6"});
  for (int pad : {TE_FL_I32, TE_FL_I64}) {
    all.push_back(
        {.pad = pad, .experts = 3, .more = 9, .pads = {-1, 0, 0}, .wrong = "pad_offsets[0] is -1"});
    all.push_back(
        {.pad = pad, .experts = 3, .more = 9, .pads = {1, 4, 3}, .wrong = "pad_offsets[2] is 3"});
  }
  all.push_back({.pad = TE_FL_I64,
                 .tokens = 3,
                 .experts = 2,
                 .every = 1,
                 .more = -4294967296 + 6,
                 .pads = {0, 4294967296},
                 .wrong = "has row 42949"});
  // The sum of the padding and the preceding pairs exceeds 64 bits.
  constexpr int64_t kMost = 0x7FFFFFFFFFFFF000;  // exactly representable as a double
  for (int64_t every : {1, 3})
    all.push_back({.pad = TE_FL_I64,
                   .tokens = 5000,
                   .experts = 3,
                   .width = 2,
                   .every = every,
                   .more = -kMost + 6,
                   .pads = {0, 0, kMost},
                   .wrong = "has row "});
  return all;
}

void add_cases(Table& table) {
  for (const MaskVariant& v : mask_variants())
    add(
        table, "moe", "moe_permute_by_mask_fwd", mask_name(v),
        [v](Problem& p) { permute_by_mask(p, v); }, v.large);
}

void draw_cases(Drawn& drawn) {
  drawn.cases("moe", "moe_permute_by_mask_fwd", [](Draw& r) -> DrawnCase {
    const Dims shape = Drawn::shape(r, 2);
    MaskVariant v{.dtype = Drawn::high(r), .mask = Drawn::chance(r, 2) ? TE_FL_U8 : TE_FL_BOOL};
    v.probs = Drawn::chance(r, 3) ? -1 : Drawn::high(r);
    if (Drawn::chance(r, 2)) v.pad = Drawn::chance(r, 2) ? TE_FL_I32 : TE_FL_I64;
    const bool large = r.swept != nullptr && r.swept->large;
    v.tokens = large ? shape[0] : std::min<int64_t>(shape[0], 300), v.width = shape.back();
    v.experts = 1 + r.below(large ? 5 : 70), v.every = 1 + r.below(9), v.more = r.below(5);
    const int64_t most = large ? 3'000'000 : 600'000;
    if (v.tokens * v.experts * v.width > most) v.tokens = 1 + most / (v.experts * v.width);
    return {mask_name(v), [v](Problem& p) { permute_by_mask(p, v); }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

// Token t is routed to expert e if (t + e) % 4 is 0. One output row without a token precedes the
// rows of the last expert.
void permute_by_mask(Run& run, int64_t cols) {
  constexpr int64_t kExperts = 8, kEvery = 4;
  const Pattern pattern(1), weights(2);
  const int64_t each = run.rows(cols * kExperts / kEvery, 1), tokens = each * kEvery;
  const int64_t rows = each * kExperts + 1;
  const Tensor mask = run.output({tokens, kExperts}, DType::kU8);
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < kEvery * kExperts; ++i) {
    bytes.push_back((i / kExperts + i % kExperts) % kEvery == 0 ? 1 : 0);
  }
  run.repeat(mask, bytes);
  std::vector<int32_t> left_out(kExperts, 0);
  left_out.back() = 1;
  const Tensor x = run.input({tokens, cols}, pattern), y = run.output({rows, cols});
  const Tensor probs = run.input({tokens, kExperts}, weights, DType::kF32);
  const Tensor moved = run.output({rows}, DType::kF32), pads = run.integers(left_out);
  const Tensor map = run.output({kExperts, tokens}, DType::kI32);
  if (run.failed()) return;
  te_fl_moe_permute_by_mask_fwd_args args{};
  args.input = x, args.routing_map = mask, args.probs = probs, args.pad_offsets = pads;
  args.output = y, args.permuted_probs = moved, args.row_id_map = map;
  run.call("moe_permute_by_mask_fwd", &args);
  // The pair (token, expert) of a row; -1 for the row that is left out.
  const auto pair_of = [&](int64_t row) -> int64_t {
    if (row == rows - 1 - each) return -1;
    if (row >= rows - each) --row;
    const int64_t e = row / each;
    return (row % each * kEvery + (kEvery - e % kEvery) % kEvery) * kExperts + e;
  };
  run.expect(
      y, "output",
      [&](int64_t i) -> double {
        const int64_t pair = pair_of(i / cols);
        if (pair < 0 || weights.at(pair) == 0) return 0.0;
        return pattern.at(pair / kExperts * cols + i % cols);
      },
      0, 0);
  run.expect(
      moved, "permuted_probs",
      [&](int64_t r) -> double { return pair_of(r) < 0 ? 0.0 : double{weights.at(pair_of(r))}; }, 0,
      0);
}

void add_cases(Cases& cases) {
  cases.push_back({"moe_permute_by_mask_fwd", "", [](Run& r) { permute_by_mask(r, kCols); }});
  cases.push_back(
      {"moe_permute_by_mask_fwd", "odd rows", [](Run& r) { permute_by_mask(r, kOddCols); }});
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  constexpr int64_t kExperts = 64, kTop = 2;
  both_dtypes(cases, "moe_permute_by_mask_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_moe_permute_by_mask_fwd_args>();
    BenchTensor& mask = c.in({rows, kExperts}, TE_FL_U8);
    std::fill_n(mask.data<uint8_t>(), rows * kExperts, uint8_t{0});
    for (int64_t i = 0; i < rows * kTop; ++i) {
      mask.data<uint8_t>()[i / kTop * kExperts + i * 37 % kExperts] = 1;
    }
    a.input = c.in({rows, c.cols()}, dtype), a.routing_map = mask;
    a.probs = c.in({rows, kExperts}, TE_FL_F32), a.permuted_probs = c.out({rows * kTop}, TE_FL_F32);
    a.output = c.out({rows * kTop, c.cols()}, dtype);
    a.row_id_map = c.out({kExperts, rows}, TE_FL_I32);
  });
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile permute_by_mask_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
