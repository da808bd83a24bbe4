// CompiledOp on calls: the rules of an op's own arguments with their messages, lists, and arguments
// that a later version of the op added.
#include "core/op/op_table.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "op_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/attention.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/optimizer.h"
#include "te_fl/ops/quantize.h"
#include "te_fl/ops/softmax.h"
#include "te_fl/ops/tensor.h"

namespace te_fl::core {
namespace {

class Gemm : public ::testing::Test {
 protected:
  std::unique_ptr<const CompiledOp> op = compile("generic_gemm");
  Tensor a = f32({4, 8}), b = f32({8, 3}), d = f32({4, 3});
  te_fl_generic_gemm_args args;
  void SetUp() override { args.a = a, args.b = b, args.d = d; }
  std::string text() { return check(*op, &args); }
};

TEST_F(Gemm, FlagsChooseTheRule) {
  EXPECT_EQ(text(), "");
  args.trans_a = 1;
  EXPECT_EQ(text(),
            "generic_gemm: argument 'b' has shape [8, 3], must be [4, N] (rule \"trans_b ? N K : K "
            "N\", set by 'a', "
            "trans_b is 0)");
  const Tensor at = f32({8, 4});
  args.a = at;
  EXPECT_EQ(text(), "");
  args.trans_b = 1;
  EXPECT_HAS(text(), "must be [8, 8]");
}

TEST_F(Gemm, ShapesByName) {
  const Tensor wrong = f32({3, 4}), bias = f32({4}), cube = f32({1, 4, 8});
  args.d = wrong;
  EXPECT_HAS(text(),
             "argument 'd' has shape [3, 4], must be [4, 3] (rule \"M N\", set by 'a' and 'b')");
  args.d = d;
  args.bias = bias;
  EXPECT_HAS(text(), "argument 'bias' has shape [4], must be [3] (rule \"N\", set by 'b')");
  args.bias = nullptr;
  args.a = cube;
  EXPECT_HAS(text(), "argument 'a' has shape [1, 4, 8], must be [M, K]");
}

TEST_F(Gemm, Scalars) {
  args.trans_b = 2;
  EXPECT_EQ(text(), "generic_gemm: argument 'trans_b' is 2, must be 0 or 1");
  args.trans_b = -1;
  EXPECT_HAS(text(), "'trans_b' is -1");
  args.trans_b = 0;
  args.alpha = NAN;
  EXPECT_EQ(text(), "generic_gemm: argument 'alpha' is NaN, must be a number");
  args.alpha = INFINITY;
  EXPECT_EQ(text(), "") << "unbounded scalars may be infinite";
}

TEST_F(Gemm, MissingScaleOfAnInput) {
  const Tensor codes = Tensor::zeros({4, 8}, DType::kF8E4M3).value();
  args.a = codes;
  EXPECT_EQ(text(),
            "generic_gemm: argument 'a' is f8e4m3[4,8] cpu without quantisation data: its "
            "scale_inv is missing; make "
            "it with quantize or set te_fl_tensor.quant");
  const Tensor q = quantised({4, 8});
  Raw r(q);
  r.quant.scale_inv = nullptr;
  args.a = &r.t;
  EXPECT_HAS(text(),
             "argument 'a' is f8e4m3[4,8] tensor row cpu: its scale_inv is missing (NULL); make it "
             "with quantize");
  r.quant.scale_inv = q.scale_inv().raw_data();
  r.quant.scale = nullptr, r.quant.amax = nullptr;
  EXPECT_EQ(text(), "") << "an input needs neither scale nor amax";
}

TEST_F(Gemm, InoutIsReadOnlyIfItsConditionHolds) {
  const Tensor q = quantised({4, 3});
  Raw r(q);
  r.quant.columnwise_scale_inv = r.quant.scale_inv;
  r.quant.scale_inv = nullptr;
  args.d = &r.t;
  EXPECT_EQ(text(), "") << "an output with a given scale";
  args.accumulate = 1;
  EXPECT_HAS(text(), "argument 'd' is f8e4m3[4,3] tensor row cpu: its scale_inv is missing");
}

TEST_F(Gemm, ScalingModesThatAnArgumentDoesNotTake) {
  QuantSpec spec;
  spec.scaling = Scaling::kMXFP8;
  const Tensor mx = quantised({4, 3}, spec);
  args.d = mx;
  EXPECT_HAS(text(),
             "argument 'd' is f8e4m3[4,3] mxfp8 row cpu: its scaling mode must be none|tensor");
  const auto q = compile("quantize");
  te_fl_quantize_args quantize;
  quantize.input = a, quantize.output = a;
  EXPECT_HAS(check(*q, &quantize),
             "argument 'output' is f32[4,8] cpu, its dtype must be f8e4m3|f8e5m2|f4e2m1");
}

TEST_F(Gemm, Aliasing) {
  const Tensor square = f32({4, 4}), other = f32({4, 4});
  args.a = square, args.b = other, args.d = square;
  EXPECT_EQ(text(),
            "generic_gemm: argument 'd' has the same memory as 'a', which this op does not allow; "
            "give the output "
            "memory of its own");
  const Tensor out = f32({4, 4});
  args.d = out, args.pre_gelu_out = out;
  EXPECT_HAS(text(), "has the same memory as");
  args.pre_gelu_out = nullptr;
  args.b = square;
  EXPECT_EQ(text(), "") << "inputs may share memory";
}

// Implementations read every member of the tensor struct that ABI 0.9 has, so a shorter tensor
// struct is refused.
TEST_F(Gemm, ATensorStructIsAtLeastThatOfAbi10) {
  Raw r(a);
  r.t.struct_size = offsetof(te_fl_tensor, quant);
  r.t.quant = reinterpret_cast<const te_fl_quant*>(8);  // must not be read
  args.a = &r.t;
  EXPECT_HAS(text(), "te_fl_tensor struct_size 56, must be at least 64");
}

TEST(LayerNorm, LeadingDimensionsAndTheirProduct) {
  const auto op = compile("layernorm_fwd");
  const Tensor x = f32({2, 3, 8}), gamma = f32({8}), z = f32({2, 3, 8}), mu = f32({6}),
               rsigma = f32({6});
  te_fl_layernorm_fwd_args args;
  args.x = x, args.gamma = gamma, args.z = z, args.mu = mu, args.rsigma = rsigma;
  EXPECT_EQ(check(*op, &args), "");
  const Tensor five = f32({5}), beta = Tensor::zeros({8}, DType::kBF16).value();
  args.mu = five;
  EXPECT_EQ(check(*op, &args),
            "layernorm_fwd: argument 'mu' has shape [5], must be [6] (rule \"@...\", set by 'x')");
  args.mu = mu;
  args.beta = beta;
  EXPECT_EQ(
      check(*op, &args),
      "layernorm_fwd: argument 'beta' is bf16[8] cpu, must have the dtype of 'gamma': f32[8] cpu");
  args.beta = nullptr;
  args.rsigma = mu;
  EXPECT_HAS(check(*op, &args), "has the same memory as");
  const Tensor scalar = f32({});
  args.rsigma = rsigma;
  args.x = scalar;
  EXPECT_HAS(check(*op, &args), "argument 'x' has shape [], must be [..., H]");
}

TEST(Swiglu, Factors) {
  const auto op = compile("swiglu");
  const Tensor x = f32({3, 8}), y = f32({3, 4}), odd = f32({3, 9}), wide = f32({3, 5});
  te_fl_activation_glu_fwd_args args;
  args.input = x, args.output = y;
  EXPECT_EQ(check(*op, &args), "");
  args.input = odd;
  EXPECT_HAS(check(*op, &args),
             "argument 'input' has shape [3, 9], must be [..., 2*H] (rule \"... 2*H\")");
  args.input = x, args.output = wide;
  EXPECT_HAS(check(*op, &args), "must be [3, 4] (rule \"... H\", set by 'input')");
  const auto backward = compile("dswiglu");
  te_fl_activation_glu_bwd_args b;
  const Tensor dx = f32({3, 8});
  b.grad = wide, b.input = x, b.output = dx;
  EXPECT_HAS(check(*backward, &b), "argument 'input' has shape [3, 8], must be [3, 10]");
}

TEST(MaskedSoftmax, OneOrTheName) {
  const auto op = compile("scaled_masked_softmax_forward");
  const Tensor x = f32({2, 3, 4, 5}), y = f32({2, 3, 4, 5});
  te_fl_softmax_masked_args args;
  args.input = x, args.output = y;
  for (const int64_t batch : {1, 2}) {
    const Tensor mask = Tensor::zeros({batch, 1, 4, 5}, DType::kU8).value();
    args.mask = mask;
    EXPECT_EQ(check(*op, &args), "");
  }
  const Tensor bad = Tensor::zeros({3, 1, 4, 5}, DType::kU8).value();
  args.mask = bad;
  EXPECT_HAS(check(*op, &args),
             "argument 'mask' has shape [3, 1, 4, 5], must be [1 or 2, 1 or 3, 4, 5]");
}

TEST(Enquiry, MetadataNeedsNoDataAndTheAnswerIsOnTheHost) {
  const auto op = compile("get_fused_attn_backend");
  const Tensor q = f32({2, 3, 4, 8}), answer = Tensor::zeros({1}, DType::kI32).value();
  Raw metadata(q);
  metadata.t.dl.data = nullptr;
  metadata.t.dl.device = {TE_FL_DEVICE_CUDA, 0};
  te_fl_get_fused_attn_backend_args args;
  args.q = args.k = args.v = &metadata.t;
  args.backend = answer;
  Signature s;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.device.type, TE_FL_DEVICE_CUDA) << "host arguments do not place the op";
  Raw there(answer);
  there.t.dl.device = {TE_FL_DEVICE_CUDA, 0};
  args.backend = &there.t;
  EXPECT_HAS(check(*op, &args), "argument 'backend' is i32[1] cuda:0, must be in host memory");
  args.backend = answer;
  args.layout = 3;
  EXPECT_EQ(check(*op, &args),
            "get_fused_attn_backend: argument 'layout' is 3, must be from 0 to 2 (sbhd bshd thd)");
  args.layout = 0;
  args.dropout_p = 1.0f;
  EXPECT_HAS(check(*op, &args), "argument 'dropout_p' is 1, must be from 0 to 0.999999");
}

class Attention : public ::testing::Test {
 protected:
  std::unique_ptr<const CompiledOp> op = compile("fused_attn_fwd");
  Tensor q = f32({4, 1, 2, 8}), k = f32({4, 1, 2, 8}), v = f32({4, 1, 2, 8}), o = f32({4, 1, 2, 8});
  te_fl_fused_attn_fwd_args args;
  void SetUp() override { args.q = q, args.k = k, args.v = v, args.o = o; }
};

TEST_F(Attention, QuantOnlyArgumentsNeedTheirScaleAlone) {
  const Tensor codes = quantised({4, 1, 2, 8}), s = quantised({1});
  args.q = args.k = args.v = codes;
  Raw r(s);
  r.t.dl.data = nullptr;
  r.quant.scale_inv = nullptr;
  args.s_quant = &r.t;
  EXPECT_EQ(check(*op, &args), "");
  r.quant.scale = nullptr;
  EXPECT_HAS(check(*op, &args),
             "argument 's_quant' is f8e4m3[1] tensor cpu: its scale is missing (NULL)");
}

TEST_F(Attention, TheSavedRecord) {
  EXPECT_EQ(op->saved(&args), nullptr);
  te_fl_saved record;
  args.saved = &record;
  EXPECT_EQ(check(*op, &args), "");
  EXPECT_EQ(op->saved(&args), &record);
  record.struct_size = 4;
  EXPECT_HAS(check(*op, &args), "te_fl_saved whose struct_size is too small");
  record.struct_size = sizeof record;
  const Tensor bytes = Tensor::zeros({64}, DType::kU8).value();
  record.storage = bytes;
  EXPECT_EQ(check(*op, &args), "");
  record.storage = q;
  EXPECT_HAS(check(*op, &args), "has a storage that is not a contiguous u8 tensor of rank 1");
  Raw there(bytes);
  there.t.dl.device = {TE_FL_DEVICE_CUDA, 0};
  record.storage = &there.t;
  EXPECT_HAS(check(*op, &args), "has its storage on another device than 'q', must be on cpu");
  EXPECT_EQ(compile("gelu")->saved(&args), nullptr);
}

TEST_F(Attention, IntegersAreCheckedExactly) {
  args.max_seqlen_q = INT64_C(2147483647);
  EXPECT_EQ(check(*op, &args), "");
  args.max_seqlen_q = INT64_C(2147483648);
  EXPECT_HAS(check(*op, &args),
             "argument 'max_seqlen_q' is 2147483648, must be from 0 to 2147483647");
  args.max_seqlen_q = INT64_MIN;
  EXPECT_HAS(check(*op, &args), "is -9223372036854775808, must be");
  args.max_seqlen_q = 0;
  args.window_left = INT64_MIN;
  EXPECT_HAS(check(*op, &args),
             "argument 'window_left' is -9223372036854775808, must be from -1 to "
             "9223372036854775807");
  args.window_left = INT64_MAX;
  EXPECT_EQ(check(*op, &args), "");
}

TEST(Broadcast, IsAllowedWhereTheSchemaSaysSo) {
  const auto op = compile("strided_copy");
  const Tensor x = f32({4, 8}), y = f32({4, 8});
  Raw r(x);
  r.strided().strides[0] = 0;
  te_fl_strided_copy_args args;
  args.input = &r.t, args.output = y;
  EXPECT_EQ(check(*op, &args), "");
  const Tensor raw = Tensor::zeros({4, 8}, DType::kF8E5M2).value();
  args.input = raw;
  EXPECT_EQ(check(*op, &args), "") << "raw FP8 codes are meant";
  Raw packed(Tensor(Tensor::zeros({4, 8}, DType::kF4E2M1).value()));
  const Tensor keep = Tensor::zeros({4, 8}, DType::kF4E2M1).value();
  packed.t.dl.data = keep.raw_data();
  packed.strided().strides[0] = 16;
  args.input = &packed.t;
  EXPECT_HAS(check(*op, &args), "4-bit elements are packed and must be contiguous");
}

class Lists : public ::testing::Test {
 protected:
  std::unique_ptr<const CompiledOp> op = compile("multi_tensor_adam");
  std::vector<Tensor> tensors;
  std::vector<const te_fl_tensor*> g, p, m, v;
  te_fl_multi_tensor_adam_args args;
  void SetUp() override {
    for (int i = 0; i < 8; ++i) tensors.push_back(f32({2, 3 + i / 4}));
    for (size_t i = 0; i < 2; ++i) {
      g.push_back(tensors[4 * i]), p.push_back(tensors[4 * i + 1]);
      m.push_back(tensors[4 * i + 2]), v.push_back(tensors[4 * i + 3]);
    }
    args.grads = g.data(), args.params = p.data(), args.exp_avgs = m.data(),
    args.exp_avg_sqs = v.data();
    args.grads_count = args.params_count = args.exp_avgs_count = args.exp_avg_sqs_count = 2;
  }
};

TEST_F(Lists, NamesAreBoundAfreshForEachIndex) {
  Signature s;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.dtypes, TE_FL_BIT(TE_FL_F32));
  std::swap(p[0], p[1]);
  EXPECT_EQ(check(*op, &args),
            "multi_tensor_adam: argument 'params'[0] has shape [2, 4], must be [2, 3] (rule "
            "\"...\", set by 'grads')");
}

