// Tests the list of copies for a staged call, which te-fl derives from the call's tensors without
// accessing their memory: the addresses here have no memory behind them.
#include "dispatch/staging/staging_plan.hpp"

#include <gtest/gtest.h>

#include <deque>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::dispatch {
namespace {

using te_fl::testing::tensor_arg;

// Two inputs, two outputs, a flag that keeps the second output's contents, and a third output that
// accumulates.
struct Args {
  uint32_t struct_size = sizeof(Args);
  const te_fl_tensor* a = nullptr;
  const te_fl_tensor* b = nullptr;
  const te_fl_tensor* y = nullptr;
  const te_fl_tensor* z = nullptr;
  const te_fl_tensor* keep = nullptr;
  const te_fl_tensor* sum = nullptr;
  const te_fl_tensor* here = nullptr;
  int32_t accumulate = 0;
};

const core::CompiledOp& compiled() {
  static const auto op = [] {
    static te_fl_arg_desc a = tensor_arg("a", TE_FL_IN, offsetof(Args, a)),
                          b = tensor_arg("b", TE_FL_IN, offsetof(Args, b)),
                          y = tensor_arg("y", TE_FL_OUT, offsetof(Args, y)),
                          z = tensor_arg("z", TE_FL_OUT, offsetof(Args, z)),
                          keep = tensor_arg("keep", TE_FL_IN, offsetof(Args, keep)),
                          sum = tensor_arg("sum", TE_FL_INOUT, offsetof(Args, sum)),
                          here = tensor_arg("here", TE_FL_OUT, offsetof(Args, here)), flag{};
    for (te_fl_arg_desc* d : {&a, &b, &y, &z, &keep, &sum, &here}) {
      d->shape = "any";
      d->flags = TE_FL_ARG_OPTIONAL;
    }
    b.flags |= TE_FL_ARG_ANY_MEMORY;
    z.inout_if = "keep";
    sum.inout_if = "accumulate";
    here.flags |= TE_FL_ARG_HOST;
    flag.struct_size = sizeof flag;
    flag.type = TE_FL_ARG_BOOL;
    flag.offset = offsetof(Args, accumulate);
    flag.name = "accumulate";
    static const te_fl_arg_desc* const args[] = {&a, &b, &y, &z, &keep, &sum, &here, &flag};
    te_fl_op_schema s{};
    s.struct_size = sizeof s;
    s.args_size = s.least_args_size = sizeof(Args);
    s.arg_count = 8;
    s.args = args;
    s.name = "test::plan";
    s.summary = s.formula = s.source = "tests";
    return core::CompiledOp::compile(s).value();
  }();
  return *op;
}

const Device kChip{TE_FL_DEVICE_CUDA, 0, 0};

class Plan : public ::testing::Test {
 protected:
  struct Held {
    te_fl_tensor tensor;
    std::vector<int64_t> shape, strides;
  };
  // Returns an F32 tensor at `address` in the chip's memory.
  const te_fl_tensor* at(uintptr_t address, std::vector<int64_t> shape,
                         std::vector<int64_t> strides = {}, Device device = kChip) {
    Held& h = held.emplace_back();
    h.shape = std::move(shape);
    h.strides = std::move(strides);
    h.tensor.dl.data = reinterpret_cast<void*>(address);
    h.tensor.dl.device = device.to_c();
    h.tensor.dl.ndim = static_cast<int32_t>(h.shape.size());
    h.tensor.dl.dtype = {TE_FL_CODE_FLOAT, 32, 1};
    h.tensor.dl.shape = h.shape.data();
    h.tensor.dl.strides = h.strides.empty() ? nullptr : h.strides.data();
    h.tensor.dl.byte_offset = 0;
    return &h.tensor;
  }
  Status make() { return plan.make(compiled(), &args, kChip, {}); }
  // Formats copies as "address+bytes ...".
  static std::string text(const std::vector<StagedCopy>& copies) {
    std::string out;
    for (const StagedCopy& c : copies) {
      out += (out.empty() ? "" : " ") + std::to_string(reinterpret_cast<uintptr_t>(c.device)) +
             "+" + std::to_string(c.bytes);
    }
    return out;
  }
  const Args& seen() const { return *static_cast<const Args*>(plan.args()); }
  static uintptr_t data(const te_fl_tensor* t) {
    return reinterpret_cast<uintptr_t>(t->dl.data) + t->dl.byte_offset;
  }

