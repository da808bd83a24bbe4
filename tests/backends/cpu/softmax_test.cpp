// Softmax of the CPU backend against the reference backend and hand-derived rows.
#include "te_fl/ops/softmax.h"

#include <cmath>

#include "support/cpu_call.hpp"
#include "support/expect.hpp"

namespace te_fl::testing::softmax_test {
namespace {

double relative(int dtype) { return dtype == TE_FL_F32 ? 1e-5 : dtype == TE_FL_F16 ? 1e-3 : 1e-2; }

struct Extents {
  int64_t b, h, q, k;
};
const Extents kExtents[] = {{1, 1, 1, 1}, {2, 3, 5, 7}, {1, 2, 3, 16}, {2, 1, 4, 67},
                            {1, 1, 9, 4}, {1, 2, 3, 0}, {0, 1, 2, 3},  {1, 3, 40, 1100}};

template <class Fwd, class Bwd>
void check(const char* fwd_op, const char* bwd_op, const Shape& shape, int dtype,
           const te_fl_tensor* mask) {
  HostTensor x(shape, dtype, random_values(count(shape), 1, -4, 4)), y(shape, dtype),
      want(shape, dtype);
  Fwd f;
  f.input = x, f.output = y, f.scale = 0.7f;
  if constexpr (std::is_same_v<Fwd, te_fl_softmax_masked_args>) f.mask = mask;
  ASSERT_OK(run_cpu(fwd_op, f));
  f.output = want;
  ASSERT_OK(run_reference(fwd_op, f));
  expect_near(y.values(), want.values(), 1e-6, relative(dtype), fwd_op);
  HostTensor dy(shape, dtype, random_values(count(shape), 2)), dx(shape, dtype),
      want_dx(shape, dtype);
  Bwd g;
  g.output_grad = dy, g.softmax_results = want, g.input_grad = dx, g.scale = 0.7f;
  ASSERT_OK(run_cpu(bwd_op, g));
  g.input_grad = want_dx;
  ASSERT_OK(run_reference(bwd_op, g));
  expect_near(dx.values(), want_dx.values(), 1e-6, relative(dtype), bwd_op);
  // Repeats the ops in place: the results have the same bits.
  f.output = x, g.input_grad = dy;
  ASSERT_OK(run_cpu(fwd_op, f));
  ASSERT_OK(run_cpu(bwd_op, g));
  EXPECT_EQ(x.bytes(), y.bytes());
  EXPECT_EQ(dy.bytes(), dx.bytes());
}

TEST(CpuSoftmax, EveryFormAgainstTheReference) {
  for (int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16}) {
    for (const Extents& e : kExtents) {
      const Shape shape = {e.b, e.h, e.q, e.k};
      check<te_fl_softmax_fwd4_args, te_fl_softmax_bwd4_args>(
          "scaled_softmax_forward", "scaled_softmax_backward", shape, dtype, nullptr);
      check<te_fl_softmax_fwd4_args, te_fl_softmax_bwd4_args>(
          "scaled_aligned_causal_masked_softmax_forward",
          "scaled_aligned_causal_masked_softmax_backward", shape, dtype, nullptr);
      check<te_fl_softmax_fwd3_args, te_fl_softmax_bwd3_args>(
          "scaled_upper_triang_masked_softmax_forward",
          "scaled_upper_triang_masked_softmax_backward", {e.b, e.q, e.q}, dtype, nullptr);
      for (const Shape& s : {Shape{1, 1, e.q, e.k}, Shape{e.b, e.h, e.q, e.k}}) {
        auto hidden = random_values(count(s), 3, 0, 2);
        for (double& m : hidden) m = std::floor(m) * 2;
        HostTensor mask(s, TE_FL_U8, hidden);
        check<te_fl_softmax_masked_args, te_fl_softmax_bwd4_args>(
            "scaled_masked_softmax_forward", "scaled_masked_softmax_backward", shape, dtype, mask);
      }
    }
  }
}

TEST(CpuSoftmax, MaskedRowsNanAndInfinity) {
  HostTensor x({1, 1, 4, 3}, TE_FL_F32, {NAN, 1, 1, 1, 2, NAN, 3, 1, 5, 1, 1, -INFINITY});
  HostTensor mask({1, 1, 4, 3}, TE_FL_U8, {1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0}),
      y({1, 1, 4, 3}, TE_FL_F32);
  te_fl_softmax_masked_args a;
  a.input = x, a.mask = mask, a.output = y;
  ASSERT_OK(run_cpu("scaled_masked_softmax_forward", a));
  const auto v = y.values();
  EXPECT_EQ(v[0], 0) << "a masked NaN is not seen";
  EXPECT_EQ(v[1], 0.5);
  EXPECT_TRUE(std::isnan(v[3]) && std::isnan(v[5]));
  for (int i = 6; i < 9; ++i) EXPECT_EQ(v[i], 0) << "a fully masked row";
  EXPECT_EQ(v[9], 0.5);
  EXPECT_EQ(v[11], 0);
  // A masked element gives 0 even in a row with a NaN, or with an infinity that becomes a NaN.
  for (const float odd : {NAN, INFINITY}) {
    HostTensor wide({1, 1, 1, 40}, TE_FL_F32), hidden({1, 1, 1, 40}, TE_FL_U8),
        out(wide.shape(), TE_FL_F32);
    std::vector<double> values(40, 1), bits(40, 0);
    values[7] = odd, bits[3] = 1, bits[38] = 7;
    wide.fill(values), hidden.fill(bits);
    a.input = wide, a.mask = hidden, a.output = out;
    ASSERT_OK(run_cpu("scaled_masked_softmax_forward", a));
    for (size_t i = 0; i < 40; ++i) {
      EXPECT_EQ(std::isnan(out.values()[i]), bits[i] == 0) << odd << " " << i;
    }
  }
  HostTensor shifted(x, {1, 1, 3, 3}, {}, 1), front(x, {1, 1, 3, 3}, {}, 0);
  te_fl_softmax_fwd4_args f;
  f.input = shifted, f.output = front;
  EXPECT_FAILS(run_cpu("scaled_softmax_forward", f), kUnsupported, "shares memory");
  HostTensor turned(x, {1, 1, 3, 4}, {12, 12, 1, 3}, 0), out({1, 1, 3, 4}, TE_FL_F32);
  f.input = turned, f.output = out;
  EXPECT_FAILS(run_cpu("scaled_softmax_forward", f), kUnsupported, "strided_copy");
}

}  // namespace
}  // namespace te_fl::testing::softmax_test