TEST_F(Lists, Counts) {
  args.params_count = 1;
  EXPECT_EQ(check(*op, &args),
            "multi_tensor_adam: argument 'params' has 1 tensors, must have as many as 'grads': 2");
  args.params_count = -1;
  EXPECT_HAS(check(*op, &args), "argument 'params' has count -1, must not be negative");
  args.params_count = INT64_MAX;
  EXPECT_HAS(check(*op, &args), "must be at most");
  args.params_count = 2;
  args.params = nullptr;
  EXPECT_HAS(check(*op, &args), "argument 'params' is NULL but its count is 2");
  args.params = p.data();
  args.master_params_count = 1;
  EXPECT_HAS(check(*op, &args), "argument 'master_params' is NULL but its count is 1");
  args.master_params_count = 0;
  p[1] = nullptr;
  EXPECT_HAS(check(*op, &args), "argument 'params'[1] is missing (NULL)");
  args.grads_count = args.params_count = args.exp_avgs_count = args.exp_avg_sqs_count = 0;
  EXPECT_EQ(check(*op, &args), "") << "nothing to do is in order";
}

TEST_F(Lists, Aliasing) {
  m[1] = g[1];
  EXPECT_HAS(check(*op, &args), "has the same memory as");
  m[1] = tensors[6];
  const Tensor flag = Tensor::zeros({1}, DType::kI32).value();
  args.noop_flag = flag;
  EXPECT_EQ(check(*op, &args), "");
  // One gradient tensor may occur at two indices of a list; the same parameter at two indices
  // is an error.
  const Tensor a = f32({2, 4}), b = f32({2, 4});
  g[0] = g[1];
  p[0] = a, m[0] = b;
  const Tensor c = f32({2, 4});
  v[0] = c;
  EXPECT_EQ(check(*op, &args), "");
  p[0] = p[1];
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_HAS(check(*op, &args), "argument 'params'[0] overlaps the memory of 'params'");
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
}

