// Streams of two devices of one provider with equal handles, copies between the devices, and
// scratch of graphs and of short-lived streams. These devices run enqueued work only when a caller
// waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "core/device/device_list.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FarDevice;
using testing::FiveArgs;

// Two devices of one provider.
class TwoDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    OpManager::instance();  // creates the manager, which installs the hooks that release devices
    a = devices::add(&far_a.desc).value();
    b = devices::add(&far_b.desc).value();
  }
  void TearDown() override {
    for (const Device& device : {a, b}) {
      ASSERT_OK(devices::remove(device));
    }
  }
  FarDevice& far(const Device& device) { return device == a ? far_a : far_b; }
  // Enqueues work on `stream`; when it runs, it sets all elements of `t` to `value`.
  void write_later(const Tensor& t, float value, void* stream) {
    FarDevice& device = far(t.device());
    auto* to = reinterpret_cast<float*>(device.real(t.raw_data()));
    device.enqueue(stream, [to, value, n = t.numel()] { std::fill_n(to, n, value); });
  }
  // Returns the first element as it is in device memory now.
  float now(const Tensor& t) {
    return *reinterpret_cast<float*>(far(t.device()).real(t.raw_data()));
  }
  // Returns the first element on the host, after the work of `stream`.
  static float read(const Tensor& t, void* stream = nullptr) {
    return t.to(Device(), stream).value().data<float>()[0];
  }

  FarDevice far_a{0}, far_b{1};
  Device a, b;
};

// ---- copies to the host

// A withdrawn device creates no new objects, not even events. Its tensors, which have pending work
// on two streams, can still be copied to the host.
TEST_F(TwoDevices, ATensorOfAWithdrawnDeviceIsCopiedHome) {
  const Stream stream = Stream::create(a).value();
  Tensor x, y;
  {
    const StreamScope scope(stream);
    x = Tensor::zeros({4}, DType::kF32, a).value();
    y = Tensor::zeros({4, 4}, DType::kF32, a).value();
  }
  write_later(x, 7, stream.get());
  write_later(y, 5, stream.get());
  core::bar_device(a);
  const Result<Tensor> home = x.to(Device());
  ASSERT_OK(home);
  EXPECT_EQ(home->data<float>()[0], 7);
  const Result<Tensor> part = y.slice(1, 1, 3).value().to(Device());
  ASSERT_OK(part);
  EXPECT_EQ(part->data<float>()[0], 5);
  const Result<Tensor> away = x.to(b);
  ASSERT_OK(away);
  EXPECT_EQ(read(*away), 7);
}

// synchronize() fails while a copy is still pending: either once (it reports an earlier op's
// error), or every time.
class FailedWaits : public TwoDevices, public ::testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    of = this;
    synchronize = far_a.api.synchronize;
    far_a.api.synchronize = [](void* self, void* on, const te_fl_error_sink* e) -> te_fl_status {
      if (of->failing > 0) {
        --of->failing;
        e->write(e->host, "an earlier op has failed");
        return TE_FL_INTERNAL;
      }
      return of->synchronize(self, on, e);
    };
    far_a.api.struct_size = offsetof(te_fl_device_api, copy_between);
    TwoDevices::SetUp();
  }
  void TearDown() override {
    failing = 0;
    far_a.queues.drain();  // pending copies write into memory that was kept for them
    TwoDevices::TearDown();
  }
  // Checks that no copy is pending, as its memory may have been freed.
  void expect_none_under_way() {
    if (GetParam() == 1) {
      EXPECT_EQ(far_a.queues.pending(nullptr), 0u);
    }
  }
  static inline FailedWaits* of = nullptr;
  decltype(te_fl_device_api::synchronize) synchronize = nullptr;
  int failing = 0;
};
INSTANTIATE_TEST_SUITE_P(Times, FailedWaits, ::testing::Values(1, 100));

TEST_P(FailedWaits, FreeNoMemoryUnderACopy) {
  const Tensor x = Tensor::zeros({4, 4}, DType::kF32, a).value();
  for (const Tensor& t : {x, x.slice(1, 1, 3).value()}) {
    for (const Device& to : {Device(), b}) {
      failing = GetParam();
      const Result<Tensor> copy = t.to(to);
      EXPECT_FAILS(copy.status(), kInternal, "an earlier op has failed");
      expect_none_under_way();
    }
  }
}

