// Errors of a device that fails or is misused: memory and streams of other devices, out of memory,
// sticky errors and the ops suspected of causing them. The device is host memory under another
// name.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "core/device/device_list.hpp"
#include "core/device/recent_ops.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/memory.hpp"

namespace te_fl {
namespace {

using testing::Fake;

// A fake device. Knows its allocations and its one stream, has `limit` bytes of memory, and fails
// on demand.
struct Chip {
  std::map<const char*, size_t> blocks;
  size_t held = 0, limit = 1 << 20;
  te_fl_status next_error = TE_FL_OK;  // status that the next synchronize, copy, fill or allocate
                                       // returns
  bool capturing = false;
  int synchronised = 0;
  int stream = 0;                 // its address is the handle
  const void* foreign = nullptr;  // a stream that is_capturing() refuses
  te_fl_device_api api{};
  te_fl_device_desc desc{};

  static Chip& of(void* self) { return *static_cast<Chip*>(self); }
  te_fl_status answer(const te_fl_error_sink* errors) const {
    if (next_error != TE_FL_OK && errors != nullptr) errors->write(errors->host, "illegal address");
    return next_error;
  }
  explicit Chip(int32_t index = 0) {
    api.struct_size = sizeof api;
    api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* errors) -> te_fl_status {
      if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
      const size_t bytes = memory->bytes;
      Chip& c = of(self);
      if (const te_fl_status code = c.answer(errors)) return code;
      if (c.held + bytes > c.limit) {
        errors->write(errors->host, "the chip is full");
        return TE_FL_OUT_OF_MEMORY;
      }
      *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
      c.blocks[static_cast<char*>(*out)] = bytes;
      c.held += bytes;
      return TE_FL_OK;
    };
    api.free = [](void* self, void* data, uint32_t, void*,
                  const te_fl_error_sink*) -> te_fl_status {
      const auto block = of(self).blocks.find(static_cast<char*>(data));
      of(self).held -= block->second;
      of(self).blocks.erase(block);
      std::free(data);
      return TE_FL_OK;
    };
    api.copy = [](void* self, void* dst, const void* src, size_t bytes, uint32_t, void*,
                  const te_fl_error_sink* errors) -> te_fl_status {
      std::memcpy(dst, src, bytes);
      return of(self).answer(errors);
    };
    api.fill = [](void* self, void* dst, uint8_t value, size_t bytes, void*,
                  const te_fl_error_sink* errors) -> te_fl_status {
      std::memset(dst, value, bytes);
      return of(self).answer(errors);
    };
    api.synchronize = [](void* self, void*, const te_fl_error_sink* errors) -> te_fl_status {
      ++of(self).synchronised;
      return of(self).answer(errors);
    };
    api.is_capturing = [](void* self, void* stream, int32_t* capturing,
                          const te_fl_error_sink*) -> te_fl_status {
      *capturing = of(self).capturing ? 1 : 0;
      return stream != nullptr && stream == of(self).foreign ? TE_FL_INVALID_ARGUMENT : TE_FL_OK;
    };
    api.properties = [](void*, te_fl_device_props*, const te_fl_error_sink*) -> te_fl_status {
      return TE_FL_OK;
    };
    api.check_pointer = [](void* self, const void* data, size_t bytes,
                           const te_fl_error_sink* errors) -> te_fl_status {
      const auto* p = static_cast<const char*>(data);
      for (const auto& [block, size] : of(self).blocks) {
        if (p >= block && p + bytes <= block + size) return TE_FL_OK;
      }
      errors->write(errors->host, "it is pageable host memory");
      return TE_FL_INVALID_ARGUMENT;
    };
    api.check_stream = [](void* self, void* stream,
                          const te_fl_error_sink* errors) -> te_fl_status {
      if (stream == &of(self).stream) return TE_FL_OK;
      errors->write(errors->host, "it belongs to another chip");
      return TE_FL_INVALID_ARGUMENT;
    };
    desc.struct_size = sizeof desc;
    desc.device = {TE_FL_DEVICE_CUDA, index};
    desc.provider = "fake";
    desc.self = this;
    desc.api = &api;
  }
};

class DeviceErrors : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto added = devices::add(&chip.desc);
    ASSERT_OK(added);
    device = *added;
    native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_CUDA;
    native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
    ASSERT_OK(registry.register_op(native.desc));
    op = *registry.find("test::five");
    for (Tensor& t : tensors) t = Tensor::empty({2, 3}, DType::kF32, device).value();
    args.a = tensors[0];
    args.b = tensors[1];
    args.c = tensors[2];
    args.d = tensors[3];
    args.out = tensors[4];
  }
  void TearDown() override {
    for (const char* name : {"TE_FL_VALIDATE", "TE_FL_SYNC"}) ASSERT_OK(environment::unset(name));
    for (Tensor& t : tensors) t = Tensor();
    core::g_device_hooks.on_added.load()(device);
    ASSERT_OK(devices::remove(device));
    EXPECT_TRUE(chip.blocks.empty());
  }
  Status call(void* stream = nullptr) {
    CallOptions options;
    options.stream = stream;
    return manager.call(op, &args, options);
  }

  Chip chip;
  Device device;
  OpRegistry registry;
  OpManager manager{registry};
  Fake native{"vendor.native"};
  Tensor tensors[5];
  testing::FiveArgs args;
  OpId op;
};

