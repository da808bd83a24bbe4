// Two GEMM calls share a cached plan only if they agree in everything that the plan depends on.
#include "backends/cuda/gemm/gemm_plan_key.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "metadata_tensor.hpp"

namespace te_fl::cuda::gemm_plan_key_test {
namespace {

struct Product {
  MetadataTensor a, b, d, more;
  te_fl_generic_gemm_args args{};

  explicit Product(int dtype = TE_FL_BF16, uint64_t a_offset = 0, uint64_t d_offset = 0,
                   int64_t m = 64, int64_t n = 48, int64_t k = 32, int d_dtype = TE_FL_BF16)
      : a(dtype, {m, k}, a_offset),
        b(dtype, {n, k}),
        d(d_dtype, {m, n}, d_offset),
        more(TE_FL_BF16, {n}) {
    args.a = &a.t, args.b = &b.t, args.d = &d.t, args.trans_b = 1;
  }
  PlanKey key(int device = 0) const { return {device, args, make_problem(args)}; }
};

TEST(CudaGemmPlanKey, EqualProductsHaveOneKey) {
  const Product one, other;
  EXPECT_EQ(one.key(), other.key());
  EXPECT_EQ(PlanKey::Hash()(one.key()), PlanKey::Hash()(other.key()));
  Product scaled;  // alpha and beta are arguments of the call, not of the plan
  scaled.args.alpha = 0.5f;
  EXPECT_EQ(one.key(), scaled.key());
}

TEST(CudaGemmPlanKey, WhateverDiffersGivesAnotherKey) {
  std::vector<PlanKey> keys{Product().key(),
                            Product().key(1),
                            Product(TE_FL_BF16, 2).key(),
                            Product(TE_FL_BF16, 0, 16).key(),
                            Product(TE_FL_BF16, 0, 0, 65).key(),
                            Product(TE_FL_BF16, 0, 0, 64, 49).key(),
                            Product(TE_FL_BF16, 0, 0, 64, 48, 33).key(),
                            Product(TE_FL_F16).key(),
                            Product(TE_FL_BF16, 0, 0, 64, 48, 32, TE_FL_F32).key()};
  const auto with = [&](const std::function<void(Product&)>& change, int dtype = TE_FL_BF16) {
    Product p(dtype, 0, 0, 128, 128, 128);
    if (is_fp8(dtype))
      p.a.quantise(TE_FL_SCALING_TENSOR, true), p.b.quantise(TE_FL_SCALING_TENSOR, true);
    change(p);
    keys.push_back(p.key());
  };
  with([](Product&) {});
  with([](Product& p) { p.args.bias = &p.more.t; });
  with([](Product& p) { p.args.bias_grad = &p.more.t; });
  with([](Product& p) { p.args.bias_grad = &p.more.t, p.args.accumulate_bias_grad = 1; });
  with([](Product& p) { p.args.accumulate = 1; });
  with([](Product& p) { p.args.trans_a = 1; });
  with([](Product& p) { p.args.trans_b = 0; });
  with([](Product&) {}, TE_FL_F8E4M3);
  with([](Product& p) { p.args.use_split_accumulator = 1; }, TE_FL_F8E4M3);
  with([](Product& p) { p.a.quant.scaling = TE_FL_SCALING_BLOCK_1X128; }, TE_FL_F8E4M3);
  with([](Product& p) { p.a.quant.scaling = p.b.quant.scaling = TE_FL_SCALING_BLOCK_1X128; },
       TE_FL_F8E4M3);
  with(
      [](Product& p) {
        p.a.quant.scaling = TE_FL_SCALING_BLOCK_1X128;
        p.b.quant.scaling = TE_FL_SCALING_BLOCK_128X128;
      },
      TE_FL_F8E4M3);
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(keys[i] == keys[j]) << i << " and " << j;
  }
}

}  // namespace
}  // namespace te_fl::cuda::gemm_plan_key_test