// ---- copies between devices

// The path of a copy between devices. kDirect: by the device's own copy function. Otherwise through
// the host, because that function refuses (kRefused) or is missing (kAbsent).
enum class Way { kDirect, kRefused, kAbsent };

class CopiesBetween : public TwoDevices, public ::testing::WithParamInterface<Way> {
 protected:
  void SetUp() override {
    if (GetParam() == Way::kAbsent) {
      far_a.api.struct_size = offsetof(te_fl_device_api, copy_between);
    }
    far_b.next_copy_between = GetParam() == Way::kRefused ? TE_FL_UNSUPPORTED : TE_FL_OK;
    TwoDevices::SetUp();
  }
  void TearDown() override {
    EXPECT_EQ(far_b.copies_between.load() > 0, GetParam() == Way::kDirect && copied);
    TwoDevices::TearDown();
  }
  bool copied = true;  // false if only strided tensors are copied, which are always copied through
                       // the host
};
INSTANTIATE_TEST_SUITE_P(Ways, CopiesBetween,
                         ::testing::Values(Way::kDirect, Way::kRefused, Way::kAbsent));

TEST_P(CopiesBetween, HaveWhatTheStreamOfTheMemoryWrites) {
  const Stream stream = Stream::create(a).value();
  Tensor x;
  {
    const StreamScope scope(stream);
    x = Tensor::zeros({4}, DType::kF32, a).value();
  }
  write_later(x, 7, stream.get());
  EXPECT_EQ(read(x.to(b).value()), 7);
}

TEST_P(CopiesBetween, HaveWhatTheCurrentStreamWrites) {
  const Stream stream = Stream::create(a).value();
  const Tensor x = Tensor::zeros({4}, DType::kF32, a).value();
  ASSERT_OK(devices::synchronize(a));
  const StreamScope scope(stream);
  write_later(x, 7, stream.get());
  EXPECT_EQ(read(x.to(b).value()), 7);
}

TEST_P(CopiesBetween, OfMemoryFollowTheCurrentStreamOfTheSource) {
  const Stream stream = Stream::create(a).value(), there = Stream::create(b).value();
  const Tensor x = Tensor::zeros({4}, DType::kF32, a).value();
  const Tensor y = Tensor::zeros({4}, DType::kF32, b).value();
  ASSERT_OK(devices::synchronize(a));
  ASSERT_OK(devices::synchronize(b));
  write_later(x, 7, stream.get());
  write_later(y, 3, there.get());  // runs before the copy
  {
    const StreamScope scope(stream);
    ASSERT_OK(devices::copy(b, y.raw_data(), a, x.raw_data(), 16, there.get()));
  }
  write_later(x, 5, stream.get());  // runs after the copy
  ASSERT_OK(stream.synchronize());
  ASSERT_OK(there.synchronize());
  EXPECT_EQ(now(x), 5);
  EXPECT_EQ(now(y), 7);
}

TEST_P(CopiesBetween, OfStridedTensorsFollowBothStreams) {
  copied = false;
  const Stream stream = Stream::create(a).value(), there = Stream::create(b).value();
  const StreamScope scope(stream), other(there);
  const Tensor x = Tensor::zeros({4, 4}, DType::kF32, a).value();
  write_later(x, 7, stream.get());
  const Tensor y = x.slice(1, 1, 3).value().to(b).value();
  EXPECT_TRUE(y.contiguous());
  EXPECT_EQ(read(y), 7);
}

TEST_P(CopiesBetween, OfQuantisedTensorsWaitForTheStreamsOfAllTheirParts) {
  const Stream codes = Stream::create(a).value(), state = Stream::create(a).value();
  Tensor scale, q;
  {
    const StreamScope scope(state);
    scale = Tensor::zeros({1}, DType::kF32, a).value();
  }
  {
    const StreamScope scope(codes);
    q = Tensor::empty_quantized(std::vector<int64_t>{4, 4}, QuantSpec{}, a, &scale).value();
  }
  write_later(scale, 7, state.get());
  far_a.enqueue(codes.get(), [to = far_a.real(q.raw_data())] { std::memset(to, 0x38, 16); });
  const Tensor copy = q.to(b).value();
  EXPECT_EQ(read(copy.scale()), 7);
  EXPECT_EQ(copy.rowwise_codes().to(Device()).value().data<uint8_t>()[15], 0x38);
}

