#include "te_fl/device.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "core/device/device_list.hpp"
#include "core/device/host_device.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

// A fake device that records its calls; its memory is host memory.
struct FakeDevice {
  te_fl_device_api api{};
  te_fl_device_desc desc{};
  int frees = 0;
  uint32_t last_flags = 99;
  bool fail = false;

  explicit FakeDevice(const char* provider, int32_t index = 0, int32_t type = TE_FL_DEVICE_EXT) {
    api.struct_size = sizeof api;
    api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* sink) {
      if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
      const size_t bytes = memory->bytes;
      if (static_cast<FakeDevice*>(self)->fail) {
        sink->write(sink->host, "the card is full");
        return static_cast<te_fl_status>(TE_FL_OUT_OF_MEMORY);
      }
      *out = std::aligned_alloc(256, (bytes + 256) / 256 * 256);
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.free = [](void* self, void* data, uint32_t, void*, const te_fl_error_sink*) {
      ++static_cast<FakeDevice*>(self)->frees;
      std::free(data);
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.copy = [](void* self, void* dst, const void* src, size_t bytes, uint32_t flags, void*,
                  const te_fl_error_sink*) {
      static_cast<FakeDevice*>(self)->last_flags = flags;
      std::memcpy(dst, src, bytes);
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.fill = [](void*, void* dst, uint8_t value, size_t bytes, void*, const te_fl_error_sink*) {
      std::memset(dst, value, bytes);
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.synchronize = [](void*, void*, const te_fl_error_sink*) {
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.properties = [](void*, te_fl_device_props* props, const te_fl_error_sink*) {
      props->arch = 7;
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    desc = {sizeof desc, 0, {type, index}, provider, this, &api};
  }
};

TEST(Device, TextAndBack) {
  const uint32_t acme = devices::intern_provider("acme");
  const std::pair<Device, const char*> cases[] = {
      {{}, "cpu"},
      {{TE_FL_DEVICE_CUDA, 3, 0}, "cuda:3"},
      {{TE_FL_DEVICE_CUDA_HOST, 0, 0}, "cuda_host:0"},
      {{TE_FL_DEVICE_OPENCL, 1, 0}, "opencl:1"},
      {{TE_FL_DEVICE_EXT, 2, acme}, "ext:acme:2"},
  };
  for (const auto& [device, text] : cases) {
    EXPECT_EQ(to_string(device), text);
    EXPECT_EQ(parse_device(text).value(), device) << text;
  }
  EXPECT_EQ(parse_device(" CUDA ").value(), (Device{TE_FL_DEVICE_CUDA, 0, 0}));
  EXPECT_EQ(parse_device("ext:ACME:2").value(), (Device{TE_FL_DEVICE_EXT, 2, acme}));
  EXPECT_EQ(to_string(Device{77, 1, 0}), "dlpack77:1");
}

TEST(Device, BadTextIsExplained) {
  EXPECT_HAS(parse_device("cdua:0").status().message(), "did you mean 'cuda'?");
  for (const char* bad :
       {"cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "ext", "ext::0", "ext:acme:", ""}) {
    EXPECT_FALSE(parse_device(bad).ok()) << bad;
  }
}

TEST(HostDevice, AllocatesAligned) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{100003}}) {
    void* data = devices::allocate(Device{}, bytes).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
    EXPECT_OK(devices::fill(Device{}, data, 0xab, bytes));
    devices::free(Device{}, data);
    void* pinned = devices::allocate_pinned(Device{}, bytes).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(pinned) % 256, 0u);
    std::memset(pinned, 1, bytes);
    devices::free_pinned(Device{}, pinned);
  }
}

TEST(HostDevice, TooMuchIsAnErrorWithTheSize) {
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX - 300, size_t{1} << 62}) {
    const auto result = devices::allocate(Device{}, bytes);
    EXPECT_FAILS(result, kOutOfMemory, std::to_string(bytes));
    EXPECT_EQ(devices::allocate_pinned(Device{}, bytes).status().code(), StatusCode::kOutOfMemory);
  }
}

