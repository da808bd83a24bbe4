#include "conformance/huge/quantize.hpp"
#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/huge/dequantize.hpp"
#include "conformance/oracle_quantize.hpp"
#include "te_fl/ops/quantize.h"

// The plain quantisation ops are compared exactly: codes, scales, amax and padding, bit for bit.
// Only NVFP4 is compared by intervals, since docs/numerics.md does not define the rounding order of
// its two scales.
namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};

enum class Data { kGaussian, kSpecial, kTiny, kHuge, kZeros, kBlocks };
const char* const kDataNames[] = {"", "/special", "/tiny", "/huge", "/zeros", "/blocks"};

// Element i of a [.., 256] matrix. Each strip of 32 columns has one kind of block: zeros, NaN,
// infinities, only subnormals, or an amax next to a value at which the E8M0 scale changes.
double block_value(double g, int64_t i) {
  const double beside = 1 + static_cast<double>(i / 256 % 3) * 0x1p-22 / 3.5;
  switch (i / 32 % 8) {
    case 1:
      return 0;
    case 2:
      return nan_value();
    case 3:
      return i % 2 == 0 ? infinity() : -infinity();
    case 4:
      return g * 1e-40;
    case 5:
      return 448 * 0x1p-127 * beside;
    case 6:
      return 57344 * 0x1p-127 * beside;
    case 7:
      return 448 * beside;
    default:
      return g * 1e38;
  }
}

// Random data by kind: Gaussian; with NaN, infinities, zeros and rounding ties; amaxes for which
// the scale overflows; large values; zeros.
Fill data_fill(Data data) {
  if (data == Data::kGaussian) return gaussian();
  return [data](Random& r, int64_t i) -> double {
    const double g = r.gaussian();
    switch (data) {
      case Data::kSpecial: {
        static const double special[] = {0,   -0.0, 1.0625, 1.1875,  -1.3125, 448,
                                         463, 480,  0x1p-9, 0x1p-10, 1.5e-5};
        if (i % 1031 == 700) return nan_value();
        if (i % 3517 == 2000) return -infinity();
        if (i % 7 == 3) return special[i / 7 % 11];
        return g;
      }
      case Data::kTiny:
        return g * 1e-38;
      case Data::kHuge:
        return g * 1e37;
      case Data::kZeros:
        return i % 2 == 0 ? 0.0 : -0.0;
      case Data::kBlocks:
        return block_value(g, i);
      default:
        return g;
    }
  };
}

void expect_quantised(Problem& p, Tensor* y, std::vector<double> x, int input_dtype) {
  if (y->spec.scaling == TE_FL_SCALING_NVFP4)
    p.expect(y, std::move(x)).widen = 0;
  else
    p.expect_exact(y, std::move(x), input_dtype);
}

// `shift`: number of elements before the input in its memory.
void quantize(Problem& p, int in, const Spec& spec, const Dims& shape, Data data, double noop,
              int64_t shift = 0) {
  int64_t elements = shift;
  for (int64_t rest = 1; const int64_t e : shape) elements = shift + (rest *= e);
  Tensor* x = shift == 0 ? p.in("input", in, shape, data_fill(data))
                         : p.strided("input", Role::kIn, in, shape, {}, data_fill(data), nullptr,
                                     shift, elements);
  Tensor* y = p.out("output", spec, shape);
  if (noop >= 0) p.in("noop_flag", TE_FL_F32, {1}, constant(noop));
  p.oracle([&p, in, noop, x, y] {
    if (noop > 0)
      p.expect_unchanged(y);
    else
      expect_quantised(p, y, x->values(), in);
  });
}

void dequantize(Problem& p, const Spec& spec, int out, const Dims& shape) {
  Tensor* x = p.quantised_in("input", spec, shape, gaussian(3));
  Tensor* y = p.out("output", out, shape);
  p.oracle([&p, x, y] { p.expect(y, dequantised(*x)); });
}

// Dequantises all codes of the FP8 dtype, including NaN and infinity.
void dequantize_codes(Problem& p, int dtype) {
  Tensor* x = p.quantised_in("input", {dtype, TE_FL_SCALING_TENSOR, true, false}, {16, 16});
  for (int i = 0; i < 256; ++i) x->data->data()[i] = static_cast<uint8_t>(i);
  x->data->freeze();
  Tensor* y = p.out("output", TE_FL_F32, {16, 16});
  p.oracle([&p, x, y] { p.expect(y, dequantised(*x)); });
}

// Dequantises MXFP8 data with all E8M0 scales, including NaN, from row-wise or column-wise data.
void dequantize_scales(Problem& p, bool columnwise) {
  const Dims shape = columnwise ? Dims{32, 256} : Dims{256, 32};
  Tensor* x =
      p.quantised_in("input", {TE_FL_F8E4M3, TE_FL_SCALING_MXFP8, !columnwise, columnwise}, shape);
  Buffer& codes = columnwise ? *x->col_data : *x->data;
  Buffer& scales = columnwise ? *x->col_scale_inv : *x->scale_inv;
  static constexpr uint8_t kCodes[] = {0x38, 0xB8, 0x30};  // 1, -1, 0.5
  for (int64_t i = 0; i < x->numel(); ++i) codes.data()[i] = kCodes[i % 3];
  const CopyLayout at(TE_FL_SCALING_MXFP8, columnwise, shape[0], shape[1]);
  for (int i = 0; i < 256; ++i)
    scales.data()[columnwise ? at.scale_index(0, i) : at.scale_index(i, 0)] =
        static_cast<uint8_t>(i);
  codes.freeze(), scales.freeze();
  Tensor* y = p.out("output", TE_FL_F32, shape);
  p.oracle([&p, x, y] { p.expect(y, dequantised(*x)); });
}