// The source tensor is freed and its memory overwritten before the copy has run.
TEST_P(CopiesBetween, OutliveTheirSource) {
  const Stream stream = Stream::create(a).value(), current = Stream::create(a).value();
  Tensor y;
  {
    Tensor x;
    {
      const StreamScope scope(stream);
      x = Tensor::zeros({4}, DType::kF32, a).value();
    }
    write_later(x, 7, stream.get());
    const StreamScope scope(current);
    y = x.to(b).value();
  }
  ASSERT_OK(stream.synchronize());
  EXPECT_EQ(read(y), 7);
}

TEST_P(CopiesBetween, NeedAStreamOfTheDestination) {
  copied = false;
  const Stream first = Stream::create(b).value(), of_source = Stream::create(a).value();
  const Stream second = Stream::create(a).value();
  const Tensor x = Tensor::zeros({4}, DType::kF32, a).value();
  EXPECT_FAILS(x.to(b, second.get()).status(), kInvalidArgument,
               "takes a stream of ext:far:1; the given stream belongs to ext:far:0");
  const Tensor y = Tensor::zeros({4}, DType::kF32, b).value();
  EXPECT_FAILS(devices::copy(b, y.raw_data(), a, x.raw_data(), 16, second.get()), kInvalidArgument,
               "takes a stream of ext:far:1");
  EXPECT_FAILS(devices::copy_between(b, y.raw_data(), nullptr, Device(), x.raw_data(), nullptr, 16),
               kInvalidArgument, "use devices::copy");
}

TEST_P(CopiesBetween, CannotBeCaptured) {
  copied = false;
  const Stream stream = Stream::create(a).value();
  const Tensor x = Tensor::zeros({4}, DType::kF32, a).value();
  const Capture capture = Capture::begin(a, stream.get()).value();
  const StreamScope scope(stream);
  EXPECT_FAILS(x.to(b).status(), kFailedPrecondition,
               "a copy from ext:far:0 to ext:far:1 cannot be captured into a graph");
}

TEST_F(TwoDevices, ACopyOnAnotherStreamWaitsForTheStreamOfTheMemory) {
  const Stream stream = Stream::create(a).value(), other = Stream::create(a).value();
  Tensor x;
  {
    const StreamScope scope(stream);
    x = Tensor::zeros({4}, DType::kF32, a).value();
  }
  write_later(x, 7, stream.get());
  EXPECT_EQ(read(x), 7) << "to the host";
  write_later(x, 8, stream.get());
  EXPECT_EQ(read(x.to(a, other.get()).value(), other.get()), 8) << "within the device";
  // Without events, the calling thread waits.
  far_a.api.create_event = nullptr;
  write_later(x, 9, stream.get());
  EXPECT_EQ(read(x, other.get()), 9);
}

// Devices of one provider wait for each other's events without the host.
TEST_F(TwoDevices, AStreamWaitsForAnEventOfTheOtherDevice) {
  const Stream on_a = Stream::create(a).value(), on_b = Stream::create(b).value();
  Event event = Event::create(a).value();
  bool done = false, seen = false;
  far_a.queues.enqueue(on_a.get(), [&done]() -> te_fl_status {
    done = true;
    return TE_FL_OK;
  });
  ASSERT_OK(event.record(on_a.get()));
  EXPECT_FALSE(event.done().value());
  ASSERT_OK(on_b.wait(event));
  far_b.queues.enqueue(on_b.get(), [&done, &seen]() -> te_fl_status {
    seen = done;
    return TE_FL_OK;
  });
  ASSERT_OK(on_b.synchronize());
  EXPECT_TRUE(seen);
  EXPECT_TRUE(event.done().value());
}

