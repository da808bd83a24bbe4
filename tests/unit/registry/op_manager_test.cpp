#include "te_fl/op_manager.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "dispatch_fixture.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveArgs;
using testing::FiveCall;
using testing::save_schema;
using testing::SaveArgs;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#define EXPECT_FAILS(expr, expected_code, part)                        \
  do {                                                                 \
    const Status s_ = (expr);                                          \
    EXPECT_EQ(s_.code(), StatusCode::expected_code) << s_.to_string(); \
    EXPECT_TRUE(contains(s_.to_string(), part)) << s_.to_string();     \
  } while (false)

#define ASSERT_OK(expr)                     \
  do {                                      \
    const Status s_ = (expr);               \
    ASSERT_TRUE(s_.ok()) << s_.to_string(); \
  } while (false)

PolicySettings prefer(Kind kind) {
  PolicySettings s;
  s.prefer = kind;
  return s;
}

PolicySettings strict() {
  PolicySettings s;
  s.strict = true;
  return s;
}

PolicySettings list(std::vector<PolicyToken> tokens) {
  PolicySettings s;
  s.per_op["test::five"] = std::move(tokens);
  return s;
}

PolicyToken impl(std::string id) {
  return {PolicyToken::Type::kImpl, Kind::kDefault, std::move(id)};
}

// Three implementations of test::five, one of each kind.
class Dispatch : public ::testing::Test {
 protected:
  void SetUp() override {
    for (Fake* f : {&portable, &vendor, &reference})
      ASSERT_OK(registry.register_op(f->desc, "tests", "acme"));
    op = *registry.find("test::five");
  }
  Status call() { return manager.call(op, &five.args); }
  // Which ones ran since the last look: "default vendor", ...
  std::string ran() {
    std::string text;
    for (Fake* f : {&portable, &vendor, &reference}) {
      for (int n = f->runs.exchange(0); n > 0; --n)
        text += (text.empty() ? "" : " ") + std::string(f->desc.impl_id);
    }
    return text;
  }
  void reregister(Fake& f) {
    ASSERT_OK(registry.unregister_op("test::five", f.desc.impl_id));
    ASSERT_OK(registry.register_op(f.desc, "tests", "acme"));
  }

  OpRegistry registry;
  OpManager manager{registry};
  Fake portable{"default.p"}, vendor{"vendor.v"}, reference{"reference.r"};
  FiveCall five;
  OpId op;
};

TEST_F(Dispatch, TakesTheHighestPriority) {
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
  ASSERT_OK(registry.set_priority("test::five", "reference.r", 500));
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "reference.r");
  ASSERT_OK(registry.unregister_op("test::five", "reference.r"));
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, ACleanFailureMovesOn) {
  portable.run_status = TE_FL_UNSUPPORTED;
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p vendor.v");
  portable.run_status = TE_FL_OUT_OF_MEMORY | TE_FL_CLEAN;
  vendor.run_status = TE_FL_INTERNAL | TE_FL_CLEAN;
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p vendor.v reference.r");
}

TEST_F(Dispatch, ACallGoesOnAlongTheRouteThatItBeganWith) {
  portable.run_body = [this](const te_fl_context&, const void*) {
    EXPECT_TRUE(registry.set_priority("test::five", "reference.r", 500).ok());
    return te_fl_status{TE_FL_UNSUPPORTED};
  };
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p vendor.v");
  portable.run_body = nullptr;
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "reference.r");
}

TEST_F(Dispatch, AnUncleanFailureIsNotFollowed) {
  auto* out = five.tensors[4].data<float>();
  portable.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    for (int i = 0; i < 3; ++i) out[i] = 7;  // half of it
    ctx.errors->write(ctx.errors->host, "the device stumbled");
    return TE_FL_INTERNAL;
  };
  const Status s = call();
  EXPECT_EQ(ran(), "default.p");
  EXPECT_FAILS(s, kInternal, "the device stumbled");
  EXPECT_FAILS(s, kInternal, "'test::five'");
  EXPECT_FAILS(s, kInternal, "'default.p'");
  EXPECT_FAILS(s, kInternal, "a f32[2,3] cpu");
  EXPECT_EQ(out[2], 7);
}