void bgrad(Problem& p, int in, const Spec& spec, int out, const Dims& shape) {
  Tensor* x = p.in("input", in, shape);
  Tensor* y = p.out("output", spec, shape);
  Tensor* bias = p.out("bias_grad", out, {shape.back()});
  p.oracle([&p, in, x, y, bias] {
    const int64_t h = x->cols();
    std::vector<double> sum(static_cast<size_t>(h)), size(sum.size());
    for (int64_t i = 0; i < x->numel(); ++i)
      sum[i % h] += x->get(i), size[i % h] += std::fabs(x->get(i));
    for (double& s : size) s = sum_tolerance(static_cast<double>(x->rows()), s);
    expect_quantised(p, y, x->values(), in);
    p.expect(bias, sum, size).widen = 4;
  });
}

// MXFP8 formats that quantised_specs() does not have: the other FP8 dtypes, and a lower bound of
// amaxes.
std::vector<Spec> mxfp8_specs() {
  constexpr int kMxfp8 = TE_FL_SCALING_MXFP8;
  return {{TE_FL_F8E4M3, kMxfp8, true, false},
          {TE_FL_F8E4M3, kMxfp8, false, true},
          {TE_FL_F8E4M3, kMxfp8, true, true},
          {TE_FL_F8E5M2, kMxfp8, true, true},
          {TE_FL_F8E4M3, kMxfp8, true, true, 0, 3.0f}};
}

std::string spec_case(int in, const Dims& shape, const Spec& spec) {
  return std::string(name_of(in)) + "/" + dims_name(shape) + "/out=" + spec.name();
}

void add_quantize(Table& table) {
  auto one = [&](int in, const Spec& spec, const Dims& shape, Data data = Data::kGaussian,
                 double noop = -1, bool large = false) {
    std::string name = spec_case(in, shape, spec) + kDataNames[static_cast<int>(data)];
    if (noop >= 0) name += noop > 0 ? "/noop=1" : "/noop=0";
    add(
        table, "quantize", "quantize", name,
        [=](Problem& p) { quantize(p, in, spec, shape, data, noop); }, large);
  };
  for (const Spec& spec : quantised_specs()) {
    const bool fp4 = spec.dtype == TE_FL_F4E2M1;
    for (int in : kHigh) one(in, spec, {130, 258});
    for (const Dims& shape :
         {Dims{0, 16}, {1, 1}, {17}, {3, 5, 38}, {257, 2}, {128, 128}, {1, 1022}})
      one(TE_FL_F32, spec, shape);
    if (!fp4) one(TE_FL_F32, spec, {13, 37}), one(TE_FL_BF16, spec, {259, 131});
    // Multiples of the vector width in both directions, but not of the tile size.
    for (int in : kHigh) one(in, spec, {144, 200});
    for (Data data : {Data::kSpecial, Data::kTiny, Data::kHuge, Data::kZeros}) {
      if (fp4 && data != Data::kZeros) continue;
      one(TE_FL_F32, spec, {140, 260}, data);
      if (data == Data::kSpecial || data == Data::kTiny) one(TE_FL_BF16, spec, {140, 260}, data);
      one(TE_FL_BF16, spec, {272, 264}, data);
      one(TE_FL_BF16, spec, {96, 264}, data);
    }
    one(TE_FL_F32, spec, {9, 40}, Data::kGaussian, 0);
    one(TE_FL_F32, spec, {9, 40}, Data::kGaussian, 1);
  }
  for (const Spec& spec : mxfp8_specs()) {
    // Rows of more than one tile, and tiles that consist of padding only.
    for (const int in : kHigh) {
      one(in, spec, {40, 1096});
      one(in, spec, {33, 520});
      one(in, spec, {96, 256}, Data::kBlocks);
    }
    one(TE_FL_F32, spec, {97, 516});
    one(TE_FL_BF16, spec, {50, 259}, Data::kSpecial);
    one(TE_FL_F32, spec, {96, 256}, Data::kBlocks, 1);
    for (const int in : kHigh)
      add(table, "quantize", "quantize", spec_case(in, {34, 136}, spec) + "/shifted",
          [=](Problem& p) {
            quantize(p, in, spec, {34, 136}, Data::kGaussian, -1, 1);
          });
  }
  one(TE_FL_F32, quantised_specs()[0], {}, Data::kGaussian);
  for (size_t i : {3u, 12u, 17u})
    one(TE_FL_BF16, quantised_specs()[i], {520, 1000}, Data::kGaussian, -1, true);
}