// ---- pointers and streams under TE_FL_VALIDATE

TEST_F(DeviceErrors, HostMemoryPassedAsTheDevicesIsFound) {
  float host[6] = {};
  const int64_t shape[] = {2, 3};
  const Tensor wrong = Tensor::wrap(host, shape, {}, DType::kF32, device, nullptr).value();
  args.b = wrong;
  ASSERT_OK(call());  // not checked unless TE_FL_VALIDATE is set
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_FAILS(call(), kInvalidArgument, "argument 'b' is f32[2,3] cuda:0, and its data is not");
  EXPECT_FAILS(call(), kInvalidArgument, "is not memory of cuda:0: it is pageable host memory");
  EXPECT_FAILS(call(), kInvalidArgument, "copy it there with Tensor::to");
  EXPECT_EQ(native.runs.load(), 1);
  args.b = tensors[1];
  ASSERT_OK(call());
}

TEST_F(DeviceErrors, MemoryThatEndsTooEarlyIsFound) {
  const int64_t shape[] = {3, 3};  // the memory holds only two of the three rows
  Tensor large[5];
  for (int i = 0; i < 5; ++i) {
    large[i] = Tensor::wrap(tensors[i].raw_data(), shape, {}, DType::kF32, device, nullptr).value();
  }
  args = {.a = large[0], .b = large[1], .c = large[2], .d = large[3], .out = large[4]};
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_FAILS(call(), kInvalidArgument, "argument 'a'");
  EXPECT_EQ(native.runs.load(), 0);
}

TEST_F(DeviceErrors, StridedMemoryIsCheckedWhereItIs) {
  const Tensor all = Tensor::empty({4, 3}, DType::kF32, device).value();
  const int64_t shape[] = {2, 3}, strides[] = {6, 1}, too_far[] = {90, 1};
  const Tensor rows =
      Tensor::wrap(all.raw_data(), shape, strides, DType::kF32, device, nullptr).value();
  args.a = rows;
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  ASSERT_OK(call());
  const Tensor beyond =
      Tensor::wrap(all.raw_data(), shape, too_far, DType::kF32, device, nullptr).value();
  args.a = beyond;
  EXPECT_FAILS(call(), kInvalidArgument, "argument 'a'");
}

TEST_F(DeviceErrors, EveryPartOfAQuantisedTensorIsChecked) {
  const QuantSpec spec{.dtype = DType::kF8E4M3, .columnwise = true};
  const int64_t shape[] = {2, 3};
  const Tensor good = Tensor::empty_quantized(shape, spec, device).value();
  const te_fl_tensor* const as_c = good;
  te_fl_quant quant = *as_c->quant;
  te_fl_tensor bad = *as_c;
  bad.quant = &quant;
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  args.a = good;
  ASSERT_OK(call());
  float scale = 1;
  args.a = &bad;
  quant.scale_inv = &scale;
  EXPECT_FAILS(call(), kInvalidArgument, "its scale_inv is not memory of cuda:0");
  quant = *as_c->quant;
  quant.amax = &scale;
  EXPECT_FAILS(call(), kInvalidArgument, "its amax is not memory of cuda:0");
  quant = *as_c->quant;
  quant.columnwise_data = &scale;
  EXPECT_FAILS(call(), kInvalidArgument, "its columnwise_data is not memory of cuda:0");
}

