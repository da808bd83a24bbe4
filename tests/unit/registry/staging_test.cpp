// Host implementations on the tensors of a device whose memory nobody but the device can touch.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "core/device_list.hpp"
#include "dispatch_fixture.hpp"
#include "plugins/hooks.hpp"
#include "support/far_device.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FarDevice;
using testing::FiveArgs;
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

PolicySettings listed(const char* op, PolicyToken::Type type, Kind kind, std::string name = "") {
  PolicySettings s;
  s.per_op[op] = {PolicyToken{type, kind, std::move(name)}};
  return s;
}

class Staging : public ::testing::Test {
 protected:
  void SetUp() override {
    far.keep_ranges = true;
    device = devices::add(&far.desc).value();
    native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    native.desc.provider = "far";
    native.desc.vendor = "acme";
    native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
    host.desc.flags |= TE_FL_OP_GRAPH_SAFE;
    for (Fake* f : {&host, &reference, &native}) f->run_body = sum;
  }
  void TearDown() override {
    kept.clear();
    plugins::g_hooks.release_device.load()(device);
    ASSERT_OK(devices::remove(device));
    EXPECT_EQ(far.pinned.load(), 0);
  }

  // out = a + b + c + d on compact F32 in memory that this code may read.
  static te_fl_status sum(const te_fl_context& ctx, const void* raw) {
    const auto& args = *static_cast<const FiveArgs*>(raw);
    if (ctx.device.type != TE_FL_DEVICE_CPU) return TE_FL_OK;  // the native one only counts
    const auto at = [](const te_fl_tensor* t) { return static_cast<float*>(t->dl.data); };
    const int64_t n = args.a->dl.shape[0];
    for (int64_t i = 0; i < n; ++i) {
      at(args.out)[i] = at(args.a)[i] + at(args.b)[i] + at(args.c)[i] + at(args.d)[i];
    }
    return TE_FL_OK;
  }
  void add(Fake& f) {
    ASSERT_OK(registry.register_op(f.desc, "test", "acme"));
    op = *registry.find(f.desc.op_name);
  }
  // A compact device tensor of `count` elements from `first` up, kept until the test ends.
  Tensor& on_device(int64_t count, float first) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
    Tensor t = Tensor::empty({count}, DType::kF32, device).value();
    if (count > 0) std::memcpy(far.real(t.raw_data()), values.data(), values.size() * 4);
    return kept.emplace_back(std::move(t));
  }
  float at(const Tensor& t, int64_t i) const {
    float value;
    std::memcpy(&value, far.real(t.raw_data()) + 4 * i, sizeof value);
    return value;
  }
  // a = i, b = 10 + i, c = 100 + i, d = 1000 + i.
  FiveArgs five(int64_t count = 4) {
    FiveArgs args;
    args.a = on_device(count, 0).c();
    args.b = on_device(count, 10).c();
    args.c = on_device(count, 100).c();
    args.d = on_device(count, 1000).c();
    args.out = on_device(count, -1).c();
    return args;
  }
  Status call(const FiveArgs& args, void* stream = nullptr) {
    CallOptions options;
    options.stream = stream;
    return manager.call(op, &args, options);
  }
  OpUsage use_of(const std::string& impl) {
    for (const OpUsage& use : manager.usage()) {
      if (use.impl_id == impl) return use;
    }
    return {};
  }

  FarDevice far;
  Device device;
  OpRegistry registry;
  OpManager manager{registry};
  Fake native{"vendor.native"}, host{"default.host"}, reference{"reference.host"};
  std::deque<Tensor> kept;  // stay where they are
  OpId op;
};