TEST_F(Lists, PlainTensorsBindForAllIndices) {
  const auto split = compile("split_quantize");
  const Tensor x = f32({6, 16}), q0 = quantised({2, 16}), q1 = quantised({4, 16}),
               bad = quantised({4, 8});
  const te_fl_tensor* parts[] = {q0, q1};
  te_fl_split_quantize_args s;
  s.input = x, s.outputs = parts, s.outputs_count = 2;
  EXPECT_EQ(check(*split, &s), "");
  parts[1] = bad;
  EXPECT_HAS(check(*split, &s), "argument 'outputs'[1] has shape [4, 8], must be [_, 16]");
}

TEST(Signature, IsGivenWithoutShapesAndScalars) {
  const auto op = compile("layernorm_fwd");
  const Tensor x = f32({2, 3}), other = Tensor::zeros({7}, DType::kBF16).value();
  te_fl_layernorm_fwd_args args;
  args.x = x, args.gamma = other, args.z = x, args.mu = x, args.rsigma = x;
  args.zero_centered_gamma = 9;
  Signature s;
  EXPECT_TRUE(op->signature(&args, s));
  EXPECT_EQ(s.dtypes, TE_FL_BIT(TE_FL_F32) | TE_FL_BIT(TE_FL_BF16));
  args.mu = nullptr;
  EXPECT_FALSE(op->signature(&args, s));
}

