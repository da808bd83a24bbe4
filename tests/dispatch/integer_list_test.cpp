// Tests an op with a list of integers as an argument. The list is part of the plan key, a copied
// call owns a copy of the list, and a saved call contains the list.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/op/op_table.hpp"
#include "dispatch/staging/staging_plan.hpp"
#include "dispatch/watch/call_file.hpp"
#include "registry/arguments.hpp"
#include "registry/plan_cache.hpp"
#include "support/dispatch_fixture.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

// test::split: the list gives the number of rows of x in each part.
struct SplitArgs {
  uint32_t struct_size = sizeof(SplitArgs);
  const te_fl_tensor* x = nullptr;
  const te_fl_tensor* y = nullptr;
  const int64_t* rows = nullptr;
  int64_t rows_count = 0;
};

const te_fl_op_schema& split_schema() {
  static const te_fl_arg_desc x = testing::tensor_arg("x", TE_FL_IN, offsetof(SplitArgs, x));
  static const te_fl_arg_desc y = testing::tensor_arg("y", TE_FL_OUT, offsetof(SplitArgs, y));
  static const te_fl_arg_desc rows = [] {
    te_fl_arg_desc a;
    a.type = TE_FL_ARG_I64_LIST;
    a.offset = offsetof(SplitArgs, rows);
    a.count_offset = offsetof(SplitArgs, rows_count);
    a.name = "rows";
    a.min = 0, a.max = 1 << 20;
    return a;
  }();
  static const te_fl_arg_desc* const args[] = {&x, &y, &rows};
  static const te_fl_op_schema schema = [] {
    te_fl_op_schema s;
    s.args_size = s.least_args_size = sizeof(SplitArgs);
    s.arg_count = 3;
    s.args = args;
    s.name = "test::split";
    s.summary = s.formula = s.source = "tests";
    return s;
  }();
  return schema;
}

class IntegerList : public ::testing::Test {
 protected:
  void SetUp() override {
    args.x = x, args.y = y;
    args.rows = rows.data();
    args.rows_count = static_cast<int64_t>(rows.size());
  }
  std::string key() const {
    te_fl_context context{};
    registry::PlanKey made;
    made.set(*core::CompiledOp::compile(split_schema()).value(), &args, context);
    return std::string(made.text());
  }

  Tensor x = Tensor::zeros({4, 2}, DType::kF32).value(),
         y = Tensor::zeros({4, 2}, DType::kF32).value();
  std::vector<int64_t> rows{1, 3};
  SplitArgs args;
};

TEST_F(IntegerList, ReachesTheImplementationChecked) {
  OpRegistry registry;
  OpManager manager(registry);
  testing::Fake fake("default.split", split_schema());
  std::vector<int64_t> seen;
  fake.run_body = [&](const te_fl_context&, const void* raw) {
    const auto& a = *static_cast<const SplitArgs*>(raw);
    seen.assign(a.rows, a.rows + a.rows_count);
    return TE_FL_OK;
  };
  ASSERT_TRUE(registry.register_op(fake.desc, "test", "acme").ok());
  const OpId op = registry.find("test::split").value();
  EXPECT_TRUE(manager.call(op, &args).ok());
  EXPECT_EQ(seen, rows);
  rows[1] = -3;
  const Status refused = manager.call(op, &args);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.to_string().find("'rows'[1] is -3, must be from 0"), std::string::npos)
      << refused.to_string();
  rows[1] = 4;  // the memo of earlier calls must not accept this list
  EXPECT_TRUE(manager.call(op, &args).ok());
  EXPECT_EQ(seen, rows);
}

TEST_F(IntegerList, IsPartOfAPlansKey) {
  const std::string plain = key();
  const std::vector<int64_t> moved = rows;
  args.rows = moved.data();
  EXPECT_EQ(key(), plain) << "its address is not";
  rows[1] = 4;
  args.rows = rows.data();
  EXPECT_NE(key(), plain);
  rows[1] = 3;
  args.rows_count = 1;
  EXPECT_NE(key(), plain);
}

TEST_F(IntegerList, IsShownInMessages) {
  rows = {1, 3, 5, 7};
  args.rows = rows.data(), args.rows_count = 4;
  const std::string text = registry::describe_arguments(split_schema(), &args);
  EXPECT_NE(text.find("rows (4: 1; 3; 5; ...)"), std::string::npos) << text;
}

TEST_F(IntegerList, CopiesOfACallHaveTheirOwn) {
  const auto op = core::CompiledOp::compile(split_schema()).value();
  dispatch::StagingPlan plan;
  ASSERT_TRUE(
      plan.make(*op, &args, Device{}, te_fl_rng{}, dispatch::StagingPlan::Scope::kAll).ok());
  std::vector<uint64_t> memory(plan.buffer_bytes() / 8 + 64);
  plan.bind(memory.data());
  SplitArgs copy;
  std::memcpy(&copy, plan.args(), sizeof copy);
  EXPECT_NE(copy.rows, rows.data());
  const std::vector<int64_t> before = rows;
  rows = {9, 9};
  EXPECT_EQ(std::vector<int64_t>(copy.rows, copy.rows + copy.rows_count), before);
}

TEST_F(IntegerList, ADescriptionBringsItBack) {
  // A saved description is read with the process-wide registry.
  testing::Fake fake("default.split", split_schema());
  ASSERT_TRUE(OpRegistry::instance().register_op(fake.desc, "test", "acme").ok());
  const auto op = core::CompiledOp::compile(split_schema()).value();
  dispatch::StagingPlan plan;
  ASSERT_TRUE(
      plan.make(*op, &args, Device{}, te_fl_rng{}, dispatch::StagingPlan::Scope::kAll).ok());
  std::vector<char> memory(plan.buffer_bytes() + 256);
  auto* base =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  plan.bind(base);
  const nlohmann::json description = dispatch::describe_call(*op, plan, base, Device{}, false);
  EXPECT_EQ(description.at("args").at("rows"), (nlohmann::json{1, 3}));
  const auto filed = dispatch::FiledCall::make(description, "test");
  ASSERT_TRUE(filed.ok()) << filed.status().to_string();
  SplitArgs back;
  std::memcpy(&back, (*filed)->bind(base, Device{}, base), sizeof back);
  EXPECT_EQ(std::vector<int64_t>(back.rows, back.rows + back.rows_count), rows);
  nlohmann::json damaged = description;
  damaged["args"]["rows"] = "many";
  EXPECT_EQ(dispatch::FiledCall::make(damaged, "test").status().code(), StatusCode::kDataLoss);
  ASSERT_TRUE(OpRegistry::instance().unregister_op("test::split", "default.split").ok());
}

}  // namespace
}  // namespace te_fl