TEST_F(Staging, CopiesInputsThereAndOutputsBack) {
  add(host);
  FiveArgs args = five();
  host.run_body = [&](const te_fl_context& ctx, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    EXPECT_EQ(ctx.device.type, TE_FL_DEVICE_CPU);
    EXPECT_EQ(ctx.stream, nullptr);
    EXPECT_EQ(seen.a->dl.device.type, TE_FL_DEVICE_CPU);
    EXPECT_EQ(seen.a->provider, 0u);
    for (const te_fl_tensor* t : {seen.a, seen.b, seen.c, seen.d, seen.out}) {
      EXPECT_FALSE(far.owns(t->dl.data));
    }
    return sum(ctx, raw);
  };
  ASSERT_OK(call(args));
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(at(kept[4], i), 1110 + 4 * static_cast<float>(i));
  EXPECT_EQ(far.reads().size(), 4u);  // outputs are not copied in
  ASSERT_EQ(far.writes().size(), 1u);
  EXPECT_EQ(far.writes()[0].begin, reinterpret_cast<uintptr_t>(kept[4].raw_data()));
  EXPECT_EQ(far.writes()[0].bytes, 16u);
}

TEST_F(Staging, FollowsTheCallsStreamAndNoOther) {
  add(host);
  const FiveArgs args = five();
  int mine = 0, other = 0;
  bool other_done = false;
  far.enqueue(&mine, [&] { std::memset(far.real(kept[0].raw_data()), 0, 16); });
  far.enqueue(&other, [&] { other_done = true; });
  ASSERT_OK(call(args, &mine));
  EXPECT_EQ(at(kept[4], 3), 1110 + 9);  // a was zeroed by work enqueued before
  EXPECT_FALSE(other_done);
  for (const auto& r : far.reads()) EXPECT_EQ(r.stream, &mine);
  for (const auto& w : far.writes()) EXPECT_EQ(w.stream, &mine);
}

TEST_F(Staging, AliasingSurvives) {
  add(host);
  FiveArgs args = five(8);
  // b starts in the middle of a, and the output is a.
  Tensor whole = kept[0];
  const Tensor a = whole.slice(0, 0, 6).value(), b = whole.slice(0, 2, 8).value();
  const Tensor c = kept[2].slice(0, 0, 6).value(), d = kept[3].slice(0, 0, 6).value();
  args.a = a.c(), args.b = b.c(), args.c = c.c(), args.d = d.c(), args.out = a.c();
  far.forget();
  host.run_body = [&](const te_fl_context& ctx, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    EXPECT_EQ(seen.a->dl.data, seen.out->dl.data);
    EXPECT_EQ(static_cast<char*>(seen.b->dl.data) - static_cast<char*>(seen.a->dl.data), 8);
    return sum(ctx, raw);
  };
  ASSERT_OK(call(args));
  EXPECT_EQ(far.reads().size(), 3u);
  // As on the host, where b reads what the loop has already written.
  std::vector<float> x = {0, 1, 2, 3, 4, 5, 6, 7};
  for (size_t i = 0; i < 6; ++i) x[i] = x[i] + x[i + 2] + 1100 + 2 * static_cast<float>(i);
  for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(at(whole, i), x[static_cast<size_t>(i)]) << i;
}

TEST_F(Staging, TheGapsOfAStridedOutputAreNotWritten) {
  add(host);
  FiveArgs args = five(4);
  Tensor wide = Tensor::zeros({2, 8}, DType::kF32, device).value();
  const Tensor out = wide.slice(1, 1, 3).value();
  std::vector<Tensor> in;
  for (int i = 0; i < 4; ++i) in.push_back(kept[static_cast<size_t>(i)].view({2, 2}).value());
  args.a = in[0].c(), args.b = in[1].c(), args.c = in[2].c(), args.d = in[3].c();
  args.out = out.c();
  far.forget();
  host.run_body = [&](const te_fl_context&, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    EXPECT_EQ(seen.out->dl.strides[0], 8);
    auto* y = static_cast<float*>(seen.out->dl.data);
    for (int row = 0; row < 2; ++row) {
      // What is between in this copy is of no consequence.
      for (int column = 0; column < 2; ++column) y[8 * row + column] = 5;
    }
    for (int column = 2; column < 8; ++column) y[column] = 77;
    // Another thread writes there meanwhile.
    auto* real = reinterpret_cast<float*>(far.real(wide.raw_data()));
    for (int i = 0; i < 16; ++i) real[i] = 9;
    return TE_FL_OK;
  };
  ASSERT_OK(call(args));
  for (int64_t i = 0; i < 16; ++i) {
    EXPECT_EQ(at(wide, i), i % 8 == 1 || i % 8 == 2 ? 5 : 9) << i;
  }
  EXPECT_EQ(far.writes().size(), 2u);
  EXPECT_EQ(far.writes()[0].bytes, 8u);
  EXPECT_EQ(far.reads().size(), 4u);
}