TEST(Refusals, NameTheArgument) {
  const auto op = compile("gelu");
  const Tensor x = f32({4, 8}), y = quantised({4, 8});
  te_fl_activation_act_fwd_args args;
  args.input = x, args.output = y;
  EXPECT_EQ(op->dtype_outside(&args, TE_FL_MASK_HIGH), "output");
  EXPECT_EQ(op->dtype_outside(&args, TE_FL_MASK_FP8), "input");
  EXPECT_EQ(op->dtype_outside(&args, TE_FL_MASK_ANY_DTYPE), "");
  EXPECT_EQ(op->scaling_outside(&args, 1), "output");
  EXPECT_EQ(op->scaling_outside(&args, 3), "");
}

// An op of version 3 with a scalar and a tensor that later versions added.
struct Versioned : ::testing::Test {
  SchemaBuilder b;
  std::unique_ptr<const CompiledOp> op;
  struct Args {
    uint32_t struct_size = sizeof(Args);
    uint32_t padding = 0;
    const te_fl_tensor* x = nullptr;
    const te_fl_tensor* y = nullptr;
    float factor = 2.5f;  // added later, neutral value 2.5
    int32_t padding2 = 0;
    const te_fl_tensor* extra = nullptr;  // added later
  } args;
  Tensor x = f32({4}), y = f32({4}), extra = f32({4});
  void SetUp() override {
    b.tensor("x", "N");
    b.tensor("y", "N", TE_FL_OUT);
    auto& factor = b.add("factor", TE_FL_ARG_F32, TE_FL_IN, offsetof(Args, factor), nullptr);
    factor.flags = TE_FL_ARG_LATER;
    factor.neutral = 2.5;
    auto& e = b.add("extra", TE_FL_ARG_TENSOR, TE_FL_IN, offsetof(Args, extra), "N");
    e.flags = TE_FL_ARG_OPTIONAL | TE_FL_ARG_LATER;
    b.schema.args_size = sizeof(Args);
    b.schema.least_args_size = offsetof(Args, factor);
    auto result = b.compile();
    ASSERT_OK(result);
    op = std::move(*result);
    args.x = x, args.y = y;
  }
};