TEST_F(TwoDevices, TimeBetweenEventsWantsBothDone) {
  const Stream stream = Stream::create(a).value();
  Event first = Event::create(a, true).value(), last = Event::create(a, true).value();
  ASSERT_OK(first.record(stream.get()));
  far_a.queues.enqueue(stream.get(), []() -> te_fl_status { return TE_FL_OK; });
  ASSERT_OK(last.record(stream.get()));
  EXPECT_FAILS(last.elapsed_since(first).status(), kFailedPrecondition, "is not done yet");
  ASSERT_OK(last.synchronize());
  EXPECT_EQ(last.elapsed_since(first).value(), 2000u) << "two pieces of work";
  Event other = Event::create(b, true).value();
  EXPECT_FAILS(other.elapsed_since(first).status(), kInvalidArgument, "no common clock");
}

TEST_F(TwoDevices, AFailedCopyBetweenSaysWhichDevices) {
  const Tensor x = Tensor::zeros({4}, DType::kF32, a).value();
  far_b.next_copy_between = TE_FL_INTERNAL;
  EXPECT_FAILS(x.to(b).status(), kInternal,
               "copy of 16 bytes from ext:far:0 to ext:far:1: there is no way between the two");
}

// ---- equal handles of two devices

TEST_F(TwoDevices, ATensorKeepsTheStreamOfItsOwnDevice) {
  const Stream other = Stream::create(a).value();
  Tensor t;
  {
    const Stream stream = Stream::create(b).value();
    ASSERT_EQ(stream.get(), other.get()) << "the handles of these devices are their own";
    const StreamScope scope(stream);
    t = Tensor::zeros({4}, DType::kF32, b).value();
  }
  EXPECT_EQ(devices::live_objects(b), 2) << "the stream waits for its tensor";
  EXPECT_EQ(devices::live_objects(a), 1);
}

TEST_F(TwoDevices, AScopeIsForOneDevice) {
  const Stream of_a = Stream::create(a).value(), of_b = Stream::create(b).value();
  const Stream second = Stream::create(b).value();
  const StreamScope outer(of_a);
  EXPECT_EQ(devices::current_stream(b), nullptr);
  const StreamScope inner(second);
  EXPECT_EQ(devices::current_stream(a), of_a.get());
  EXPECT_EQ(devices::current_stream(b), second.get());
  EXPECT_EQ(devices::current_stream(), second.get()) << "the innermost";
  EXPECT_EQ(devices::current_stream(Device()), nullptr);
  const StreamScope none(nullptr);
  EXPECT_EQ(devices::current_stream(a), nullptr);
  EXPECT_EQ(devices::current_stream(b), nullptr);
}

TEST_F(TwoDevices, MemoryOfOneDeviceIsNotFreedOnAStreamOfAnother) {
  static void* freed_on;
  static decltype(te_fl_device_api::free) free;
  free = far_b.api.free;
  far_b.api.free = [](void* self, void* data, uint32_t kind, void* stream,
                      const te_fl_error_sink* errors) {
    freed_on = stream;
    return free(self, data, kind, stream, errors);
  };
  freed_on = &far_b;
  const Stream stream = Stream::create(a).value();
  const StreamScope scope(stream);
  (void)Tensor::zeros({4}, DType::kF32, b).value();
  EXPECT_EQ(freed_on, nullptr);
}

TEST_F(TwoDevices, AScopeWithoutADeviceFindsItOrSaysThatItCannot) {
  const Stream of_a = Stream::create(a).value(), of_b = Stream::create(b).value();
  const Stream second = Stream::create(b).value();
  {
    const StreamScope scope(second.get());  // device b has this stream, device a does not
    EXPECT_EQ(devices::current_stream(a), nullptr);
    EXPECT_EQ(devices::current_stream(b), second.get());
  }
  {
    const StreamScope scope(of_a.get());  // both devices have a stream with this handle
    EXPECT_FAILS(Tensor::empty({4}, DType::kF32, b).status(), kFailedPrecondition,
                 "name the device: StreamScope(device, stream)");
    ASSERT_OK(Tensor::empty({4}, DType::kF32).status());
  }
  static void* of_framework;
  (void)far_a.queues.make_stream();  // its handle equals that of `second`
  of_framework = far_a.queues.make_stream();
  for (FarDevice* far : {&far_a, &far_b}) {
    far->api.check_stream = [](void* self, void* stream, const te_fl_error_sink*) {
      const bool is_a = static_cast<FarDevice*>(self)->desc.device.index == 0;
      return te_fl_status{is_a == (stream == of_framework) ? TE_FL_OK : TE_FL_INVALID_ARGUMENT};
    };
  }
  const StreamScope scope(of_framework);  // b reports this stream as unknown
  EXPECT_EQ(devices::current_stream(a), of_framework);
  EXPECT_EQ(devices::current_stream(b), nullptr);
}