TEST_F(DeviceErrors, AStreamOfAnotherDeviceIsFound) {
  int other = 0;
  ASSERT_OK(call(&other));
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_FAILS(call(&other), kInvalidArgument,
               "the stream given for cuda:0 is not one of it: it belongs to another chip");
  ASSERT_OK(call(&chip.stream));
  ASSERT_OK(call(nullptr));
  auto handle = manager.prepare(op, &args);
  ASSERT_OK(handle);
  CallOptions options;
  options.stream = &other;
  EXPECT_FAILS(handle->call(&args, options), kInvalidArgument, "give a stream of that device");
}

TEST_F(DeviceErrors, AStreamThatTheDeviceRefusesIsRefusedWithoutAsking) {
  int other = 0;
  chip.foreign = &other;
  Fake scratch{"vendor.scratch"};  // an implementation whose scratch would be allocated on the
                                   // foreign stream
  scratch.desc.device_types = native.desc.device_types;
  scratch.desc.priority = 200;
  scratch.desc.workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
    *bytes = 4096;
    return te_fl_status{TE_FL_OK};
  };
  ASSERT_OK(registry.register_op(scratch.desc));
  const size_t held = chip.held;
  const char* const words =
      "op 'test::five': the stream given for cuda:0 is not one of it: it belongs to another chip";
  EXPECT_FAILS(call(&other), kInvalidArgument, words);
  EXPECT_EQ(chip.held, held);
  ASSERT_OK(call(&chip.stream));
  EXPECT_GT(chip.held, held);
  auto handle = manager.prepare(op, &args);
  ASSERT_OK(handle);
  CallOptions options;
  ASSERT_OK(handle->call(&args, options));
  options.stream = &other;
  for (int i = 0; i < 3; ++i) EXPECT_FAILS(handle->call(&args, options), kInvalidArgument, words);
  EXPECT_FAILS(manager.first_choice(op, &args, options).status(), kInvalidArgument, words);
  EXPECT_EQ(scratch.runs.load(), 2);
  // A call with both errors reports the invalid argument, not the invalid stream.
  args.b = nullptr;
  EXPECT_FAILS(call(&other), kInvalidArgument, "argument 'b'");
  args.b = tensors[1];
  // A device without check_pointer cannot tell foreign streams; the call runs as it does without
  // TE_FL_VALIDATE.
  chip.api.struct_size = offsetof(te_fl_device_api, check_pointer);
  ASSERT_OK(call(&other));
}

TEST_F(DeviceErrors, ARandomStateInHostMemoryIsFound) {
  uint64_t host[2] = {1, 2};
  const Tensor state = Tensor::empty({2}, DType::kI64, device).value();
  const auto run = [&](const void* at) {
    CallOptions options;
    options.rng.seed_address = static_cast<const uint64_t*>(at);
    return manager.call(op, &args, options);
  };
  ASSERT_OK(run(host));  // not checked unless TE_FL_VALIDATE is set
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_FAILS(
      run(host), kInvalidArgument,
      "op 'test::five': the random state's seed (CallOptions::rng.seed_address) is not memory of "
      "cuda:0: it is pageable host memory");
  EXPECT_FAILS(run(host), kInvalidArgument, "8 bytes of that device");
  EXPECT_EQ(native.runs.load(), 1);
  ASSERT_OK(run(state.raw_data()));
  ASSERT_OK(run(nullptr));
  // The address of the RNG offset is checked, too.
  CallOptions options;
  options.rng.offset_address = host;
  EXPECT_FAILS(manager.call(op, &args, options), kInvalidArgument,
               "the random state's offset (CallOptions::rng.offset_address)");
  chip.api.struct_size = offsetof(te_fl_device_api, check_pointer);
  ASSERT_OK(run(host));
}

// Simulates check_pointer() or check_stream() of a lost device, which fails because of the loss.
// te-fl must report the loss and not a mistake of the caller.
te_fl_status lost(const te_fl_error_sink* errors) {
  errors->write(errors->host, "it fell off the bus");
  return TE_FL_DEVICE_LOST;
}