void add_dequantize(Table& table) {
  for (const Spec& spec : quantised_specs()) {
    Spec scaled = spec;
    scaled.scale = 37.0f;
    for (int out : kHigh)
      for (const Dims& shape :
           {Dims{130, 258}, Dims{144, 200}, Dims{3, 5, 38}, Dims{0, 16}, Dims{1, 1}}) {
        if (out != TE_FL_F32 && shape[0] < 130) continue;
        add(table, "quantize", "dequantize",
            "in=" + scaled.name() + (spec.scale < 1 ? ".b/" : "/") + dims_name(shape) + "/" +
                name_of(out),
            [=](Problem& p) { dequantize(p, scaled, out, shape); });
      }
  }
  for (int d : {TE_FL_F8E4M3, TE_FL_F8E5M2})
    add(table, "quantize", "dequantize", std::string("all_codes/") + name_of(d),
        [d](Problem& p) { dequantize_codes(p, d); });
  for (const bool columnwise : {false, true})
    add(table, "quantize", "dequantize",
        std::string("all_scales/mxfp8") + (columnwise ? ".col/f32" : ".row/f32"),
        [=](Problem& p) { dequantize_scales(p, columnwise); });
}

void add_bgrad(Table& table) {
  for (const Spec& spec : quantised_specs()) {
    add(table, "quantize", "bgrad_quantize", spec_case(TE_FL_BF16, {130, 258}, spec),
        [=](Problem& p) {
          bgrad(p, TE_FL_BF16, spec, TE_FL_BF16, {130, 258});
        });
    add(table, "quantize", "bgrad_quantize", spec_case(TE_FL_BF16, {144, 200}, spec),
        [=](Problem& p) {
          bgrad(p, TE_FL_BF16, spec, TE_FL_BF16, {144, 200});
        });
  }
  for (size_t s : {5u, 7u, 14u, 21u})  // more rows than one round of partial sums
    add(
        table, "quantize", "bgrad_quantize",
        spec_case(TE_FL_BF16, {16640, 8}, quantised_specs()[s]),
        [=](Problem& p) {
          bgrad(p, TE_FL_BF16, quantised_specs()[s], TE_FL_F32, {16640, 8});
        },
        true);
  for (size_t s : {5u, 7u, 14u, 21u})  // few rows: partial sums are the result
    for (int out : kHigh)
      add(table, "quantize", "bgrad_quantize",
          spec_case(TE_FL_BF16, {128, 200}, quantised_specs()[s]) + "/bias=" + name_of(out),
          [=](Problem& p) {
            bgrad(p, TE_FL_BF16, quantised_specs()[s], out, {128, 200});
          });
  const Spec spec = quantised_specs()[7];
  for (int in : kHigh)
    for (int out : kHigh)
      add(table, "quantize", "bgrad_quantize",
          spec_case(in, {7, 33}, spec) + "/bias=" + name_of(out), [=](Problem& p) {
            bgrad(p, in, spec, out, {7, 33});
          });
  for (const Dims& shape : {Dims{0, 5}, {1, 1}, {17}, {2, 3, 19}, {300, 1000}})
    add(
        table, "quantize", "bgrad_quantize", spec_case(TE_FL_F32, shape, spec),
        [=](Problem& p) { bgrad(p, TE_FL_F32, spec, TE_FL_F32, shape); }, shape[0] == 300);
}

// One tensor of multi_tensor_quantize.
struct Listed {
  int in = TE_FL_F32;
  Spec spec = {};
  Dims shape = {};
};

void quantize_list(Problem& p, const std::vector<Listed>& list, double noop) {
  std::vector<Tensor*> xs, ys;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string n = "[" + std::to_string(i) + "]";
    xs.push_back(p.unnamed(p.in("inputs" + n, list[i].in, list[i].shape)));
    ys.push_back(p.unnamed(p.out("outputs" + n, list[i].spec, list[i].shape)));
  }
  p.list("inputs", xs), p.list("outputs", ys);
  if (noop >= 0) p.in("noop_flag", TE_FL_F32, {1}, constant(noop));
  p.oracle([&p, xs, ys, noop] {
    for (size_t i = 0; i < xs.size(); ++i) {
      if (noop > 0)
        p.expect_unchanged(ys[i]);
      else
        expect_quantised(p, ys[i], xs[i]->values(), xs[i]->spec.dtype);
    }
  });
}

// A case with `count` tensors. Tensor i has specs[i % specs.size()].
void multi_quantize(Problem& p, int count, const std::vector<Spec>& specs, double noop,
                    bool even = false) {
  std::vector<Listed> list;
  for (int i = 0; i < count; ++i) {
    const Dims shape = even ? Dims{i % 5 * 48, i % 7 * 40 + 8} : Dims{i % 5 * 13, i % 3 * 20 + 2};
    Spec s = specs[static_cast<size_t>(i) % specs.size()];
    s.scale = static_cast<float>(i + 1);
    list.push_back({kHigh[i % 3], s, shape});
  }
  quantize_list(p, list, noop);
}

void split(Problem& p, int in, const Spec& spec, const std::vector<int64_t>& parts, int64_t k,
           Data data = Data::kGaussian) {
  int64_t rows = 0;
  for (int64_t n : parts) rows += n;
  Tensor* x = p.in("input", in, {rows, k}, data_fill(data));
  std::vector<Tensor*> ys;
  for (size_t i = 0; i < parts.size(); ++i)
    ys.push_back(p.unnamed(p.out("outputs[" + std::to_string(i) + "]", spec, {parts[i], k})));
  p.list("outputs", ys);
  p.oracle([&p, in, k, x, ys, parts] {
    const auto all = x->values();
    int64_t at = 0;
    for (size_t i = 0; i < ys.size(); ++i) {
      expect_quantised(p, ys[i], {all.begin() + at, all.begin() + at + parts[i] * k}, in);
      at += parts[i] * k;
    }
  });
}

