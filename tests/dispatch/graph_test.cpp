// A thread's current stream, memory on streams, captures and graphs, on a RecordingDevice.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "core/device/device_list.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"

namespace te_fl {
namespace {

using testing::RecordingDevice;

class Graphs : public ::testing::Test {
 protected:
  void TearDown() override {
    recorder.queues.drain();
    kept.clear();
    EXPECT_EQ(recorder.blocks(), 0u);
    EXPECT_EQ(devices::live_objects(device), 0);
    ASSERT_OK(devices::remove(device));
  }
  Tensor zeros(int64_t n) { return Tensor::zeros({n}, DType::kF32, device).value(); }
  // Returns a tensor that may be used on any stream; it is freed after all work is done.
  Tensor lasting(int64_t n) {
    kept.push_back(zeros(n));
    return kept.back();
  }
  // Returns the tensor's element after all work is done.
  float now(const Tensor& t) {
    recorder.queues.drain();
    return *t.data<float>();
  }
  static Status fill(const Tensor& t, double value, void* stream) {
    te_fl_fill_args args{};
    args.output = t;
    args.value = value;
    return ops::fill(args, {.stream = stream});
  }
  static Status add(const Tensor& a, const Tensor& b, const Tensor& out, void* stream) {
    te_fl_add_args args{};
    args.a = a;
    args.b = b;
    args.output = out;
    return ops::add(args, {.stream = stream});
  }

