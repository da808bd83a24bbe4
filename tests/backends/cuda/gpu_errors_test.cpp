// Invalid input and broken devices on a real GPU. Usage: TE_FL_PLUGIN_MODULES=.../libte_fl_cuda.so
// gpu_errors_test. Skipped without a GPU.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <limits>

#include "support/expect.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

const Device kGpu{TE_FL_DEVICE_CUDA, 0, 0};
constexpr int64_t kShape[] = {64, 64};

class GpuErrors : public ::testing::Test {
 protected:
  void SetUp() override {
    OpManager::instance();
    if (!devices::find(kGpu).ok()) GTEST_SKIP() << "no GPU, or TE_FL_PLUGIN_MODULES is not set";
    x = Tensor::zeros(kShape, DType::kF32, kGpu).value();
    y = Tensor::empty(kShape, DType::kF32, kGpu).value();
  }
  void TearDown() override {
    for (const char* name : {"TE_FL_VALIDATE", "TE_FL_SYNC"}) ASSERT_OK(environment::unset(name));
  }
  Status gelu(const te_fl_tensor* input, void* stream = nullptr) {
    CallOptions options;
    options.stream = stream;
    const te_fl_activation_act_fwd_args args{.input = input, .output = y};
    return OpManager::instance().call(op::gelu, &args, options);
  }
  static Tensor at(void* data) {
    return Tensor::wrap(data, kShape, {}, DType::kF32, kGpu, nullptr).value();
  }
  Tensor x, y;
};

TEST_F(GpuErrors, HostPointersAreFound) {
  std::vector<float> host(64 * 64);
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  ASSERT_OK(gelu(x));
  EXPECT_FAILS(gelu(at(host.data())), kInvalidArgument, "argument 'input' is f32[64,64] cuda:0");
  EXPECT_FAILS(gelu(at(host.data())), kInvalidArgument, "is pageable host memory");
  // This address lies far beyond the pages of the allocation.
  void* small = devices::allocate(kGpu, 256).value();
  void* end = static_cast<char*>(small) + (int64_t{1} << 40);
  EXPECT_FAILS(gelu(at(end)), kInvalidArgument, "or no memory at all");
  devices::free(kGpu, small);
  void* pinned = devices::allocate_pinned(kGpu, 64 * 64 * 4).value();
  ASSERT_OK(gelu(at(pinned)));
  ASSERT_OK(devices::synchronize(kGpu));
  devices::free_pinned(kGpu, pinned);
}

TEST_F(GpuErrors, ARandomStateInHostMemoryIsFound) {
  const uint64_t host[2] = {1, 2};
  const Tensor mask = Tensor::empty({64 * 64 / 8}, DType::kU8, kGpu).value();
  const auto drop = [&](const uint64_t* state) {
    CallOptions options;
    options.rng.seed_address = state;
    const te_fl_dropout_fwd_args args{.input = x, .output = y, .mask = mask, .p = 0.5f};
    return OpManager::instance().call(op::dropout_fwd, &args, options);
  };
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_FAILS(drop(host), kInvalidArgument,
               "(CallOptions::rng.seed_address) is not memory of cuda:0");
  const Tensor state = Tensor::zeros({2}, DType::kI64, kGpu).value();
  ASSERT_OK(drop(static_cast<const uint64_t*>(state.raw_data())));
  ASSERT_OK(devices::synchronize(kGpu));
}

TEST_F(GpuErrors, MisalignedPointersAreRefused) {
  te_fl_tensor odd = *static_cast<const te_fl_tensor*>(x);
  odd.dl.byte_offset = 2;
  EXPECT_FAILS(gelu(&odd), kInvalidArgument, "is not a multiple of the element's 4 bytes");
}

TEST_F(GpuErrors, TensorsOnHostAndDeviceAreRefused) {
  const Tensor host = Tensor::zeros(kShape, DType::kF32).value();
  EXPECT_FAILS(gelu(host), kInvalidArgument, "argument 'output' is on cuda:0, must be on cpu");
}

TEST_F(GpuErrors, StreamsOfTheDevicePassTheCheck) {
  Stream stream = std::move(Stream::create(kGpu)).value();
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  ASSERT_OK(gelu(x, stream.get()));
  ASSERT_OK(stream.synchronize());
}

TEST_F(GpuErrors, AStreamOfAnotherDeviceIsRefused) {
  const Device second{TE_FL_DEVICE_CUDA, 1, 0};
  if (!devices::find(second).ok()) GTEST_SKIP() << "one GPU only";
  Stream stream = std::move(Stream::create(second)).value();
  const char* const words = "the stream given for cuda:0 is not one of it: it belongs to cuda:1";
  EXPECT_FAILS(gelu(x, stream.get()), kInvalidArgument, words);
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_FAILS(gelu(x, stream.get()), kInvalidArgument, words);
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
  const char* const direct = "the stream belongs to cuda:1; give one of cuda:0";
  EXPECT_FAILS(devices::allocate(kGpu, 256, stream.get()).status(), kInvalidArgument, direct);
  EXPECT_FAILS(devices::fill(kGpu, x.raw_data(), 0, 16, stream.get()), kInvalidArgument, direct);
  EXPECT_FAILS(devices::is_capturing(kGpu, stream.get()).status(), kInvalidArgument, direct);
  const Tensor there = Tensor::zeros(kShape, DType::kF32, second).value();
  EXPECT_FAILS(gelu(there), kInvalidArgument, "argument 'output' is on cuda:0, must be on cuda:1");
}

