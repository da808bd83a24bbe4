// Rotary embedding of the CPU backend against the reference backend.
#include "te_fl/ops/rope.h"

#include <cmath>

#include "support/cpu_call.hpp"
#include "support/expect.hpp"

namespace te_fl::testing::rope_test {
namespace {

double relative(int dtype) { return dtype == TE_FL_F32 ? 5e-6 : dtype == TE_FL_F16 ? 1e-3 : 1e-2; }

// Returns typical angles, and some that are large, negative or far beyond the argument reduction.
std::vector<double> angles(int64_t positions, int64_t columns) {
  auto out = random_values(positions * columns, 9, -3000, 3000);
  for (size_t i = 0; i < out.size(); i += 3) out[i] /= 1000;
  for (size_t i = 0; i < out.size(); i += 31)
    out[i] = static_cast<float>(1e6 + static_cast<double>(i));
  if (!out.empty()) out[0] = 0;
  return out;
}

void check(te_fl_rope_rope_args a, const Shape& shape, int dtype) {
  for (const char* op : {"fused_rope_forward", "fused_rope_backward"}) {
    HostTensor x(shape, dtype, random_values(count(shape), 1)), y(shape, dtype), want(shape, dtype);
    a.input = x, a.output = y;
    ASSERT_OK(run_cpu(op, a));
    a.output = want;
    ASSERT_OK(run_reference(op, a));
    expect_near(y.values(), want.values(), 1e-6, relative(dtype), op);
    a.output = x;  // repeats the op in place: the bits are the same
    ASSERT_OK(run_cpu(op, a));
    EXPECT_EQ(x.bytes(), y.bytes());
  }
}

TEST(CpuRope, LayoutsPairsAndContextParallel) {
  for (int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16}) {
    for (int64_t columns : {2, 6, 32, 40, 64}) {
      for (int interleaved : {0, 1}) {
        HostTensor freqs({40, 1, 1, columns}, TE_FL_F32, angles(40, columns));
        HostTensor starts({3}, TE_FL_I32, {4, 0, 9}), cu({3}, TE_FL_I32, {0, 8, 20});
        te_fl_rope_rope_args a;
        a.freqs = freqs, a.interleaved = interleaved;
        check(a, {6, 3, 2, 64}, dtype);
        a.start_positions = starts;
        a.layout = TE_FL_LAYOUT_BSHD;
        check(a, {3, 6, 2, 70}, dtype);
        a.cp_size = 2, a.cp_rank = 1;
        check(a, {3, 6, 2, 64}, dtype);
        a.layout = TE_FL_LAYOUT_THD, a.cu_seqlens = cu, a.start_positions = nullptr;
        check(a, {12, 2, 64}, dtype);  // two tokens belong to no sequence
        a.cp_size = 1, a.cp_rank = 0;
        check(a, {21, 2, 64}, dtype);
      }
    }
  }
}

TEST(CpuRope, ManyTokensAndStridedViews) {
  HostTensor freqs({1500, 1, 1, 64}, TE_FL_F32, angles(1500, 64));
  te_fl_rope_rope_args a;
  a.freqs = freqs;
  check(a, {1500, 2, 1, 64}, TE_FL_BF16);
  const int64_t s = 5, b = 2, h = 3, d = 64;
  HostTensor packed({s, b, h, 3 * d}, TE_FL_F32, random_values(s * b * h * 3 * d, 1));
  HostTensor k(packed, {s, b, h, d}, {b * h * 3 * d, h * 3 * d, 3 * d, 1}, d);
  HostTensor y({s, b, h, d}, TE_FL_F32), want({s, b, h, d}, TE_FL_F32);
  a.input = k, a.output = y;
  ASSERT_OK(run_cpu("fused_rope_forward", a));
  a.output = want;
  ASSERT_OK(run_reference("fused_rope_forward", a));
  expect_near(y.values(), want.values(), 1e-6, 5e-6, "strided");
  a.output = k;
  ASSERT_OK(run_cpu("fused_rope_forward", a));
  EXPECT_EQ(k.values(), y.values());
  HostTensor askew(packed, {s, b, h, d}, {b * h * 3 * d, h * 3 * d, 3 * d, 1}, d + 1);
  a.output = askew;
  EXPECT_FAILS(run_cpu("fused_rope_forward", a), kUnsupported, "shares memory");
}

TEST(CpuRope, PackedQkvThereAndBack) {
  for (int dtype : {TE_FL_F32, TE_FL_BF16}) {
    for (int interleaved : {0, 1}) {
      const Shape qkv = {7, 2, 3, 4 * 24 + 10}, q = {7, 2, 9, 24}, k = {7, 2, 3, 24},
                  v = {7, 2, 3, 10};
      HostTensor q_freqs({7, 1, 1, 16}, TE_FL_F32, angles(7, 16));
      HostTensor k_freqs({9, 1, 1, 24}, TE_FL_F32, angles(9, 24));
      HostTensor x(qkv, dtype, random_values(count(qkv), 1));
      HostTensor qo(q, dtype), ko(k, dtype), vo(v, dtype), wq(q, dtype), wk(k, dtype), wv(v, dtype);
      te_fl_fused_qkv_rope_forward_args f;
      f.qkv_input = x, f.q_freqs = q_freqs, f.k_freqs = k_freqs;
      f.q_out = qo, f.k_out = ko, f.v_out = vo;
      f.q_dim = 72, f.k_dim = 24, f.v_dim = 10, f.interleaved = interleaved;
      ASSERT_OK(run_cpu("fused_qkv_rope_forward", f));
      f.q_out = wq, f.k_out = wk, f.v_out = wv;
      ASSERT_OK(run_reference("fused_qkv_rope_forward", f));
      expect_near(qo.values(), wq.values(), 1e-6, relative(dtype), "q");
      expect_near(ko.values(), wk.values(), 1e-6, relative(dtype), "k");
      EXPECT_EQ(vo.bytes(), wv.bytes());
      HostTensor g(qkv, dtype), want(qkv, dtype);
      te_fl_fused_qkv_rope_backward_args b;
      b.q_grad = wq, b.k_grad = wk, b.v_grad = wv, b.q_freqs = q_freqs, b.k_freqs = k_freqs;
      b.qkv_grad = g, b.q_dim = 72, b.k_dim = 24, b.v_dim = 10, b.interleaved = interleaved;
      ASSERT_OK(run_cpu("fused_qkv_rope_backward", b));
      b.qkv_grad = want;
      ASSERT_OK(run_reference("fused_qkv_rope_backward", b));
      expect_near(g.values(), want.values(), 1e-6, relative(dtype), "qkv");
    }
  }
}

TEST(CpuRope, ErrorsNameTheArgument) {
  HostTensor x({4, 1, 1, 8}, TE_FL_F32, random_values(32, 1)), y({4, 1, 1, 8}, TE_FL_F32);
  HostTensor freqs({4, 1, 1, 8}, TE_FL_F32, random_values(32, 2)), late({1}, TE_FL_I32, {1});
  te_fl_rope_rope_args a;
  a.input = x, a.output = y, a.freqs = freqs, a.start_positions = late;
  EXPECT_REFUSED(run_cpu("fused_rope_forward", a), "position 4 is needed");
  EXPECT_TRUE(y.untouched());
}

}  // namespace
}  // namespace te_fl::testing::rope_test
