// The OpenCL plugin's device: copies, streams, events, memory, many threads. Skipped without an
// OpenCL device.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "support/expect.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

const Device kDevice{TE_FL_DEVICE_OPENCL, 0, 0};
constexpr size_t kBytes = size_t{1} << 20;

class OpenclDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    OpManager::instance();
    if (!devices::find(kDevice).ok()) GTEST_SKIP() << "no OpenCL device";
  }
  static std::vector<uint8_t> pattern(int seed) {
    std::vector<uint8_t> bytes(kBytes);
    for (size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<uint8_t>(i * 7 + i / 251 + seed);
    return bytes;
  }
};

TEST_F(OpenclDevice, CopiesIntoAndOutOfTheMiddleOfABlock) {
  const auto bytes = pattern(1);
  auto* data = static_cast<char*>(devices::allocate(kDevice, 2 * kBytes).value());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
  std::vector<uint8_t> scratch = bytes;
  ASSERT_OK(devices::copy(kDevice, data + 13, Device(), scratch.data(), kBytes));
  std::memset(scratch.data(), 0, kBytes);  // the copy has finished reading pageable memory
  ASSERT_OK(devices::copy(kDevice, data + kBytes + 100, kDevice, data + 13, kBytes / 2));
  ASSERT_OK(devices::fill(kDevice, data + 13, 0xab, kBytes / 2));
  std::vector<uint8_t> back(kBytes);
  ASSERT_OK(devices::copy(Device(), back.data(), kDevice, data + kBytes + 100, kBytes / 2));
  ASSERT_OK(devices::synchronize(kDevice));
  EXPECT_EQ(std::memcmp(back.data(), bytes.data(), kBytes / 2), 0);
  ASSERT_OK(devices::copy(Device(), back.data(), kDevice, data + 13, kBytes));
  ASSERT_OK(devices::synchronize(kDevice));
  EXPECT_EQ(back[0], 0xab);
  EXPECT_EQ(back[kBytes / 2 - 1], 0xab);
  EXPECT_EQ(back[kBytes / 2], bytes[kBytes / 2]);
  devices::free(kDevice, data);
}

TEST_F(OpenclDevice, EventsOrderStreams) {
  const auto bytes = pattern(2);
  Stream first = Stream::create(kDevice).value(), second = Stream::create(kDevice).value();
  Event written = Event::create(kDevice).value();
  ASSERT_OK(written.synchronize());  // returns at once, as nothing was recorded
  void* pinned = devices::allocate_pinned(kDevice, 2 * kBytes).value();
  auto* out = static_cast<uint8_t*>(pinned) + kBytes;
  void* data = devices::allocate(kDevice, kBytes, first.get()).value();
  for (int round = 0; round < 20; ++round) {
    std::memcpy(pinned, bytes.data(), kBytes);
    std::memset(out, 0, kBytes);
    ASSERT_OK(devices::fill(kDevice, data, 0, kBytes, first.get()));
    ASSERT_OK(devices::copy(kDevice, data, Device(), pinned, kBytes, first.get()));
    ASSERT_OK(written.record(first.get()));
    ASSERT_OK(second.wait(written));
    ASSERT_OK(devices::copy(Device(), out, kDevice, data, kBytes, second.get()));
    ASSERT_OK(second.synchronize());
    ASSERT_EQ(std::memcmp(out, bytes.data(), kBytes), 0);
    ASSERT_OK(first.synchronize());
  }
  devices::free(kDevice, data, first.get());
  devices::free_pinned(kDevice, pinned);
}

TEST_F(OpenclDevice, SaysWhatItIs) {
  const te_fl_device_props props = devices::properties(kDevice).value();
  EXPECT_GT(props.compute_units, 0u);
  EXPECT_GT(props.total_memory, 0u);
  EXPECT_LE(props.free_memory, props.total_memory);
  EXPECT_NE(props.name[0], '\0');
  EXPECT_FALSE(devices::check_capture(kDevice).ok());
}

TEST_F(OpenclDevice, TooMuchMemoryIsRefusedAndTheNextCallRuns) {
  const auto huge = devices::allocate(kDevice, size_t{1} << 50);
  ASSERT_FALSE(huge.ok());
  EXPECT_EQ(huge.status().code(), StatusCode::kOutOfMemory) << huge.status().to_string();
  const auto small = devices::allocate(kDevice, 64);
  ASSERT_OK(small);
  devices::free(kDevice, *small);
}

TEST_F(OpenclDevice, HostPointersAreFound) {
  constexpr int64_t kShape[] = {64};
  std::vector<float> host(64);
  const Tensor y = Tensor::empty(kShape, DType::kF32, kDevice).value();
  const Tensor x = Tensor::wrap(host.data(), kShape, {}, DType::kF32, kDevice, nullptr).value();
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  const Status status = ops::relu({.input = x, .output = y});
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
  EXPECT_FAILS(status, kInvalidArgument, "host memory");
}

// OpenCL kernel objects hold their arguments, so threads that launch the same kernel must not share
// one.
TEST_F(OpenclDevice, ThreadsOnTheirOwnStreams) {
  constexpr int64_t kShape[] = {4099};
  std::vector<std::thread> threads;
  std::vector<std::string> errors(8);
  for (size_t t = 0; t < errors.size(); ++t) {
    threads.emplace_back([&, t] {
      const auto run = [&]() -> Status {
        TE_FL_ASSIGN_OR_RETURN(const Stream stream, Stream::create(kDevice));
        const StreamScope scope(stream.get());
        CallOptions options;
        options.stream = stream.get();
        std::vector<float> values(4099);
        for (int round = 0; round < 30; ++round) {
          std::iota(values.begin(), values.end(), static_cast<float>(1000 * t + round));
          TE_FL_ASSIGN_OR_RETURN(const Tensor host,
                                 Tensor::from_values({4099}, values, DType::kF32));
          TE_FL_ASSIGN_OR_RETURN(const Tensor x, host.to(kDevice));
          TE_FL_ASSIGN_OR_RETURN(const Tensor y, Tensor::empty(kShape, DType::kF32, kDevice));
          TE_FL_RETURN_IF_ERROR(ops::add({.a = x, .b = x, .output = y}, options));
          TE_FL_ASSIGN_OR_RETURN(const Tensor back, y.to(Device()));
          const float* found = back.data<float>();
          for (size_t i = 0; i < values.size(); ++i) {
            if (found[i] != 2 * values[i]) {
              return internal_error("element " + std::to_string(i) + " is " +
                                    std::to_string(found[i]));
            }
          }
        }
        return {};
      };
      if (const Status status = run(); !status.ok()) errors[t] = status.to_string();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace te_fl