  RecordingDevice recorder;
  Device device = recorder.device();
  std::vector<Tensor> kept;
};

TEST_F(Graphs, ScopesSayWhichStreamAThreadIsOn) {
  EXPECT_EQ(devices::current_stream(), nullptr);
  Stream a = Stream::create(device).value(), b = Stream::create(device).value();
  {
    const StreamScope outer(a.get());
    EXPECT_EQ(devices::current_stream(), a.get());
    {
      const StreamScope inner(b.get());
      EXPECT_EQ(devices::current_stream(), b.get());
      std::thread([] { EXPECT_EQ(devices::current_stream(), nullptr); }).join();
    }
    EXPECT_EQ(devices::current_stream(), a.get());
    const StreamScope none(nullptr);
    EXPECT_EQ(devices::current_stream(), nullptr);
  }
  EXPECT_EQ(devices::current_stream(), nullptr);
}

TEST_F(Graphs, TensorsKeepTheStreamThatTheirMemoryIsFreedOn) {
  Tensor on_stream, copied;
  {
    Stream stream = Stream::create(device).value();
    const StreamScope scope(stream.get());
    on_stream = zeros(3);
    EXPECT_EQ(devices::live_objects(device), 2);
  }
  EXPECT_EQ(devices::live_objects(device), 2) << "the stream waits for its tensor";
  on_stream = Tensor();
  EXPECT_EQ(devices::live_objects(device), 0);
  {
    Stream stream = Stream::create(device).value();
    copied = Tensor::zeros({3}, DType::kF32).value().to(device, stream.get()).value();
  }
  EXPECT_EQ(devices::live_objects(device), 2);
}

TEST_F(Graphs, MemoryIsAllocatedAndFreedOnTheCurrentStream) {
  static void *allocated_on, *freed_on;
  static decltype(te_fl_device_api::allocate) allocate;
  static decltype(te_fl_device_api::free) free;
  allocate = recorder.api().allocate;
  free = recorder.api().free;
  recorder.api().allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                               const te_fl_error_sink* errors) {
    allocated_on = memory->stream;
    return allocate(self, memory, out, errors);
  };
  recorder.api().free = [](void* self, void* data, uint32_t kind, void* stream,
                           const te_fl_error_sink* errors) {
    freed_on = stream;
    return free(self, data, kind, stream, errors);
  };
  const Stream stream = Stream::create(device).value();
  Tensor t;
  {
    const StreamScope scope(stream.get());
    t = zeros(4);
  }
  EXPECT_EQ(allocated_on, stream.get());
  t = Tensor();
  EXPECT_EQ(freed_on, stream.get()) << "wherever the last copy goes";
  zeros(4);
  EXPECT_EQ(allocated_on, nullptr);
  EXPECT_EQ(freed_on, nullptr);
}

TEST_F(Graphs, ALaunchRunsWhatWasCaptured) {
  const Stream stream = Stream::create(device).value();
  const Tensor total = lasting(1), one = lasting(1);
  ASSERT_OK(fill(one, 1, stream.get()));
  ASSERT_OK(add(total, one, total, stream.get()));  // allocates the scratch
  Graph graph;
  {
    Capture capture = Capture::begin(device, stream.get()).value();
    EXPECT_TRUE(devices::is_capturing(device, stream.get()).value());
    ASSERT_OK(add(total, one, total, stream.get()));
    {
      const StreamScope scope(stream.get());  // allocates memory that only the graph keeps alive
      const Tensor twice = zeros(1);
      ASSERT_OK(add(one, one, twice, stream.get()));
      ASSERT_OK(add(total, twice, total, stream.get()));
    }
    graph = capture.end().value();
    EXPECT_FAILS(capture.end().status(), kFailedPrecondition, "has already ended");
  }
  EXPECT_FALSE(devices::is_capturing(device, stream.get()).value());
  EXPECT_EQ(now(total), 1) << "nothing ran in the capture";
  EXPECT_EQ(graph.stream(), stream.get());
  for (int i = 1; i <= 3; ++i) {
    ASSERT_OK(graph.launch());
    EXPECT_EQ(now(total), 1 + 3 * i);
  }
  Graph moved = std::move(graph);
  EXPECT_FAILS(graph.launch(), kFailedPrecondition, "an empty Graph cannot be launched");
  ASSERT_OK(moved.launch());
  EXPECT_EQ(now(total), 13);
}

TEST_F(Graphs, ScratchOfAStreamGoesWithItAndTheGraphsCapturedOnIt) {
  const Tensor x = lasting(1);
  const size_t before = recorder.blocks();
  Graph graph;
  {
    const Stream stream = Stream::create(device).value();
    ASSERT_OK(fill(x, 1, stream.get()));
    Capture capture = Capture::begin(device, stream.get()).value();
    ASSERT_OK(fill(x, 2, stream.get()));
    graph = capture.end().value();
  }
  EXPECT_EQ(recorder.blocks(), before + 2) << "the graph's own, and the stream's, which it keeps";
  ASSERT_OK(graph.launch());
  EXPECT_EQ(now(x), 2);
  graph = Graph();
  EXPECT_EQ(recorder.blocks(), before);
}

// A framework captures a graph on its own stream. The graph keeps the scratch memory alive after
// the stream is destroyed.
TEST_F(Graphs, ScratchOfAGraphOutlivesItsStream) {
  const Tensor x = lasting(1);
  const size_t before = recorder.blocks();
  void* graph = nullptr;
  {
    const Stream stream = Stream::create(device).value();
    ASSERT_OK(fill(x, 1, stream.get()));
    ASSERT_EQ(recorder.api().begin_capture(&recorder, stream.get(), nullptr), TE_FL_OK);
    ASSERT_OK(fill(x, 2, stream.get()));
    ASSERT_EQ(recorder.api().end_capture(&recorder, stream.get(), &graph, nullptr), TE_FL_OK);
  }
  EXPECT_EQ(recorder.blocks(), before + 1);
  EXPECT_EQ(recorder.api().launch_graph(&recorder, graph, nullptr, nullptr), TE_FL_OK);
  EXPECT_EQ(now(x), 2);
  EXPECT_EQ(recorder.api().destroy_graph(&recorder, graph, nullptr), TE_FL_OK);
  EXPECT_EQ(recorder.blocks(), before);
}

TEST_F(Graphs, ALaunchThatMeetsAStickyErrorRetiresTheDevice) {
  const Stream stream = Stream::create(device).value();
  const Tensor x = lasting(1);
  ASSERT_OK(fill(x, 1, stream.get()));
  Capture capture = Capture::begin(device, stream.get()).value();
  ASSERT_OK(fill(x, 2, stream.get()));
  const Graph graph = capture.end().value();
  recorder.api().launch_graph = [](void*, void*, void*, const te_fl_error_sink* errors) {
    errors->write(errors->host, "illegal address");
    return te_fl_status{TE_FL_DEVICE_LOST};
  };
  EXPECT_FAILS(graph.launch(), kDeviceLost, "illegal address; enqueued last, newest first: 'fill'");
  EXPECT_FAILS(fill(x, 3, stream.get()), kDeviceLost, "is lost since launch of a graph");
  core::g_device_hooks.on_added.load()(
      device);  // makes the device usable again, as a restart would
}

TEST_F(Graphs, ACaptureThatIsLeftEndsAndIsForgotten) {
  const Stream stream = Stream::create(device).value();
  const Tensor x = lasting(1);
  ASSERT_OK(fill(x, 1, stream.get()));
  {
    const Capture capture = Capture::begin(device, stream.get()).value();
    ASSERT_OK(fill(x, 2, stream.get()));
    EXPECT_FAILS(Capture::begin(device, stream.get()).status(), kFailedPrecondition,
                 "the beginning of a capture on ext:recorder:0: the stream is being captured");
  }
  EXPECT_FALSE(devices::is_capturing(device, stream.get()).value());
  EXPECT_EQ(now(x), 1);
}

TEST_F(Graphs, WaitingAndTransfersAreRefusedInACapture) {
  const Stream stream = Stream::create(device).value();
  const Tensor x = lasting(2), y = lasting(2);
  Tensor host = Tensor::zeros({2}, DType::kF32).value();
  const Capture capture = Capture::begin(device, stream.get()).value();
  EXPECT_FAILS(stream.synchronize(), kFailedPrecondition, "its work has not run");
  EXPECT_FAILS(x.to(Device(), stream.get()).status(), kFailedPrecondition,
               "a copy of 8 bytes to host memory cannot be captured on ext:recorder:0");
  EXPECT_FAILS(host.to(device, stream.get()).status(), kFailedPrecondition,
               "a copy of 8 bytes from host memory");
  // Copies within the device, between streams and with pinned memory are allowed.
  ASSERT_OK(devices::copy(device, y.raw_data(), device, x.raw_data(), 8, stream.get()));
  ASSERT_OK(devices::copy(device, y.raw_data(), Device{TE_FL_DEVICE_CUDA_HOST, 0, 0},
                          host.raw_data(), 8, stream.get()));
  ASSERT_OK(x.to(Device()).status());
  ASSERT_OK(devices::synchronize(device));
}

TEST_F(Graphs, DevicesThatCannotCaptureSaySo) {
  const Stream stream = Stream::create(device).value();
  EXPECT_FAILS(Capture::begin(Device(), nullptr).status(), kUnsupported,
               "cpu cannot capture graphs (its begin_capture is NULL)");
  EXPECT_FAILS(Capture::begin(device, nullptr).status(), kInvalidArgument,
               "the default stream of ext:recorder:0 cannot be captured");
  const auto destroy = recorder.api().destroy_graph;
  recorder.api().destroy_graph = nullptr;
  EXPECT_FAILS(Capture::begin(device, stream.get()).status(), kUnsupported,
               "its destroy_graph is NULL");
  recorder.api().destroy_graph = destroy;
  // The table of an older plugin ends before these functions.
  recorder.api().struct_size = offsetof(te_fl_device_api, begin_capture);
  EXPECT_FAILS(Capture::begin(device, stream.get()).status(), kUnsupported,
               "its begin_capture is NULL");
  recorder.api().struct_size = sizeof(te_fl_device_api);
  ASSERT_OK(devices::check_capture(device));
}

TEST_F(Graphs, OlderAndShorterTablesAreTaken) {
  te_fl_device_api api = recorder.api();
  api.struct_size = offsetof(te_fl_device_api, begin_capture);
  te_fl_device_desc desc{};
  desc.struct_size = sizeof desc;
  desc.device = {TE_FL_DEVICE_EXT, 3};
  desc.provider = "older";
  desc.self = &recorder;
  desc.api = &api;
  const Device older = devices::add(&desc).value();
  EXPECT_FAILS(devices::check_capture(older), kUnsupported, "begin_capture is NULL");
  ASSERT_OK(devices::remove(older));
  api.struct_size -= 8;  // cuts off `properties`, which is required
  EXPECT_FAILS(devices::add(&desc).status(), kInvalidArgument,
               "function table has struct_size 112, must be from 120");
}

}  // namespace
}  // namespace te_fl
