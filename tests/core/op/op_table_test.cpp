// CompiledOp on calls: the checks that apply to every tensor of a call, with their messages.
#include "core/op/op_table.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "op_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::core {
namespace {

TEST(Catalogue, EverySchemaCompiles) {
  ASSERT_EQ(catalogue().size(), catalogue_families().size());
  for (const te_fl_op_schema* schema : catalogue()) {
    const auto op = CompiledOp::compile(*schema);
    ASSERT_OK(op);
    EXPECT_STREQ((*op)->schema().name, schema->name);
    EXPECT_NE((*op)->schema().args, schema->args) << "a deep copy";
    EXPECT_EQ((*op)->difference(*schema), "") << schema->name;
  }
}

TEST(Catalogue, NullAndShortStructsAreRefusedByEveryOp) {
  for (const te_fl_op_schema* schema : catalogue()) {
    const auto op = CompiledOp::compile(*schema).value();
    EXPECT_HAS(check(*op, nullptr), "the argument struct is NULL");
    const uint32_t small = 4;
    EXPECT_HAS(check(*op, &small), "struct_size 4, must be at least");
    Signature ignored;
    EXPECT_FALSE(op->signature(nullptr, ignored));
    EXPECT_FALSE(op->signature(&small, ignored));
    // An all-zero struct of the right size must not crash. It is refused unless the op requires no
    // argument.
    std::vector<uint64_t> zero(schema->args_size / 8 + 1);
    std::memcpy(zero.data(), &schema->args_size, 4);
    check(*op, zero.data());
  }
}

class Gelu : public ::testing::Test {
 protected:
  std::unique_ptr<const CompiledOp> op = compile("gelu");
  Tensor x = f32({4, 8}), y = f32({4, 8});
  te_fl_activation_act_fwd_args args;
  void SetUp() override { args.input = x, args.output = y; }
  std::string with_output(const te_fl_tensor* t) {
    args.output = t;
    return check(*op, &args);
  }
  std::string with_input(const te_fl_tensor* t) {
    args.input = t;
    return check(*op, &args);
  }
};

TEST_F(Gelu, InOrder) {
  Signature s;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.dtypes, TE_FL_BIT(TE_FL_F32));
  EXPECT_EQ(s.scalings, 1u);
  EXPECT_EQ(s.later, 0u);
  EXPECT_EQ(s.device, Device{});
  args.struct_size = 4096;  // a struct of a newer caller
  EXPECT_EQ(check(*op, &args), "");
}

TEST_F(Gelu, MissingTensors) {
  EXPECT_EQ(with_input(nullptr),
            "gelu: argument 'input' is missing (NULL), must be a tensor f32|f16|bf16 of shape rule "
            "\"...\"");
}

TEST_F(Gelu, Shapes) {
  const Tensor wide = f32({4, 9}), flat = f32({32});
  EXPECT_EQ(
      with_output(wide),
      "gelu: argument 'output' has shape [4, 9], must be [4, 8] (rule \"...\", set by 'input')");
  EXPECT_EQ(
      with_output(flat),
      "gelu: argument 'output' has shape [32], must be [4, 8] (rule \"...\", set by 'input')");
}

TEST_F(Gelu, ScalarAndEmptyTensorsAreFine) {
  const Tensor a = f32({}), b = f32({}), c = f32({0, 8}), d = f32({0, 8});
  args.input = a, args.output = b;
  EXPECT_EQ(check(*op, &args), "");
  args.input = c, args.output = d;
  EXPECT_EQ(check(*op, &args), "");
  Raw hollow(c);
  hollow.t.dl.data = nullptr;
  EXPECT_EQ(with_input(&hollow.t), "") << "an empty tensor needs no data";
}

