// Tests which implementation dispatch chooses for a call, by policy, supports() and policy scopes.
// resolve() and explain() must report the same choice.
#include <gtest/gtest.h>

#include <thread>

#include "op_manager_fixture.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

using testing::Dispatch;
using testing::Fake;
using testing::impl;
using testing::list;
using testing::prefer;
using testing::strict;

TEST_F(Dispatch, StrictRunsTheFirstChoiceOrFails) {
  const PolicyScope scope(strict());
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
  portable.run_status = TE_FL_UNSUPPORTED;
  portable.run_text = "not today";
  const Status s = call();
  EXPECT_EQ(ran(), "default.p");
  EXPECT_FAILS(s, kUnsupported, "not today");
  EXPECT_FAILS(s, kUnsupported, "TE_FL_STRICT");
  EXPECT_FAILS(s, kUnsupported, "vendor.v");  // the message lists the other candidates, too
}

TEST_F(Dispatch, StrictTakesItsFirstChoiceWithinThePreference) {
  PolicySettings s = prefer(Kind::kVendor);
  s.strict = true;
  s.deny_vendors = {"acme"};
  const PolicyScope scope(s);
  EXPECT_FAILS(call(), kUnsupported, "no vendor implementation");
  EXPECT_EQ(ran(), "");
}

TEST_F(Dispatch, PreferPutsAKindFirst) {
  {
    const PolicyScope scope(prefer(Kind::kVendor));
    ASSERT_OK(call());
    EXPECT_EQ(ran(), "vendor.v");
    vendor.run_status = TE_FL_UNSUPPORTED;
    ASSERT_OK(call());
    EXPECT_EQ(ran(), "default.p vendor.v");  // ran() lists them in the fixture's order, default
                                             // first
  }
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, APerOpListIsExclusive) {
  const PolicyScope scope(list({impl("reference.r"), impl("vendor.v")}));
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "reference.r");
  reference.run_status = vendor.run_status = TE_FL_UNSUPPORTED;
  const Status s = call();
  EXPECT_EQ(ran(), "vendor.v reference.r");
  EXPECT_FAILS(s, kUnsupported, "the policy's list for this op does not name it");
  EXPECT_FAILS(s, kUnsupported, "'default.p' could run it if the policy allowed it");
}

TEST_F(Dispatch, AListForAMisspeltOpFailsCallsUnderIt) {
  PolicySettings s;
  s.per_op["layernorm_fw"] = {impl("vendor.v")};
  {
    const PolicyScope scope(s);
    EXPECT_FAILS(
        call(), kInvalidArgument,
        "a list for op 'layernorm_fw', which does not exist; did you mean 'layernorm_fwd'?");
    EXPECT_EQ(ran(), "");
  }
  s.per_op.clear();
  s.per_op["acme::later"] = {impl("vendor.v")};  // may name an op that is registered later
  const PolicyScope scope(s);
  ASSERT_OK(call());
}

TEST_F(Dispatch, InPlaceCallsPassOverThoseThatDoNotWorkInPlace) {
  for (Fake* f : {&portable, &vendor, &reference}) {
    f->desc.flags &= ~uint32_t{TE_FL_OP_IN_PLACE_OK};
    reregister(*f);
  }
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
  five.args.out = five.args.b;
  EXPECT_FAILS(
      call(), kUnsupported,
      "it does not work in place (TE_FL_OP_IN_PLACE_OK), and output 'out' has the memory of 'b'");
  EXPECT_EQ(ran(), "");
  vendor.desc.flags |= TE_FL_OP_IN_PLACE_OK;
  reregister(vendor);
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "vendor.v");
  five.args.out = five.tensors[4];
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, VendorListsFilter) {
  PolicySettings s = prefer(Kind::kVendor);
  s.deny_vendors = {"acme"};
  const PolicyScope scope(s);
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
}

void asks(Fake& f) {
  f.desc.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  f.with_supports();
}