TEST_F(Dispatch, ACallersMistakeReturnsAtOnce) {
  portable.run_status = TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN;
  portable.run_text = "gain is 3, must be 1 or 2";
  EXPECT_FAILS(call(), kInvalidArgument, "gain is 3");
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, AnExceptionIsAStatus) {
  portable.run_body = [](const te_fl_context&, const void*) -> te_fl_status {
    throw std::runtime_error("boom");
  };
  EXPECT_FAILS(call(), kInternal, "boom");
  EXPECT_FAILS(call(), kInternal, "R5");
  portable.run_body = [](const te_fl_context&, const void*) -> te_fl_status { throw 1; };
  EXPECT_FAILS(call(), kInternal, "R5");
}

TEST_F(Dispatch, UnknownCodesAreInternal) {
  portable.run_status = 999;
  EXPECT_FAILS(call(), kInternal, "999");
  EXPECT_EQ(ran(), "default.p");
}

TEST_F(Dispatch, CauseLinesAreKept) {
  portable.run_body = [](const te_fl_context& ctx, const void*) -> te_fl_status {
    ctx.errors->write(ctx.errors->host, "outer");
    ctx.errors->write(ctx.errors->host, "inner");
    ctx.errors->write(ctx.errors->host, nullptr);
    return TE_FL_DATA_LOSS;
  };
  EXPECT_FAILS(call(), kDataLoss, "outer\n  caused by: inner");
}

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
  EXPECT_FAILS(s, kUnsupported, "vendor.v");  // lists the others, too
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
    EXPECT_EQ(ran(), "default.p vendor.v");  // in the fixture's order
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
  EXPECT_FAILS(s, kUnsupported, "'default.p' could serve it if the policy let it");
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
  s.per_op["acme::later"] = {impl("vendor.v")};  // may be registered yet
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

TEST_F(Dispatch, SupportsIsAskedOnEveryCallUnlessStatic) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  portable.with_supports();
  reregister(portable);
  portable.supports_status = TE_FL_UNSUPPORTED;
  portable.supports_text = "odd sizes are not served";
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "vendor.v");
  portable.supports_status = TE_FL_OK;
  ASSERT_OK(call());
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "default.p default.p");
  EXPECT_EQ(portable.asked.load(), 3);
  portable.supports_status = TE_FL_UNSUPPORTED;
  vendor.run_status = reference.run_status = TE_FL_UNSUPPORTED;
  EXPECT_FAILS(call(), kUnsupported, "odd sizes are not served");
}

TEST_F(Dispatch, NoCandidateListsEveryReason) {
  portable.desc.dtypes = TE_FL_BIT(TE_FL_F16);
  vendor.desc.device_types = uint64_t{1} << TE_FL_DEVICE_CUDA;
  reference.desc.later_args = nullptr;
  for (Fake* f : {&portable, &vendor, &reference}) reregister(*f);
  five.args.gain = 2;
  const Status s = call();
  EXPECT_FAILS(s, kUnsupported,
               "default.p (tests, priority 150): dtype f32 of a is not served (it serves f16)");
  EXPECT_FAILS(s, kUnsupported,
               "vendor.v (tests, priority 100): the tensors are on cpu, it serves cuda");
  EXPECT_FAILS(s, kUnsupported,
               "reference.r (tests, priority 50): the call sets gain, which the op gained later");
  EXPECT_FAILS(s, kUnsupported, "gain");
  EXPECT_FAILS(s, kUnsupported, "way out");
  five.args.gain = 1;
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "reference.r");
}

TEST_F(Dispatch, AnOlderCallersShorterStructIsPassedAsItIs) {
  uint32_t seen = 0;
  portable.run_body = [&](const te_fl_context&, const void* args) -> te_fl_status {
    std::memcpy(&seen, args, sizeof seen);
    return TE_FL_OK;
  };
  five.args.struct_size = offsetof(FiveArgs, out) + sizeof(void*);
  ASSERT_OK(call());
  EXPECT_EQ(seen, five.args.struct_size);
}

TEST_F(Dispatch, DeterminismIsAskedFor) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_DETERMINISTIC};
  reregister(portable);
  uint32_t flags = 0;
  vendor.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    flags = ctx.flags;
    return TE_FL_OK;
  };
  PolicySettings s;
  s.deterministic = true;
  const PolicyScope scope(s);
  ASSERT_OK(call());
  EXPECT_EQ(ran(), "vendor.v");
  EXPECT_EQ(flags & TE_FL_CALL_DETERMINISTIC, uint32_t{TE_FL_CALL_DETERMINISTIC});
}