  std::deque<Held> held;
  Args args;
  StagingPlan plan;
};

TEST_F(Plan, InterleavedOutputsThatLeaveNoGapAreOneCopy) {
  // y and z are the left and right half of the columns of one [3, 4] buffer.
  args.y = at(4096, {3, 2}, {4, 1});
  args.z = at(4104, {3, 2}, {4, 1});
  ASSERT_OK(make());
  EXPECT_EQ(text(plan.in()), "");
  EXPECT_EQ(text(plan.out()), "4096+48");
  EXPECT_EQ(plan.bytes(), 48u);
  plan.bind(reinterpret_cast<void*>(uintptr_t{1} << 20));
  EXPECT_EQ(data(seen().z) - data(seen().y), 8u);
}

TEST_F(Plan, AHalfOfThemIsWrittenRowByRow) {
  args.y = at(4096, {3, 2}, {4, 1});
  ASSERT_OK(make());
  EXPECT_EQ(text(plan.out()), "4096+8 4112+8 4128+8");
}

TEST_F(Plan, GapsInsideRowsAndBetweenThem) {
  args.y = at(4096, {2, 3, 2}, {100, 10, 5});
  ASSERT_OK(make());
  EXPECT_EQ(text(plan.out()),
            "4096+4 4116+4 4136+4 4156+4 4176+4 4196+4 "
            "4496+4 4516+4 4536+4 4556+4 4576+4 4596+4");
}

TEST_F(Plan, OverlappingInputsMoveOnceAndNeighboursApart) {
  args.a = at(1000, {10});    // ends at 1040
  args.b = at(1020, {10});    // ends at 1060
  args.keep = at(1060, {1});  // adjacent, but perhaps another allocation
  ASSERT_OK(make());
  EXPECT_EQ(text(plan.in()), "1000+60 1060+4");
  plan.bind(reinterpret_cast<void*>(uintptr_t{1} << 20));
  EXPECT_EQ(data(seen().b) - data(seen().a), 20u);
  EXPECT_EQ(data(seen().a) % 256, 1000u % 256);
  EXPECT_EQ(data(seen().keep) % 256, 1060u % 256);
  EXPECT_GE(data(seen().keep), data(seen().a) + 60);
  EXPECT_LE(data(seen().keep) + 4, (uintptr_t{1} << 20) + plan.buffer_bytes());
}

TEST_F(Plan, AnInputInsideAnOutputKeepsItsPlace) {
  args.y = at(4096, {100});
  args.a = at(4096 + 40, {5});
  args.b = at(4096 + 400 + 256, {5});
  ASSERT_OK(make());
  EXPECT_EQ(text(plan.in()), "4136+20 4752+20");
  EXPECT_EQ(text(plan.out()), "4096+400");
  plan.bind(reinterpret_cast<void*>(uintptr_t{1} << 20));
  EXPECT_EQ(data(seen().a) - data(seen().y), 40u);
}

TEST_F(Plan, ContentsThatMatterAreCopiedIn) {
  args.z = at(4096, {4});
  args.sum = at(8192, {4});
  ASSERT_OK(make());
  EXPECT_EQ(text(plan.in()), "");
  EXPECT_EQ(text(plan.out()), "4096+16 8192+16");

  args.accumulate = 1;
  args.keep = at(1024, {1});
  StagingPlan again;
  ASSERT_OK(again.make(compiled(), &args, kChip, {}));
  EXPECT_EQ(text(again.in()), "1024+4 4096+16 8192+16");
  EXPECT_EQ(again.bytes(), 68u);
}

TEST_F(Plan, WhatIsOnTheHostStaysTheCallersOwn) {
  args.a = at(1000, {4}, {}, Device{});
  args.b = at(2000, {4}, {}, Device{TE_FL_DEVICE_CUDA_HOST, 0, 0});
  args.here = at(3000, {4}, {}, Device{});
  args.y = at(4096, {4});
  ASSERT_OK(make());
  EXPECT_EQ(text(plan.in()), "");
  EXPECT_EQ(seen().a, args.a);
  EXPECT_EQ(seen().b, args.b);
  EXPECT_EQ(seen().here, args.here);
  EXPECT_NE(seen().y, args.y);
}

TEST_F(Plan, TensorsOfAnotherDeviceAreRefused) {
  args.a = at(1000, {4});
  args.b = at(2000, {4}, {}, Device{TE_FL_DEVICE_CUDA, 1, 0});
  const Status s = make();
  EXPECT_FAILS(s, kUnsupported, "argument 'b' is on cuda:1");
}

TEST_F(Plan, EmptyTensorsHaveAnAddressAndNoCopies) {
  args.a = at(1000, {0, 5});
  args.y = at(0, {0, 5});
  ASSERT_OK(make());
  EXPECT_EQ(plan.bytes(), 0u);
  EXPECT_GT(plan.buffer_bytes(), 0u);
  plan.bind(reinterpret_cast<void*>(uintptr_t{1} << 20));
  EXPECT_NE(seen().a->dl.data, nullptr);
  EXPECT_EQ(seen().y->dl.data, nullptr);
}

TEST_F(Plan, ATransposedOutputIsDense) {
  args.y = at(4096, {4, 6}, {1, 4});
  ASSERT_OK(make());
  EXPECT_EQ(text(plan.out()), "4096+96");
}

TEST_F(Plan, TooManyRangesAreRefusedWithAReason) {
  args.y = at(4096, {StagingPlan::kMaxPieces + 1}, {2});
  const Status s = make();
  EXPECT_FAILS(s, kUnsupported, "1048577 separate pieces");
}

}  // namespace
}  // namespace te_fl::dispatch