TEST_F(Staging, AnOutputWithoutGapsIsOneCopyInAnyOrderOfItsDimensions) {
  add(host);
  FiveArgs args = five(6);
  std::vector<Tensor> in;
  for (int i = 0; i < 4; ++i) in.push_back(kept[static_cast<size_t>(i)].view({2, 3}).value());
  const Tensor out = kept[4].view({3, 2}).value().transpose(0, 1).value();
  args.a = in[0].c(), args.b = in[1].c(), args.c = in[2].c(), args.d = in[3].c();
  args.out = out.c();
  far.forget();
  host.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    auto* y = static_cast<float*>(seen.out->dl.data);
    for (int r = 0; r < 2; ++r) {
      for (int c = 0; c < 3; ++c)
        y[r * seen.out->dl.strides[0] + c * seen.out->dl.strides[1]] = 10.f * r + c;
    }
    return TE_FL_OK;
  };
  ASSERT_OK(call(args));
  EXPECT_EQ(far.writes().size(), 1u);
  const float expected[] = {0, 10, 1, 11, 2, 12};
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(at(kept[4], i), expected[i]);
}

TEST_F(Staging, NegativeStridesReachBackwards) {
  add(host);
  FiveArgs args = five(4);
  int64_t shape[] = {4}, strides[] = {-1};
  te_fl_tensor a = *args.a, out = *args.out;
  for (te_fl_tensor* t : {&a, &out}) {
    t->dl.data = static_cast<char*>(t->dl.data) + 12;
    t->dl.shape = shape;
    t->dl.strides = strides;
  }
  args.a = &a, args.out = &out;
  host.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    for (int i = 0; i < 4; ++i)
      static_cast<float*>(seen.out->dl.data)[-i] = 2 * static_cast<float*>(seen.a->dl.data)[-i];
    return TE_FL_OK;
  };
  ASSERT_OK(call(args));
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(at(kept[4], i), 2 * static_cast<float>(i));
}

TEST_F(Staging, AScatteredOutputIsRefused) {
  add(host);
  const int64_t n = (int64_t{1} << 20) + 1;
  const Tensor in = Tensor::zeros({n}, DType::kU8, device).value();
  const Tensor wide = Tensor::zeros({n, 2}, DType::kU8, device).value();
  int64_t shape[] = {n}, strides[] = {2};
  te_fl_tensor out = *wide.c();
  out.dl.ndim = 1;
  out.dl.shape = shape;
  out.dl.strides = strides;
  FiveArgs args;
  args.a = args.b = args.c = args.d = in.c();
  args.out = &out;
  EXPECT_FAILS(call(args), kUnsupported, "separate pieces of memory");
  EXPECT_EQ(host.runs.load(), 0);
  shape[0] = 100;
  const Tensor few = in.slice(0, 0, 100).value();
  args.a = args.b = args.c = args.d = few.c();
  host.run_body = nullptr;
  far.forget();
  ASSERT_OK(call(args));
  EXPECT_EQ(far.writes().size(), 100u);
}