void cast(Problem& p, int in, int out, const Dims& shape, bool with_amax, bool with_inverse,
          Data data, double factor = 99.7) {
  Tensor* x = p.in("input", in, shape, data_fill(data));
  Tensor* y = p.out("output", out, shape);
  Tensor* scale = p.in("scale", TE_FL_F32, {1}, constant(factor));
  Tensor* amax = with_amax
                     ? p.inout("amax", TE_FL_F32, {1}, constant(shape.size() == 1 ? 1e30 : 0.5))
                     : nullptr;
  Tensor* inverse = with_inverse ? p.out("scale_inv", TE_FL_F32, {1}) : nullptr;
  p.oracle([&p, out, x, y, scale, amax, inverse] {
    const auto s = static_cast<float>(scale->get(0));
    std::vector<uint8_t> codes;
    float top = amax == nullptr ? 0 : static_cast<float>(amax->get(0));
    for (double v : x->values())
      codes.push_back(cast_code(out, static_cast<float>(v), s)), top = amax_with(top, v);
    p.expect_bytes(y, codes);
    if (amax != nullptr) p.expect_exact(amax, {static_cast<double>(top)}, TE_FL_F32);
    if (inverse != nullptr) p.expect_exact(inverse, {static_cast<double>(1.0f / s)}, TE_FL_F32);
  });
}

void transpose(Problem& p, int dtype, int64_t m, int64_t k) {
  Tensor* x = p.in("input", dtype, {m, k}, constant(0));
  for (int64_t i = 0; i < m * k; ++i) x->data->data()[i] = static_cast<uint8_t>(p.random.bits());
  x->data->freeze();
  Tensor* y = p.out("output", dtype, {k, m});
  p.oracle([&p, m, k, x, y] {
    std::vector<uint8_t> want(static_cast<size_t>(m * k));
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < k; ++j) want[j * m + i] = x->data->data()[x->index(i * k + j)];
    p.expect_bytes(y, want);
  });
}

// Transposes FP8 data of random numbers, and sums the columns.
void transpose_and_sum(Problem& p, int dtype, int out, int64_t m, int64_t k, bool scaled) {
  const double scale_inv = scaled ? 0.375 : 1;
  Tensor* x = p.in("input", dtype, {m, k}, gaussian(4));
  Tensor* y = p.out("output", dtype, {k, m});
  Tensor* sums = p.out("column_sums", out, {k});
  if (scaled) p.in("scale_inv", TE_FL_F32, {1}, constant(scale_inv));
  p.oracle([&p, m, k, x, y, sums, scale_inv] {
    std::vector<uint8_t> want(static_cast<size_t>(m * k));
    std::vector<double> total(static_cast<size_t>(k)), tolerance(total);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < k; ++j) {
        want[j * m + i] = x->data->data()[x->index(i * k + j)];
        total[j] += x->get(i * k + j) * scale_inv;
        tolerance[j] += std::fabs(x->get(i * k + j) * scale_inv);
      }
    for (double& s : tolerance) s = sum_tolerance(static_cast<double>(m), s);
    p.expect_bytes(y, want);
    p.expect(sums, total, tolerance);
  });
}

void amax(Problem& p, int in, const Dims& shape, Data data) {
  Tensor* x = p.in("input", in, shape, data_fill(data));
  Tensor* y = p.out("amax", TE_FL_F32, {1});
  p.oracle([&p, x, y] {
    float top = 0;
    for (double v : x->values()) top = amax_with(top, v);
    p.expect_exact(y, {static_cast<double>(top)}, TE_FL_F32);
  });
}

