// Tests state memory (rule R27): device memory of an implementation, one block per stream, that
// persists between calls.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "dispatch/device_state_fixture.hpp"
#include "te_fl/memory.hpp"

namespace te_fl {
namespace {

using testing::DeviceState;
using testing::Fake;

class StreamState : public DeviceState {
 protected:
  // Each op records the value that it finds in the state and adds one.
  void SetUp() override {
    DeviceState::SetUp();
    native.desc.stream_state_bytes = 4000;
    native.run_body = [this](const te_fl_context& ctx, const void*) -> te_fl_status {
      places.push_back(ctx.stream_state);
      char* const at = far.real(ctx.stream_state);
      far.enqueue(ctx.stream, [this, at] {
        int32_t value = 0;
        std::memcpy(&value, at, sizeof value);
        found.push_back(value);
        bool zero = true;  // true if all bytes behind the counter are zero
        for (int i = 4; i < 4000; ++i) zero &= at[i] == 0;
        clean &= zero;
        ++value;
        std::memcpy(at, &value, sizeof value);
      });
      return TE_FL_OK;
    };
  }
  // The device's queued work still writes into this object, so it must finish before the
  // destruction.
  ~StreamState() override { far.queues.drain(); }
  // Returns the bytes of stream states that te-fl holds.
  size_t held() const {
    const auto account = devices::memory_account(device).value();
    for (const auto& holder : account.holders) {
      if (holder.use == "stream state") return holder.bytes;
    }
    return 0;
  }

  std::vector<void*> places;
  std::vector<int32_t> found;
  bool clean = true;
};

TEST_F(StreamState, IsZeroAtFirstAndThenAsTheLastOpLeftIt) {
  add();
  void* const stream = devices::create_stream(device).value();
  for (int i = 0; i < 3; ++i) ASSERT_OK(call(stream));
  ASSERT_OK(devices::synchronize(device, stream));
  EXPECT_EQ(found, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(places[0], places[2]);
  ASSERT_OK(call(nullptr));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(found.back(), 0) << "another stream has its own";
  EXPECT_NE(places.back(), places[0]);
  EXPECT_TRUE(clean);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(places[0]) % 256, 0u);
  ASSERT_OK(remove());
  EXPECT_EQ(held(), 0u);
  devices::destroy_stream(device, stream);
}

TEST_F(StreamState, GoesWithItsStream) {
  add();
  void* const stream = far.queues.make_stream();
  ASSERT_OK(call(stream));
  EXPECT_EQ(held(), 4096u);
  ASSERT_OK(devices::retire_stream(device, stream));
  EXPECT_EQ(held(), 0u);
  far.queues.drain();
  far.queues.destroy(stream);
  ASSERT_EQ(far.queues.make_stream(), stream) << "the handle comes again";
  ASSERT_OK(call(stream));
  ASSERT_OK(devices::synchronize(device, stream));
  EXPECT_EQ(found, (std::vector<int32_t>{0, 0}));
}

// One thread unregisters the implementation, which frees its state on a stream, while another
// thread retires that stream.
class StateOnAStreamThatGoes : public StreamState {
 protected:
  void SetUp() override {
    StreamState::SetUp();
    of = this;
    free = far.api.free;
    far.api.free = [](void* self, void* data, uint32_t kind, void* on,
                      const te_fl_error_sink* e) -> te_fl_status {
      if (on != nullptr && on == of->stream) of->while_freeing();
      return of->free(self, data, kind, on, e);
    };
  }
  static inline StateOnAStreamThatGoes* of = nullptr;
  decltype(te_fl_device_api::free) free = nullptr;
  void* stream = nullptr;
  std::function<void()> while_freeing;
};

TEST_F(StateOnAStreamThatGoes, AFrameworksIsRetiredAfterwards) {
  add();
  void* const mine = far.queues.make_stream();
  ASSERT_OK(call(mine));
  std::atomic<bool> retired{false};
  bool too_early = false;
  std::thread framework;
  while_freeing = [&] {
    stream = nullptr;
    framework = std::thread([&] {
      EXPECT_OK(devices::retire_stream(device, mine));
      retired = true;
    });
    const auto limit = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    while (!retired && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    too_early = retired;
  };
  stream = mine;
  ASSERT_OK(remove());
  ASSERT_TRUE(framework.joinable());
  framework.join();
  EXPECT_FALSE(too_early) << "retire_stream() returned while memory was being freed on the stream";
  EXPECT_EQ(held(), 0u);
}

TEST_F(StateOnAStreamThatGoes, OneThatTeFlMadeIsDestroyedAfterwards) {
  add();
  void* const mine = devices::create_stream(device).value();
  ASSERT_OK(call(mine));
  bool was_there = false;
  while_freeing = [&] {
    stream = nullptr;
    std::thread([&] { devices::destroy_stream(device, mine); }).join();
    was_there = far.queues.exists(mine);
  };
  stream = mine;
  ASSERT_OK(remove());
  EXPECT_TRUE(was_there);
  EXPECT_FALSE(far.queues.exists(mine)) << "the last user destroys it";
  EXPECT_EQ(held(), 0u);
}

TEST_F(StreamState, IsOneImplementationsOwn) {
  Fake second("vendor.second");
  second.desc.device_types = native.desc.device_types;
  second.desc.provider = "far";
  second.desc.stream_state_bytes = 4000;
  second.run_body = native.run_body;
  add();
  ASSERT_OK(registry.register_op(second.desc, "test", "far"));
  ASSERT_OK(call(nullptr));
  ASSERT_OK(registry.set_priority("test::five", "vendor.second", 500));
  ASSERT_OK(call(nullptr));
  ASSERT_OK(registry.set_priority("test::five", "vendor.second", 1));
  ASSERT_OK(call(nullptr));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(found, (std::vector<int32_t>{0, 0, 1}));
  ASSERT_OK(remove());
  EXPECT_EQ(held(), 4096u) << "the other's";
  add();  // registers it again as a new implementation
  ASSERT_OK(call(nullptr));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(found.back(), 0);
}

TEST_F(StreamState, OfACapturedOpIsZeroAtEveryLaunch) {
  add();
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  {
    auto capture = Capture::begin(device, stream);
    ASSERT_OK(capture);
    ASSERT_OK(call(stream));
    const Result<Graph> graph = capture->end();
    ASSERT_OK(graph);
    for (int i = 0; i < 2; ++i) ASSERT_OK(graph->launch());
    ASSERT_OK(call(stream));
    ASSERT_OK(devices::synchronize(device, stream));
    EXPECT_EQ(found, (std::vector<int32_t>{0, 0, 0, 1}));
  }
  EXPECT_NE(places[0], places[1]);
  EXPECT_EQ(places[0], places[2]);
  devices::destroy_stream(device, stream);
}

TEST_F(StreamState, StandsBesideScratch) {
  native.desc.workspace = [](void*, const te_fl_context* ctx, const void*, size_t* bytes) {
    *bytes = 64;
    return te_fl_status{ctx->workspace == nullptr ? TE_FL_OK : TE_FL_INTERNAL};
  };
  add();
  for (int i = 0; i < 2; ++i) ASSERT_OK(call(nullptr));
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(found, (std::vector<int32_t>{0, 1}));
}

TEST_F(StreamState, IsRefusedToHostImplementations) {
  native.desc.device_types |= uint64_t{1} << TE_FL_DEVICE_CPU;
  EXPECT_FAILS(registry.register_op(native.desc, "test", "far"), kInvalidArgument,
               "whose work has no stream (rule R27)");
}

}  // namespace
}  // namespace te_fl