TEST(HostDevice, CountsLiveObjects) {
  const int64_t before = devices::live_objects(Device{});
  void* a = devices::allocate(Device{}, 8).value();
  void* b = devices::allocate_pinned(Device{}, 8).value();
  EXPECT_EQ(devices::live_objects(Device{}), before + 2);
  devices::free(Device{}, a);
  devices::free_pinned(Device{}, b);
  devices::free(Device{}, nullptr);
  EXPECT_EQ(devices::live_objects(Device{}), before);
  EXPECT_FALSE(devices::allocate(Device{}, SIZE_MAX).ok());
  EXPECT_EQ(devices::live_objects(Device{}), before) << "a failed allocation is not alive";
}

TEST(HostDevice, Properties) {
  const te_fl_device_props props = devices::properties(Device{}).value();
  EXPECT_EQ(props.compute_units, core::available_cores());
  EXPECT_GT(props.total_memory, uint64_t{1} << 20);
  EXPECT_LE(props.free_memory, props.total_memory);
  EXPECT_NE(props.name[0], '\0');
}

TEST(HostDevice, PropertiesOfASmallerStructStayInside) {
  const te_fl_device_desc* host = core::host_device();
  alignas(te_fl_device_props) unsigned char raw[sizeof(te_fl_device_props)];
  std::memset(raw, 0xee, sizeof raw);
  const uint32_t size = offsetof(te_fl_device_props, compute_units);
  std::memcpy(raw, &size, sizeof size);
  ASSERT_EQ(host->api->properties(host->self, reinterpret_cast<te_fl_device_props*>(raw), nullptr),
            TE_FL_OK);
  for (size_t i = size; i < sizeof raw; ++i) ASSERT_EQ(raw[i], 0xee) << i;
}

TEST(HostDevice, SurvivesFork) {
  TE_FL_SKIP_FORK_WHILE_ALLOCATING();
  Tensor t = Tensor::zeros({4}, DType::kF32).value();
  std::thread other([] {
    for (int i = 0; i < 1000; ++i) EXPECT_OK(Tensor::empty({16}, DType::kF32));
  });
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    const auto copy = t.clone();
    _exit(copy.ok() && devices::list().front().is_host() ? 0 : 1);
  }
  int result = 0;
  ASSERT_EQ(waitpid(child, &result, 0), child);
  EXPECT_EQ(result, 0);
  other.join();
}

TEST(DeviceList, AMissingDeviceNamesThoseThatExist) {
  const Status s = devices::find({TE_FL_DEVICE_CUDA, 0, 0}).status();
  EXPECT_EQ(s.code(), StatusCode::kNotFound);
  EXPECT_EQ(s.message(),
            "there is no device cuda:0; present: cpu; `te-fl doctor` says what is missing");
  EXPECT_FALSE(devices::allocate({TE_FL_DEVICE_CUDA, 0, 0}, 1).ok());
}

TEST(DeviceList, ADeviceThatComesWhileItIsLookedForIsThereOrIsNot) {
  static FakeDevice late("late");
  static int looks;
  looks = 0;
  // Simulates another thread that loads the plugin between two look-ups.
  const auto before = core::g_bring_devices.exchange([](const Device*) noexcept {
    if (++looks != 2) return;
    EXPECT_OK(devices::add(&late.desc));
  });
  const Device device = parse_device("ext:late:0").value();
  const Result<void*> memory = devices::allocate(device, 4);
  core::g_bring_devices = before;
  if (memory.ok()) {
    devices::free(device, *memory);
  } else {
    EXPECT_EQ(memory.status().code(), StatusCode::kNotFound) << memory.status().to_string();
  }
  EXPECT_GE(looks, 2);
  EXPECT_OK(devices::remove(device));
}

