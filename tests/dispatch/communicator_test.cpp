// Communicators as arguments of ops (rule R29): they are validated and are part of plan keys. A
// call with a communicator runs only on implementations of the plugin that created it, and is never
// staged.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/op/op_table.hpp"
#include "registry/plan_cache.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FarDevice;
using testing::tensor_arg;

// test::gather, a collective: out receives x of all ranks.
struct GatherArgs {
  uint32_t struct_size = sizeof(GatherArgs);
  const te_fl_tensor* x = nullptr;
  const te_fl_tensor* out = nullptr;
  const te_fl_communicator* group = nullptr;
  const te_fl_communicator* other = nullptr;
};

const te_fl_op_schema& gather_schema() {
  static const te_fl_arg_desc x = tensor_arg("x", TE_FL_IN, offsetof(GatherArgs, x));
  static const te_fl_arg_desc out = tensor_arg("out", TE_FL_OUT, offsetof(GatherArgs, out));
  static const auto communicator = [](const char* name, uint32_t offset, uint32_t flags) {
    te_fl_arg_desc d;
    d.type = TE_FL_ARG_COMMUNICATOR;
    d.flags = flags;
    d.offset = offset;
    d.name = name;
    return d;
  };
  static const te_fl_arg_desc group = communicator("group", offsetof(GatherArgs, group), 0);
  static const te_fl_arg_desc other =
      communicator("other", offsetof(GatherArgs, other), TE_FL_ARG_OPTIONAL | TE_FL_ARG_LATER);
  static const te_fl_arg_desc* const args[] = {&x, &out, &group, &other};
  static const te_fl_op_schema schema = {
      .args_size = sizeof(GatherArgs),
      .least_args_size = offsetof(GatherArgs, other),
      .arg_count = 4,
      .args = args,
      .name = "test::gather",
      .summary = "Gathers.",
      .formula = "out = x",
      .source = "tests",
  };
  return schema;
}

class Communicators : public ::testing::Test {
 protected:
  void SetUp() override {
    fake.desc.later_args = "other";
    ASSERT_OK(registry.register_op(fake.desc, "test", "acme"));
    op = *registry.find("test::gather");
    x = Tensor::zeros({4}, DType::kF32).value();
    out = Tensor::zeros({4}, DType::kF32).value();
    args.x = x.c();
    args.out = out.c();
    args.group = &group;
    group.device = {TE_FL_DEVICE_CPU, 0};
    group.rank = 1;
    group.size = 4;
    group.id = 7;
    group.maker = "test";
  }
  Status call() { return manager.call(op, &args); }
  std::string key() {
    te_fl_context context{};
    registry::PlanKey made;
    made.set(*core::CompiledOp::compile(*registry.schema(op)).value(), &args, context);
    return std::string(made.text());
  }

  OpRegistry registry;
  OpManager manager{registry};
  Fake fake{"reference.acme", gather_schema()};
  OpId op{};
  Tensor x, out;
  GatherArgs args;
  te_fl_communicator group, second;
};

TEST_F(Communicators, ReachTheImplementation) {
  const te_fl_communicator* seen = nullptr;
  fake.run_body = [&](const te_fl_context&, const void* raw) -> te_fl_status {
    seen = static_cast<const GatherArgs*>(raw)->group;
    return TE_FL_OK;
  };
  for (int i = 0; i < 3; ++i) ASSERT_OK(call());
  EXPECT_EQ(seen, &group);
  group.device = {TE_FL_DEVICE_CUDA_HOST, 0};  // host memory is allowed, too
  EXPECT_OK(call());
}

TEST_F(Communicators, AreChecked) {
  const auto refused = [&](auto spoil) {
    const te_fl_communicator before = group;
    spoil(group);
    const Status status = call();
    group = before;
    return status;
  };
  EXPECT_FAILS(refused([&](auto& g) { g.struct_size = 8; }), kInvalidArgument,
               "argument 'group' has struct_size 8");
  EXPECT_FAILS(refused([&](auto& g) { g.rank = 4; }), kInvalidArgument,
               "argument 'group' is rank 4 of 4, must be one of 0 to size - 1");
  EXPECT_FAILS(refused([&](auto& g) { g.rank = -1; }), kInvalidArgument, "is rank -1 of 4");
  EXPECT_FAILS(refused([&](auto& g) { g.rank = g.size = 0; }), kInvalidArgument, "rank 0 of 0");
  EXPECT_FAILS(refused([&](auto& g) { g.id = 0; }), kInvalidArgument, "has id 0");
  EXPECT_FAILS(refused([&](auto& g) { g.maker = nullptr; }), kInvalidArgument, "names no maker");
  EXPECT_FAILS(refused([&](auto& g) {
                 g.device = {TE_FL_DEVICE_CUDA, 1};
               }),
               kInvalidArgument, "is of cuda:1, must be of the call's device cpu (rule R29)");
  args.group = nullptr;
  EXPECT_FAILS(call(), kInvalidArgument,
               "argument 'group' is missing (NULL), must be a te_fl_communicator");
  EXPECT_EQ(fake.runs.load(), 0);
}

