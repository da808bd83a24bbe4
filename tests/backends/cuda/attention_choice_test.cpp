// The choice of the CUDA plugin's own attention kernel for a call, and the stated reason if it is
// not a tensor-core kernel. Needs no GPU.
#include "backends/cuda/attention/attention_choice.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace te_fl::cuda::attention_choice_test {
namespace {

alignas(16) char attention_memory[64];

// Metadata of a compact tensor; its elements are never read.
struct ChoiceTensor {
  std::vector<int64_t> shape, strides;
  te_fl_tensor t{};

  ChoiceTensor(int dtype, std::vector<int64_t> extents) : shape(std::move(extents)) {
    strides.resize(shape.size(), 1);
    for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    t.struct_size = sizeof t;
    t.dl.data = attention_memory;
    t.dl.ndim = static_cast<int32_t>(shape.size());
    t.dl.dtype = to_c(static_cast<DType>(dtype));
    t.dl.shape = shape.data();
    t.dl.strides = strides.data();
  }
  ChoiceTensor(const ChoiceTensor&) = delete;
};

// An attention backward with head sizes `dim` and `dim_v`, in layout [B, S, H, D].
struct ChoiceCall {
  ChoiceTensor q, k, v, o, d_o, dq, dk, dv, bias;
  te_fl_fused_attn_bwd_args backward{};
  te_fl_fused_attn_fwd_args forward{};