// Another plugin may dereference a handle as a pointer, so it must not get foreign handles.
TEST_F(TwoDevices, OnlyItsOwnPluginIsCalledForAHandle) {
  static int asked;
  asked = 0;
  FarDevice other;
  other.desc.provider = "other";
  other.api.check_stream = [](void*, void*, const te_fl_error_sink*) {
    ++asked;
    return te_fl_status{TE_FL_INVALID_ARGUMENT};
  };
  const Device of_other = devices::add(&other.desc).value();
  const Stream stream = Stream::create(b).value();
  int framework_stream = 0;
  {
    const StreamScope known(stream.get());  // b has equal handles
    EXPECT_EQ(devices::current_stream(b), stream.get());
    const StreamScope unknown(&framework_stream);
    for (const Device& device : {a, of_other}) {
      EXPECT_FAILS(Tensor::empty({4}, DType::kF32, device).status(), kFailedPrecondition,
                   "name the device: StreamScope(device, stream)");
    }
  }
  EXPECT_EQ(asked, 0);
  ASSERT_OK(devices::remove(of_other));
}

// ---- scratch of graphs and of short-lived streams

// An op out = a that copies through scratch in two units of work.
class Scratch : public TwoDevices {
 protected:
  void SetUp() override {
    TwoDevices::SetUp();
    native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    native.desc.provider = "far";
    native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
    native.desc.workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
      *bytes = sizeof(float);
      return te_fl_status{TE_FL_OK};
    };
    native.run_body = [this](const te_fl_context& ctx, const void* raw) -> te_fl_status {
      const auto& args = *static_cast<const FiveArgs*>(raw);
      FarDevice& device = ctx.device.index == 0 ? far_a : far_b;
      const auto at = [&](const void* p) { return reinterpret_cast<float*>(device.real(p)); };
      float *in = at(args.a->dl.data), *out = at(args.out->dl.data), *between = at(ctx.workspace);
      device.enqueue(ctx.stream, [=] { *between = *in; });
      device.enqueue(ctx.stream, [=] { *out = *between; });
      return TE_FL_OK;
    };
    ASSERT_OK(registry.register_op(native.desc, "test", "far"));
    op = *registry.find(native.desc.op_name);
  }
  void TearDown() override {
    in = out = {};
    TwoDevices::TearDown();
  }
  Status copy(const Tensor& from, const Tensor& to, void* stream) {
    FiveArgs args;
    args.a = args.b = args.c = args.d = from.c();
    args.out = to.c();
    CallOptions options;
    options.stream = stream;
    return manager.call(op, &args, options);
  }
  // Makes tensors of one element on `a`: in[i] is i + 1, out[i] is -1.
  void make(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      in.push_back(Tensor::zeros({1}, DType::kF32, a).value());
      out.push_back(Tensor::zeros({1}, DType::kF32, a).value());
      write_later(in.back(), static_cast<float>(i + 1), nullptr);
      write_later(out.back(), -1, nullptr);
    }
    ASSERT_OK(devices::synchronize(a));
  }
  // Captures copy(from, to) on `stream` outside te-fl, as a framework does; returns the graph.
  void* capture(const Tensor& from, const Tensor& to, void* stream) {
    void* graph = nullptr;
    EXPECT_EQ(far_a.api.begin_capture(&far_a, stream, nullptr), TE_FL_OK);
    const Status called = copy(from, to, stream);
    EXPECT_OK(called);
    EXPECT_EQ(far_a.api.end_capture(&far_a, stream, &graph, nullptr), TE_FL_OK);
    return graph;
  }

  OpRegistry registry;
  OpManager manager{registry};
  Fake native{"vendor.native"};
  OpId op;
  std::vector<Tensor> in, out;
};