TEST_F(Gelu, MalformedTensors) {
  {
    Raw r(x);
    r.t.struct_size = 16;
    EXPECT_HAS(with_input(&r.t),
               "argument 'input' has te_fl_tensor struct_size 16, must be at least 64");
  }
  for (const int32_t rank : {-1, 9, INT32_MAX, INT32_MIN}) {
    Raw r(x);
    r.t.dl.ndim = rank;
    EXPECT_HAS(
        with_input(&r.t),
        ("argument 'input' has rank " + std::to_string(rank) + ", must be from 0 to 8").c_str());
  }
  {
    Raw r(x);
    r.t.dl.shape = nullptr;
    EXPECT_HAS(with_input(&r.t), "has rank 2 but its shape is NULL");
  }
  {
    Raw r(x);
    r.shape[0] = -4;
    EXPECT_HAS(with_input(&r.t), "f32[-4,8] cpu: extents must not be negative");
  }
  {
    Raw r(x);
    r.shape[0] = r.shape[1] = int64_t{1} << 31;
    EXPECT_HAS(with_input(&r.t), "does not fit 63 bits");
    r.shape[0] = 0;
    r.shape[1] = INT64_MAX;
    EXPECT_HAS(with_input(&r.t), "does not fit 63 bits");
  }
  {
    Raw r(x);
    r.t.dl.data = nullptr;
    EXPECT_HAS(with_input(&r.t), "NULL data pointer");
    r.t.dl.byte_offset = 64;
    EXPECT_HAS(with_input(&r.t), "NULL data pointer");
  }
  {
    Raw r(x);
    r.t.dl.byte_offset = 2;
    EXPECT_HAS(with_input(&r.t), "is not a multiple of the element's 4 bytes");
    r.t.dl.data = static_cast<char*>(r.t.dl.data) + 2;
    EXPECT_EQ(with_input(&r.t), "") << "data + byte_offset counts, not each";
  }
}

TEST_F(Gelu, DTypes) {
  const Tensor ints = Tensor::zeros({4, 8}, DType::kI32).value();
  EXPECT_EQ(
      with_input(ints),
      "gelu: argument 'input' is i32[4,8] cpu, its dtype must be f32|f16|bf16; convert it first");
  for (const te_fl_dtype bad :
       {te_fl_dtype{0, 0, 0}, te_fl_dtype{2, 32, 2}, te_fl_dtype{255, 255, 65535},
        te_fl_dtype{2, 33, 1}, te_fl_dtype{34, 32, 1}, te_fl_dtype{2, 128, 1}}) {
    Raw r(x);
    r.t.dl.dtype = bad;
    EXPECT_HAS(with_input(&r.t), "its dtype must be");
  }
}

TEST_F(Gelu, Strides) {
  Raw spaced(f32({4, 16}).slice(1, 0, 8).value());
  const Tensor memory = f32({4, 16});
  spaced.t.dl.data = memory.raw_data();
  spaced.strided();
  EXPECT_EQ(with_input(&spaced.t), "") << "inputs may have any strides that do not overlap";
  args.input = x;
  EXPECT_EQ(with_output(&spaced.t), "");
}

TEST_F(Gelu, BroadcastInputsAndOverlappingOutputs) {
  Raw r(x);
  r.strided().strides[0] = 0;
  EXPECT_HAS(with_input(&r.t),
             "argument 'input' is f32[4,8] cpu with a stride of 0 over an extent above 1");
  args.input = x;
  Raw o(y);
  o.strided().strides[0] = 0;
  EXPECT_HAS(with_output(&o.t), "an output with strides [0, 1] whose elements overlap in memory");
  o.shape[0] = 1;
  const Tensor one = f32({1, 8});
  args.input = one;
  EXPECT_EQ(with_output(&o.t), "") << "a stride over an extent of 1 is never taken";
}

TEST_F(Gelu, OverlapsThatNeedTheExactTest) {
  Raw o(y);
  o.strided().strides[0] = 4;  // rows of 8 elements start every 4 elements
  EXPECT_EQ(with_output(&o.t), "");
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_HAS(with_output(&o.t), "whose elements overlap in memory");
  o.strides[0] = 1, o.strides[1] = 4;
  EXPECT_EQ(with_output(&o.t), "") << "transposed, not overlapping";
  // Input and output overlap partly and start at different addresses.
  const Tensor buffer = f32({5, 8});
  const Tensor first = buffer.slice(0, 0, 4).value(), second = buffer.slice(0, 1, 5).value();
  args.input = first;
  EXPECT_HAS(with_output(second),
             "overlaps the memory of 'input' without beginning where it begins");
  args.input = x;
  EXPECT_EQ(with_output(x), "") << "in place is allowed";
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
  args.input = first;
  EXPECT_EQ(with_output(second), "") << "not looked for without TE_FL_VALIDATE";
}