void add_small_ops(Table& table) {
  for (int count : {0, 1, 3, 100})
    for (size_t s : {3u, 7u, 12u, 17u, 21u, 24u}) {
      if ((count == 0 || count == 100) && s != 7) continue;
      const Spec spec = quantised_specs()[s];
      add(table, "quantize", "multi_tensor_quantize",
          std::to_string(count) + "_tensors/out=" + spec.name(),
          [=](Problem& p) { multi_quantize(p, count, {spec}, -1); });
    }
  for (size_t s : {3u, 7u, 12u, 18u, 21u})
    add(table, "quantize", "multi_tensor_quantize",
        "40_even_tensors/out=" + quantised_specs()[s].name(),
        [=](Problem& p) { multi_quantize(p, 40, {quantised_specs()[s]}, -1, true); });
  for (const bool even : {false, true})
    add(table, "quantize", "multi_tensor_quantize",
        std::string("40_") + (even ? "even_" : "") + "tensors/out=mxfp8_and_others",
        [=](Problem& p) {
          std::vector<Spec> specs = mxfp8_specs();
          for (const size_t s : {0u, 7u, 12u, 18u}) specs.push_back(quantised_specs()[s]);
          multi_quantize(p, 40, specs, -1, even);
        });
  for (double noop : {0.0, 1.0})
    add(table, "quantize", "multi_tensor_quantize",
        noop > 0 ? "3_tensors/noop=1" : "3_tensors/noop=0",
        [=](Problem& p) { multi_quantize(p, 3, {quantised_specs()[7]}, noop); });
  for (size_t s = 0; s < quantised_specs().size(); ++s) {
    const Spec spec = quantised_specs()[s];
    add(table, "quantize", "split_quantize",
        "bf16/5,0,130,1x258/out=" + spec.name() + (spec.scale < 1 ? ".b" : ""), [=](Problem& p) {
          split(p, TE_FL_BF16, spec, {5, 0, 130, 1}, 258);
        });
    add(table, "quantize", "split_quantize",
        "f32/16,0,144,32x136/out=" + spec.name() + (spec.scale < 1 ? ".b" : ""), [=](Problem& p) {
          split(p, TE_FL_F32, spec, {16, 0, 144, 32}, 136);
        });
  }
  for (const Spec& spec : mxfp8_specs())
    add(table, "quantize", "split_quantize", "bf16/32,0,100,1x520/out=" + spec.name(),
        [=](Problem& p) {
          split(p, TE_FL_BF16, spec, {32, 0, 100, 1}, 520);
        });
  const Spec spec = quantised_specs()[7];
  add(table, "quantize", "split_quantize", "f32/none",
      [=](Problem& p) { split(p, TE_FL_F32, spec, {}, 16); });
  add(table, "quantize", "split_quantize", "f16/all_empty", [=](Problem& p) {
    split(p, TE_FL_F16, spec, {0, 0}, 16);
  });
  add(table, "quantize", "split_quantize", "f32/one",
      [=](Problem& p) { split(p, TE_FL_F32, spec, {7}, 33); });

  for (int in : kHigh)
    for (int out : {TE_FL_F8E4M3, TE_FL_F8E5M2})
      for (int parts = 0; parts < 4; ++parts)
        add(table, "quantize", "cast_to_fp8",
            std::string(name_of(in)) + "->" + name_of(out) + "/7x33" + (parts & 1 ? "/amax" : "") +
                (parts & 2 ? "/scale_inv" : ""),
            [=](Problem& p) {
              cast(p, in, out, {7, 33}, parts & 1, parts & 2, Data::kGaussian);
            });
  for (const Dims& shape : {Dims{0, 5}, {1}, {17}, {3, 5, 2, 19}, {130, 257}})
    add(table, "quantize", "cast_to_fp8", "f32->f8e4m3/" + dims_name(shape),
        [=](Problem& p) { cast(p, TE_FL_F32, TE_FL_F8E4M3, shape, true, true, Data::kGaussian); });
  for (int out : {TE_FL_F8E4M3, TE_FL_F8E5M2})
    add(table, "quantize", "cast_to_fp8", std::string("f32->") + name_of(out) + "/special",
        [=](Problem& p) {
          cast(p, TE_FL_F32, out, {140, 260}, true, true, Data::kSpecial);
        });

  for (int d : {TE_FL_F8E4M3, TE_FL_F8E5M2, TE_FL_U8})
    for (const Dims& s : {Dims{7, 33},
                          {1, 1},
                          {0, 5},
                          {5, 0},
                          {1, 257},
                          {257, 1},
                          {130, 257},
                          {64, 64},
                          {144, 272},
                          {600, 515}})
      add(
          table, "quantize", "fp8_transpose", std::string(name_of(d)) + "/" + dims_name(s),
          [=](Problem& p) { transpose(p, d, s[0], s[1]); }, s[0] == 600);
  for (int d : {TE_FL_F8E4M3, TE_FL_F8E5M2})
    for (const Dims& s : {Dims{7, 33}, {1, 1}, {0, 5}, {5, 0}, {64, 64}, {144, 272}, {16640, 48}})
      add(
          table, "quantize", "fp8_transpose",
          std::string(name_of(d)) + "/" + dims_name(s) + "/sums",
          [=](Problem& p) {
            transpose_and_sum(p, d,
                              s[0] == 144  ? TE_FL_BF16
                              : s[0] == 64 ? TE_FL_F16
                                           : TE_FL_F32,
                              s[0], s[1], s[0] != 7);
          },
          s[0] > 600);
  add(table, "quantize", "fp8_transpose", "mistake/sums_of_bytes", [](Problem& p) {
    transpose(p, TE_FL_U8, 5, 7);
    p.oracles.clear();
    p.out("column_sums", TE_FL_F32, {7});
    p.expect_error(-1, "u8");
    for (const auto& t : p.tensors)
      if (t->role != Role::kIn) p.expect_unchanged(t.get());
  });

  const auto one_amax = [&](int in, const Dims& shape, Data data) {
    add(table, "quantize", "compute_amax",
        std::string(name_of(in)) + "/" + dims_name(shape) + kDataNames[static_cast<int>(data)],
        [=](Problem& p) { amax(p, in, shape, data); });
  };
  for (int in : kHigh)
    for (const Dims& shape : {Dims{}, Dims{7, 33}, {0, 4}, {1}, {130, 257}, {2, 3, 4, 5}})
      one_amax(in, shape, Data::kGaussian);
  for (Data d : {Data::kSpecial, Data::kTiny, Data::kZeros}) one_amax(TE_FL_F32, {90, 100}, d);
}

void add_cases(Table& table) {
  add_quantize(table);
  add_dequantize(table);
  add_bgrad(table);
  add_small_ops(table);
}