TEST_F(Staging, TensorsWithoutElementsMoveNothing) {
  add(host);
  const FiveArgs args = five(0);
  far.forget();
  ASSERT_OK(call(args));
  EXPECT_EQ(far.reads().size() + far.writes().size(), 0u);
  EXPECT_EQ(use_of("default.host").staged_calls, 1u);
}

// ---- order and refusals

TEST_F(Staging, NativeImplementationsComeFirst) {
  add(host);
  add(native);
  const FiveArgs args = five();
  ASSERT_OK(call(args));
  EXPECT_EQ(native.runs.load(), 1);
  native.run_status = TE_FL_UNSUPPORTED;
  native.run_body = nullptr;
  ASSERT_OK(call(args));  // falls back to the host
  EXPECT_EQ(host.runs.load(), 1);
  PolicySettings preferred;
  preferred.prefer = Kind::kDefault;
  native.run_status = TE_FL_OK;
  {
    const PolicyScope scope(preferred);  // names no host implementation
    ASSERT_OK(call(args));
    EXPECT_EQ(host.runs.load(), 1);
  }
  PolicySettings denied;
  denied.deny_vendors = {"acme"};
  const PolicyScope scope(denied);
  ASSERT_OK(call(args));
  EXPECT_EQ(host.runs.load(), 2);
}

TEST_F(Staging, ReferenceImplIdAndListsNameIt) {
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
      const Resolution r = manager.resolve(op, &args).value();
      EXPECT_EQ(r.impl_id, "reference.host");
      EXPECT_TRUE(r.candidates[0].staged);
      EXPECT_TRUE(contains(r.candidates[0].reason, "taken: staged")) << r.candidates[0].reason;
      const auto first = manager.first_choice(op, &args);
      ASSERT_TRUE(first.ok()) << first.status().to_string();
      EXPECT_EQ(first->impl_id, nullptr);
    }
  }
  EXPECT_EQ(native.runs.load(), 0);
}

TEST_F(Staging, StrictRefusesItUnlessNamed) {
  add(host);
  const FiveArgs args = five();
  PolicySettings strict;
  strict.strict = true;
  const PolicyScope scope(strict);
  EXPECT_FAILS(call(args), kUnsupported, "strict (TE_FL_STRICT) allows that only if");
  EXPECT_FAILS(call(args), kUnsupported, "could serve it if the policy let it");
  EXPECT_EQ(host.runs.load(), 0);
}

TEST_F(Staging, AGraphCannotHoldIt) {
  add(host);
  const FiveArgs args = five();
  ASSERT_OK(call(args));
  far.capturing = true;
  EXPECT_FAILS(call(args), kUnsupported, "into which copies to the host cannot go");
  EXPECT_TRUE(contains(manager.resolve(op, &args).value().candidates[0].reason, "captured"));
  const PolicyScope scope(listed("test::five", PolicyToken::Type::kKind, Kind::kDefault));
  EXPECT_FAILS(call(args), kUnsupported, "into which copies to the host cannot go");
  far.capturing = false;
  ASSERT_OK(call(args));
}

TEST_F(Staging, TheCapCountsBothWays) {
  add(host);
  const FiveArgs args = five();  // four inputs and one output of 16 bytes
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
    EXPECT_FAILS(call(args), kUnsupported, "raise that, or load a plugin that serves the op");
    const Resolution r = manager.resolve(op, &args).value();
    EXPECT_EQ(r.impl_id, "");
    EXPECT_TRUE(contains(r.candidates[0].reason, "moves 80 bytes")) << r.candidates[0].reason;
    EXPECT_EQ(host.runs.load(), 1);
  }
  s.max_staged_bytes = 0;
  const PolicyScope scope(s);
  EXPECT_FAILS(call(args), kUnsupported, "forbidden (TE_FL_MAX_STAGED_BYTES is 0)");
}

