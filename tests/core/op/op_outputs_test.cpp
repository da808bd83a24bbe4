// OutputRules: extents and dtypes of outputs, derived from schemas of the catalogue.
#include "te_fl/op_outputs.hpp"

#include <gtest/gtest.h>

#include "op_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/dropout.h"
#include "te_fl/ops/moe.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/softmax.h"

namespace te_fl::core {
namespace {

struct Described {
  std::optional<Shape> shape;  // none: the extents do not follow
  std::optional<DType> dtype;
};

// Describes the named output of a call.
Described described(const char* op, const void* args, std::string_view output) {
  const te_fl_op_schema* schema = catalogue_schema(op);
  const auto rules = OutputRules::compile(*schema).value();
  uint32_t index = 0;
  while (output != schema->args[index]->name) ++index;
  const OutputForm form = rules->form(args, index);
  Described result{std::nullopt, form.dtype};
  if (form.rank < 0) return result;
  Shape shape;
  for (int d = 0; d < form.rank; ++d) {
    shape.push_back(rules->value(form.extents[static_cast<size_t>(d)], args));
  }
  result.shape = shape;
  return result;
}

Tensor of(std::initializer_list<int64_t> shape, DType dtype) {
  return Tensor::zeros(shape, dtype).value();
}

TEST(OutputRules, LeadingDimensionsAndTheirProduct) {
  const Tensor x = of({2, 3, 8}, DType::kBF16), gamma = f32({8});
  te_fl_layernorm_fwd_args args;
  args.x = x, args.gamma = gamma;
  EXPECT_EQ(described("layernorm_fwd", &args, "z").shape, (Shape{2, 3, 8}));
  EXPECT_EQ(described("layernorm_fwd", &args, "z").dtype, DType::kBF16);
  EXPECT_EQ(described("layernorm_fwd", &args, "mu").shape, (Shape{6}));
  EXPECT_EQ(described("layernorm_fwd", &args, "mu").dtype, DType::kF32);
}

TEST(OutputRules, AnotherArgumentsDType) {
  const Tensor dz = of({2, 8}, DType::kF16), x = of({2, 8}, DType::kBF16), gamma = f32({8});
  const Tensor row = f32({2});
  te_fl_layernorm_bwd_args args;
  args.dz = dz, args.x = x, args.gamma = gamma, args.mu = row, args.rsigma = row;
  EXPECT_EQ(described("layernorm_bwd", &args, "dx").dtype, DType::kBF16);
  EXPECT_EQ(described("layernorm_bwd", &args, "dgamma").dtype, DType::kF32);
  EXPECT_EQ(described("layernorm_bwd", &args, "dgamma").shape, (Shape{8}));
}

TEST(OutputRules, AFactorADivisorAndASum) {
  const Tensor x = f32({3, 5, 8}), scales = f32({15});
  te_fl_swiglu_args glu;
  glu.input = x;
  EXPECT_EQ(described("swiglu", &glu, "output").shape, (Shape{3, 5, 4}));
  te_fl_dswiglu_args back;
  back.grad = x;
  EXPECT_EQ(described("dswiglu", &back, "output").shape, (Shape{3, 5, 16}));
  te_fl_dropout_fwd_args drop;
  drop.input = x;
  EXPECT_EQ(described("dropout_fwd", &drop, "mask").shape, (Shape{15}));
  const Tensor odd = f32({3, 3});
  drop.input = odd;
  EXPECT_EQ(described("dropout_fwd", &drop, "mask").shape, (Shape{2})) << "9 bits are 2 bytes";
  const Tensor splits = of({4}, DType::kI64);
  te_fl_splits_to_offsets_args offsets;
  offsets.splits = splits;
  EXPECT_EQ(described("splits_to_offsets", &offsets, "offsets").shape, (Shape{5}));
  offsets.leading_zero = 0;
  EXPECT_EQ(described("splits_to_offsets", &offsets, "offsets").shape, (Shape{4}));
}

TEST(OutputRules, WhatDoesNotFollow) {
  const Tensor tokens = f32({6, 4}), indices = of({6, 2}, DType::kI32), rows = f32({9, 4});
  te_fl_moe_permute_fwd_args args;
  args.input = tokens, args.indices = indices;
  EXPECT_EQ(described("moe_permute_fwd", &args, "output").shape, std::nullopt);
  EXPECT_EQ(described("moe_permute_fwd", &args, "output").dtype, DType::kF32);
  EXPECT_EQ(described("moe_permute_fwd", &args, "row_id_map").shape, (Shape{2, 6}));
  const te_fl_splits_to_offsets_args nothing;
  EXPECT_EQ(described("splits_to_offsets", &nothing, "offsets").dtype, std::nullopt);
  te_fl_moe_permute_by_mask_fwd_args masked;
  masked.output = rows;
  EXPECT_EQ(described("moe_permute_by_mask_fwd", &masked, "permuted_probs").shape, (Shape{9}))
      << "a given output determines names too";
}

TEST(OutputRules, ATensorOfTheWrongRankDeterminesNothing) {
  const Tensor x = f32({2, 3});
  te_fl_scaled_softmax_forward_args args;
  args.input = x;
  EXPECT_EQ(described("scaled_softmax_forward", &args, "output").shape, std::nullopt);
}

}  // namespace
}  // namespace te_fl::core