TEST_F(Dispatch, SupportsIsCalledUntilItAcceptsUnlessStatic) {
  asks(portable);
  reregister(portable);
  portable.supports_status = TE_FL_UNSUPPORTED;
  portable.supports_text = "odd sizes are not supported";
  ASSERT_OK(call());
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "vendor.v vendor.v");
  EXPECT_EQ(portable.asked.load(), 2);
  portable.supports_status = TE_FL_OK;
  ASSERT_OK(call());
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p default.p");
  EXPECT_EQ(portable.asked.load(), 3) << "the answer to the very call is known";
}

// Rule R10: dispatch may skip supports() for a call equal to one that it accepted, and for no other
// call.
TEST_F(Dispatch, SupportsIsCalledAgainForEveryOtherCall) {
  asks(portable);
  reregister(portable);
  ASSERT_OK(call());
  const auto asked_of_this = [&](const char* what) {
    portable.asked = 0;
    ASSERT_OK(call()) << what;
    EXPECT_EQ(portable.asked.load(), 1) << what;
    ASSERT_OK(call()) << what;
    EXPECT_EQ(portable.asked.load(), 1) << what << ", again";
  };
  Tensor elsewhere = Tensor::zeros({2, 3}, DType::kF32).value();
  five.args.out = elsewhere;
  asked_of_this("an output elsewhere");
  five.args.out = five.tensors[4];
  asked_of_this("the first output again");
  {
    PolicySettings s;
    s.deterministic = true;
    const PolicyScope scope(s);
    asked_of_this("a deterministic call");
  }
  asked_of_this("one that is not");
  reregister(portable);
  asked_of_this("an implementation that came anew");
  ASSERT_OK(manager.reload());
  asked_of_this("settings that were read again");
  portable.supports_status = TE_FL_UNSUPPORTED;
  portable.supports_text = "odd sizes are not supported";
  vendor.run_status = reference.run_status = TE_FL_UNSUPPORTED;
  five.args.out = elsewhere;
  EXPECT_FAILS(call(), kUnsupported, "odd sizes are not supported");
}

TEST_F(Dispatch, NoCandidateListsEveryReason) {
  portable.desc.dtypes = TE_FL_BIT(TE_FL_F16);
  vendor.desc.device_types = uint64_t{1} << TE_FL_DEVICE_CUDA;
  reference.desc.later_args = nullptr;
  for (Fake* f : {&portable, &vendor, &reference}) reregister(*f);
  five.args.gain = 2;
  const Status s = call();
  EXPECT_FAILS(
      s, kUnsupported,
      "default.p (tests, priority 150): dtype f32 of a is not supported (it supports f16)");
  EXPECT_FAILS(s, kUnsupported,
               "vendor.v (tests, priority 100): the tensors are on cpu, it supports cuda");
  EXPECT_FAILS(s, kUnsupported,
               "reference.r (tests, priority 50): the call sets gain, which the op gained later");
  EXPECT_FAILS(s, kUnsupported, "gain");
  EXPECT_FAILS(s, kUnsupported, "way out");
  five.args.gain = 1;
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "reference.r");
}

TEST_F(Dispatch, AnInvalidEnvironmentMakesCallsFail) {
  ASSERT_OK(environment::set("TE_FL_PER_OP", "test::five=nonsense"));
  EXPECT_FAILS(call(), kInvalidArgument, "nonsense");
  EXPECT_FAILS(manager.resolve(op, &five.args).status(), kInvalidArgument, "nonsense");
  ASSERT_OK(environment::set("TE_FL_PER_OP", "test::five=vendor:acme"));
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "vendor.v");
  ASSERT_OK(environment::unset("TE_FL_PER_OP"));
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, GlobalPolicyAndCapturedScopesReachOtherThreads) {
  set_global_policy(SelectionPolicy::intern(prefer(Kind::kVendor)));
  CapturedPolicy captured;
  {
    const PolicyScope scope(prefer(Kind::kReference));
    captured = CapturedPolicy::capture();
    std::thread([&] { ASSERT_OK(call()); }).join();  // a scope applies to its own thread only
    EXPECT_EQ(ran(), "vendor.v");
  }
  std::thread([&] {
    const auto scope = captured.enter();
    ASSERT_OK(call());
  }).join();
  EXPECT_EQ(ran(), "reference.r");
  clear_global_policy();
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, ACapturedScopeOutlivesItsPlugin) {
  CapturedPolicy captured;
  {
    const PolicyScope scope(
        list({impl("vendor.v"), {PolicyToken::Type::kKind, Kind::kReference, ""}}));
    captured = CapturedPolicy::capture();
    ASSERT_OK(call());
  }
  EXPECT_EQ(ran(), "vendor.v");
  ASSERT_OK(registry.unregister_op("test::five", "vendor.v"));
  const auto scope = captured.enter();
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "reference.r");
}