TEST_F(Staging, TheCapComesFromTheEnvironmentToo) {
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

TEST_F(Staging, SupportsIsAskedAboutTheCopies) {
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
  EXPECT_EQ(far.reads().size(), 0u);  // asked before anything is copied
}

TEST_F(Staging, ADescribedCallOnAnAbsentDeviceHasNoCandidate) {
  add(host);
  CallProfile profile;
  profile.device = Device{TE_FL_DEVICE_CUDA, 3, 0};
  EXPECT_EQ(manager.explain(op, profile).value().impl_id, "");
  profile.device = device;
  const Resolution r = manager.explain(op, profile).value();
  EXPECT_EQ(r.impl_id, "default.host");
  EXPECT_TRUE(r.candidates[0].staged);
}

// ---- what goes wrong

TEST_F(Staging, AFailedRunLeavesTheDeviceAlone) {
  add(host);
  add(reference);
  const FiveArgs args = five();
  host.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    static_cast<float*>(static_cast<const FiveArgs*>(raw)->out->dl.data)[0] = 5;
    return TE_FL_INTERNAL;
  };
  EXPECT_FAILS(call(args), kInternal, "failed in 'default.host'");
  EXPECT_EQ(at(kept[4], 0), -1);
  EXPECT_EQ(reference.runs.load(), 0);
  host.run_body = [](const te_fl_context&, const void*) -> te_fl_status {
    return TE_FL_UNSUPPORTED;
  };
  ASSERT_OK(call(args));
  EXPECT_EQ(reference.runs.load(), 1);
  EXPECT_EQ(at(kept[4], 0), 1110);
}

TEST_F(Staging, FailedCopiesAreReported) {
  add(host);
  add(reference);
  const FiveArgs args = five();
  far.next_copy = TE_FL_INTERNAL;
  EXPECT_FAILS(call(args), kInternal, "the call's tensors could not be copied to the host");
  EXPECT_FAILS(call(args), kInternal, "the bus is down");
  EXPECT_EQ(host.runs.load() + reference.runs.load(), 0);
  far.next_copy = TE_FL_OK;
  // A device that refuses to take results back: nobody may follow, whatever it answers.
  host.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    far.next_copy = TE_FL_UNSUPPORTED;
    return TE_FL_OK;
  };
  EXPECT_FAILS(call(args), kInternal, "the results could not be copied from the host");
  EXPECT_EQ(reference.runs.load(), 0);
  far.next_copy = TE_FL_DEVICE_LOST;
  EXPECT_EQ(call(args).code(), StatusCode::kDeviceLost);
  far.next_copy = TE_FL_OK;
  EXPECT_FAILS(call(args), kDeviceLost, "is lost since");
  core::g_device_hooks.added.load()(device);
  host.run_body = sum;
  ASSERT_OK(call(args));
}

TEST_F(Staging, WithoutPinnedMemoryPlainMemoryDoes) {
  add(host);
  const FiveArgs args = five();
  far.next_pinned = TE_FL_OUT_OF_MEMORY;
  ASSERT_OK(call(args));
  EXPECT_EQ(at(kept[4], 1), 1114);
  EXPECT_EQ(far.pinned.load(), 0);
  far.next_pinned = TE_FL_OK;
}

// ---- counting

TEST_F(Staging, IsCountedAndSaidOncePerOp) {
  add(host);
  const FiveArgs args = five();
  ::testing::internal::CaptureStderr();
  ASSERT_OK(call(args));
  ASSERT_OK(call(args));
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::string line = "op 'test::five' on ext:far:0 is served by 'default.host'";
  const size_t first = said.find(line);
  // Another test of this process may have said it already, for the op and not for the manager.
  if (first != std::string::npos) {
    EXPECT_EQ(said.find(line, first + 1), std::string::npos);
    EXPECT_TRUE(contains(said, "this call 80 bytes (4 copies in, 1 out)")) << said;
  }
  OpUsage use = use_of("default.host");
  EXPECT_EQ(use.calls, 2u);
  EXPECT_EQ(use.staged_calls, 2u);
  EXPECT_EQ(use.staged_bytes, 160u);
  manager.reset_usage();
  EXPECT_EQ(use_of("default.host").calls, 0u);
  testing::FiveCall here;  // on the host nothing is staged
  host.run_body = nullptr;
  ASSERT_OK(manager.call(op, &here.args));
  use = use_of("default.host");
  EXPECT_EQ(use.calls, 1u);
  EXPECT_EQ(use.staged_calls, 0u);
  EXPECT_EQ(use.staged_bytes, 0u);
  EXPECT_EQ(use.staged_microseconds, 0u);
}

