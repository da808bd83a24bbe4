// The choice of kernels for dropout, addition, embedding, cross-entropy and multi-tensor ops. Needs
// no GPU.
#include "backends/cuda/pointwise/pointwise_choice.hpp"

#include <gtest/gtest.h>

#include <string>

#include "backends/cuda/optimizer/list_choice.hpp"
#include "metadata_tensor.hpp"

namespace te_fl::cuda::pointwise_choice_test {
namespace {

const std::string kOnce = ": eight elements are read and written at once";
const std::string kSingly = ": element by element, as a tensor is not aligned to 16 bytes";

TEST(CudaPointwiseChoice, DropoutAndAdditionGoByAlignment) {
  const MetadataTensor x(TE_FL_BF16, {4, 64}), askew(TE_FL_BF16, {4, 64}, 2);
  const MetadataTensor wide(TE_FL_F32, {4, 64}), empty(TE_FL_BF16, {0, 64});
  EXPECT_EQ(choose_dropout(x.t, x.t).text(), "dropout" + kOnce);
  EXPECT_EQ(choose_dropout(x.t, askew.t).text(), "dropout" + kSingly);
  EXPECT_EQ(choose_dropout(empty.t, empty.t).text(), "none: a tensor without elements");
  te_fl_add_args a{};
  a.a = a.b = a.output = &x.t;
  EXPECT_EQ(choose_pointwise(a).text(), "add" + kOnce);
  a.b = &askew.t;
  EXPECT_EQ(choose_pointwise(a).text(), "add" + kSingly);
  a.b = &wide.t;
  EXPECT_EQ(choose_pointwise(a).text(), "add_mixed: tensors of several dtypes");
}

TEST(CudaPointwiseChoice, ScaledActivationsTakePacksOfOneDtype) {
  const MetadataTensor x(TE_FL_BF16, {4, 64}), y(TE_FL_BF16, {4, 32}), wide(TE_FL_F32, {4, 32});
  const MetadataTensor askew(TE_FL_BF16, {4, 32}, 8);
  const std::string packs = "scaled_forward_packs: sixteen columns of a thread";
  EXPECT_EQ(choose_scaled(true, {&x.t, &y.t}, 32, 0).text(), packs);
  EXPECT_EQ(choose_scaled(true, {&x.t, &y.t}, 32, 16).text(), packs);
  EXPECT_EQ(choose_scaled(false, {&y.t, &x.t, &x.t}, 32, 0).text(),
            "scaled_gradient_packs: sixteen columns of a thread");
  EXPECT_EQ(
      choose_scaled(true, {&x.t, &y.t}, 32, 4).text(),
      "scaled_forward: one column per thread, since glu_interleave_size is not a multiple of 8");
  EXPECT_EQ(choose_scaled(true, {&x.t, &wide.t}, 32, 0).text(),
            "scaled_forward: eight columns of a thread, of tensors of several dtypes");
  for (const bool aligned : {true, false}) {
    EXPECT_EQ(
        choose_scaled(false, {aligned ? &y.t : &askew.t, &x.t, &x.t}, aligned ? 36 : 32, 0).text(),
        "scaled_gradient: eight columns of a thread, of rows that are not whole packs");
  }
}

std::string lookup(int dtype, int64_t cols, int out_dtype, uint64_t offset = 0,
                   int64_t tokens = 3) {
  const MetadataTensor weight(dtype, {100, cols}, offset), indices(TE_FL_I64, {tokens});
  const MetadataTensor output(out_dtype, {tokens, cols});
  te_fl_embedding_fwd_args a{};
  a.weight = &weight.t, a.indices = &indices.t, a.output = &output.t;
  return choose_pointwise(a).text();
}
TEST(CudaPointwiseChoice, RowsOfEmbeddingsAreCopiedIn16Bytes) {
  EXPECT_EQ(lookup(TE_FL_BF16, 64, TE_FL_BF16), "embedding: rows are copied 16 bytes at a time");
  EXPECT_EQ(lookup(TE_FL_F32, 4, TE_FL_F32), "embedding: rows are copied 16 bytes at a time");
  EXPECT_EQ(lookup(TE_FL_BF16, 64, TE_FL_F32), "store: the rows are converted to another dtype");
  EXPECT_EQ(lookup(TE_FL_BF16, 60, TE_FL_BF16),
            "store: rows that are not whole pieces of 16 bytes");
  EXPECT_EQ(lookup(TE_FL_BF16, 64, TE_FL_BF16, 8),
            "store: rows that are not whole pieces of 16 bytes");
  EXPECT_EQ(lookup(TE_FL_BF16, 64, TE_FL_BF16, 0, int64_t{1} << 28),
            "store: 2^31 pieces of 16 bytes or more");
}

TEST(CudaPointwiseChoice, GradientsOfEmbeddingsHaveListsOfPositions) {
  const MetadataTensor table(TE_FL_F32, {100, 8}), few(TE_FL_I32, {5});
  const MetadataTensor many(TE_FL_I32, {int64_t{1} << 31});
  te_fl_embedding_bwd_args a{};
  a.grad_weight = &table.t, a.indices = &few.t;
  EXPECT_EQ(choose_pointwise(a).text(),
            "embedding_gradient by lists: each row's positions are linked first");
  a.indices = &many.t;
  EXPECT_EQ(choose_pointwise(a).text(),
            "embedding_gradient: 2^31 positions or more, which lists do not count");
}

int packs(int dtype, int64_t classes, uint64_t offset = 0) {
  const MetadataTensor logits(dtype, {3, classes}, offset);
  te_fl_cross_entropy_bwd_args a{};
  a.logits = &logits.t;
  return choose_pointwise(a).packs;
}
TEST(CudaPointwiseChoice, CrossEntropysGradientHoldsFourPacksWhereABlockNeedsThem) {
  EXPECT_EQ(packs(TE_FL_BF16, 2048), 1);
  EXPECT_EQ(packs(TE_FL_BF16, 2056), 4);
  EXPECT_EQ(packs(TE_FL_F32, 1024), 1);
  EXPECT_EQ(packs(TE_FL_F32, 1032), 4);
  // A row that does not start at a pack boundary may need one more pack.
  EXPECT_EQ(packs(TE_FL_BF16, 2048, 2), 4);
  EXPECT_EQ(packs(TE_FL_BF16, 2041), 1);
  EXPECT_EQ(packs(TE_FL_BF16, 0), 0);
}

TEST(CudaListChoice, ListsAreCutIntoLaunches) {
  te_fl_multi_tensor_adam_args adam{};
  adam.grads_count = 57;
  EXPECT_EQ(choose_list(adam).text(), "adam: 57 tensors, up to 56 in a launch");
  adam.fp8_params_count = adam.grads_count = 32;
  EXPECT_EQ(choose_list(adam).text(), "adam_fp8: 32 tensors, up to 32 in a launch");
  adam.fp8_params_count = adam.grads_count = 33;
  EXPECT_EQ(choose_list(adam).text(), "adam_fp8: 33 tensors, up to 280 in a launch");
  te_fl_fused_amax_and_scale_update_after_reduction_args update{};
  update.amax_histories_count = 80;
  EXPECT_EQ(choose_list(update).text(), "scale_update: 80 tensors, up to 80 in a launch");
  update.amax_histories_count = 81;
  EXPECT_EQ(choose_list(update).capacity, 660);
  te_fl_multi_tensor_l2norm_args norm{};
  norm.inputs_count = 1;
  EXPECT_EQ(choose_list(norm).text(), "squares, norm: 1 tensor, up to 56 in a launch");
}

}  // namespace
}  // namespace te_fl::cuda::pointwise_choice_test
