#include "te_fl/ops/dropout.h"
#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/oracle_philox.hpp"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};

// A second RNG seed and offset. A call that differs only in these reuses the cached plan of an
// earlier call, so the plan must not store them.
constexpr uint64_t kOtherSeed = 0xfedcba987654321ull, kOtherOffset = (uint64_t{1} << 33) + 6;

struct Variant {
  int dtype = TE_FL_F32;
  Dims shape = {};
  float p = 0.1f;
  uint64_t seed = 0x123456789abcdefull, offset = 5;
  bool in_place = false, state = false, large = false;
};

std::string variant_name(const Variant& v) {
  std::string name =
      std::string(name_of(v.dtype)) + "/" + dims_name(v.shape) + "/p=" + std::to_string(v.p);
  if (v.offset > 1000) name += "/offset";
  if (v.seed == kOtherSeed) name += "/other_seed";
  return name + (v.in_place ? "/in_place" : "") + (v.state ? "/state" : "");
}

// Expects the mask's bits. Unused bits of the last byte may have any value.
void expect_mask(Problem& p, Tensor* mask, int64_t n, float drop) {
  std::vector<uint8_t> bits(static_cast<size_t>((n + 7) / 8), 0);
  for (int64_t i = 0; i < n; ++i)
    if (keeps(p.rng, i, drop)) bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | 1u << (i % 8));
  if (n % 8 == 0) return p.expect_bytes(mask, bits);
  const auto used = static_cast<uint8_t>((1u << (n % 8)) - 1);
  std::vector<double> values(bits.begin(), bits.end());
  p.expect_custom(mask, [bits, used](const Tensor& t) -> std::string {
    for (size_t i = 0; i < bits.size(); ++i) {
      const uint8_t used_bits = i + 1 == bits.size() ? used : 0xff;
      if ((t.data->data()[i] & used_bits) != (bits[i] & used_bits))
        return "mask[" + std::to_string(i) + "]: got " + std::to_string(t.data->data()[i]) +
               ", expected " + std::to_string(bits[i]) + " exactly";
    }
    return {};
  });
}

void forward(Problem& p, const Variant& v) {
  p.set_rng(v.seed, v.offset, v.state);
  Tensor* x = p.in("input", v.dtype, v.shape);
  Tensor* y = v.in_place ? p.in_place("output", x) : p.out("output", v.dtype, v.shape);
  const int64_t n = x->numel();
  Tensor* mask = p.out("mask", TE_FL_U8, {(n + 7) / 8});
  p.set("p", static_cast<double>(v.p));
  p.oracle([&p, v, n, x, y, mask] {
    std::vector<double> want(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i)
      want[i] = keeps(p.rng, i, v.p) ? x->get(i) / (1 - static_cast<double>(v.p)) : 0;
    p.expect(y, want);
    expect_mask(p, mask, n, v.p);
  });
}

void backward(Problem& p, const Variant& v) {
  Tensor* dy = p.in("grad_output", v.dtype, v.shape);
  const int64_t n = dy->numel();
  Tensor* mask = p.in("mask", TE_FL_U8, {(n + 7) / 8}, integers(256));
  Tensor* dx = v.in_place ? p.in_place("grad_input", dy) : p.out("grad_input", v.dtype, v.shape);
  p.set("p", static_cast<double>(v.p));
  p.oracle([&p, v, n, dy, mask, dx] {
    std::vector<double> want(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i)
      want[i] = (mask->data->data()[i / 8] >> (i % 8)) & 1
                    ? dy->get(i) / (1 - static_cast<double>(v.p))
                    : 0;
    p.expect(dx, want);
  });
}

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (int d : kHigh)
    for (float p : {0.0f, 0.1f, 0.5f}) all.push_back({.dtype = d, .shape = {7, 33}, .p = p});
  for (const Dims& s : {Dims{0, 5}, {1}, {1, 7}, {8}, {3, 5, 2, 19}, {130, 257}})
    all.push_back({.shape = s});
  all.push_back({.shape = {64, 8}, .p = 0.999f});
  all.push_back(
      {.shape = {64, 8}, .offset = 0xfffffffeull});  // the low word of the counter overflows
  all.push_back({.shape = {9, 40}, .in_place = true});
  all.push_back({.dtype = TE_FL_BF16, .shape = {512, 1024}, .large = true});
  return all;
}

