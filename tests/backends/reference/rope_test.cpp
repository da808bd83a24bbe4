// Rotary position embedding of the reference backend.
#include "te_fl/ops/rope.h"

#include <cmath>
#include <functional>

#include "support/expect.hpp"
#include "support/reference_call.hpp"
#include "te_fl/ops.hpp"

namespace te_fl::testing {
namespace {

// Rotates one head by the angles of one position.
std::vector<double> rotate(const std::vector<double>& x, const std::vector<double>& angle,
                           bool interleaved) {
  std::vector<double> y = x;
  const size_t r = angle.size();
  for (size_t i = 0; i < r; ++i) {
    double partner;  // element i of rotate(x)
    if (interleaved) {
      partner = i % 2 == 0 ? -x[i + 1] : x[i - 1];
    } else {
      partner = i < r / 2 ? -x[i + r / 2] : x[i - r / 2];
    }
    y[i] = x[i] * std::cos(angle[i]) + partner * std::sin(angle[i]);
  }
  return y;
}

// Rotates the tokens in order, each by its expected position; heads and dims as in `x`.
std::vector<double> rotate_all(const std::vector<double>& x, int64_t heads, int64_t dim,
                               const std::vector<int>& positions, const HostTensor& freqs,
                               bool interleaved) {
  const int64_t r = freqs.shape()[3];
  const std::vector<double> f = freqs.values();
  std::vector<double> y;
  for (size_t token = 0; token < positions.size(); ++token) {
    for (int64_t h = 0; h < heads; ++h) {
      const auto at = x.begin() + static_cast<int64_t>(token) * heads * dim + h * dim;
      const std::vector<double> head(at, at + dim);
      std::vector<double> turned(static_cast<size_t>(dim), 0);
      if (positions[token] >= 0) {
        const auto angle = f.begin() + positions[token] * r;
        turned = rotate(head, {angle, angle + r}, interleaved);
      }
      y.insert(y.end(), turned.begin(), turned.end());
    }
  }
  return y;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// The backward is the transpose of the forward: <w, rope(x)> = <rope'(w), x> for all w and x. Unit
// vectors x check every entry of the matrix.
void check_transpose(te_fl_fused_rope_forward_args f, const Shape& shape) {
  const int64_t n = count(shape);
  const std::vector<double> w = random_values(n, 31);
  HostTensor x(shape, TE_FL_F32), y(shape, TE_FL_F32), grad(shape, TE_FL_F32, w),
      dx(shape, TE_FL_F32);
  te_fl_fused_rope_backward_args b = f;
  b.input = grad, b.output = dx;
  ASSERT_OK(run_reference("fused_rope_backward", b));
  f.input = x, f.output = y;
  std::vector<double> want;
  for (int64_t i = 0; i < n; ++i) {
    std::vector<double> unit(static_cast<size_t>(n), 0);
    unit[static_cast<size_t>(i)] = 1;
    x.fill(unit);
    ASSERT_OK(run_reference("fused_rope_forward", f));
    want.push_back(dot(w, y.values()));
  }
  expect_near(dx.values(), want, 1e-6, 5e-6, "dx");
}

void check_rope(te_fl_fused_rope_forward_args a, const Shape& shape,
                const std::vector<int>& positions, int64_t r) {
  HostTensor freqs({40, 1, 1, r}, TE_FL_F32, random_values(40 * r, 3, -3, 3));
  const std::vector<double> x = random_values(count(shape), 4);
  HostTensor input(shape, TE_FL_F32, x), output(shape, TE_FL_F32);
  a.input = input, a.output = output, a.freqs = freqs;
  ASSERT_OK(run_reference("fused_rope_forward", a));
  const int64_t heads = shape[shape.size() - 2];
  const std::vector<double> want =
      rotate_all(x, heads, shape.back(), positions, freqs, a.interleaved != 0);
  expect_near(output.values(), want, 1e-6, 5e-6, "y");
  check_transpose(a, shape);
  a.output = input;
  ASSERT_OK(run_reference("fused_rope_forward", a));
  EXPECT_EQ(input.values(), output.values()) << "in place";
}

TEST(ReferenceRope, LayoutsAndPairings) {
  for (int interleaved : {0, 1}) {
    te_fl_fused_rope_forward_args a;
    a.interleaved = interleaved;
    a.layout = TE_FL_LAYOUT_SBHD;
    check_rope(a, {3, 2, 2, 6}, {0, 0, 1, 1, 2, 2}, 4);
    a.layout = TE_FL_LAYOUT_BSHD;
    check_rope(a, {2, 3, 2, 6}, {0, 1, 2, 0, 1, 2}, 6);
    HostTensor cu({3}, TE_FL_I32, {0, 3, 5});
    a.layout = TE_FL_LAYOUT_THD;
    a.cu_seqlens = cu;
    check_rope(a, {6, 2, 4}, {0, 1, 2, 0, 1, -1}, 2);
  }
  te_fl_fused_rope_forward_args a;
  check_rope(a, {2, 1, 1, 4}, {0, 1}, 0);  // no columns to rotate
  check_rope(a, {0, 2, 1, 4}, {}, 4);
}

TEST(ReferenceRope, StartPositions) {
  HostTensor starts({2}, TE_FL_I32, {5, 30}), cu({3}, TE_FL_I32, {0, 1, 3});
  te_fl_fused_rope_forward_args a;
  a.start_positions = starts;
  check_rope(a, {2, 2, 1, 4}, {5, 30, 6, 31}, 4);
  a.layout = TE_FL_LAYOUT_THD, a.cu_seqlens = cu;
  check_rope(a, {3, 1, 4}, {5, 30, 31}, 4);
}

// 16 positions on 2 ranks form 4 chunks of 4; rank 0 holds chunks 0 and 3, rank 1 holds chunks 1
// and 2.
TEST(ReferenceRope, ContextParallel) {
  te_fl_fused_rope_forward_args a;
  a.cp_size = 2;
  check_rope(a, {8, 1, 1, 2}, {0, 1, 2, 3, 12, 13, 14, 15}, 2);
  a.cp_rank = 1;
  check_rope(a, {8, 1, 1, 2}, {4, 5, 6, 7, 8, 9, 10, 11}, 2);
  // The two sequences have 4 and 12 tokens over all ranks: 2 and 6 tokens on this rank.
  HostTensor cu({3}, TE_FL_I32, {0, 4, 16});
  a.layout = TE_FL_LAYOUT_THD, a.cu_seqlens = cu;
  check_rope(a, {8, 1, 2}, {1, 2, 3, 4, 5, 6, 7, 8}, 2);
  a.cp_rank = 0;
  check_rope(a, {8, 1, 2}, {0, 3, 0, 1, 2, 9, 10, 11}, 2);
}

// A rotation by 90 degrees: (1, 2) becomes (-2, 1).
TEST(ReferenceRope, HandDerivedWithStrides) {
  const double quarter = std::acos(-1.0) / 2;
  HostTensor freqs({1, 1, 1, 2}, TE_FL_F32, {quarter, quarter});
  HostTensor base({1, 1, 2, 3}, TE_FL_F32, {1, 2, 9, 3, 4, 8});
  HostTensor x(base, {1, 1, 2, 2}, {6, 6, 3, 1}, 0), y({1, 1, 2, 2}, TE_FL_F16);
  HostTensor z({1, 1, 2, 2}, TE_FL_F32);
  te_fl_fused_rope_forward_args a;
  a.input = x, a.output = z, a.freqs = freqs;
  ASSERT_OK(run_reference("fused_rope_forward", a));
  expect_near(z.values(), {-2, 1, -4, 3}, 1e-6, 0, "y");
}

struct Packed {
  static constexpr int64_t s = 4, b = 2, g = 2, k_dim = 4, v_dim = 3, q_dim = 8;
  static constexpr int64_t e = q_dim + k_dim + v_dim;
  template <class Args>
  static void set(Args& a, const HostTensor& qf, const HostTensor& kf) {
    a.q_freqs = qf, a.k_freqs = kf;
    a.q_dim = q_dim, a.k_dim = k_dim, a.v_dim = v_dim;
  }
};

TEST(ReferenceRope, PackedQkv) {
  using P = Packed;
  for (int layout : {TE_FL_LAYOUT_SBHD, TE_FL_LAYOUT_BSHD}) {
    const bool sbhd = layout == TE_FL_LAYOUT_SBHD;
    const int64_t a0 = sbhd ? P::s : P::b, a1 = sbhd ? P::b : P::s;
    HostTensor qf({40, 1, 1, 4}, TE_FL_F32, random_values(160, 5, -3, 3));
    HostTensor kf({40, 1, 1, 2}, TE_FL_F32, random_values(80, 6, -3, 3));
    HostTensor starts({P::b}, TE_FL_I32, {3, 20});
    const std::vector<double> x = random_values(a0 * a1 * P::g * P::e, 7);
    HostTensor qkv({a0, a1, P::g, P::e}, TE_FL_F32, x);
    HostTensor q({a0, a1, P::g * 2, P::k_dim}, TE_FL_F32), k({a0, a1, P::g, P::k_dim}, TE_FL_F32),
        v({a0, a1, P::g, P::v_dim}, TE_FL_F32);
    te_fl_fused_qkv_rope_forward_args f;
    P::set(f, qf, kf);
    f.qkv_input = qkv, f.q_out = q, f.k_out = k, f.v_out = v;
    f.layout = layout, f.interleaved = 1, f.start_positions = starts, f.cp_size = 2, f.cp_rank = 1;
    ASSERT_OK(run_reference("fused_qkv_rope_forward", f));

    // Splits QKV, then rotates q and k. The 4 local positions of rank 1 of 2 are 2, 3, 4, 5.
    std::vector<double> q_in, k_in, v_in;
    std::vector<int> positions;
    for (int64_t row = 0; row < a0 * a1 * P::g; ++row) {
      const auto at = x.begin() + row * P::e;
      q_in.insert(q_in.end(), at, at + P::q_dim);
      k_in.insert(k_in.end(), at + P::q_dim, at + P::q_dim + P::k_dim);
      v_in.insert(v_in.end(), at + P::q_dim + P::k_dim, at + P::e);
    }
    for (int64_t token = 0; token < a0 * a1; ++token) {
      const int64_t seq = sbhd ? token / a1 : token % a1, batch = sbhd ? token % a1 : token / a1;
      positions.push_back(static_cast<int>(2 + seq + (batch == 0 ? 3 : 20)));
    }
    expect_near(q.values(), rotate_all(q_in, P::g * 2, P::k_dim, positions, qf, true), 1e-6, 5e-6,
                "q");
    expect_near(k.values(), rotate_all(k_in, P::g, P::k_dim, positions, kf, true), 1e-6, 5e-6, "k");
    EXPECT_EQ(v.values(), v_in);

    // The backward is the transpose: <w, forward(x)> = <backward(w), x> for unit vectors x.
    HostTensor dq(q.shape(), TE_FL_F32, random_values(q.size(), 8)),
        dk(k.shape(), TE_FL_F32, random_values(k.size(), 9)),
        dv(v.shape(), TE_FL_F32, random_values(v.size(), 10)), dqkv(qkv.shape(), TE_FL_F32);
    te_fl_fused_qkv_rope_backward_args g;
    P::set(g, qf, kf);
    g.q_grad = dq, g.k_grad = dk, g.v_grad = dv, g.qkv_grad = dqkv;
    g.layout = layout, g.interleaved = 1, g.start_positions = starts, g.cp_size = 2, g.cp_rank = 1;
    ASSERT_OK(run_reference("fused_qkv_rope_backward", g));
    std::vector<double> want;
    for (int64_t i = 0; i < qkv.size(); ++i) {
      std::vector<double> unit(static_cast<size_t>(qkv.size()), 0);
      unit[static_cast<size_t>(i)] = 1;
      qkv.fill(unit);
      ASSERT_OK(run_reference("fused_qkv_rope_forward", f));
      want.push_back(dot(dq.values(), q.values()) + dot(dk.values(), k.values()) +
                     dot(dv.values(), v.values()));
    }
    expect_near(dqkv.values(), want, 1e-6, 5e-6, "dqkv");
  }
}

TEST(ReferenceRope, RefusesBeforeWriting) {
  HostTensor x({4, 2, 1, 4}, TE_FL_F32, random_values(32, 1)), y({4, 2, 1, 4}, TE_FL_F32);
  HostTensor freqs({4, 1, 1, 4}, TE_FL_F32, random_values(16, 2));
  HostTensor cu({2}, TE_FL_I32, {0, 9}), starts({2}, TE_FL_I32, {0, -1}),
      late({2}, TE_FL_I32, {0, 1}), tokens({8, 1, 4}, TE_FL_F32, random_values(32, 1)),
      tokens_out({8, 1, 4}, TE_FL_F32), cu_odd({2}, TE_FL_I32, {0, 6});
  using Args = te_fl_fused_rope_forward_args;
  const auto refuse = [&](const std::function<void(Args&)>& break_it, const char* part) {
    Args a;
    a.input = x, a.output = y, a.freqs = freqs;
    break_it(a);
    EXPECT_REFUSED(run_reference("fused_rope_forward", a), part);
    EXPECT_TRUE(y.untouched() && tokens_out.untouched()) << part;
  };
  const auto thd = [&](Args& a, const te_fl_tensor* seqlens) {
    a.layout = TE_FL_LAYOUT_THD, a.input = tokens, a.output = tokens_out, a.cu_seqlens = seqlens;
  };
  refuse([&](Args& a) { a.start_positions = late; },
         "freqs has 4 positions, but position 4 is needed");
  refuse([&](Args& a) { a.start_positions = starts; }, "start_positions[1] is -1");
  refuse([&](Args& a) { thd(a, cu); }, "sequence 0 of cu_seqlens spans tokens 0 to 9");
  refuse([&](Args& a) { thd(a, cu_odd), a.cp_size = 2; }, "has 3 tokens on this rank");
  refuse([&](Args& a) { thd(a, cu_odd), a.cp_size = 4; }, "expected multiples of cp_size, 4");
}

TEST(ReferenceRope, TheDescriptionRefusesExtents) {
  HostTensor x({4, 2, 1, 4}, TE_FL_F32, random_values(32, 1)), y({4, 2, 1, 4}, TE_FL_F32),
      tokens({8, 1, 4}, TE_FL_F32, random_values(32, 1)), tokens_out({8, 1, 4}, TE_FL_F32),
      freqs({8, 1, 1, 4}, TE_FL_F32, random_values(32, 2)), odd({4, 1, 1, 3}, TE_FL_F32),
      wide({4, 1, 1, 6}, TE_FL_F32), few({3, 1, 1, 4}, TE_FL_F32, random_values(12, 2));
  HostTensor four({4}, TE_FL_I32, {0, 0, 0, 0}), none({0}, TE_FL_I32, {}),
      cu({3}, TE_FL_I32, {0, 3, 8}), square({2, 2}, TE_FL_I32, {0, 1, 2, 3});
  using Args = te_fl_rope_rope_args;
  const auto refuse = [&](const std::function<void(Args&)>& break_it, const char* part,
                          const char* more = "") {
    Args a;
    a.input = x, a.output = y, a.freqs = freqs;
    break_it(a);
    EXPECT_REFUSED(ops::fused_rope_forward(a), part, more);
    EXPECT_REFUSED(ops::fused_rope_backward(a), part, more);
    EXPECT_TRUE(y.untouched() && tokens_out.untouched()) << part;
  };
  const auto thd = [&](Args& a, const te_fl_tensor* seqlens) {
    a.layout = TE_FL_LAYOUT_THD, a.input = tokens, a.output = tokens_out, a.cu_seqlens = seqlens;
  };
  refuse([&](Args& a) { a.freqs = odd; },
         "argument 'freqs' has shape [4, 1, 1, 3], must be [4, 1, 1");
  refuse([&](Args& a) { a.freqs = wide; }, "R is 3 (in 'freqs'), D is 4 (in 'input')",
         "freqs has no more columns than a head");
  refuse([&](Args& a) { a.freqs = few; }, "P is 3 (in 'freqs'), S is 4 (in 'input')",
         "freqs has a row for each position");
  refuse([&](Args& a) { a.input = tokens; },
         "argument 'input' has shape [8, 1, 4], must be [S, B, H, D]", "layout is sbhd");
  refuse([&](Args& a) { a.input = tokens, a.layout = TE_FL_LAYOUT_BSHD; },
         "argument 'input' has shape [8, 1, 4], must be [B, S, H, D]", "layout is bshd");
  refuse([&](Args& a) { thd(a, cu), a.input = x; },
         "argument 'input' has shape [4, 2, 1, 4], must be [T, H, D]", "layout is thd");
  refuse([&](Args& a) { a.start_positions = four; },
         "argument 'start_positions' has shape [4], must be [2] (rule \"B\", set by 'input')");
  refuse(
      [&](Args& a) { thd(a, cu), a.start_positions = four; },
      "argument 'cu_seqlens' has shape [3], must be [5] (rule \"B+1\", set by 'start_positions')");
  refuse([&](Args& a) { thd(a, none); }, "argument 'cu_seqlens' has shape [0], must be [B+1]");
  refuse([&](Args& a) { thd(a, square); }, "argument 'cu_seqlens' has shape [2, 2], must be [B+1]");
  Args a;
  a.input = x, a.output = y, a.freqs = freqs, a.start_positions = four;
  a.layout = TE_FL_LAYOUT_BSHD;
  EXPECT_OK(ops::fused_rope_forward(a)) << "bshd [4,2,..] has four sequences";
}

TEST(ReferenceRope, PackedRefusesBeforeWriting) {
  using P = Packed;
  HostTensor freqs({4, 1, 1, 4}, TE_FL_F32, random_values(16, 2));
  HostTensor qkv({4, 1, 2, P::e}, TE_FL_F32, random_values(8 * P::e, 1)),
      q({4, 1, 4, 4}, TE_FL_F32), k({4, 1, 2, 4}, TE_FL_F32), v({4, 1, 2, 3}, TE_FL_F32),
      two_heads({4, 1, 2, 4}, TE_FL_F32);
  te_fl_fused_qkv_rope_forward_args a;
  P::set(a, freqs, freqs);
  a.qkv_input = qkv, a.q_out = q, a.k_out = k, a.v_out = v;
  auto bad = a;
  bad.q_out = two_heads;
  EXPECT_REFUSED(ops::fused_qkv_rope_forward(bad), "N is 2 (in 'q_out')",
                 "each group has q_dim / k_dim heads of queries");
  bad = a, bad.v_dim = 4;
  EXPECT_REFUSED(ops::fused_qkv_rope_forward(bad), "V is 3 (in 'v_out'), 'v_dim' is 4");
  HostTensor starts({4}, TE_FL_I32, {0, 0, 0, 0});
  bad = a, bad.start_positions = starts;
  EXPECT_REFUSED(ops::fused_qkv_rope_forward(bad),
                 "argument 'start_positions' has shape [4], must be [1]", "set by 'qkv_input'");
  EXPECT_TRUE(q.untouched() && k.untouched() && v.untouched());
}

}  // namespace
}  // namespace te_fl::testing