TEST_F(DeviceErrors, TensorsOfALostDeviceAreNoMistake) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  chip.api.check_pointer = [](void*, const void*, size_t, const te_fl_error_sink* errors) {
    return lost(errors);
  };
  const Status failed = call();
  EXPECT_FAILS(failed, kDeviceLost, "device cuda:0 is lost since op 'test::five'");
  EXPECT_HAS(failed.to_string(), "it fell off the bus");
  EXPECT_EQ(native.runs.load(), 0);
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
  EXPECT_FAILS(call(), kDeviceLost, "device cuda:0 is lost since");
  EXPECT_FAILS(devices::synchronize(device, nullptr), kDeviceLost, "is lost since");
}

TEST_F(DeviceErrors, ARandomStateOnALostDeviceIsNoMistake) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  chip.api.check_pointer = [](void*, const void*, size_t bytes, const te_fl_error_sink* errors) {
    // Checks only the RNG seed and offset, which have 8 bytes; tensors are larger and are accepted.
    if (bytes != sizeof(uint64_t)) return te_fl_status{TE_FL_OK};
    return lost(errors);
  };
  const uint64_t state = 1;
  CallOptions options;
  options.rng.seed_address = &state;
  const Status failed = manager.call(op, &args, options);
  EXPECT_FAILS(failed, kDeviceLost, "the random state's seed cannot be looked at");
  EXPECT_HAS(failed.to_string(), "it fell off the bus");
  EXPECT_EQ(native.runs.load(), 0);
  EXPECT_FAILS(call(), kDeviceLost, "device cuda:0 is lost since");
}

TEST_F(DeviceErrors, AStreamOfALostDeviceIsNoMistake) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  chip.api.check_stream = [](void*, void*, const te_fl_error_sink* errors) { return lost(errors); };
  EXPECT_FAILS(call(&chip.stream), kDeviceLost, "the stream cannot be looked at");
  EXPECT_EQ(native.runs.load(), 0);
  EXPECT_FAILS(call(), kDeviceLost, "device cuda:0 is lost since");
}

TEST_F(DeviceErrors, ProvidersWithoutTheseFunctionsAreNotCalled) {
  chip.api.struct_size = offsetof(te_fl_device_api, check_pointer);
  chip.api.check_pointer = reinterpret_cast<decltype(chip.api.check_pointer)>(1);
  chip.api.check_stream = reinterpret_cast<decltype(chip.api.check_stream)>(1);
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  int other = 0;
  ASSERT_OK(call(&other));
}

TEST_F(DeviceErrors, TensorsOfTwoDevicesAreRefused) {
  Chip second(1);
  const auto added = devices::add(&second.desc);
  ASSERT_OK(added);
  {
    const Tensor there = Tensor::empty({2, 3}, DType::kF32, *added).value();
    args.c = there;
    EXPECT_FAILS(call(), kInvalidArgument,
                 "argument 'c' is on cuda:1, must be on cuda:0 as 'a' is; copy it there first");
  }
  EXPECT_EQ(native.runs.load(), 0);
  ASSERT_OK(devices::remove(*added));
}

// ---- errors of the device

TEST_F(DeviceErrors, AnErrorFoundLaterNamesTheSuspects) {
  ASSERT_OK(call(&chip.stream));
  chip.next_error = TE_FL_INTERNAL;
  EXPECT_FAILS(devices::synchronize(device, &chip.stream), kInternal,
               "illegal address; enqueued last, newest first: 'test::five' by vendor.native");
  EXPECT_FAILS(devices::synchronize(device, &chip.stream), kInternal, "TE_FL_SYNC=1 finds the one");
  chip.next_error = TE_FL_OK;
  ASSERT_OK(call(&chip.stream));  // the error is not sticky: the device stays usable
}

TEST_F(DeviceErrors, AStickyErrorRetiresTheDeviceWhereverItShows) {
  ASSERT_OK(call());
  chip.next_error = TE_FL_DEVICE_LOST;
  EXPECT_FAILS(devices::synchronize(device), kDeviceLost, "illegal address");
  chip.next_error = TE_FL_OK;  // a lost device is not called any more
  const char* const since =
      "device cuda:0 is lost since synchronisation of cuda:0: illegal address";
  EXPECT_FAILS(call(), kDeviceLost, since);
  EXPECT_FAILS(call(), kDeviceLost, "'test::five' by vendor.native");
  EXPECT_FAILS(devices::synchronize(device), kDeviceLost, since);
  EXPECT_FAILS(devices::allocate(device, 16).status(), kDeviceLost, since);
  EXPECT_FAILS(tensors[0].to(Device()).status(), kDeviceLost, since);
  EXPECT_FAILS(Tensor::empty({2}, DType::kF32, device).status(), kDeviceLost,
               "restart the process");
  EXPECT_EQ(native.runs.load(), 1);
}

