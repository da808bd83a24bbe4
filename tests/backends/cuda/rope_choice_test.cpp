// Tests how rotary embedding's work is divided among a GPU's threads, and the stated reason. Needs
// no GPU.
#include "backends/cuda/pointwise/rope_choice.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "metadata_tensor.hpp"

namespace te_fl::cuda::rope_choice_test {
namespace {

RopeChoice chosen(std::vector<int64_t> shape, int64_t columns, uint64_t offset = 0) {
  const MetadataTensor input(TE_FL_BF16, shape, offset), output(TE_FL_BF16, shape);
  const MetadataTensor freqs(TE_FL_F32, {4096, 1, 1, columns});
  te_fl_rope_rope_args a{};
  a.input = &input.t, a.output = &output.t, a.freqs = &freqs.t;
  return choose_rope(rope_problem(a));
}

TEST(CudaRopeChoice, HeadsOfALayer) {
  // A head has 8 packs. Four tokens of 16 heads give 256 threads two items each.
  EXPECT_EQ(chosen({4096, 2, 16, 128}, 128).text(),
            "packs, a block has 4 tokens: eight elements are read and written at once");
  EXPECT_EQ(chosen({4096, 2, 128, 128}, 128).text(),
            "packs, a block has 1 token: eight elements are read and written at once");
  // 8 heads have 4 items each. A round has 16 tokens, whose angles take 8 of the 48 KiB of shared
  // memory.
  const RopeChoice small = chosen({128, 1, 8, 64}, 64);
  EXPECT_EQ(small.tokens, 16);
  EXPECT_EQ(small.items, 4);
  EXPECT_EQ(small.shared_bytes(), 16 * 64 * 2 * 4);
}

TEST(CudaRopeChoice, ColumnsThatPassThroughAreItemsToo) {
  // 32 of 128 columns rotate in 2 items; the other 96 columns take 6 more.
  EXPECT_EQ(chosen({64, 1, 1, 128}, 32).items, 8);
  EXPECT_EQ(chosen({64, 1, 1, 40}, 16).items, 1 + 2);
}

TEST(CudaRopeChoice, CallsWithoutWholePacksGoByPairs) {
  EXPECT_EQ(chosen({64, 1, 2, 128}, 128, 2).text(),
            "pairs, a block has 4 tokens: a tensor is not aligned to 16 bytes");
  EXPECT_EQ(chosen({64, 1, 2, 100}, 100).reason, std::string("heads of no multiple of 8 elements"));
  EXPECT_EQ(chosen({64, 1, 2, 128}, 8).reason, std::string("angles of no multiple of 16 columns"));
  const RopeChoice wide = chosen({64, 1, 1, 8192}, 8192);
  EXPECT_EQ(wide.text(),
            "pairs, a block has 1 token and no angles in shared memory: the angles of a token do "
            "not fit in 48 KiB");
  EXPECT_EQ(wide.shared_bytes(), 0);
  EXPECT_EQ(chosen({0, 1, 2, 128}, 128).text(), "none: a tensor without elements");
}

TEST(CudaRopeChoice, PackedHeads) {
  const MetadataTensor qkv(TE_FL_BF16, {64, 2, 4, 2 * 128 + 128 + 64});
  const MetadataTensor q(TE_FL_BF16, {64, 2, 8, 128}), k(TE_FL_BF16, {64, 2, 4, 128});
  const MetadataTensor v(TE_FL_BF16, {64, 2, 4, 64}), freqs(TE_FL_F32, {64, 1, 1, 128});
  te_fl_fused_qkv_rope_forward_args a{};
  a.qkv_input = &qkv.t, a.q_out = &q.t, a.k_out = &k.t, a.v_out = &v.t;
  a.q_freqs = a.k_freqs = &freqs.t;
  a.q_dim = 256, a.k_dim = 128, a.v_dim = 64;
  const RopeProblem p = rope_problem(a);
  EXPECT_EQ(p.heads, 4 * 4);
  const RopeChoice same = choose_rope(p);
  EXPECT_TRUE(same.same);
  EXPECT_EQ(same.columns, 128);
  EXPECT_EQ(same.text(),
            "packs, a block has 4 tokens: eight elements are read and written at once");
  const MetadataTensor other(TE_FL_F32, {128, 1, 1, 64});
  a.k_freqs = &other.t;
  const RopeChoice two = choose_rope(rope_problem(a));
  EXPECT_FALSE(two.same);
  EXPECT_EQ(two.columns, 128 + 64);
}

}  // namespace
}  // namespace te_fl::cuda::rope_choice_test