TEST_F(Dispatch, TheContextCarriesTheCall) {
  te_fl_context seen{};
  te_fl_rng seen_rng;
  portable.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    seen = ctx, seen_rng = *ctx.rng;
    return TE_FL_OK;
  };
  int stream = 0;
  CallOptions options;
  options.stream = &stream;
  options.rng = {.seed = 5, .offset = 6};
  ASSERT_OK(manager.call(op, &five.args, options));
  EXPECT_EQ(seen.struct_size, sizeof(te_fl_context));
  EXPECT_EQ(seen.stream, &stream);
  EXPECT_EQ(seen_rng.seed, 5u);
  EXPECT_EQ(seen_rng.offset, 6u);
  EXPECT_EQ(seen.device.type, TE_FL_DEVICE_CPU);
  EXPECT_EQ(seen.workspace, nullptr);
  EXPECT_EQ(seen.plan, nullptr);
}

TEST_F(Dispatch, WrongArgumentsNeverReachAnImplementation) {
  EXPECT_FAILS(manager.call(op, nullptr), kInvalidArgument, "null");
  five.args.b = nullptr;
  EXPECT_FAILS(call(), kInvalidArgument, "b");
  EXPECT_FAILS(call(), kInvalidArgument, "test::five");
  EXPECT_FAILS(manager.call(OpId{4000000}, &five.args), kNotFound, "4000000");
  EXPECT_FAILS(manager.call("test::fife", &five.args), kNotFound, "'test::five'");
  EXPECT_EQ(ran(), "");
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
    std::thread([&] { ASSERT_OK(call()); }).join();  // a scope is its thread's own
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
  for (int i = 0; i < 2; ++i) {  // the second one finds the route
    const auto first = manager.first_choice(op, &five.args);
    ASSERT_TRUE(first.ok()) << first.status().to_string();
    EXPECT_STREQ(first->impl_id, "default.p");
    EXPECT_EQ(first->flags, portable.desc.flags);
  }
  const char* const id = manager.first_choice(op, &five.args)->impl_id;
  {
    const PolicyScope scope(prefer(Kind::kVendor));
    EXPECT_STREQ(manager.first_choice(op, &five.args)->impl_id, "vendor.v");
    EXPECT_EQ(manager.first_choice(op, &five.args)->flags, vendor.desc.flags);
  }
  EXPECT_EQ(manager.first_choice(op, &five.args)->impl_id, id);  // the same address
  EXPECT_EQ(ran(), "");
}

TEST_F(Dispatch, FirstChoiceIsNoneIfThatRefuses) {
  portable.with_supports();
  reregister(portable);
  EXPECT_STREQ(manager.first_choice(op, &five.args)->impl_id, "default.p");
  portable.supports_status = TE_FL_UNSUPPORTED;
  portable.supports_text = "too small";
  const auto first = manager.first_choice(op, &five.args);
  ASSERT_TRUE(first.ok()) << first.status().to_string();
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
  ASSERT_TRUE(r.ok()) << r.status().to_string();
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
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->impl_id, "default.p");
  EXPECT_TRUE(contains(r->candidates[1].reason, "scaling none is not served"))
      << r->candidates[1].reason;
  profile.device = {TE_FL_DEVICE_CUDA, 0, 0};
  r = manager.explain(op, profile);
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->impl_id, "");
  for (const Candidate& c : r->candidates) EXPECT_TRUE(contains(c.reason, "cuda:0")) << c.reason;
}

TEST_F(Dispatch, AHandleFollowsPolicyAndRegistrations) {
  const auto handle = manager.prepare(op, &five.args);
  ASSERT_TRUE(handle.ok()) << handle.status().to_string();
  ASSERT_OK(handle->call(&five.args));
  ASSERT_OK(handle->call(&five.args));
  EXPECT_EQ(ran(), "default.p default.p");
  {
    const PolicyScope scope(prefer(Kind::kReference));
    ASSERT_OK(handle->call(&five.args));
    EXPECT_EQ(ran(), "reference.r");
  }
  ASSERT_OK(registry.unregister_op("test::five", "default.p"));
  ASSERT_OK(handle->call(&five.args));
  EXPECT_EQ(ran(), "vendor.v");
  FiveCall half(DType::kF16);
  EXPECT_FAILS(handle->call(&half.args), kInvalidArgument, "prepare another handle");
  five.args.a = nullptr;
  EXPECT_FAILS(handle->call(&five.args), kInvalidArgument, "a");
  EXPECT_FAILS(PreparedOp().call(&five.args), kFailedPrecondition, "empty");
}