TEST_F(Scratch, TwoGraphsOfOneStreamReplayedAtOnce) {
  make(2);
  void* const stream = far_a.queues.make_stream();
  void *const first = far_a.queues.make_stream(), *const second = far_a.queues.make_stream();
  ASSERT_OK(copy(in[0], out[0], stream));  // allocates the scratch of eager calls
  ASSERT_OK(devices::synchronize(a, stream));
  write_later(out[0], -1, nullptr);
  ASSERT_OK(devices::synchronize(a));
  void *one = capture(in[0], out[0], stream), *two = capture(in[1], out[1], stream);
  ASSERT_EQ(far_a.api.launch_graph(&far_a, one, first, nullptr), TE_FL_OK);
  ASSERT_EQ(far_a.api.launch_graph(&far_a, two, second, nullptr), TE_FL_OK);
  far_a.queues.run_some(first, 1);
  far_a.queues.run_some(second, 1);
  ASSERT_OK(devices::synchronize(a, first));
  ASSERT_OK(devices::synchronize(a, second));
  EXPECT_EQ(now(out[0]), 1);
  EXPECT_EQ(now(out[1]), 2);
  for (void* graph : {one, two}) far_a.api.destroy_graph(&far_a, graph, nullptr);
}

TEST_F(Scratch, AGraphReplayedBesideItsStreamsWork) {
  make(2);
  void *const stream = far_a.queues.make_stream(), *const other = far_a.queues.make_stream();
  ASSERT_OK(copy(in[0], out[0], stream));
  ASSERT_OK(devices::synchronize(a, stream));
  void* graph = capture(in[0], out[0], stream);
  ASSERT_EQ(far_a.api.launch_graph(&far_a, graph, other, nullptr), TE_FL_OK);
  far_a.queues.run_some(other, 1);
  ASSERT_OK(copy(in[1], out[1], stream));
  ASSERT_OK(devices::synchronize(a, stream));
  ASSERT_OK(devices::synchronize(a, other));
  EXPECT_EQ(now(out[0]), 1);
  EXPECT_EQ(now(out[1]), 2);
  far_a.api.destroy_graph(&far_a, graph, nullptr);
}

// A framework destroys its stream while work is pending, and the handle is reused.
TEST_F(Scratch, AFrameworksStreamDestroyedWhileBusy) {
  make(2);
  void* const stream = far_a.queues.make_stream();
  ASSERT_OK(copy(in[0], out[0], stream));
  far_a.queues.run_some(stream, 1);
  ASSERT_OK(devices::retire_stream(a, stream));
  EXPECT_EQ(far_a.retired.load(), stream) << "the plugin is told";
  EXPECT_GT(far_a.queues.pending(stream), 0u) << "and nothing was waited for";
  far_a.queues.destroy(stream);
  ASSERT_EQ(far_a.queues.make_stream(), stream) << "the handle comes again";
  ASSERT_OK(copy(in[1], out[1], stream));
  far_a.queues.run_some(stream, 1);
  far_a.queues.drain();
  EXPECT_EQ(now(out[0]), 1);
  EXPECT_EQ(now(out[1]), 2);
}

TEST_F(Scratch, TensorsOutliveTheirRetiredStream) {
  make(1);
  void* const stream = far_a.queues.make_stream();
  Tensor kept;
  {
    const StreamScope scope(a, stream);
    kept = Tensor::zeros({1}, DType::kF32, a).value();
    ASSERT_OK(copy(in[0], kept, stream));
    ASSERT_OK(devices::retire_stream(a, stream));
    EXPECT_EQ(now(kept), 1) << "its work has been waited for";
    EXPECT_FAILS(Tensor::empty({1}, DType::kF32, a).status(), kFailedPrecondition,
                 "has been retired; close its StreamScope");
    far_a.queues.destroy(stream);
  }
  ASSERT_EQ(far_a.queues.make_stream(), stream) << "the handle comes again";
  far_a.enqueue(stream, [] {});
  EXPECT_EQ(read(kept), 1);
  const size_t before = far_a.queues.pending(nullptr);
  kept = Tensor();
  EXPECT_EQ(far_a.queues.pending(nullptr), before + 1) << "freed on the default stream";
  EXPECT_EQ(far_a.queues.pending(stream), 1u);
  {
    const StreamScope scope(a, stream);  // this handle is another stream now
    ASSERT_OK(Tensor::zeros({1}, DType::kF32, a).status());
  }
}