TEST_F(GpuErrors, WhatCannotBeCapturedIsRefused) {
  Stream stream = std::move(Stream::create(kGpu)).value();
  {
    Capture capture = std::move(Capture::begin(kGpu, stream.get())).value();
    std::vector<float> host(64 * 64);
    EXPECT_FAILS(devices::copy(Device(), host.data(), kGpu, x.raw_data(), 16, stream.get()),
                 kFailedPrecondition, "to host memory cannot be captured on cuda:0");
    EXPECT_FAILS(devices::synchronize(kGpu, stream.get()), kFailedPrecondition, "captured");
    PolicySettings on_host;
    on_host.per_op["gelu"] = {
        PolicyToken{PolicyToken::Type::kImpl, Kind::kReference, "reference.host"}};
    const PolicyScope scope(on_host);
    EXPECT_FAILS(gelu(x, stream.get()), kUnsupported, "reference.host");
  }
  ASSERT_OK(gelu(x, stream.get()));
  Capture capture = std::move(Capture::begin(kGpu, stream.get())).value();
  ASSERT_OK(gelu(x, stream.get()));
  const Graph graph = std::move(capture.end()).value();
  ASSERT_OK(graph.launch());
  ASSERT_OK(stream.synchronize());
}

TEST_F(GpuErrors, TheSpeedOfCopiesIsMeasuredOnRequest) {
  const auto rate = [] { return devices::properties(kGpu).value().copy_bandwidth; };
  Stream stream = std::move(Stream::create(kGpu)).value();
  const auto free_memory = [] { return devices::properties(kGpu).value().free_memory; };
  const uint64_t free_before = free_memory();
  EXPECT_EQ(rate(), 0);  // loading the plugin measures no bandwidth
  ASSERT_OK(gelu(x, stream.get()));
  {  // a measurement must not disturb a capture on the same thread
    Capture capture = std::move(Capture::begin(kGpu, stream.get())).value();
    ASSERT_OK(plugins::diagnose("cuda"));
    ASSERT_OK(gelu(x, stream.get()));
    ASSERT_OK(capture.end());
  }
  const double measured = rate();
  EXPECT_GT(measured, 5e10);
  EXPECT_LT(measured, 5e13);
  ASSERT_OK(plugins::diagnose("cuda"));
  EXPECT_EQ(rate(), measured);
  EXPECT_GT(free_memory() + (uint64_t{64} << 20), free_before);
}

TEST_F(GpuErrors, SyncWorksOnTheDevice) {
  ASSERT_OK(environment::set("TE_FL_SYNC", "1"));
  ASSERT_OK(gelu(x));
}

TEST_F(GpuErrors, OutOfMemorySaysWhoHasIt) {
  const Tensor large = Tensor::empty({1 << 20, 256}, DType::kBF16, kGpu).value();
  const Status status = devices::allocate(kGpu, size_t{1} << 45).status();
  EXPECT_FAILS(status, kOutOfMemory, "requested 35184372088832 bytes");
  EXPECT_FAILS(status, kOutOfMemory, "MiB are free");
  EXPECT_FAILS(status, kOutOfMemory, "the largest: 512 MiB for bf16[1048576, 256]");
  ASSERT_OK(gelu(x));  // the error is not sticky
  ASSERT_OK(devices::synchronize(kGpu));
}

// Each test breaks the device for the rest of its process, so it runs in its own process.
class GpuErrorsDeathTest : public GpuErrors {};

[[noreturn]] void leave(bool good, const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::_Exit(good ? 0 : 1);
}

TEST_F(GpuErrorsDeathTest, AnIllegalAddressNamesSuspectsAndRetiresTheDevice) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        void* nowhere = reinterpret_cast<void*>(uintptr_t{1} << 45);
        const Status enqueued = gelu(at(nowhere));
        const Status found = devices::synchronize(kGpu);
        const Status later = gelu(x);
        const Status memory = devices::allocate(kGpu, 16).status();
        const bool good =
            enqueued.ok() && found.code() == StatusCode::kDeviceLost &&
            testing::contains(found.message(), "newest first: 'gelu' by vendor.cuda") &&
            later.code() == StatusCode::kDeviceLost &&
            testing::contains(later.message(), "device cuda:0 is lost since") &&
            memory.code() == StatusCode::kDeviceLost;
        leave(good, found.to_string() + "\n" + later.to_string());
      },
      ::testing::ExitedWithCode(0), "illegal memory access");
}

TEST_F(GpuErrorsDeathTest, SyncNamesTheOp) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        (void)environment::set("TE_FL_SYNC", "1");
        const Status status = gelu(at(reinterpret_cast<void*>(uintptr_t{1} << 45)));
        leave(status.code() == StatusCode::kDeviceLost, status.to_string());
      },
      ::testing::ExitedWithCode(0), "op 'gelu' in 'vendor.cuda' failed after it was enqueued");
}

}  // namespace
}  // namespace te_fl