TEST_F(Staging, TheWorkBeforeACallIsNotCountedAsCopying) {
  add(host);
  const FiveArgs args = five();
  ASSERT_OK(call(args));
  const OpUsage before = use_of("default.host");
  constexpr uint64_t kWork = 50'000;  // us
  far.enqueue(nullptr, [=] { std::this_thread::sleep_for(std::chrono::microseconds(kWork)); });
  ASSERT_OK(call(args));
  const OpUsage after = use_of("default.host");
  const uint64_t waited = after.staged_wait_microseconds - before.staged_wait_microseconds;
  const uint64_t copied = after.staged_microseconds - before.staged_microseconds;
  EXPECT_GE(waited, kWork * 9 / 10);
  EXPECT_LT(copied, kWork / 2);
}

TEST_F(Staging, BuffersAreUsedAgain) {
  add(host);
  const FiveArgs small = five(4);
  for (int i = 0; i < 3; ++i) ASSERT_OK(call(small));
  EXPECT_EQ(far.pinned.load(), 1);
  const FiveArgs large = five(100000);
  ASSERT_OK(call(large));
  EXPECT_EQ(far.pinned.load(), 1);  // the outgrown one is gone
  ASSERT_OK(call(small));
  EXPECT_EQ(far.pinned.load(), 1);
}

TEST_F(Staging, ThreadsDoNotShareABuffer) {
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
  EXPECT_EQ(use_of("default.host").staged_calls, 200u);
}

// ---- saved records

TEST_F(Staging, AnOpaqueRecordsStorageMovesAndItsBackwardGoesToItsProducer) {
  Fake forward("default.host", testing::save_schema(true)),
      backward("default.host", testing::save_schema(false)),
      stranger("vendor.native", testing::save_schema(false));
  stranger.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
  stranger.desc.provider = "far";
  stranger.desc.vendor = "acme";
  forward.desc.saved_bytes = [](void*, const te_fl_context* ctx, const void* raw,
                                size_t* bytes) -> te_fl_status {
    EXPECT_EQ(ctx->device.type, TE_FL_DEVICE_CPU);
    EXPECT_EQ(static_cast<const SaveArgs*>(raw)->x->dl.device.type, TE_FL_DEVICE_CPU);
    *bytes = 4;
    return TE_FL_OK;
  };
  forward.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    te_fl_saved* saved = static_cast<const SaveArgs*>(raw)->saved;
    saved->opaque = 1;
    std::memcpy(saved->storage->dl.data, "kept", 4);
    return TE_FL_OK;
  };
  std::string found;
  backward.run_body = [&](const te_fl_context&, const void* raw) -> te_fl_status {
    found.assign(static_cast<char*>(static_cast<const SaveArgs*>(raw)->saved->storage->dl.data), 4);
    return TE_FL_OK;
  };
  add(forward);
  const OpId fwd = op;
  add(stranger);
  add(backward);
  const Tensor x = on_device(4, 0), y = on_device(4, 0);
  SaveArgs args;
  te_fl_saved record;
  args.x = x.c(), args.y = y.c(), args.saved = &record;
  ASSERT_EQ(manager.saved_bytes(fwd, &args).value(), 4u);
  const Tensor storage = Tensor::zeros({4}, DType::kU8, device).value();
  record.storage = storage.c();
  ASSERT_OK(manager.call(fwd, &args));
  EXPECT_EQ(record.opaque, 1u);
  EXPECT_STREQ(record.producer, "default.host");
  EXPECT_EQ(record.storage, storage.c());
  EXPECT_EQ(std::memcmp(far.real(storage.raw_data()), "kept", 4), 0);
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(found, "kept");
  EXPECT_EQ(stranger.runs.load(), 0);
}