TEST_F(Scratch, GraphsOutliveTheirRetiredStream) {
  make(1);
  void *const stream = far_a.queues.make_stream(), *const other = far_a.queues.make_stream();
  Capture capture = Capture::begin(a, stream).value();
  EXPECT_FAILS(devices::retire_stream(a, stream), kFailedPrecondition, "end the capture first");
  ASSERT_OK(copy(in[0], out[0], stream));
  const Graph graph = capture.end().value();
  ASSERT_OK(devices::retire_stream(a, stream));
  far_a.queues.destroy(stream);
  EXPECT_FAILS(graph.launch(), kFailedPrecondition, "has been retired; give launch() another");
  ASSERT_OK(graph.launch(other));
  ASSERT_OK(devices::synchronize(a, other));
  EXPECT_EQ(now(out[0]), 1);
}

TEST_F(Scratch, OnlyStreamsOfOthersAreRetired) {
  const Stream own = Stream::create(a).value();
  EXPECT_FAILS(devices::retire_stream(a, own.get()), kInvalidArgument, "te-fl created this stream");
  EXPECT_FAILS(devices::retire_stream(a, nullptr), kInvalidArgument, "the default stream stays");
  ASSERT_OK(devices::retire_stream(a, far_a.queues.make_stream()));  // te-fl never saw this stream
  // The table of this device ends before retire_stream.
  far_a.api.struct_size = offsetof(te_fl_device_api, retire_stream);
  far_a.retired = nullptr;
  ASSERT_OK(devices::retire_stream(a, far_a.queues.make_stream()));
  EXPECT_EQ(far_a.retired.load(), nullptr);
}

// Streams come and go, and their graphs outlive them; te-fl keeps scratch only for streams and
// graphs that still exist.
TEST_F(Scratch, NothingIsKeptOfStreamsThatCameAndWent) {
  make(1);
  const int64_t before = devices::live_objects(a);
  for (int i = 0; i < 50; ++i) {
    void* const stream = far_a.queues.make_stream();
    ASSERT_OK(copy(in[0], out[0], stream));
    void* graph = capture(in[0], out[0], stream);
    ASSERT_OK(devices::retire_stream(a, stream));
    far_a.queues.destroy(stream);
    EXPECT_EQ(far_a.api.destroy_graph(&far_a, graph, nullptr), TE_FL_OK);
  }
  EXPECT_EQ(devices::live_objects(a), before);
}

// The device runs out of memory during a capture: the caller gets the error, and the call does not
// fall back to another implementation.
TEST_F(Scratch, WantOfItInACaptureIsTheCallers) {
  make(1);
  Fake second{"vendor.other"};
  second.desc.device_types = native.desc.device_types;
  second.desc.provider = native.desc.provider;
  second.desc.flags = native.desc.flags;
  second.desc.priority = 1;
  ASSERT_OK(registry.register_op(second.desc, "test", "far"));
  const Stream stream = Stream::create(a).value();
  Capture capture = Capture::begin(a, stream.get()).value();
  const auto allocate = far_a.api.allocate;
  far_a.api.allocate = [](void*, const te_fl_memory_desc*, void**, const te_fl_error_sink*) {
    return te_fl_status{TE_FL_OUT_OF_MEMORY | TE_FL_CLEAN};
  };
  EXPECT_FAILS(copy(in[0], out[0], stream.get()), kOutOfMemory, "workspace of 4 bytes");
  far_a.api.allocate = allocate;
  EXPECT_EQ(second.runs.load(), 0);
}

}  // namespace
}  // namespace te_fl