TEST_F(Communicators, ThatCameLaterAreOptional) {
  GatherArgs first = args;
  first.struct_size = offsetof(GatherArgs, other);
  ASSERT_OK(manager.call(op, &first));
  ASSERT_OK(call());
  second = group;
  second.id = 8;
  args.other = &second;
  ASSERT_OK(call());
  ASSERT_OK(registry.unregister_op("test::gather", "reference.acme"));
  fake.desc.later_args = nullptr;  // an implementation without support for later_args
  ASSERT_OK(registry.register_op(fake.desc, "test", "acme"));
  EXPECT_FAILS(call(), kUnsupported, "other");
  args.other = nullptr;
  ASSERT_OK(call());
}

TEST_F(Communicators, HavePlansOfTheirOwn) {
  const std::string mine = key();
  second = group;
  args.group = &second;
  EXPECT_EQ(key(), mine) << "where the struct lies is none of a plan's business";
  second.id = 8;
  EXPECT_NE(key(), mine);
  args.group = &group;
  args.other = &second;
  EXPECT_NE(key(), mine);
}

TEST_F(Communicators, CallsWithOneAreNotStaged) {
  FarDevice far;
  const Device device = devices::add(&far.desc).value();
  x = Tensor::zeros({4}, DType::kF32, device).value();
  out = Tensor::zeros({4}, DType::kF32, device).value();
  args.x = x.c();
  args.out = out.c();
  group.device = device.to_c();
  group.device_provider = device.provider;
  EXPECT_FAILS(call(), kUnsupported, "argument 'group' is a communicator");
  EXPECT_EQ(fake.runs.load(), 0);
  x = out = Tensor();
  ASSERT_OK(devices::remove(device));
}

TEST_F(Communicators, OnlyImplementationsOfTheirProviderRun) {
  Fake better{"default.other", gather_schema()};
  better.desc.later_args = "other";
  ASSERT_OK(registry.register_op(better.desc, "another", "acme"));
  ASSERT_OK(call());
  EXPECT_EQ(fake.runs, 1);
  EXPECT_EQ(better.runs, 0) << "the default's priority does not count: it is not its communicator";
  second = group;
  second.id = 8;
  second.maker = "another";
  args.group = &second;
  ASSERT_OK(call());
  EXPECT_EQ(better.runs, 1) << "routes are kept by maker";
  second.id = 9;
  second.maker = "nobody";
  EXPECT_FAILS(
      call(), kUnsupported,
      "the communicator was made by plugin nobody, whose implementations alone can use it");
  PolicySettings strict;
  strict.strict = true;
  const PolicyScope scope(strict);
  args.group = &group;
  EXPECT_OK(call()) << "the first choice is among those of the maker";
}

TEST_F(Communicators, SchemasSayHowTheyMayBe) {
  te_fl_arg_desc wrong = *gather_schema().args[2];
  const te_fl_arg_desc* const list[] = {gather_schema().args[0], gather_schema().args[1], &wrong};
  te_fl_op_schema schema = gather_schema();
  schema.name = "test::wrong";
  schema.arg_count = 3;
  schema.args = list;
  wrong.role = TE_FL_OUT;
  EXPECT_FAILS(registry.declare_op(schema).status(), kInvalidArgument,
               "a communicator's role must be in");
  wrong.role = TE_FL_IN;
  wrong.flags = TE_FL_ARG_LATER;
  EXPECT_FAILS(registry.declare_op(schema).status(), kInvalidArgument, "must be optional");
  wrong.flags = 0;
  wrong.type = 31;
  EXPECT_FAILS(registry.declare_op(schema).status(), kInvalidArgument, "type 31 is unknown");
}

}  // namespace
}  // namespace te_fl
