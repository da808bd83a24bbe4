// resolve() asks the chosen implementation for a description of its kernels (rule R31). An invalid
// answer counts as no description.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "op_manager_fixture.hpp"

namespace te_fl::testing {
namespace {

class Describe : public Dispatch {
 protected:
  // Re-registers the fakes with their current describe() and resolves the call.
  Decision resolved() {
    for (Fake* f : {&portable, &vendor, &reference}) reregister(*f);
    auto decision = manager.resolve(op, &five.args);
    EXPECT_OK(decision);
    return decision.ok() ? *decision : Decision();
  }
};

TEST_F(Describe, OnlyTheChosenImplementationIsDescribedAndNoneRuns) {
  portable.that_says("a loop, as the rows are short");
  vendor.that_says("somebody else");
  const Decision d = resolved();
  EXPECT_EQ(d.impl_id, "default.p");
  EXPECT_EQ(d.runs, "a loop, as the rows are short");
  EXPECT_EQ(d.silent, "");
  EXPECT_EQ(portable.described, 1);
  EXPECT_EQ(vendor.described, 0);
  EXPECT_EQ(ran(), "");
}

TEST_F(Describe, AnImplementationThatRefusesIsNotDescribed) {
  portable.that_says("nothing that it could").with_supports();
  portable.supports_status = TE_FL_UNSUPPORTED;
  vendor.that_says("the vendor's kernel");
  EXPECT_EQ(resolved().runs, "the vendor's kernel");
  EXPECT_EQ(portable.described, 0);
}

TEST_F(Describe, TheContextIsThatOfTheCallWithoutScratchAndPlan) {
  te_fl_context seen{};
  portable.with_describe([&](const te_fl_context& ctx, const te_fl_error_sink& text) {
    seen = ctx;
    EXPECT_NE(ctx.errors, nullptr);
    text.write(text.host, "x");
    return te_fl_status{TE_FL_OK};
  });
  PolicySettings settings;
  settings.deterministic = true;
  const PolicyScope scope(settings);
  EXPECT_EQ(resolved().runs, "x");
  EXPECT_EQ(seen.workspace, nullptr);
  EXPECT_EQ(seen.workspace_bytes, 0u);
  EXPECT_EQ(seen.plan, nullptr);
  EXPECT_EQ(seen.flags & TE_FL_CALL_DETERMINISTIC, uint32_t{TE_FL_CALL_DETERMINISTIC});
  EXPECT_NE(seen.rng, nullptr);
}

TEST_F(Describe, WhatIsWrittenIsOneLineOfBoundedLength) {
  portable.with_describe([](const te_fl_context&, const te_fl_error_sink& text) {
    text.write(text.host, "first\nline");
    text.write(text.host, nullptr);
    text.write(text.host, "");
    for (int i = 0; i < 1000; ++i) text.write(text.host, std::string(10000, 'x').c_str());
    return te_fl_status{TE_FL_OK};
  });
  const std::string runs = resolved().runs;
  EXPECT_EQ(runs.substr(0, 12), "first line x");
  EXPECT_LE(runs.size(), 410u);
  EXPECT_EQ(runs.substr(runs.size() - 4), "x...");
}

TEST_F(Describe, ACharacterOfSeveralBytesIsNotCut) {
  std::string words = "x";  // the 400th byte is the first of a three-byte character
  for (int i = 0; i < 200; ++i) words += "\u20ac";
  portable.that_says(words);
  const std::string runs = resolved().runs;
  EXPECT_EQ((runs.size() - 4) % 3, 0u) << runs;
  EXPECT_EQ(runs, words.substr(0, runs.size() - 3) + "...");
}

TEST_F(Describe, WhoeverDoesNotSayDoesNotSpoilTheAnswer) {
  EXPECT_EQ(resolved().silent, "it has no describe()");

  portable.with_describe(
      [](const te_fl_context&, const te_fl_error_sink&) { return te_fl_status{TE_FL_OK}; });
  Decision d = resolved();
  EXPECT_EQ(d.runs, "");
  EXPECT_EQ(d.silent, "its describe() wrote nothing");

  portable.with_describe([](const te_fl_context&, const te_fl_error_sink& text) -> te_fl_status {
    text.write(text.host, "half");
    throw std::runtime_error("too many kernels");
  });
  d = resolved();
  EXPECT_EQ(d.impl_id, "default.p");
  EXPECT_EQ(d.runs, "");
  EXPECT_HAS(d.silent, "describe() threw an exception (rule R5)");
  EXPECT_HAS(d.silent, "too many kernels");

  portable.with_describe([](const te_fl_context& ctx, const te_fl_error_sink& text) {
    text.write(text.host, "half");
    ctx.errors->write(ctx.errors->host, std::string(100000, 'y').c_str());
    return te_fl_status{TE_FL_INTERNAL};
  });
  d = resolved();
  EXPECT_EQ(d.runs, "");
  EXPECT_HAS(d.silent, "yyy");
  EXPECT_LE(d.silent.size(), 400u);
}

TEST_F(Describe, DescribeIsNotCalledForAProfileOrWhileACallRuns) {
  portable.that_says("a loop");
  reregister(portable);
  const auto decision = manager.explain(op, {});
  ASSERT_OK(decision);
  EXPECT_EQ(decision->runs + decision->silent, "");
  ASSERT_OK(call());
  EXPECT_EQ(portable.described, 0);
}

}  // namespace
}  // namespace te_fl::testing