TEST_F(Dispatch, AHandleThatNobodyServesIsNotMade) {
  for (Fake* f : {&portable, &vendor, &reference}) {
    f->desc.dtypes = TE_FL_BIT(TE_FL_F16);
    reregister(*f);
  }
  EXPECT_FAILS(manager.prepare(op, &five.args).status(), kUnsupported, "way out");
}

TEST_F(Dispatch, CountsWhatServed) {
  for (int i = 0; i < 3; ++i) ASSERT_OK(call());
  std::thread([&] {
    const PolicyScope scope(prefer(Kind::kVendor));
    for (int i = 0; i < 5; ++i) ASSERT_OK(call());
  }).join();
  const auto usage = manager.usage();
  ASSERT_EQ(usage.size(), 2u);
  EXPECT_EQ(usage[0].impl_id, "vendor.v");
  EXPECT_EQ(usage[0].calls, 5u);
  EXPECT_EQ(usage[1].op, "test::five");
  EXPECT_EQ(usage[1].calls, 3u);
  manager.reset_usage();
  EXPECT_TRUE(manager.usage().empty());
  ASSERT_OK(call());
  EXPECT_EQ(manager.usage()[0].calls, 1u);
}

TEST_F(Dispatch, AFailureIsNotCounted) {
  portable.run_status = TE_FL_UNSUPPORTED;
  ASSERT_OK(call());
  ASSERT_EQ(manager.usage().size(), 1u);
  EXPECT_EQ(manager.usage()[0].impl_id, "vendor.v");
}

TEST_F(Dispatch, OpsCallOps) {
  int depth = 0;
  portable.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    if (++depth > 3) return TE_FL_OK;
    const PolicyScope scope(prefer(depth % 2 == 0 ? Kind::kDefault : Kind::kVendor));
    const Status s = call();
    return s.to_c();
  };
  vendor.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    const PolicyScope scope(prefer(Kind::kDefault));
    return call().to_c();
  };
  ASSERT_OK(call());
  EXPECT_EQ(depth, 4);
}

TEST_F(Dispatch, NotThreadSafeImplementationsAreSerialised) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_THREAD_SAFE};
  reregister(portable);
  std::atomic<int> inside{0};
  int plain = 0;  // a race here is one in the lock
  portable.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    EXPECT_EQ(inside.fetch_add(1), 0);
    ++plain;
    inside.fetch_sub(1);
    return TE_FL_OK;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      FiveCall own;
      for (int i = 0; i < 500; ++i) EXPECT_TRUE(manager.call(op, &own.args).ok());
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(plain, 2000);
}

TEST_F(Dispatch, RecursionIntoANotThreadSafeImplementationIsNoDeadlock) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_THREAD_SAFE};
  reregister(portable);
  Status inner;
  portable.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    const PolicyScope scope(list({impl("default.p")}));
    inner = call();
    return TE_FL_OK;
  };
  ASSERT_OK(call());
  EXPECT_FAILS(inner, kBusy, "inside it already");
}

TEST_F(Dispatch, WorkspaceIsAlignedAndNested) {
  static size_t wanted;
  wanted = 1000;
  portable.desc.workspace = [](void*, const te_fl_context*, const void*,
                               size_t* bytes) -> te_fl_status {
    *bytes = wanted;
    return TE_FL_OK;
  };
  reregister(portable);
  std::vector<void*> blocks;
  int depth = 0;
  portable.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    EXPECT_EQ(ctx.workspace_bytes, wanted);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(ctx.workspace) % 256, 0u);
    std::memset(ctx.workspace, ++depth, ctx.workspace_bytes);
    blocks.push_back(ctx.workspace);
    const int mine = depth;
    if (depth == 1) {
      if (const Status s = call(); !s.ok()) return s.to_c();
    }
    EXPECT_EQ(*static_cast<const char*>(ctx.workspace), mine);  // the inner call had its own
    return TE_FL_OK;
  };
  ASSERT_OK(call());
  ASSERT_EQ(blocks.size(), 2u);
  EXPECT_NE(blocks[0], blocks[1]);
  wanted = 100;
  ASSERT_OK(call());
  EXPECT_EQ(blocks[2], blocks[0]);  // kept, not made again
  wanted = SIZE_MAX - 10;
  EXPECT_FAILS(call(), kOutOfMemory, "a workspace of");  // and nobody else serves instead
  EXPECT_EQ(vendor.runs.load(), 0);
}