TEST_F(DeviceErrors, AStickyErrorThatAnEventMeetsRetiresTheDeviceToo) {
  int event = 0;
  chip.api.record_event = chip.api.wait_event = [](void* self, void*, void*,
                                                   const te_fl_error_sink* errors) -> te_fl_status {
    if (Chip::of(self).next_error != TE_FL_OK) errors->write(errors->host, "the queue is dead");
    return Chip::of(self).next_error;
  };
  ASSERT_OK(call(&chip.stream));
  ASSERT_OK(devices::record_event(device, &event, &chip.stream));
  ASSERT_OK(devices::wait_event(device, &event, &chip.stream));
  chip.next_error = TE_FL_INTERNAL;
  EXPECT_FAILS(devices::wait_event(device, &event, &chip.stream), kInternal,
               "enqueued last, newest first: 'test::five' by vendor.native");
  chip.next_error = TE_FL_DEVICE_LOST;
  const Status lost = devices::record_event(device, &event, &chip.stream);
  EXPECT_FAILS(lost, kDeviceLost, "recording an event on cuda:0");
  EXPECT_HAS(lost.to_string(), "the queue is dead");
  chip.next_error = TE_FL_OK;
  EXPECT_FAILS(call(), kDeviceLost, "device cuda:0 is lost since recording an event on cuda:0");
}

TEST_F(DeviceErrors, AnOpThatMeetsALostDeviceNamesWhatRanBefore) {
  ASSERT_OK(call());
  native.run_status = TE_FL_DEVICE_LOST;
  native.run_text = "launch failed";
  EXPECT_FAILS(call(), kDeviceLost,
               "launch failed; enqueued before it, newest first: 'test::five' by vendor.native");
  EXPECT_FAILS(devices::fill(device, tensors[0].raw_data(), 0, 4), kDeviceLost,
               "is lost since implementation 'vendor.native' of op 'test::five' reported");
}

TEST_F(DeviceErrors, SyncFindsTheOpAndLeavesCapturesAlone) {
  ASSERT_OK(environment::set("TE_FL_SYNC", "1"));
  ASSERT_OK(call());
  EXPECT_EQ(chip.synchronised, 1);
  chip.capturing = true;
  ASSERT_OK(call());
  EXPECT_EQ(chip.synchronised, 1);
  chip.capturing = false;
  chip.next_error = TE_FL_DEVICE_LOST;
  EXPECT_FAILS(call(), kDeviceLost,
               "op 'test::five' in 'vendor.native' failed after it was enqueued");
  chip.next_error = TE_FL_OK;
  EXPECT_FAILS(call(), kDeviceLost, "device cuda:0 is lost since");
}

// ---- out of memory

TEST_F(DeviceErrors, OutOfMemoryNamesTheLargestHolders) {
  std::vector<Tensor> weights;
  for (int i = 0; i < 3; ++i)
    weights.push_back(Tensor::empty({256, 256}, DType::kF32, device).value());
  const Tensor codes =
      Tensor::empty_quantized({{256, 128}}, {.dtype = DType::kF8E4M3}, device).value();
  void* raw = devices::allocate(device, 100000).value();
  const Status status = Tensor::empty({1024, 256}, DType::kF32, device).status();
  EXPECT_FAILS(status, kOutOfMemory, "allocation of 1.0 MiB on cuda:0: the chip is full");
  EXPECT_FAILS(status, kOutOfMemory, "the largest: 3 x 256 KiB for f32[256, 256], ");
  EXPECT_FAILS(status, kOutOfMemory, "98 KiB for memory");
  EXPECT_FAILS(status, kOutOfMemory, "32 KiB for f8e4m3[256, 128]");
  weights.pop_back();
  EXPECT_FAILS(Tensor::empty({1024, 256}, DType::kF32, device).status(), kOutOfMemory,
               "the largest: 2 x 256 KiB");
  devices::free(device, raw);
}

// ---- te-fl's accounting of device memory