struct AddVariant {
  int a, b, out;
  Dims shape;
  float p;
  std::string in_place;
  bool mask_at_zero = false, large = false, state = false;
  uint64_t seed = 42, offset = 9;
};

void add_op(Problem& p, const AddVariant& v) {
  p.set_rng(v.seed, v.offset, v.state);
  Tensor* a = p.in("a", v.a, v.shape);
  Tensor* b = p.in("b", v.b, v.shape);
  Tensor* y = v.in_place == "a"   ? p.in_place("output", a)
              : v.in_place == "b" ? p.in_place("output", b)
                                  : p.out("output", v.out, v.shape);
  const int64_t n = a->numel();
  Tensor* mask = v.p != 0 || v.mask_at_zero ? p.out("mask", TE_FL_U8, {(n + 7) / 8}) : nullptr;
  p.set("p", static_cast<double>(v.p));
  p.oracle([&p, v, n, a, b, y, mask] {
    std::vector<double> want(static_cast<size_t>(n)), extra(want.size());
    for (int64_t i = 0; i < n; ++i) {
      want[i] = a->get(i) + (keeps(p.rng, i, v.p) ? b->get(i) / (1 - static_cast<double>(v.p)) : 0);
      extra[i] = 0x1p-22 * std::fabs(b->get(i));
    }
    p.expect(y, want, extra);
    if (mask != nullptr) expect_mask(p, mask, n, v.p);
  });
}

void add_cases(Table& table) {
  for (const Variant& v : variants()) {
    add(
        table, "dropout", "dropout_fwd", variant_name(v), [v](Problem& p) { forward(p, v); },
        v.large);
    if (v.offset == 5)
      add(
          table, "dropout", "dropout_bwd", variant_name(v), [v](Problem& p) { backward(p, v); },
          v.large);
  }
  for (const Variant& v : {Variant{.shape = {5, 31}, .state = true},
                           Variant{.shape = {7, 33}, .seed = kOtherSeed, .offset = kOtherOffset}})
    add(table, "dropout", "dropout_fwd", variant_name(v), [v](Problem& p) { forward(p, v); });

  add(table, "tensor", "add", "mistake/no_mask", [](Problem& p) {
    p.in("a", TE_FL_F32, {4}), p.in("b", TE_FL_F32, {4});
    Tensor* y = p.out("output", TE_FL_F32, {4});
    p.set("p", 0.5), p.expect_error(-1, "mask");
    p.oracle([&p, y] { p.expect_unchanged(y); });
  });
  add(table, "dropout", "dropout_fwd", "mistake/small_mask", [](Problem& p) {
    p.in("input", TE_FL_F32, {9});
    Tensor* y = p.out("output", TE_FL_F32, {9});
    Tensor* mask = p.out("mask", TE_FL_U8, {1});
    p.set("p", 0.5), p.expect_error(-1, "mask");
    p.oracle([&p, y, mask] { p.expect_unchanged(y), p.expect_unchanged(mask); });
  });

  std::vector<AddVariant> adds;
  for (int a : kHigh)
    for (int b : kHigh) adds.push_back({a, b, a, {7, 33}, 0.25f, ""});
  adds.push_back({TE_FL_F32, TE_FL_BF16, TE_FL_F16, {7, 33}, 0, ""});
  for (const Dims& s : {Dims{0, 5}, {1}, {3, 5, 2, 19}, {130, 257}}) {
    adds.push_back({TE_FL_F32, TE_FL_F32, TE_FL_F32, s, 0, ""});
    adds.push_back({TE_FL_F32, TE_FL_F32, TE_FL_F32, s, 0.1f, ""});
  }
  adds.push_back({TE_FL_F32, TE_FL_F32, TE_FL_F32, {9, 40}, 0, "a"});
  adds.push_back({TE_FL_F32, TE_FL_F32, TE_FL_F32, {9, 40}, 0.5f, "b"});
  adds.push_back({TE_FL_F32, TE_FL_F32, TE_FL_F32, {9, 40}, 0, "", true});
  adds.push_back({TE_FL_BF16, TE_FL_BF16, TE_FL_BF16, {512, 512}, 0.1f, "", false, true});
  adds.push_back({TE_FL_F32, TE_FL_F32, TE_FL_F32, {7, 33}, 0.25f, "", false, false, true});
  adds.push_back({TE_FL_F32,
                  TE_FL_F32,
                  TE_FL_F32,
                  {7, 33},
                  0.25f,
                  "",
                  false,
                  false,
                  false,
                  kOtherSeed,
                  kOtherOffset});
  for (const AddVariant& v : adds) {
    std::string name = std::string(name_of(v.a)) + "+" + name_of(v.b) + "/" + dims_name(v.shape) +
                       "/out=" + name_of(v.out) + "/p=" + std::to_string(v.p);
    if (!v.in_place.empty()) name += "/in_place=" + v.in_place;
    if (v.mask_at_zero) name += "/mask";
    if (v.state) name += "/state";
    if (v.seed == kOtherSeed) name += "/other_seed";
    add(
        table, "tensor", "add", name, [v](Problem& p) { add_op(p, v); }, v.large);
  }
}