TEST_F(Gelu, InterleavedViewsDoNotOverlap) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  const Tensor packed = f32({4, 16});
  const Tensor even = packed.slice(1, 0, 8).value(), odd = packed.slice(1, 8, 16).value();
  args.input = even;
  EXPECT_EQ(with_output(odd), "");
  const Tensor shifted = packed.slice(1, 4, 12).value();
  EXPECT_HAS(with_output(shifted), "overlaps the memory of 'input'");
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
}

TEST_F(Gelu, Devices) {
  Raw cuda(y);
  cuda.t.dl.device = {TE_FL_DEVICE_CUDA, 1};
  EXPECT_EQ(
      with_output(&cuda.t),
      "gelu: argument 'output' is on cuda:1, must be on cpu as 'input' is; copy it there first");
  Raw in(x);
  in.t.dl.device = {TE_FL_DEVICE_CUDA, 1};
  args.output = &cuda.t;
  EXPECT_EQ(with_input(&in.t), "");
  Signature s;
  ASSERT_TRUE(op->check(&args, s));
  EXPECT_EQ(s.device, (Device{TE_FL_DEVICE_CUDA, 1, 0}));
  in.t.provider = 3;
  EXPECT_HAS(with_input(&in.t), "must be on");
}

TEST_F(Gelu, PinnedMemoryGoesWithTheHostAndWithItsChip) {
  Raw pinned(x), cuda(y);
  pinned.t.dl.device = {TE_FL_DEVICE_CUDA_HOST, 0};
  args.input = &pinned.t;
  Signature s;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.device, Device{});
  cuda.t.dl.device = {TE_FL_DEVICE_CUDA, 0};
  args.output = &cuda.t;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.device, (Device{TE_FL_DEVICE_CUDA, 0, 0}));
  pinned.t.dl.device.type = TE_FL_DEVICE_ROCM_HOST;
  EXPECT_HAS(check(*op, &args), "must be on");
}

TEST_F(Gelu, QuantisedOutputs) {
  const Tensor delayed = quantised({4, 8});
  Signature s;
  args.output = delayed;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.scalings, 3u);
  EXPECT_EQ(s.dtypes, TE_FL_BIT(TE_FL_F32) | TE_FL_BIT(TE_FL_F8E4M3));
  {
    Raw r(delayed);
    r.quant.scale = nullptr;
    EXPECT_HAS(with_output(&r.t),
               "its scale is missing (NULL); set te_fl_quant.scale (delayed scaling) or");
    r.quant.flags = TE_FL_QUANT_COMPUTE_SCALE;
    EXPECT_HAS(with_output(&r.t), "its scale is missing (NULL)");
  }
  {
    Raw r(delayed);
    r.quant.amax = nullptr;
    EXPECT_EQ(with_output(&r.t), "") << "optional when the scale is given";
    r.quant.scale_inv = nullptr;
    EXPECT_HAS(with_output(&r.t),
               "its scale_inv is missing (NULL), where the reciprocal of its scale is written");
    r.quant.columnwise_scale_inv = delayed.scale_inv().raw_data();
    EXPECT_EQ(with_output(&r.t), "") << "one value serves both copies";
    r.quant.flags = TE_FL_QUANT_COMPUTE_SCALE;
    EXPECT_HAS(with_output(&r.t),
               "its scale_inv is missing (NULL), where the scale that the op derives is written");
    r.quant.scale_inv = delayed.scale_inv().raw_data();
    EXPECT_HAS(with_output(&r.t), "its amax is missing (NULL)");
  }
  {
    Raw r(delayed);
    r.t.quant = nullptr;
    EXPECT_EQ(with_output(&r.t),
              "gelu: argument 'output' is f8e4m3[4,8] cpu without quantisation data: its scale is "
              "missing; make it "
              "with Tensor::empty_quantized or set te_fl_tensor.quant");
    r.t.quant = &r.quant;
    r.quant.scaling = TE_FL_SCALING_NONE;
    EXPECT_HAS(with_output(&r.t), "without quantisation data");
  }
  {
    Raw r(delayed);
    r.quant.struct_size = 8;
    EXPECT_HAS(with_output(&r.t), "te_fl_quant struct_size 8, must be at least");
  }
  {
    Raw r(delayed);
    r.quant.scaling = 17;
    EXPECT_HAS(with_output(&r.t), "scaling mode 17 is unknown, must be none|tensor|");
  }
  {
    Raw r(delayed);
    r.quant.flags = 1u << 2;
    EXPECT_HAS(with_output(&r.t), "quantisation flags 4 hold bits that this te-fl does not know");
  }
  {
    Raw r(delayed);
    r.t.dl.dtype = to_c(DType::kF32);
    EXPECT_HAS(with_output(&r.t), "scaling tensor needs dtype f8e4m3|f8e5m2");
    r.t.dl.dtype = to_c(DType::kF8E4M3);
    r.quant.scaling = TE_FL_SCALING_NVFP4;
    EXPECT_HAS(with_output(&r.t), "scaling nvfp4 needs dtype f4e2m1");
  }
  {
    Raw r(delayed);
    r.strided().strides[0] = 16;
    EXPECT_HAS(with_output(&r.t), "quantised tensors must be contiguous");
  }
  {
    Raw r(delayed);
    r.quant.amax = reinterpret_cast<float*>(reinterpret_cast<char*>(r.quant.amax) + 1);
    EXPECT_HAS(with_output(&r.t), "must be aligned to their elements");
  }
  {
    Raw r(delayed);
    r.t.dl.data = nullptr;
    EXPECT_HAS(with_output(&r.t), "without row-wise data (dl.data) and without columnwise_data");
  }
}

