// Staging runs host implementations on host copies of a device's tensors, if only the device can
// access its memory. Tests when staging is chosen, when it is refused, and its counters.
#include <chrono>
#include <thread>

#include "staging_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl {
namespace {

using testing::contains;
using testing::Fake;
using testing::FiveArgs;
using testing::Staging;

class StagingChoice : public Staging {};

PolicySettings listed(const char* op, PolicyToken::Type type, Kind kind, std::string name = "") {
  PolicySettings s;
  s.per_op[op] = {PolicyToken{type, kind, std::move(name)}};
  return s;
}

// ---- order and refusals

TEST_F(Staging, WhoIsStagedSaysWhatItRunsForTheCopies) {
  int32_t type = -1;
  host.with_describe([&](const te_fl_context& ctx, const te_fl_error_sink& text) {
    type = ctx.device.type;
    text.write(text.host, "a loop on the copies");
    return te_fl_status{TE_FL_OK};
  });
  add(host);
  const FiveArgs args = five();
  far.forget();
  const auto decision = manager.resolve(op, &args);
  ASSERT_OK(decision);
  EXPECT_EQ(decision->runs, "a loop on the copies");
  EXPECT_EQ(type, int32_t{TE_FL_DEVICE_CPU});
  EXPECT_TRUE(far.reads().empty());
  EXPECT_EQ(host.runs, 0);
}

TEST_F(StagingChoice, NativeImplementationsComeFirst) {
  add(host);
  add(native);
  const FiveArgs args = five();
  ASSERT_OK(call(args));
  EXPECT_EQ(native.runs.load(), 1);
  native.run_status = TE_FL_UNSUPPORTED;
  native.run_body = nullptr;
  ASSERT_OK(call(args));  // falls back to the host implementation
  EXPECT_EQ(host.runs.load(), 1);
  PolicySettings preferred;
  preferred.prefer = Kind::kDefault;
  native.run_status = TE_FL_OK;
  {
    const PolicyScope scope(preferred);  // must not rank host implementations before native ones
    ASSERT_OK(call(args));
    EXPECT_EQ(host.runs.load(), 1);
  }
  PolicySettings denied;
  denied.deny_vendors = {"acme"};
  const PolicyScope scope(denied);
  ASSERT_OK(call(args));
  EXPECT_EQ(host.runs.load(), 2);
}

TEST_F(StagingChoice, ReferenceImplIdAndListsNameIt) {
  for (Fake* f : {&host, &reference, &native}) add(*f);
  const FiveArgs args = five();
  PolicySettings preferred;
  preferred.prefer = Kind::kReference;
  const PolicySettings policies[] = {
      preferred, listed("test::five", PolicyToken::Type::kKind, Kind::kReference),
      listed("test::five", PolicyToken::Type::kImpl, Kind::kDefault, "reference.host")};
  int runs = 0;
  for (PolicySettings s : policies) {
    for (const bool strict : {false, true}) {
      s.strict = strict;
      const PolicyScope scope(s);
      ASSERT_OK(call(args));
      EXPECT_EQ(reference.runs.load(), ++runs);
      const Decision r = manager.resolve(op, &args).value();
      EXPECT_EQ(r.impl_id, "reference.host");
      EXPECT_TRUE(r.candidates[0].staged);
      EXPECT_HAS(r.candidates[0].reason, "chosen: staged");
      const auto first = manager.first_choice(op, &args);
      ASSERT_OK(first);
      EXPECT_EQ(first->impl_id, nullptr);
    }
  }
  EXPECT_EQ(native.runs.load(), 0);
}

TEST_F(StagingChoice, StrictRefusesItUnlessNamed) {
  add(host);
  const FiveArgs args = five();
  PolicySettings strict;
  strict.strict = true;
  const PolicyScope scope(strict);
  EXPECT_FAILS(call(args), kUnsupported, "strict (TE_FL_STRICT) allows that only if");
  EXPECT_FAILS(call(args), kUnsupported, "could run it if the policy allowed it");
  EXPECT_EQ(host.runs.load(), 0);
}

TEST_F(StagingChoice, AGraphCannotHoldIt) {
  add(host);
  const FiveArgs args = five();
  ASSERT_OK(call(args));
  far.capturing = true;
  EXPECT_FAILS(call(args), kUnsupported, "into which copies to the host cannot go");
  EXPECT_HAS(manager.resolve(op, &args).value().candidates[0].reason, "captured");
  const PolicyScope scope(listed("test::five", PolicyToken::Type::kKind, Kind::kDefault));
  EXPECT_FAILS(call(args), kUnsupported, "into which copies to the host cannot go");
  far.capturing = false;
  ASSERT_OK(call(args));
}

TEST_F(StagingChoice, TheCapCountsBothWays) {
  add(host);
  const FiveArgs args = five();  // four inputs and one output of 16 bytes each
  PolicySettings s;
  s.max_staged_bytes = 80;
  {
    const PolicyScope scope(s);
    ASSERT_OK(call(args));
  }
  s.max_staged_bytes = 79;
  {
    const PolicyScope scope(s);
    EXPECT_FAILS(call(args), kUnsupported, "moves 80 bytes, more than the 79 of");
    EXPECT_FAILS(call(args), kUnsupported, "raise that, or load a plugin that supports the op");
    const Decision r = manager.resolve(op, &args).value();
    EXPECT_EQ(r.impl_id, "");
    EXPECT_HAS(r.candidates[0].reason, "moves 80 bytes");
    EXPECT_EQ(host.runs.load(), 1);
  }
  s.max_staged_bytes = 0;
  const PolicyScope scope(s);
  EXPECT_FAILS(call(args), kUnsupported, "forbidden (TE_FL_MAX_STAGED_BYTES is 0)");
}

TEST_F(StagingChoice, TheCapComesFromTheEnvironmentToo) {
  add(host);
  const FiveArgs args = five();
  ASSERT_OK(environment::set("TE_FL_MAX_STAGED_BYTES", "10"));
  EXPECT_FAILS(call(args), kUnsupported, "more than the 10 of TE_FL_MAX_STAGED_BYTES");
  ASSERT_OK(environment::set("TE_FL_MAX_STAGED_BYTES", "0"));
  EXPECT_FAILS(call(args), kUnsupported, "TE_FL_MAX_STAGED_BYTES is 0");
  ASSERT_OK(environment::unset("TE_FL_MAX_STAGED_BYTES"));
  ASSERT_OK(call(args));
  EXPECT_FAILS(environment::set("TE_FL_MAX_STAGED_BYTES", "-1"), kInvalidArgument, "must be");
}

TEST_F(StagingChoice, SupportsIsCalledWithTheCopies) {
  add(host.with_supports());
  const FiveArgs args = five();
  host.supports_body = [&](const te_fl_context& ctx, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    EXPECT_EQ(ctx.device.type, TE_FL_DEVICE_CPU);
    EXPECT_EQ(seen.a->dl.device.type, TE_FL_DEVICE_CPU);
    const auto address = reinterpret_cast<uintptr_t>(seen.a->dl.data);
    EXPECT_EQ(address % 256, reinterpret_cast<uintptr_t>(args.a->dl.data) % 256);
    return TE_FL_UNSUPPORTED;
  };
  far.forget();
  EXPECT_EQ(manager.resolve(op, &args).value().impl_id, "");
  EXPECT_EQ(call(args).code(), StatusCode::kUnsupported);
  EXPECT_EQ(host.asked.load(), 2);
  EXPECT_EQ(far.reads().size(), 0u);  // supports() runs before any copy
}

TEST_F(StagingChoice, ADescribedCallOnAnAbsentDeviceHasNoCandidate) {
  add(host);
  CallProfile profile;
  profile.device = Device{TE_FL_DEVICE_CUDA, 3, 0};
  EXPECT_EQ(manager.explain(op, profile).value().impl_id, "");
  profile.device = device;
  const Decision r = manager.explain(op, profile).value();
  EXPECT_EQ(r.impl_id, "default.host");
  EXPECT_TRUE(r.candidates[0].staged);
}

// ---- counters

TEST_F(StagingChoice, IsCountedAndSaidOncePerOp) {
  add(host);
  const FiveArgs args = five();
  ::testing::internal::CaptureStderr();
  ASSERT_OK(call(args));
  ASSERT_OK(call(args));
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::string line = "op 'test::five' on ext:far:0 is run by 'default.host'";
  const size_t first = log.find(line);
  // Another test of this process may have logged the line already, as it is logged once per op and
  // not per manager.
  if (first != std::string::npos) {
    EXPECT_EQ(log.find(line, first + 1), std::string::npos);
    EXPECT_HAS(log, "this call 80 bytes (4 copies in, 1 out)");
  }
  OpUsage use = find_usage("default.host");
  EXPECT_EQ(use.calls, 2u);
  EXPECT_EQ(use.staged_calls, 2u);
  EXPECT_EQ(use.staged_bytes, 160u);
  manager.reset_usage();
  EXPECT_EQ(find_usage("default.host").calls, 0u);
  testing::FiveCall here;  // a call on the host is not staged
  host.run_body = nullptr;
  ASSERT_OK(manager.call(op, &here.args));
  use = find_usage("default.host");
  EXPECT_EQ(use.calls, 1u);
  EXPECT_EQ(use.staged_calls, 0u);
  EXPECT_EQ(use.staged_bytes, 0u);
  EXPECT_EQ(use.staged_microseconds, 0u);
}

TEST_F(StagingChoice, TheWorkBeforeACallIsNotCountedAsCopying) {
  add(host);
  const FiveArgs args = five();
  ASSERT_OK(call(args));
  const OpUsage before = find_usage("default.host");
  constexpr uint64_t kWork = 50'000;  // microseconds
  far.enqueue(nullptr, [=] { std::this_thread::sleep_for(std::chrono::microseconds(kWork)); });
  ASSERT_OK(call(args));
  const OpUsage after = find_usage("default.host");
  const uint64_t waited = after.staged_wait_microseconds - before.staged_wait_microseconds;
  const uint64_t copied = after.staged_microseconds - before.staged_microseconds;
  EXPECT_GE(waited, kWork * 9 / 10);
  EXPECT_LT(copied, kWork / 2);
}

TEST_F(StagingChoice, BuffersAreUsedAgain) {
  add(host);
  const FiveArgs small = five(4);
  for (int i = 0; i < 3; ++i) ASSERT_OK(call(small));
  EXPECT_EQ(far.pinned.load(), 1);
  const FiveArgs large = five(100000);
  ASSERT_OK(call(large));
  EXPECT_EQ(far.pinned.load(), 1);  // the smaller buffer has been freed
  ASSERT_OK(call(small));
  EXPECT_EQ(far.pinned.load(), 1);
}

TEST_F(StagingChoice, ThreadsDoNotShareABuffer) {
  add(host);
  constexpr int kThreads = 4;
  std::vector<FiveArgs> args;
  for (int i = 0; i < kThreads; ++i) args.push_back(five(1000));
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) {
        if (!call(args[static_cast<size_t>(i)], &args[static_cast<size_t>(i)]).ok()) ++failures;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures.load(), 0);
  for (int i = 0; i < kThreads; ++i) {
    EXPECT_EQ(at(kept[static_cast<size_t>(5 * i + 4)], 999), 1110 + 4 * 999);
  }
  EXPECT_LE(far.pinned.load(), kThreads);
  EXPECT_EQ(find_usage("default.host").staged_calls, 200u);
}

}  // namespace
}  // namespace te_fl