void draw_cases(Drawn& drawn) {
  drawn.cases("quantize", "quantize", [](Draw& r) -> DrawnCase {
    const int in = Drawn::high(r);
    const Dims shape = Drawn::shape(r);
    const Spec spec = Drawn::quantised(r, shape);
    const bool fp4 = spec.dtype == TE_FL_F4E2M1;
    const auto data = fp4 || !Drawn::chance(r, 3) ? Data::kGaussian : static_cast<Data>(r.below(5));
    const double noop = Drawn::chance(r, 6) ? static_cast<double>(r.below(4)) - 1 : -1;
    std::string name = spec_case(in, shape, spec) + kDataNames[static_cast<int>(data)];
    if (noop >= 0) name += "/noop=" + std::to_string(static_cast<int>(noop));
    return {name, [=](Problem& p) { quantize(p, in, spec, shape, data, noop); }};
  });
  drawn.cases("quantize", "multi_tensor_quantize", [](Draw& r) -> DrawnCase {
    std::vector<Listed> list(static_cast<size_t>(r.swept != nullptr ? 2 : r.below(9)));
    for (Listed& one : list) {
      one.in = Drawn::high(r), one.shape = Drawn::shape(r);
      one.spec = Drawn::quantised(r, one.shape);
    }
    r.quantises = true;
    const double noop = Drawn::chance(r, 6) ? static_cast<double>(r.below(3)) : -1;
    std::string name = std::to_string(list.size());
    if (!list.empty())
      name = spec_case(list[0].in, list[0].shape, list[0].spec) + "/" + name + "_tensors";
    if (noop >= 0) name += "/noop=" + std::to_string(static_cast<int>(noop));
    return {name, [=](Problem& p) { quantize_list(p, list, noop); }};
  });
  drawn.cases("quantize", "split_quantize", [](Draw& r) -> DrawnCase {
    const int in = Drawn::high(r);
    const Dims shape = Drawn::shape(r, 2);
    const int64_t k = shape.back();
    int64_t left = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) left *= shape[i];
    Dims parts;
    while (left > 0) {
      if (Drawn::chance(r, 6)) parts.push_back(0);
      parts.push_back(std::min(left, r.below(left + 1) / 2 * 2 + 2));  // even parts for FP4
      left -= parts.back();
    }
    const Spec spec = Drawn::quantised(r, shape);
    const bool special = spec.dtype != TE_FL_F4E2M1 && Drawn::chance(r, 3);
    const auto data = special ? Data::kSpecial : Data::kGaussian;
    return {spec_case(in, {shape[0], k}, spec) + "/" + std::to_string(parts.size()) + "_parts" +
                kDataNames[static_cast<int>(data)],
            [=](Problem& p) { split(p, in, spec, parts, k, data); }};
  });
  drawn.cases("quantize", "dequantize", [](Draw& r) -> DrawnCase {
    const int out = Drawn::high(r);
    const Dims shape = Drawn::shape(r);
    const Spec spec = Drawn::quantised(r, shape);
    return {"in=" + spec.name() + "/" + dims_name(shape) + "/" + name_of(out),
            [=](Problem& p) { dequantize(p, spec, out, shape); }};
  });
  drawn.cases("quantize", "bgrad_quantize", [](Draw& r) -> DrawnCase {
    const int in = Drawn::high(r), bias = Drawn::high(r);
    const Dims shape = Drawn::shape(r);
    const Spec spec = Drawn::quantised(r, shape);
    return {spec_case(in, shape, spec) + "/bias=" + name_of(bias),
            [=](Problem& p) { bgrad(p, in, spec, bias, shape); }};
  });
  drawn.cases("quantize", "cast_to_fp8", [](Draw& r) -> DrawnCase {
    const int in = Drawn::high(r), out = Drawn::chance(r, 2) ? TE_FL_F8E4M3 : TE_FL_F8E5M2;
    const Dims shape = Drawn::shape(r);
    static constexpr double kFactors[] = {1, 0.5, 16, 99.7};
    const double factor = kFactors[r.below(4)];
    const bool amax = !Drawn::chance(r, 4), inverse = !Drawn::chance(r, 4);
    const auto data = Drawn::chance(r, 3) ? Data::kSpecial : Data::kGaussian;
    return {std::string(name_of(in)) + "->" + name_of(out) + "/" + dims_name(shape) +
                kDataNames[static_cast<int>(data)],
            [=](Problem& p) { cast(p, in, out, shape, amax, inverse, data, factor); }};
  });
  drawn.cases("quantize", "compute_amax", [](Draw& r) -> DrawnCase {
    const int in = Drawn::high(r);
    const Dims shape = Drawn::shape(r);
    const auto data = Drawn::chance(r, 2) ? Data::kGaussian : static_cast<Data>(r.below(4));
    return {std::string(name_of(in)) + "/" + dims_name(shape) + kDataNames[static_cast<int>(data)],
            [=](Problem& p) { amax(p, in, shape, data); }};
  });
  drawn.cases("quantize", "fp8_transpose", [](Draw& r) -> DrawnCase {
    static const int dtypes[] = {TE_FL_F8E4M3, TE_FL_F8E5M2, TE_FL_U8};
    const int dtype = dtypes[r.below(3)];
    const Dims shape = Drawn::shape(r, 2);
    const int64_t k = shape.back(), m = std::min<int64_t>(shape[0], 60000 / k + 1);
    const bool sums = dtype != TE_FL_U8 && Drawn::chance(r, 2), scaled = Drawn::chance(r, 2);
    const int out = Drawn::high(r);
    return {std::string(name_of(dtype)) + "/" + dims_name({m, k}) + (sums ? "/sums" : ""),
            [=](Problem& p) {
              if (sums)
                transpose_and_sum(p, dtype, out, m, k, scaled);
              else
                transpose(p, dtype, m, k);
            }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_quantize(Cases& cases) {
  using namespace quantize_calls;
  const Cases all = {
      {"quantize", "", [](Run& r) { quantize(r, kCols, kTensor); }},
      {"quantize", "row-wise, from F32", [](Run& r) { quantize(r, kCols, kRows, DType::kF32); }},
      {"quantize", "odd rows", [](Run& r) { quantize(r, kOddCols, kTensor); }},
      {"quantize", "short rows", [](Run& r) { quantize(r, 16, kTensor); }},
      {"quantize", "1x128, short odd rows", [](Run& r) { quantize(r, 7, kLines); }},
      {"quantize", "E5M2, one row", [](Run& r) { quantize(r, r.elements(), kGradient); }},
      {"quantize", "current scaling", [](Run& r) { quantize(r, kCols, kCurrent); }},
      {"quantize", "current scaling, from F32",
       [](Run& r) { quantize(r, kCols, kCurrent, DType::kF32); }},
      {"quantize", "1x128, from F32", [](Run& r) { quantize(r, kCols, kLines, DType::kF32); }},
      {"quantize", "current scaling, odd rows", [](Run& r) { quantize(r, kOddCols, kCurrent); }},
      {"quantize", "1x128", [](Run& r) { quantize(r, kCols, kLines); }},
      {"quantize", "1x128, powers of two", [](Run& r) { quantize(r, kCols, kPow2Lines); }},
      {"quantize", "1x128, odd rows", [](Run& r) { quantize(r, kOddCols, kLines); }},
      {"quantize", "128x128", [](Run& r) { quantize(r, kCols, kSquares); }},
      {"quantize", "128x128, odd rows", [](Run& r) { quantize(r, kOddCols, kSquares); }},
      {"quantize", "MXFP8", [](Run& r) { quantize(r, kCols, kMicro); }},
      {"quantize", "MXFP8, row-wise, from F32",
       [](Run& r) { quantize(r, kCols, kMicroRows, DType::kF32); }},
      {"quantize", "MXFP8, column-wise", [](Run& r) { quantize(r, kCols, kMicroColumns); }},
      {"quantize", "MXFP8, odd rows", [](Run& r) { quantize(r, kOddCols, kMicro); }},
      {"quantize", "MXFP8, short odd rows", [](Run& r) { quantize(r, 7, kMicroColumns); }},
      {"bgrad_quantize", "", [](Run& r) { bgrad_quantize(r, kCols, kTensor); }},
      {"bgrad_quantize", "odd rows", [](Run& r) { bgrad_quantize(r, kOddCols, kTensor); }},
      {"bgrad_quantize", "1x128", [](Run& r) { bgrad_quantize(r, kCols, kLines); }},
      {"bgrad_quantize", "MXFP8", [](Run& r) { bgrad_quantize(r, kCols, kMicro); }},
      {"cast_to_fp8", "one row", cast_to_fp8},
      {"multi_tensor_quantize", "", [](Run& r) { quantize_list(r, kTensor); }},
      {"multi_tensor_quantize", "current scaling", [](Run& r) { quantize_list(r, kCurrent); }},
      {"multi_tensor_quantize", "1x128", [](Run& r) { quantize_list(r, kLines); }},
      {"multi_tensor_quantize", "MXFP8", [](Run& r) { quantize_list(r, kMicro); }},
      {"split_quantize", "", [](Run& r) { split_quantize(r, kTensor); }},
      {"split_quantize", "128x128", [](Run& r) { split_quantize(r, kSquares); }},
      {"split_quantize", "MXFP8", [](Run& r) { split_quantize(r, kMicro); }},
      {"compute_amax", "", [](Run& r) { compute_amax(r, r.rows(16) * 16); }},
      {"compute_amax", "odd", [](Run& r) { compute_amax(r, r.elements()); }},
      {"fused_amax_and_scale_update_after_reduction", "", scale_update},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

void add_dequantize(Cases& cases) {
  using namespace dequantize_calls;
  constexpr Scaling kTensor = Scaling::kTensor, kLines = Scaling::kBlock1x128,
                    kSquares = Scaling::kBlock128x128, kMicro = Scaling::kMXFP8;
  const Cases all = {
      {"dequantize", "", [](Run& r) { dequantize(r, kCols, kTensor, false); }},
      {"dequantize", "odd rows, to F32",
       [](Run& r) { dequantize(r, kOddCols, kTensor, false, DType::kF32); }},
      {"dequantize", "column-wise", [](Run& r) { dequantize(r, kCols, kTensor, true); }},
      {"dequantize", "1x128", [](Run& r) { dequantize(r, kCols, kLines, false); }},
      {"dequantize", "1x128, column-wise, odd rows",
       [](Run& r) { dequantize(r, kOddCols, kLines, true); }},
      {"dequantize", "128x128", [](Run& r) { dequantize(r, kCols, kSquares, false); }},
      {"dequantize", "128x128, column-wise", [](Run& r) { dequantize(r, kCols, kSquares, true); }},
      {"dequantize", "MXFP8", [](Run& r) { dequantize(r, kCols, kMicro, false); }},
      {"dequantize", "MXFP8, column-wise", [](Run& r) { dequantize(r, kCols, kMicro, true); }},
      {"dequantize", "MXFP8, column-wise, odd rows, to F32",
       [](Run& r) { dequantize(r, kOddCols, kMicro, true, DType::kF32); }},
      {"fp8_transpose", "", [](Run& r) { transpose(r, kCols, DType::kF8E4M3, false); }},
      {"fp8_transpose", "short rows", [](Run& r) { transpose(r, 16, DType::kF8E4M3, false); }},
      {"fp8_transpose", "short odd rows", [](Run& r) { transpose(r, 7, DType::kF8E4M3, false); }},
      {"fp8_transpose", "sums", [](Run& r) { transpose(r, kCols, DType::kF8E5M2, true); }},
      {"fp8_transpose", "sums, odd rows",
       [](Run& r) { transpose(r, kOddCols, DType::kF8E4M3, true); }},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  struct Mode {
    const char* name;
    te_fl_scaling scaling;
    bool columnwise;
    uint32_t flags;
  };
  const Mode modes[] = {
      {"bf16 delayed", TE_FL_SCALING_TENSOR, false, 0},
      {"bf16 delayed, both copies", TE_FL_SCALING_TENSOR, true, 0},
      {"bf16 current", TE_FL_SCALING_TENSOR, false, TE_FL_QUANT_COMPUTE_SCALE},
      {"bf16 1x128", TE_FL_SCALING_BLOCK_1X128, false, TE_FL_QUANT_POW2_SCALE},
      {"bf16 128x128", TE_FL_SCALING_BLOCK_128X128, false, TE_FL_QUANT_POW2_SCALE},
      {"bf16 mxfp8", TE_FL_SCALING_MXFP8, false, 0},
  };
  for (const Mode& mode : modes) {
    cases.push_back({"quantize", mode.name, [mode](Case& c, int64_t rows) {
                       auto& a = c.args<te_fl_quantize_args>();
                       a.input = c.in({rows, c.cols()}, TE_FL_BF16);
                       // A computed scale needs a second pass over the data.
                       if (mode.flags == TE_FL_QUANT_COMPUTE_SCALE) c.bytes *= 2;
                       a.output = c.fp8({rows, c.cols()}, TE_FL_F8E4M3, mode.scaling,
                                        mode.columnwise, mode.flags);
                     }});
  }
  cases.push_back({"dequantize", "bf16", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_dequantize_args>();
                     a.input = c.fp8({rows, c.cols()}, TE_FL_F8E4M3);
                     a.output = c.out({rows, c.cols()}, TE_FL_BF16);
                   }});
  cases.push_back({"bgrad_quantize", "bf16", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_bgrad_quantize_args>();
                     a.input = c.in({rows, c.cols()}, TE_FL_BF16);
                     a.output = c.fp8({rows, c.cols()}, TE_FL_F8E5M2);
                     a.bias_grad = c.out({c.cols()}, TE_FL_BF16);
                   }});
  cases.push_back({"multi_tensor_quantize", "bf16, 8 tensors", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_multi_tensor_quantize_args>();
                     std::vector<const te_fl_tensor*> in, out;
                     for (int i = 0; i < 8; ++i) {
                       in.push_back(c.in({(rows + 7) / 8, c.cols()}, TE_FL_BF16));
                       out.push_back(c.fp8({(rows + 7) / 8, c.cols()}, TE_FL_F8E4M3));
                     }
                     a.inputs = c.list(in), a.inputs_count = 8;
                     a.outputs = c.list(out), a.outputs_count = 8;
                   }});
  cases.push_back({"split_quantize", "bf16, 4 parts", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_split_quantize_args>();
                     const int64_t part = (rows + 3) / 4;
                     a.input = c.in({4 * part, c.cols()}, TE_FL_BF16);
                     std::vector<const te_fl_tensor*> out;
                     for (int i = 0; i < 4; ++i)
                       out.push_back(c.fp8({part, c.cols()}, TE_FL_F8E4M3));
                     a.outputs = c.list(out), a.outputs_count = 4;
                   }});
  cases.push_back({"cast_to_fp8", "bf16", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_cast_to_fp8_args>();
                     a.input = c.in({rows, c.cols()}, TE_FL_BF16);
                     a.output = c.out({rows, c.cols()}, TE_FL_F8E4M3);
                     a.scale = c.in({1}, TE_FL_F32), a.amax = c.inout({1}, TE_FL_F32);
                     a.scale_inv = c.out({1}, TE_FL_F32);
                   }});
  cases.push_back({"fp8_transpose", "e4m3", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_fp8_transpose_args>();
                     a.input = c.in({rows, c.cols()}, TE_FL_F8E4M3);
                     a.output = c.out({c.cols(), rows}, TE_FL_F8E4M3);
                   }});
  both_dtypes(cases, "compute_amax", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_compute_amax_args>();
    a.input = c.in({rows, c.cols()}, dtype), a.amax = c.out({1}, TE_FL_F32);
  });
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile quantize_cases{
    .cases = add_cases,
    .drawn = draw_cases,
    .huge = [](huge::Cases& cases) { huge::add_quantize(cases), huge::add_dequantize(cases); },
    .bench = bench::add_cases};

}  // namespace te_fl::conformance