TEST(DeviceList, PinnedMemoryOfAnAbsentChipIsHostMemory) {
  EXPECT_EQ(devices::find({TE_FL_DEVICE_CUDA_HOST, 0, 0}).value(), core::host_device());
}

TEST(DeviceList, AddUseRemove) {
  FakeDevice fake("acme");
  const Device device = devices::add(&fake.desc).value();
  EXPECT_EQ(to_string(device), "ext:acme:0");
  EXPECT_EQ(devices::find(device).value(), &fake.desc);
  EXPECT_EQ(devices::list().size(), 2u);
  EXPECT_EQ(devices::properties(device)->arch, 7u);

  void* data = devices::allocate(device, 64).value();
  EXPECT_EQ(devices::live_objects(device), 1);
  const Status busy = devices::remove(device);
  EXPECT_FAILS(busy, kBusy, "1 live");
  char bytes[4] = {1, 2, 3, 4}, back[4] = {};
  EXPECT_OK(devices::copy(device, data, Device{}, bytes, 4));
  EXPECT_EQ(fake.last_flags, 2u) << "source is host memory";
  EXPECT_OK(devices::copy(Device{}, back, device, data, 4));
  EXPECT_EQ(fake.last_flags, 1u) << "destination is host memory";
  EXPECT_OK(devices::copy(device, data, device, data, 4));
  EXPECT_EQ(fake.last_flags, 0u);
  EXPECT_EQ(std::memcmp(bytes, back, 4), 0);
  devices::free(device, data);
  EXPECT_EQ(fake.frees, 1);
  EXPECT_OK(devices::remove(device));
  EXPECT_EQ(devices::list().size(), 1u);
  EXPECT_FALSE(devices::find(device).ok());
  EXPECT_EQ(devices::remove(device).code(), StatusCode::kNotFound);
  EXPECT_EQ(devices::remove(Device{}).code(), StatusCode::kFailedPrecondition);
}

TEST(DeviceList, DevicesOfDifferentProvidersExchangeByWayOfTheHost) {
  FakeDevice a("acme"), b("brand");
  const Device x = devices::add(&a.desc).value(), y = devices::add(&b.desc).value();
  {
    const Tensor there = Tensor::from_values({3}, std::vector<float>{1, 2, 3})->to(x).value();
    const Tensor back = there.to(y)->to(Device{}).value();
    EXPECT_EQ(back.data<float>()[2], 3.0f);
  }
  EXPECT_OK(devices::remove(x));
  EXPECT_OK(devices::remove(y));
}