  explicit ChoiceCall(int dtype, int64_t dim = 128, int64_t dim_v = 128,
                      int bias_dtype = TE_FL_BF16)
      : q(dtype, {2, 7, 4, dim}),
        k(dtype, {2, 9, 2, dim}),
        v(dtype, {2, 9, 2, dim_v}),
        o(dtype, {2, 7, 4, dim_v}),
        d_o(dtype, {2, 7, 4, dim_v}),
        dq(dtype, {2, 7, 4, dim}),
        dk(dtype, {2, 9, 2, dim}),
        dv(dtype, {2, 9, 2, dim_v}),
        bias(bias_dtype, {1, 4, 7, 9}) {
    backward.d_o = &d_o.t, backward.dq = &dq.t, backward.dk = &dk.t, backward.dv = &dv.t;
    backward.q = forward.q = &q.t, backward.k = forward.k = &k.t;
    backward.v = forward.v = &v.t, backward.o = forward.o = &o.t;
    backward.layout = forward.layout = TE_FL_LAYOUT_BSHD;
  }
  void add_bias() { backward.bias = forward.bias = &bias.t; }
};

constexpr const char* kWide =
    "hopper, heads of 128: 16-bit tensors on Hopper, a head has more than 64 elements";
constexpr const char* kNarrow =
    "hopper, heads of 64: 16-bit tensors on Hopper, heads of at most 64 elements";

std::string both(const ChoiceCall& call, int architecture = 90) {
  const std::string forward = choose_attention(architecture, call.forward).text();
  EXPECT_EQ(choose_attention(architecture, call.backward).text(), forward);
  return forward;
}

TEST(CudaAttentionChoice, HalfPrecisionOnHopperTakesTensorCores) {
  for (const int dtype : {TE_FL_BF16, TE_FL_F16}) {
    EXPECT_EQ(both(ChoiceCall(dtype, 128, 128)), kWide);
    EXPECT_EQ(both(ChoiceCall(dtype, 64, 64)), kNarrow);
    EXPECT_EQ(both(ChoiceCall(dtype, 40, 96)), kWide);
    EXPECT_EQ(both(ChoiceCall(dtype, 8, 8)), kNarrow);
  }
}

TEST(CudaAttentionChoice, TermsOfAScoreChangeNothing) {
  ChoiceCall call(TE_FL_BF16);
  call.add_bias();
  call.forward.dropout_p = call.backward.dropout_p = 0.1f;
  call.forward.mask_type = call.backward.mask_type = TE_FL_MASK_TYPE_ARBITRARY;
  call.forward.softmax_type = call.backward.softmax_type = TE_FL_SOFTMAX_TYPE_OFF_BY_ONE;
  EXPECT_EQ(both(call), kWide);
}

TEST(CudaAttentionChoice, SaysWhyACallIsScalar) {
  const std::string elsewhere =
      "scalar: the tensor-core kernels are for GPUs of compute capability 9.0 (Hopper)";
  for (const int architecture : {80, 89, 100, 120}) {
    EXPECT_EQ(both(ChoiceCall(TE_FL_BF16), architecture), elsewhere);
  }
  EXPECT_EQ(both(ChoiceCall(TE_FL_F32)), "scalar: the tensor-core kernels take BF16 and F16");
  EXPECT_EQ(both(ChoiceCall(TE_FL_F8E4M3)), "scalar: the tensor-core kernels take BF16 and F16");
  EXPECT_EQ(both(ChoiceCall(TE_FL_BF16, 136, 128)), "scalar: a head has more than 128 elements");
  EXPECT_EQ(both(ChoiceCall(TE_FL_BF16, 128, 256)), "scalar: a head has more than 128 elements");
  EXPECT_EQ(both(ChoiceCall(TE_FL_BF16, 20, 16)), "scalar: a head's size is not a multiple of 8");
  ChoiceCall other_bias(TE_FL_BF16, 64, 64, TE_FL_F32);
  other_bias.add_bias();
  EXPECT_EQ(both(other_bias), "scalar: a bias of another dtype than q");
}

TEST(CudaAttentionChoice, SoftcapUsesTensorCoresWhereTheScoreDeterminesItsSlope) {
  ChoiceCall call(TE_FL_BF16);
  call.forward.softcap = call.backward.softcap = 50;
  EXPECT_EQ(both(call), kWide);
  for (const float cap : {0.003f, 257.0f, 3e38f}) {
    call.forward.softcap = call.backward.softcap = cap;
    EXPECT_EQ(both(call), "scalar: softcap is not in [1/256, 256]");
  }
  call.forward.softcap = call.backward.softcap = 50;
  call.forward.scale = call.backward.scale = -2e30f;
  EXPECT_EQ(both(call), "scalar: softcap and a scale beyond 1e30");
  call.forward.scale = call.backward.scale = 1;
  call.add_bias();
  EXPECT_EQ(both(call), "scalar: softcap and a bias or ALiBi");
}

TEST(CudaAttentionChoice, RowsMustBeReachableSixteenBytesAtATime) {
  ChoiceCall strided(TE_FL_BF16);
  strided.k.strides[1] += 4;
  EXPECT_EQ(both(strided), "scalar: a stride is not a positive multiple of 16 bytes");
  ChoiceCall expanded(TE_FL_BF16);
  expanded.v.strides[2] = 0;
  EXPECT_EQ(both(expanded), "scalar: a stride is not a positive multiple of 16 bytes");
  ChoiceCall transposed(TE_FL_BF16);
  transposed.q.strides[3] = 2;
  EXPECT_EQ(both(transposed), "scalar: the elements of a head are not contiguous");
  ChoiceCall askew(TE_FL_BF16);
  askew.o.t.dl.byte_offset = 8;
  EXPECT_EQ(both(askew), "scalar: a tensor is not aligned to 16 bytes");
  ChoiceCall packed(TE_FL_BF16);  // q, k and v are slices of one tensor
  packed.k.strides[1] = packed.v.strides[1] = 3 * 4 * 128;
  EXPECT_EQ(both(packed), kWide);
}

TEST(CudaAttentionChoice, LooksAtEveryTensorOfTheBackward) {
  ChoiceCall call(TE_FL_BF16);
  ChoiceTensor* const own[] = {&call.d_o, &call.dq, &call.dk, &call.dv};
  for (ChoiceTensor* t : own) {
    t->t.dl.byte_offset = 8;
    EXPECT_EQ(choose_attention(90, call.backward).text(),
              "scalar: a tensor is not aligned to 16 bytes");
    EXPECT_TRUE(choose_attention(90, call.forward).tensor_cores());
    t->t.dl.byte_offset = 0;
  }
  ChoiceCall wider(TE_FL_BF16);
  ChoiceTensor single(TE_FL_F32, {2, 7, 4, 128});
  wider.backward.dq = &single.t;
  EXPECT_EQ(choose_attention(90, wider.backward).text(), "scalar: tensors of another dtype than q");
}

backend::AttentionProblem scratch_problem(int64_t batch, int64_t heads, int64_t q, int64_t kv) {
  backend::AttentionProblem p;
  p.batch = batch;
  p.heads = heads;
  p.seqlen_q = q;
  p.seqlen_kv = kv;
  return p;
}
constexpr size_t kGiB = size_t{1} << 30;

TEST(CudaAttentionScratch, HasOneBitForEachPairOfWholeTiles) {
  EXPECT_EQ(pair_bits_bytes(1, 128, 64), 128u * 8);
  EXPECT_EQ(pair_bits_bytes(3, 129, 65), 3u * 256 * 2 * 8);
  EXPECT_EQ(pair_bits_bytes(128, 2048, 2048), 128u * 2048 * 2048 / 8);
  EXPECT_EQ(pair_bits_bytes(8, 0, 64), 0u);
  // A size beyond 64 bits is reported as larger than any device's memory and must not wrap to a
  // small number.
  EXPECT_GE(pair_bits_bytes(int64_t{1} << 40, int64_t{1} << 40, int64_t{1} << 40), kGiB << 20);
}

TEST(CudaAttentionScratch, HoldsTheMaskOnceForEachOfItsMatrices) {
  ChoiceTensor mask(TE_FL_BOOL, {2, 1, 200, 70});
  backend::AttentionProblem p = scratch_problem(2, 16, 200, 70);
  EXPECT_EQ(forward_scratch(p).bytes(), 0u);
  p.attn_mask = &mask.t;
  EXPECT_EQ(forward_scratch(p).hide, 2u * 256 * 2 * 8);
  EXPECT_EQ(forward_scratch(p).bytes(), forward_scratch(p).hide);
  // The backward's scratch also contains the mask's bits ordered by key, even if the limit for
  // optional scratch is 0.
  EXPECT_EQ(backward_scratch(p, false, 0).hide, 2u * (256 * 2 + 128 * 4) * 8);
}

TEST(CudaAttentionScratch, KeepsWhatIsComputedTwiceWhereItFits) {
  backend::AttentionProblem p = scratch_problem(4, 32, 2048, 2048);
  EXPECT_EQ(backward_scratch(p, false, 2 * kGiB).bytes(), 0u);
  p.dropout_p = 0.1f;
  const size_t keep = 2 * size_t{128} * 2048 * 2048 / 8, gradients = size_t{128} * 2048 * 2048 * 2;
  EXPECT_EQ(forward_scratch(p).bytes(), 0u);  // the kernel draws dropout bits itself, so none are
                                              // stored
  EXPECT_EQ(backward_scratch(p, false, keep).keep, keep);
  EXPECT_EQ(backward_scratch(p, false, keep - 1).keep, 0u);
  EXPECT_EQ(backward_scratch(p, true, keep + gradients).score_gradients, gradients);
  EXPECT_EQ(backward_scratch(p, true, keep + gradients - 1).score_gradients, 0u);
  EXPECT_EQ(backward_scratch(p, true, keep + gradients - 1).keep, keep);
  EXPECT_EQ(backward_scratch(p, true, 0).bytes(), 0u);
}

TEST(CudaAttentionScratch, IsNoneForSequencesOfUnknownLength) {
  backend::AttentionProblem p = scratch_problem(4, 32, 0, 2048);
  p.dropout_p = 0.1f;
  EXPECT_EQ(backward_scratch(p, false, kGiB).bytes(), 0u);
  EXPECT_EQ(backward_scratch(scratch_problem(4, 32, 2048, 0), true, kGiB).bytes(), 0u);
}

}  // namespace
}  // namespace te_fl::cuda::attention_choice_test