TEST_F(Gelu, BlockScaledOutputs) {
  for (const Scaling scaling :
       {Scaling::kBlock1x128, Scaling::kBlock128x128, Scaling::kMXFP8, Scaling::kNVFP4}) {
    QuantSpec spec;
    spec.scaling = scaling;
    spec.dtype = scaling == Scaling::kNVFP4 ? DType::kF4E2M1 : DType::kF8E4M3;
    spec.columnwise = true;
    const Tensor q = quantised({4, 8}, spec);
    EXPECT_EQ(with_output(q), "") << name(scaling);
    Raw r(q);
    r.quant.scale_inv = nullptr;
    EXPECT_HAS(with_output(&r.t), "its scale_inv is missing (NULL)");
    r.quant.scale_inv = q.c()->quant->scale_inv;
    r.quant.columnwise_scale_inv = nullptr;
    EXPECT_HAS(with_output(&r.t), "its columnwise_scale_inv is missing (NULL)");
    r.quant.columnwise_data = nullptr;
    EXPECT_EQ(with_output(&r.t), "") << "row-wise alone";
    Raw column(q);
    column.t.dl.data = nullptr;
    EXPECT_EQ(with_output(&column.t), "") << "column-wise alone";
    if (scaling == Scaling::kNVFP4) {
      r.quant.amax = nullptr;
      EXPECT_HAS(with_output(&r.t), "its amax is missing (NULL)");
    }
  }
}

TEST_F(Gelu, AColumnwiseCopyMayHaveAnAmaxOfItsOwn) {
  for (const Scaling scaling :
       {Scaling::kTensor, Scaling::kBlock1x128, Scaling::kMXFP8, Scaling::kNVFP4}) {
    const bool second_level = describe(scaling).second_level != 0;
    EXPECT_EQ(second_level, scaling == Scaling::kNVFP4);
    QuantSpec spec;
    spec.scaling = scaling;
    spec.dtype = second_level ? DType::kF4E2M1 : DType::kF8E4M3;
    spec.columnwise = true;
    Raw r(quantised({4, 8}, spec));
    alignas(8) float own[2] = {};
    r.quant.columnwise_amax = own;
    if (!second_level) {
      EXPECT_HAS(with_output(&r.t), "it has a columnwise_amax, which requires column-wise data");
      continue;
    }
    EXPECT_EQ(with_output(&r.t), "");
    r.quant.columnwise_amax = reinterpret_cast<float*>(reinterpret_cast<char*>(own) + 1);
    EXPECT_HAS(with_output(&r.t), "must be aligned to their elements");
    r.quant.columnwise_amax = own;
    r.quant.amax = nullptr;
    EXPECT_HAS(with_output(&r.t), "its amax is missing (NULL)") << "the row-wise copy's";
    r.t.dl.data = nullptr;
    EXPECT_EQ(with_output(&r.t), "");
    r.quant.columnwise_data = nullptr;
    r.t.dl.data = own;
    EXPECT_HAS(with_output(&r.t), "it has a columnwise_amax") << "of no copy";
  }
}

}  // namespace
}  // namespace te_fl::core