TEST_F(Staging, ARecordThatIsFilledInAnewBindsNobody) {
  Fake forward("default.host", testing::save_schema(true));
  forward.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    const te_fl_saved* saved = static_cast<const SaveArgs*>(raw)->saved;
    return saved->opaque == 0 && saved->producer == nullptr ? TE_FL_OK : TE_FL_INTERNAL;
  };
  add(forward);
  const Tensor x = on_device(4, 0), y = on_device(4, 0);
  const Tensor storage = Tensor::zeros({4}, DType::kU8, device).value();
  te_fl_saved record;
  record.opaque = 1;  // left over from an earlier use
  record.producer = "vendor.other";
  record.storage = storage.c();
  SaveArgs args;
  args.x = x.c(), args.y = y.c(), args.saved = &record;
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(record.opaque, 0u);
  EXPECT_STREQ(record.producer, "default.host");
}

// ---- the catalogue's ops, by the built-in backends

class StagedCatalogue : public Staging {
 protected:
  static Status run(const char* name, const void* args, const CallOptions& options = {}) {
    return OpManager::instance().call(name, args, options);
  }
  Tensor quantised(bool compute_scale, bool columnwise) {
    QuantSpec spec;
    spec.columnwise = columnwise;
    spec.compute_scale = compute_scale;
    return Tensor::empty_quantized(Shape{4, 4}, spec, device).value();
  }
  bool wrote(const void* p) const {
    const auto address = reinterpret_cast<uintptr_t>(p);
    for (const auto& w : far.writes()) {
      if (address >= w.begin && address < w.begin + w.bytes) return true;
    }
    return false;
  }
};

TEST_F(StagedCatalogue, AQuantisedTensorMovesWithItsParts) {
  const Tensor x = on_device(16, -8).view({4, 4}).value();
  const Tensor q = quantised(false, true);
  ASSERT_OK(devices::synchronize(device));  // or what it begins with would come later
  const float amax = 50, scale = 2;
  std::memcpy(far.real(q.amax().raw_data()), &amax, 4);
  std::memcpy(far.real(q.scale().raw_data()), &scale, 4);
  far.forget();
  te_fl_quantize_args args;
  args.input = x.c(), args.output = q.c();
  ASSERT_OK(run("quantize", &args));
  EXPECT_EQ(at(q.amax(), 0), 50);  // the running maximum went on from what the device had
  EXPECT_EQ(at(q.scale_inv(), 0), 0.5f);
  EXPECT_FALSE(wrote(q.scale().raw_data()));  // a given scale is read only
  EXPECT_TRUE(wrote(q.raw_data()));
  EXPECT_TRUE(wrote(q.columnwise_codes().raw_data()));
  te_fl_dequantize_args back;
  const Tensor y = Tensor::zeros({4, 4}, DType::kF32, device).value();
  back.input = q.c(), back.output = y.c();
  ASSERT_OK(run("dequantize", &back));
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(at(y, i), static_cast<float>(i) - 8);
}

TEST_F(StagedCatalogue, ADerivedScaleComesBack) {
  const Tensor x = on_device(16, -8).view({4, 4}).value();
  const Tensor q = quantised(true, false);
  far.forget();
  te_fl_quantize_args args;
  args.input = x.c(), args.output = q.c();
  ASSERT_OK(run("quantize", &args));
  EXPECT_EQ(at(q.amax(), 0), 8);
  EXPECT_EQ(at(q.scale(), 0), 56);  // 448 / 8
  EXPECT_TRUE(wrote(q.scale().raw_data()));
}