TEST_F(Versioned, TheLaterArgumentsInUseAreASet) {
  Signature s;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.later, 0u);
  args.factor = 3;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.later, 1u);
  EXPECT_EQ(op->later_names(s.later), "factor");
  args.factor = 2.5f;
  args.extra = extra;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.later, 2u) << "the newer one, and not the older one";
  EXPECT_EQ(op->later_names(s.later), "extra");
  EXPECT_EQ(op->later_names(3), "factor, extra");
}

TEST_F(Versioned, WhatAnImplementationKnowsIsNamed) {
  EXPECT_EQ(op->later_mask(nullptr).value(), 0u);
  EXPECT_EQ(op->later_mask("extra").value(), 2u);
  EXPECT_EQ(op->later_mask(" extra  factor ").value(), 3u);
  EXPECT_HAS(op->later_mask("extar").status().message(),
             "later_args names 'extar', which is no argument of op");
  EXPECT_HAS(op->later_mask("x").status().message(), "of the first form of op");
  EXPECT_HAS(op->later_mask("x").status().message(), "(factor, extra; rule R23)");
}

TEST_F(Versioned, MembersBeyondStructSizeAreNeverRead) {
  Signature s;
  args.factor = NAN;
  args.extra = reinterpret_cast<const te_fl_tensor*>(16);
  args.struct_size = offsetof(Args, factor);
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.later, 0u);
  args.struct_size = offsetof(Args, factor) + 3;  // a struct_size that covers only part of
                                                  // `factor`: the member counts as absent
  EXPECT_EQ(check(*op, &args, &s), "");
  args.struct_size = offsetof(Args, padding2);
  EXPECT_HAS(check(*op, &args), "argument 'factor' is NaN");
  args.struct_size = offsetof(Args, factor) - 1;
  EXPECT_HAS(check(*op, &args), "struct_size 23, must be at least 24");
}

}  // namespace
}  // namespace te_fl::core