TEST_F(DeviceErrors, TheAccountSaysWhatIsHeldAndWhoHeldThePeak) {
  const size_t before = devices::memory_account(device).value().bytes;
  ASSERT_OK(devices::watch_memory(device));
  const Tensor kept = Tensor::empty({64, 64}, DType::kF32, device).value();  // 16 KiB
  {
    const Tensor one = Tensor::empty({32, 64}, DType::kBF16, device).value();  // 4 KiB
    const Tensor two = Tensor::empty({32, 64}, DType::kBF16, device).value();
  }
  const Tensor later = Tensor::empty({16}, DType::kF32, device).value();
  auto account = devices::memory_account(device).value();
  EXPECT_EQ(account.bytes - before, size_t{16384 + 64});
  EXPECT_EQ(account.peak_bytes - before, size_t{16384 + 2 * 4096});
  EXPECT_TRUE(account.recorded.empty());  // no recording was requested

  ASSERT_OK(devices::watch_memory(device, account.bytes + 2 * 4096));
  EXPECT_EQ(devices::memory_account(device).value().peak_bytes, account.bytes);
  std::vector<Tensor> pair;
  for (int i = 0; i < 2; ++i) pair.push_back(Tensor::empty({32, 64}, DType::kBF16, device).value());
  const Tensor beyond = Tensor::empty({2048}, DType::kF32, device).value();
  pair.clear();
  account = devices::memory_account(device).value();
  ASSERT_GE(account.recorded.size(), 3u);
  EXPECT_EQ(account.recorded[0].use, "f32[64, 64]");
  EXPECT_EQ(account.recorded[0].bytes, 16384u);
  EXPECT_EQ(account.recorded[1].use, "bf16[32, 64]");
  EXPECT_EQ(account.recorded[1].count, 2u);
  EXPECT_EQ(account.recorded[1].bytes, 8192u);
  for (const auto& h : account.recorded) EXPECT_NE(h.use, "f32[2048]");  // allocated after the peak
  EXPECT_EQ(account.holders[1].use, "f32[2048]");
}

TEST_F(DeviceErrors, TheAccountNeedsADeviceThatIsCounted) {
  EXPECT_FAILS(devices::memory_account(Device{}).status(), kUnsupported,
               "memory of cpu is not counted");
  Device missing = device;
  missing.index = 77;
  EXPECT_FAILS(devices::watch_memory(missing), kNotFound, "cuda:77");
}

TEST_F(DeviceErrors, OutOfMemoryCountsTheWorkspaces) {
  native.desc.workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
    *bytes = 300 << 10;
    return te_fl_status{TE_FL_OK};
  };
  ASSERT_OK(registry.unregister_op("test::five", "vendor.native"));
  ASSERT_OK(registry.register_op(native.desc));
  ASSERT_OK(call());
  EXPECT_FAILS(devices::allocate(device, 900 << 10).status(), kOutOfMemory,
               "300 KiB for workspace");
}

// ---- the ring buffer of recent ops

TEST(RecentOps, OfTheStreamFirstAndNewestFirst) {
  const Device one{TE_FL_DEVICE_CUDA, 40, 0}, two{TE_FL_DEVICE_CUDA, 41, 0};
  int a = 0, b = 0;
  core::note_op(one, &a, "first", "i");
  core::note_op(two, &a, "elsewhere", "i");
  core::note_op(one, &b, "beside", "i");
  core::note_op(one, &a, "second", "i");
  EXPECT_EQ(core::recent_ops(one, &a),
            "'second' by i, 'first' by i, 'beside' by i (another stream)");
  EXPECT_EQ(core::recent_ops(one, &a, 1), "'second' by i");
  for (int i = 0; i < 64; ++i) core::note_op(two, &b, "later", "i");
  EXPECT_EQ(core::recent_ops(one, &a), "");
}

TEST(RecentOps, ReadersAndWritersDoNotMix) {
  const Device device{TE_FL_DEVICE_CUDA, 42, 0};
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([&device, t] {
      const char* const names[] = {"x", "y", "z"};
      for (int i = 0; i < 20000; ++i) core::note_op(device, nullptr, names[t], names[t]);
    });
  }
  for (int i = 0; i < 200; ++i) {
    const std::string text = core::recent_ops(device, nullptr, 1);
    EXPECT_TRUE(text.empty() || text == "'x' by x" || text == "'y' by y" || text == "'z' by z")
        << text;
  }
  for (std::thread& w : writers) w.join();
}

}  // namespace
}  // namespace te_fl