// A pair of ops whose forward saves a record.
class Saved : public ::testing::Test {
 protected:
  void SetUp() override {
    for (Fake* f : {&fwd_a, &fwd_b, &bwd_a, &bwd_b})
      ASSERT_OK(registry.register_op(f->desc, f->desc.impl_id, "acme"));
    x = Tensor::zeros({4}, DType::kF32).value();
    y = Tensor::zeros({4}, DType::kF32).value();
    args.x = x;
    args.y = y;
    args.saved = &record;
  }
  OpRegistry registry;
  OpManager manager{registry};
  Fake fwd_a{"default.a", save_schema(true)}, fwd_b{"vendor.b", save_schema(true)};
  Fake bwd_a{"default.a", save_schema(false)}, bwd_b{"vendor.b", save_schema(false)};
  Tensor x, y;
  te_fl_saved record;
  SaveArgs args;
};

TEST_F(Saved, AnOpaqueRecordBindsTheBackwardToItsProducer) {
  fwd_b.run_body = [&](const te_fl_context&, const void* raw) -> te_fl_status {
    static_cast<const SaveArgs*>(raw)->saved->opaque = 1;
    return TE_FL_OK;
  };
  {
    const PolicyScope scope(prefer(Kind::kVendor));
    ASSERT_OK(manager.call("test::save_fwd", &args));
  }
  EXPECT_EQ(record.opaque, 1u);
  ASSERT_STREQ(record.producer, "vendor.b");
  PolicySettings denied;
  denied.deny_vendors = {"acme"};
  const PolicyScope scope(denied);
  ASSERT_OK(manager.call("test::save_bwd", &args));
  EXPECT_EQ(bwd_b.runs.load(), 1);
  EXPECT_EQ(bwd_a.runs.load(), 0);
  ASSERT_OK(registry.unregister_op("test::save_bwd", "vendor.b"));
  EXPECT_FAILS(manager.call("test::save_bwd", &args), kFailedPrecondition, "'vendor.b'");
  EXPECT_EQ(bwd_a.runs.load(), 0);
}

TEST_F(Saved, ARecordOfFixedFormatBindsNobody) {
  record.opaque = 1;  // left over from an earlier use
  ASSERT_OK(manager.call("test::save_fwd", &args));
  EXPECT_EQ(record.opaque, 0u);
  EXPECT_STREQ(record.producer, "default.a");
  const PolicyScope scope(prefer(Kind::kVendor));
  ASSERT_OK(manager.call("test::save_bwd", &args));
  EXPECT_EQ(bwd_b.runs.load(), 1);
}

TEST_F(Saved, AProducerThatCannotIsAnError) {
  record.opaque = 1;
  EXPECT_FAILS(manager.call("test::save_bwd", &args), kInvalidArgument, "producer");
  record.producer = "vendor.b";
  bwd_b.run_status = TE_FL_UNSUPPORTED;
  bwd_b.run_text = "not this shape";
  EXPECT_FAILS(manager.call("test::save_bwd", &args), kUnsupported, "not this shape");
  EXPECT_EQ(bwd_a.runs.load(), 0);
}

TEST_F(Saved, SavedBytesAsksTheChosenOne) {
  ASSERT_TRUE(manager.saved_bytes(*registry.find("test::save_fwd"), &args).ok());
  EXPECT_EQ(*manager.saved_bytes(*registry.find("test::save_fwd"), &args), 0u);
  fwd_b.desc.saved_bytes = [](void*, const te_fl_context*, const void*,
                              size_t* bytes) -> te_fl_status {
    *bytes = 77;
    return TE_FL_OK;
  };
  ASSERT_OK(registry.unregister_op("test::save_fwd", "vendor.b"));
  ASSERT_OK(registry.register_op(fwd_b.desc, "tests", "acme"));
  const PolicyScope scope(prefer(Kind::kVendor));
  EXPECT_EQ(*manager.saved_bytes(*registry.find("test::save_fwd"), &args), 77u);
}

}  // namespace
}  // namespace te_fl
