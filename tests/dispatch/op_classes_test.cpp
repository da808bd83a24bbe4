// Tests that dispatch neither stages nor verifies a collective and has no fallback for it, and that
// ids of removed ops stay unused.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "registry/registration.hpp"
#include "staging/staging_fixture.hpp"
#include "te_fl/watch.hpp"

namespace te_fl {
namespace {

using testing::contains;
using testing::Fake;
using testing::five_schema;
using testing::FiveArgs;
using testing::FiveCall;
using testing::Staging;

// test::all_five: test::five as a collective, which all ranks run.
const te_fl_op_schema& collective_schema() {
  static const te_fl_op_schema schema = [] {
    te_fl_op_schema s = five_schema();
    s.name = "test::all_five";
    s.flags = TE_FL_SCHEMA_COLLECTIVE;
    return s;
  }();
  return schema;
}

class Collective : public Staging {
 protected:
  Fake there{"vendor.there", collective_schema()}, here{"default.here", collective_schema()},
      other{"default.another", collective_schema()}, slow{"reference.slow", collective_schema()};
};

TEST_F(Collective, IsNotStaged) {
  add(here);
  const FiveArgs args = five();
  EXPECT_FAILS(call(args), kUnsupported, "a collective cannot run on copies");
  EXPECT_EQ(here.runs, 0);
  PolicySettings named;  // not even if the policy names the host implementation
  named.per_op["test::all_five"] = {PolicyToken{PolicyToken::Type::kKind, Kind::kDefault, ""}};
  const PolicyScope scope(named);
  EXPECT_FAILS(call(args), kUnsupported, "a collective cannot run on copies");
  EXPECT_EQ(here.runs, 0);
}

TEST_F(Collective, DoesNotFallBack) {
  here.desc.priority = 200;
  add(here);
  add(other);
  FiveCall five;
  for (const te_fl_status refusal : {static_cast<te_fl_status>(TE_FL_UNSUPPORTED),
                                     static_cast<te_fl_status>(TE_FL_INTERNAL | TE_FL_CLEAN)}) {
    here.run_status = refusal;
    here.run_text = "my peer is gone";
    const Status status = manager.call(op, &five.args);
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(contains(status.to_string(), "my peer is gone")) << status.to_string();
    EXPECT_EQ(other.runs, 0);
  }
  here.run_status = TE_FL_OK;
  ASSERT_OK(manager.call(op, &five.args));
}

TEST_F(Collective, ItsFirstChoiceIsWhatTheCallsMetadataSays) {
  here.desc.priority = 200;
  here.desc.dtypes = TE_FL_BIT(TE_FL_F16);  // a condition that all ranks evaluate equally
  add(here);
  add(other);
  FiveCall five;
  ASSERT_OK(manager.call(op, &five.args));
  EXPECT_EQ(here.runs, 0);
  EXPECT_EQ(other.runs, 1);
}

TEST_F(Collective, IsNotVerified) {
  add(here);
  add(slow);
  FiveCall five;
  ASSERT_OK(environment::set("TE_FL_VERIFY", "1"));
  const VerifyCounts before = verify_counts();
  ASSERT_OK(manager.call(op, &five.args));
  const VerifyCounts after = verify_counts();
  ASSERT_OK(environment::unset("TE_FL_VERIFY"));
  EXPECT_EQ(here.runs, 1);
  EXPECT_EQ(slow.runs, 0) << "it would wait for ranks that do not run it twice";
  EXPECT_EQ(after.skipped - before.skipped, 1u);
  EXPECT_EQ(after.agreed, before.agreed);
}

// ---- op ids

using registry::Table;

TEST(OpIds, WhatLiesBetweenThemIsNoOp) {
  Table table;
  const auto compiled = [](const te_fl_op_schema& schema) {
    return std::shared_ptr<const core::CompiledOp>(core::CompiledOp::compile(schema).value());
  };
  te_fl_op_schema first = five_schema(), third = five_schema();
  first.name = "first", third.name = "third";
  registry::add_with_id(table, 0, compiled(first));
  registry::add_with_id(table, 2, compiled(third));
  EXPECT_EQ(table.row(1), nullptr);
  EXPECT_EQ(table.row(3), nullptr);
  EXPECT_EQ(registry::find_op(table, "third").value(), 2u);
  EXPECT_EQ(registry::op_names(table), (std::vector<std::string>{"first", "third"}));
  // A custom op never gets the id of a removed op.
  EXPECT_EQ(registry::add_op(table, five_schema(), registry::Naming::kOfPlugins).value(), 3u);
  const Fake fake("default.x");
  const auto impl = registry::make_implementation(&fake.desc, "test", "acme", nullptr).value();
  EXPECT_FALSE(registry::lists(table, *impl));
  ASSERT_OK(registry::add_implementation(table, impl));
  EXPECT_TRUE(registry::lists(table, *impl));
  EXPECT_EQ(registry::remove_implementations(table, [](const auto&) { return true; }).size(), 1u);
  EXPECT_EQ(table.row(1), nullptr);
}

TEST(OpIds, AreThoseOfTheTable) {
  // The ids compiled into programs are those of the registry.
  OpRegistry registry;
  const auto ids = core::catalogue_ids();
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(registry.find(core::catalogue()[i]->name).value().index, ids[i]);
    if (i > 0) {
      EXPECT_LT(ids[i - 1], ids[i]);
    }
  }
  EXPECT_EQ(registry.find("gelu").value(), op::gelu);
  EXPECT_EQ(registry.find("cross_entropy_bwd").value(), op::cross_entropy_bwd);
}

}  // namespace
}  // namespace te_fl