TEST(DeviceList, ErrorsOfADeviceKeepItsText) {
  FakeDevice fake("acme");
  const Device device = devices::add(&fake.desc).value();
  fake.fail = true;
  const Status s = devices::allocate(device, 64).status();
  EXPECT_EQ(s.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(s.message(), "allocation of 64 bytes on ext:acme:0: the card is full");
  EXPECT_EQ(devices::live_objects(device), 0);
  EXPECT_EQ(devices::allocate_pinned(device, 64).status().code(), StatusCode::kUnsupported);
  EXPECT_OK(devices::remove(device));
}

// A FakeDevice with streams and events that logs its calls in order.
struct FakeStreams : FakeDevice {
  std::vector<std::string> calls;
  bool capturing = false;
  char streams[2] = {}, events[2] = {};
  int made_streams = 0, made_events = 0;

  std::string name(void* handle) const {
    if (handle == nullptr) return "default";
    for (int i = 0; i < 2; ++i) {
      if (handle == &streams[i]) return "s" + std::to_string(i);
      if (handle == &events[i]) return "e" + std::to_string(i);
    }
    return "unknown";
  }
  static te_fl_status note(void* self, const std::string& what, void* a, void* b = nullptr,
                           bool two = false) {
    auto* fake = static_cast<FakeStreams*>(static_cast<FakeDevice*>(self));
    fake->calls.push_back(what + " " + fake->name(a) + (two ? " " + fake->name(b) : ""));
    return TE_FL_OK;
  }

  FakeStreams() : FakeDevice("acme") {
    api.create_stream = [](void* self, void** out, const te_fl_error_sink* sink) {
      auto* fake = static_cast<FakeStreams*>(static_cast<FakeDevice*>(self));
      if (fake->fail) {
        sink->write(sink->host, "no queue is left");
        return static_cast<te_fl_status>(TE_FL_OUT_OF_MEMORY);
      }
      *out = &fake->streams[fake->made_streams++];
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.destroy_stream = [](void* self, void* s, const te_fl_error_sink*) {
      return note(self, "destroy", s);
    };
    api.create_event = [](void* self, uint32_t, void** out, const te_fl_error_sink*) {
      auto* fake = static_cast<FakeStreams*>(static_cast<FakeDevice*>(self));
      *out = &fake->events[fake->made_events++];
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.destroy_event = [](void* self, void* e, const te_fl_error_sink*) {
      return note(self, "destroy", e);
    };
    api.record_event = [](void* self, void* e, void* s, const te_fl_error_sink*) {
      return note(self, "record", e, s, true);
    };
    api.wait_event = [](void* self, void* e, void* s, const te_fl_error_sink*) {
      return note(self, "wait", e, s, true);
    };
    api.synchronize_event = [](void* self, void* e, const te_fl_error_sink*) {
      return note(self, "sync", e);
    };
    api.synchronize = [](void* self, void* s, const te_fl_error_sink*) {
      return note(self, "sync", s);
    };
    api.is_capturing = [](void* self, void* s, int32_t* out, const te_fl_error_sink*) {
      auto* fake = static_cast<FakeStreams*>(static_cast<FakeDevice*>(self));
      *out = fake->capturing && s != nullptr;
      return static_cast<te_fl_status>(TE_FL_OK);
    };
  }
};

TEST(DeviceStreams, CallsReachTheDeviceAndHoldIt) {
  FakeStreams fake;
  const Device device = devices::add(&fake.desc).value();
  {
    Stream first = Stream::create(device).value();
    const Stream second = Stream::create(device).value();
    Event event = Event::create(device).value();
    EXPECT_EQ(devices::live_objects(device), 3);
    const Status busy = devices::remove(device);
    EXPECT_FAILS(busy, kBusy, "3 live allocations, streams or events");
    EXPECT_OK(event.record(first.get()));
    EXPECT_OK(second.wait(event));
    EXPECT_OK(event.synchronize());
    EXPECT_OK(second.synchronize());
    EXPECT_OK(event.record());
    EXPECT_EQ(devices::is_capturing(device, first.get()).value(), false);
    fake.capturing = true;
    EXPECT_EQ(devices::is_capturing(device, first.get()).value(), true);
    EXPECT_EQ(devices::is_capturing(device).value(), false);

    Stream moved = std::move(first);
    EXPECT_EQ(moved.get(), &fake.streams[0]);
    EXPECT_EQ(first.get(), nullptr);
    EXPECT_EQ(devices::live_objects(device), 3);
    moved = Stream();
    EXPECT_EQ(devices::live_objects(device), 2);
  }
  const std::vector<std::string> expected = {"record e0 s0", "wait e0 s1",        "sync e0",
                                             "sync s1",      "record e0 default", "destroy s0",
                                             "destroy e0",   "destroy s1"};
  EXPECT_EQ(fake.calls, expected);
  EXPECT_EQ(devices::live_objects(device), 0);
  EXPECT_OK(devices::remove(device));
  EXPECT_EQ(Stream::create(device).status().code(), StatusCode::kNotFound);
}

TEST(DeviceStreams, AMissingFunctionIsNamed) {
  FakeStreams fake;
  fake.api.destroy_stream = nullptr;  // without destroy_stream, a stream of this device could never
                                      // be destroyed
  fake.api.wait_event = nullptr;
  fake.api.is_capturing = nullptr;
  const Device device = devices::add(&fake.desc).value();
  const Status stream = devices::create_stream(device).status();
  EXPECT_EQ(stream.code(), StatusCode::kUnsupported);
  EXPECT_EQ(stream.message(),
            "ext:acme:0 has no streams (its destroy_stream is NULL); use its default stream, "
            "nullptr");
  EXPECT_EQ(fake.made_streams, 0);
  {
    const Event event = Event::create(device).value();
    const Status wait = devices::wait_event(device, event.get());
    EXPECT_EQ(wait.code(), StatusCode::kUnsupported);
    EXPECT_EQ(wait.message(),
              "ext:acme:0 has no events (its wait_event is NULL); synchronize the stream instead");
  }
  EXPECT_EQ(devices::is_capturing(device).value(), false);
  EXPECT_OK(devices::remove(device));
  EXPECT_EQ(Stream::create(Device{}).status().code(), StatusCode::kUnsupported);
}

TEST(DeviceStreams, ADeviceThatSaysItHasNoCapturesCapturesNothing) {
  FakeStreams fake;
  fake.api.is_capturing = [](void*, void*, int32_t*, const te_fl_error_sink*) {
    return static_cast<te_fl_status>(TE_FL_UNSUPPORTED);
  };
  const Device device = devices::add(&fake.desc).value();
  {
    const Stream first = Stream::create(device).value(), second = Stream::create(device).value();
    const Result<bool> capturing = devices::is_capturing(device, first.get());
    ASSERT_OK(capturing);
    EXPECT_FALSE(*capturing);
    Tensor t;
    {
      const StreamScope scope(first);
      t = Tensor::zeros({4}, DType::kF32, device).value();
    }
    const StreamScope scope(second);
    EXPECT_OK(t.to(Device{}));
    EXPECT_OK(devices::retire_stream(device, &fake));  // a framework's stream
  }
  EXPECT_OK(devices::remove(device));
}

// The plugin's elapsed_time() is called only for timed events that were recorded.
TEST(DeviceStreams, OnlyTimedEventsThatWereRecordedHaveATime) {
  FakeStreams fake;
  fake.api.query_event = [](void*, void*, int32_t* done, const te_fl_error_sink*) {
    *done = 1;
    return static_cast<te_fl_status>(TE_FL_OK);
  };
  fake.api.elapsed_time = [](void* self, void* start, void* end, uint64_t* nanoseconds,
                             const te_fl_error_sink*) {
    *nanoseconds = 7;
    return FakeStreams::note(self, "time", start, end, true);
  };
  const Device device = devices::add(&fake.desc).value();
  {
    Event start = Event::create(device).value(), end = Event::create(device, true).value();
    ASSERT_OK(start.record());
    ASSERT_OK(end.record());
    EXPECT_FAILS(end.elapsed_since(start), kInvalidArgument,
                 "the first event of ext:acme:0 was not created with `timed`");
    EXPECT_FAILS(start.elapsed_since(end), kInvalidArgument, "the second event of ext:acme:0");
  }
  fake.made_events = 0;  // makes the handles repeat
  {
    Event start = Event::create(device, true).value(), end = Event::create(device, true).value();
    ASSERT_OK(start.record());
    EXPECT_FAILS(end.elapsed_since(start), kFailedPrecondition,
                 "the second event of ext:acme:0 was never recorded");
    EXPECT_EQ(std::count(fake.calls.begin(), fake.calls.end(), "time e0 e1"), 0);
    ASSERT_OK(end.record());
    EXPECT_EQ(end.elapsed_since(start).value(), 7u);
    EXPECT_EQ(std::count(fake.calls.begin(), fake.calls.end(), "time e0 e1"), 1);
  }
  EXPECT_OK(devices::remove(device));
}

TEST(DeviceStreams, AnEmptyEventBelongsToNoDevice) {
  FakeStreams fake;
  const Device device = devices::add(&fake.desc).value();
  {
    const Stream stream = Stream::create(device).value();
    EXPECT_FAILS(stream.wait(Event()), kInvalidArgument, "the event is empty");
  }
  EXPECT_OK(devices::remove(device));
}

// On the host, work has completed when the call that enqueues it returns.
TEST(DeviceStreams, TheHostsEventsAreDoneAndTimed) {
  Event first = Event::create(Device{}, true).value(), last = Event::create(Device{}, true).value();
  EXPECT_TRUE(first.done().value()) << "it marks nothing yet";
  ASSERT_TRUE(first.record().ok());
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
  while (std::chrono::steady_clock::now() < end) {
  }
  ASSERT_TRUE(last.record().ok());
  EXPECT_TRUE(last.done().value());
  EXPECT_TRUE(last.synchronize().ok());
  EXPECT_GE(last.elapsed_since(first).value(), 200'000u);
  EXPECT_EQ(first.elapsed_since(last).value(), 0u) << "the end came first";
}

// An event belongs to a provider, whose devices may wait for each other's events (R24).
TEST(DeviceStreams, AnEventOfAnotherProviderIsRefused) {
  FakeStreams fake;
  fake.api.elapsed_time = nullptr;
  const Device device = devices::add(&fake.desc).value();
  {
    Event event = Event::create(Device{}, true).value();
    const Stream stream = Stream::create(device).value();
    const Status wait = stream.wait(event);
    EXPECT_EQ(wait.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(wait.message().find("a stream of ext:acme:0 cannot wait for an event of cpu, which "
                                  "another plugin provides (rule R24); wait for it on the host"),
              std::string::npos)
        << wait.message();
    const Status untimed = Event::create(device, true).status();
    EXPECT_EQ(untimed.code(), StatusCode::kUnsupported);
    EXPECT_NE(untimed.message().find("has no timed events (its elapsed_time is NULL)"),
              std::string::npos)
        << untimed.message();
    const Event own = Event::create(device).value();
    EXPECT_EQ(own.done().status().code(), StatusCode::kUnsupported) << "no query_event";
    EXPECT_EQ(own.elapsed_since(event).status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(devices::remove(device).ok());
}

// te-fl validates a memory descriptor before it calls the device.
TEST(Memory, ADescriptorIsChecked) {
  const auto refused = [](auto change, const char* part) {
    te_fl_memory_desc memory;
    memory.bytes = 64;
    change(memory);
    const Status status = devices::allocate(Device{}, memory).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  refused([](auto& m) { m.struct_size = 8; }, "struct_size is 8");
  refused([](auto& m) { m.kind = 4; }, "kind 4 is no te_fl_memory_kind");
  refused([](auto& m) { m.alignment = 128; }, "alignment is 128");
  refused([](auto& m) { m.alignment = 768; }, "alignment is 768");
  refused([](auto& m) { m.flags = 1; }, "flags is 1; none is defined yet");
}

TEST(Memory, EveryKindOfTheHostIsAligned) {
  for (const uint32_t kind :
       {TE_FL_MEMORY_DEVICE, TE_FL_MEMORY_PINNED, TE_FL_MEMORY_MANAGED, TE_FL_MEMORY_PEER}) {
    te_fl_memory_desc memory;
    memory.kind = kind;
    memory.bytes = 100;
    memory.alignment = 4096;
    void* const data = devices::allocate(Device{}, memory).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0u) << kind;
    devices::free(Device{}, data, static_cast<te_fl_memory_kind>(kind));
  }
  EXPECT_EQ(devices::live_objects(Device{}), 0);
}

TEST(Memory, AKindThatADeviceLacksIsNamed) {
  FakeStreams fake;
  const Device device = devices::add(&fake.desc).value();
  te_fl_memory_desc memory;
  memory.kind = TE_FL_MEMORY_MANAGED;
  memory.bytes = 64;
  const Status status = devices::allocate(device, memory).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("of managed memory on ext:acme:0"), std::string::npos)
      << status.message();
  EXPECT_TRUE(devices::remove(device).ok());
}

TEST(DeviceStreams, ErrorsAreReportedAndNotCounted) {
  FakeStreams fake;
  const Device device = devices::add(&fake.desc).value();
  fake.fail = true;
  const Status s = devices::create_stream(device).status();
  EXPECT_EQ(s.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(s.message(), "creation of a stream on ext:acme:0: no queue is left");
  EXPECT_EQ(devices::live_objects(device), 0);
  fake.fail = false;
  {
    const Stream stream = Stream::create(device).value();
    EXPECT_EQ(Event().record(stream.get()).code(), StatusCode::kInvalidArgument);
    const Status other = stream.wait(Event());
    EXPECT_FAILS(other, kInvalidArgument, "the event is empty");
  }
  devices::destroy_stream(device, nullptr);
  EXPECT_EQ(devices::live_objects(device), 0);
  EXPECT_OK(devices::remove(device));
}

TEST(DeviceList, DuplicatesNameThePresentProvider) {
  FakeDevice first("acme"), again("acme"), opencl("pocl", 0, TE_FL_DEVICE_OPENCL),
      rival("rusticl", 1, TE_FL_DEVICE_OPENCL);
  const Device device = devices::add(&first.desc).value();
  EXPECT_EQ(devices::add(&again.desc).status().code(), StatusCode::kAlreadyExists);
  const Device cl = devices::add(&opencl.desc).value();
  const Status s = devices::add(&rival.desc).status();
  EXPECT_FAILS(s, kAlreadyExists, "provider 'pocl' already has opencl:0");
  EXPECT_OK(devices::remove(device));
  EXPECT_OK(devices::remove(cl));
}

TEST(DeviceList, BadDescriptorsAreRefused) {
  EXPECT_FALSE(devices::add(nullptr).ok());
  FakeDevice fake("acme");
  fake.desc.struct_size = 8;
  EXPECT_HAS(devices::add(&fake.desc).status().message(), "struct_size 8,");
  fake.desc.struct_size = sizeof fake.desc + 4;
  EXPECT_HAS(devices::add(&fake.desc).status().message(), "a multiple of 8");
  fake.desc.struct_size = sizeof fake.desc;
  fake.api.struct_size = offsetof(te_fl_device_api, is_capturing) + 4;
  EXPECT_HAS(devices::add(&fake.desc).status().message(),
             "struct_size " + std::to_string(fake.api.struct_size));
  fake = FakeDevice("acme");
  fake.desc.self = &fake;
  fake.desc.api = &fake.api;
  fake.api.copy = nullptr;
  EXPECT_HAS(devices::add(&fake.desc).status().message(), "rule R4");
  fake.desc.api = nullptr;
  EXPECT_FALSE(devices::add(&fake.desc).ok());
  FakeDevice nameless("");
  EXPECT_HAS(devices::add(&nameless.desc).status().message(), "rule R18");
  FakeDevice negative("acme", -1);
  EXPECT_FALSE(devices::add(&negative.desc).ok());
}

// Allocation and removal race: either the allocation is counted and removal returns BUSY, or the
// allocation fails.
TEST(DeviceList, RemovalNeverLeavesLiveMemoryBehind) {
  for (int round = 0; round < 50; ++round) {
    FakeDevice fake("racer");
    const Device device = devices::add(&fake.desc).value();
    std::thread user([&] {
      for (int i = 0; i < 20; ++i) {
        const auto data = devices::allocate(device, 16);
        if (data.ok()) devices::free(device, *data);
      }
    });
    while (!devices::remove(device).ok()) {
    }
    user.join();
    EXPECT_FALSE(devices::find(device).ok());
  }
}

}  // namespace
}  // namespace te_fl