TEST_F(StagedCatalogue, ANoOpFlagKeepsWhatTheDeviceHas) {
  const Tensor x = on_device(16, -8).view({4, 4}).value();
  const Tensor q = quantised(false, true);
  std::memset(far.real(q.raw_data()), 0x33, 16);
  std::memset(far.real(q.columnwise_codes().raw_data()), 0x44, 16);
  const Tensor flag = on_device(1, 1);
  te_fl_quantize_args args;
  args.input = x.c(), args.output = q.c(), args.noop_flag = flag.c();
  ASSERT_OK(run("quantize", &args));
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(far.real(q.raw_data())[i], 0x33);
    EXPECT_EQ(far.real(q.columnwise_codes().raw_data())[i], 0x44);
  }
}

TEST_F(StagedCatalogue, ListsMoveElementByElement) {
  std::vector<Tensor> in, out;
  std::vector<const te_fl_tensor*> ins, outs;
  for (int i = 0; i < 5; ++i) {
    in.push_back(on_device(3 + i, static_cast<float>(i)));
    out.push_back(on_device(3 + i, -1));
  }
  for (int i = 0; i < 5; ++i) {
    ins.push_back(in[static_cast<size_t>(i)].c());
    outs.push_back(out[static_cast<size_t>(i)].c());
  }
  const Tensor flag = Tensor::zeros({1}, DType::kI32, device).value();
  te_fl_multi_tensor_scale_args args;
  args.inputs = ins.data(), args.inputs_count = 5;
  args.outputs = outs.data(), args.outputs_count = 5;
  args.noop_flag = flag.c();
  args.scale = 2;
  ASSERT_OK(run("multi_tensor_scale", &args));
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(at(out[static_cast<size_t>(i)], 2 + i), 2.f * static_cast<float>(2 * i + 2));
  }
}

TEST_F(StagedCatalogue, RandomStateIsReadFromTheDevice) {
  const Tensor x = on_device(64, 1), y = on_device(64, 0), z = on_device(64, 0);
  const Tensor mask = Tensor::zeros({8}, DType::kU8, device).value();
  const Tensor state = Tensor::zeros({2}, DType::kU64, device).value();
  ASSERT_OK(devices::synchronize(device));  // zeros() may still be on its way
  const uint64_t words[] = {1234, 56};
  std::memcpy(far.real(state.raw_data()), words, sizeof words);
  te_fl_dropout_fwd_args args;
  args.input = x.c(), args.output = y.c(), args.mask = mask.c(), args.p = 0.5f;
  CallOptions by_pointer;
  by_pointer.rng = {1, 2, state.data<uint64_t>()};
  ASSERT_OK(run("dropout_fwd", &args, by_pointer));
  args.output = z.c();
  CallOptions by_value;
  by_value.rng = {1234, 58, nullptr};  // the offset of the call is added to the state's
  ASSERT_OK(run("dropout_fwd", &args, by_value));
  EXPECT_EQ(std::memcmp(far.real(y.raw_data()), far.real(z.raw_data()), 256), 0);
}

TEST_F(StagedCatalogue, HostArgumentsAndEnquiriesMoveNothing) {
  const Tensor x = Tensor::zeros({2, 8, 4, 64}, DType::kBF16, device).value();
  const Tensor answer = Tensor::zeros({1}, DType::kI32).value();
  te_fl_get_fused_attn_backend_args args;
  args.q = x.c(), args.k = x.c(), args.v = x.c(), args.backend = answer.c();
  args.layout = TE_FL_LAYOUT_BSHD;
  far.forget();
  ASSERT_OK(run("get_fused_attn_backend", &args));
  EXPECT_EQ(far.reads().size() + far.writes().size(), 0u);
}

}  // namespace
}  // namespace te_fl