void draw_cases(Drawn& drawn) {
  const auto draw = [](Draw& r) {
    Variant v{.dtype = Drawn::high(r), .shape = Drawn::shape(r)};
    static constexpr float kShares[] = {0, 0.1f, 0.5f, 0.75f};
    v.p = kShares[r.below(4)], v.state = Drawn::chance(r, 3);
    if (Drawn::chance(r, 2)) v.seed = kOtherSeed, v.offset = kOtherOffset;
    v.in_place = Drawn::chance(r, 6);
    return v;
  };
  drawn.cases("dropout", "dropout_fwd", [&](Draw& r) -> DrawnCase {
    const Variant v = draw(r);
    return {variant_name(v), [v](Problem& p) { forward(p, v); }};
  });
  drawn.cases("dropout", "dropout_bwd", [&](Draw& r) -> DrawnCase {
    const Variant v = draw(r);
    return {variant_name(v), [v](Problem& p) { backward(p, v); }};
  });
  drawn.cases("tensor", "add", [](Draw& r) -> DrawnCase {
    const int a = Drawn::high(r), b = Drawn::high(r), out = Drawn::high(r);
    AddVariant v{a, b, out, Drawn::shape(r), r.below(2) == 0 ? 0.0f : 0.25f, ""};
    v.state = Drawn::chance(r, 3);
    if (Drawn::chance(r, 2)) v.seed = kOtherSeed, v.offset = kOtherOffset;
    if (Drawn::chance(r, 6)) v.in_place = "a", v.out = v.a;
    return {std::string(name_of(a)) + "+" + name_of(b) + "/" + dims_name(v.shape) +
                "/out=" + name_of(out) + "/p=" + (v.p == 0 ? "0" : "0.25"),
            [v](Problem& p) { add_op(p, v); }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  both_dtypes(cases, "dropout_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_dropout_fwd_args>();
    a.input = c.in({rows, c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
    a.mask = c.out({(rows * c.cols() + 7) / 8}, TE_FL_U8), a.p = 0.1f;
  });
  both_dtypes(cases, "dropout_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_dropout_bwd_args>();
    a.grad_output = c.in({rows, c.cols()}, dtype), a.grad_input = c.out({rows, c.cols()}, dtype);
    a.mask = c.in({(rows * c.cols() + 7) / 8}, TE_FL_U8), a.p = 0.1f;
  });
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile dropout_cases{
    .cases = add_cases, .drawn = draw_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