TEST_F(Dispatch, FirstChoiceIsTheImplementationThatCallTriesFirst) {
  portable.desc.flags |= TE_FL_OP_CHEAP_EPILOGUES;
  reregister(portable);
  for (int i = 0; i < 2; ++i) {  // the second iteration uses the cached choice
    const auto first = manager.first_choice(op, &five.args);
    ASSERT_OK(first);
    EXPECT_STREQ(first->impl_id, "default.p");
    EXPECT_EQ(first->flags, portable.desc.flags);
  }
  const char* const id = manager.first_choice(op, &five.args)->impl_id;
  {
    const PolicyScope scope(prefer(Kind::kVendor));
    EXPECT_STREQ(manager.first_choice(op, &five.args)->impl_id, "vendor.v");
    EXPECT_EQ(manager.first_choice(op, &five.args)->flags, vendor.desc.flags);
  }
  // impl_id is the registered string itself, at the same address.
  EXPECT_EQ(manager.first_choice(op, &five.args)->impl_id, id);
  EXPECT_EQ(ran(), "");
}

TEST_F(Dispatch, FirstChoiceIsNoneIfThatRefuses) {
  portable.with_supports();
  reregister(portable);
  EXPECT_STREQ(manager.first_choice(op, &five.args)->impl_id, "default.p");
  portable.supports_status = TE_FL_UNSUPPORTED;
  portable.supports_text = "too small";
  const auto first = manager.first_choice(op, &five.args);
  ASSERT_OK(first);
  EXPECT_EQ(first->impl_id, nullptr);
  EXPECT_EQ(first->flags, 0u);
  EXPECT_EQ(ran(), "");
  five.args.out = nullptr;
  EXPECT_FAILS(manager.first_choice(op, &five.args).status(), kInvalidArgument, "out");
  EXPECT_FAILS(manager.first_choice(OpId{}, &five.args).status(), kNotFound, "no op number");
}

TEST_F(Dispatch, ResolveSaysWhatCallDoes) {
  vendor.with_supports();
  reregister(vendor);
  vendor.supports_status = TE_FL_UNSUPPORTED;
  vendor.supports_text = "too small";
  const PolicyScope scope(prefer(Kind::kVendor));
  const auto r = manager.resolve(op, &five.args);
  ASSERT_OK(r);
  EXPECT_EQ(r->op, "test::five");
  EXPECT_EQ(r->impl_id, "default.p");
  EXPECT_EQ(r->policy, "prefer=vendor");
  ASSERT_EQ(r->candidates.size(), 3u);
  EXPECT_EQ(r->candidates[0].impl_id, "vendor.v");
  EXPECT_FALSE(r->candidates[0].accepted);
  EXPECT_EQ(r->candidates[0].reason, "too small");
  EXPECT_TRUE(r->candidates[1].chosen);
  EXPECT_TRUE(r->candidates[2].accepted);
  EXPECT_FALSE(r->candidates[2].chosen);
  EXPECT_EQ(ran(), "");
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, ExplainNeedsNoArguments) {
  vendor.desc.scalings = TE_FL_BIT(TE_FL_SCALING_TENSOR);
  reregister(vendor);
  CallProfile profile;
  profile.dtypes = {DType::kF32};
  auto r = manager.explain(op, profile);
  ASSERT_OK(r);
  EXPECT_EQ(r->impl_id, "default.p");
  EXPECT_HAS(r->candidates[1].reason, "scaling none is not supported");
  profile.device = {TE_FL_DEVICE_CUDA, 0, 0};
  r = manager.explain(op, profile);
  ASSERT_OK(r);
  EXPECT_EQ(r->impl_id, "");
  for (const Candidate& c : r->candidates) EXPECT_HAS(c.reason, "cuda:0");
}

}  // namespace
}  // namespace te_fl
