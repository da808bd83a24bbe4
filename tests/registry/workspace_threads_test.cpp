// Threads use scratch and state memory of the same streams, while other threads create and destroy
// those of other streams.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "registry/workspace.hpp"
#include "support/expect.hpp"
#include "support/plain_device.hpp"
#include "support/threads.hpp"

namespace te_fl {
namespace {

TEST(WorkspaceThreads, ShareScratchAndState) {
  testing::PlainDevice plain("relay");
  const Device device = devices::add(&plain.desc).value();
  constexpr uint64_t kShared = 7, kOwn = 9, kNobodys = 8;  // numbers of implementations
  constexpr int kRounds = 200;
  {
    registry::DeviceArenas arenas;
    char streams[3] = {};  // whose addresses are handles
    const auto share = [&](int round) {
      registry::DeviceScratch scratch, state;
      const size_t bytes = 256u * static_cast<size_t>(1 + round % 3);
      const bool may_wait = round % 2 == 0;
      ASSERT_OK(arenas.acquire(device, &streams[0], 0, bytes, false, may_wait, scratch));
      std::memset(scratch.data(), round, bytes);
      ASSERT_OK(arenas.acquire_state(device, &streams[0], 0, kShared, sizeof(int), false, state));
      ++*static_cast<int*>(state.data());
    };
    const auto come_and_go = [&](void* stream) {
      return [&, stream](int) {
        {
          registry::DeviceScratch scratch, state;
          ASSERT_OK(arenas.acquire(device, stream, 0, 512, false, true, scratch));
          ASSERT_OK(arenas.acquire_state(device, stream, 0, kOwn, 64, false, state));
        }
        EXPECT_GE(arenas.held(device), 2);
        arenas.release_state(kNobodys);
        arenas.release(device, stream);
      };
    };
    testing::together(kRounds, {share, share, come_and_go(&streams[1]), come_and_go(&streams[2])});
    arenas.release_state(kOwn);
    registry::DeviceScratch state;
    ASSERT_OK(arenas.acquire_state(device, &streams[0], 0, kShared, sizeof(int), false, state));
    EXPECT_EQ(*static_cast<const int*>(state.data()), 2 * kRounds) << "no thread's was lost";
  }
  EXPECT_EQ(devices::live_objects(device), 0);
  EXPECT_OK(devices::remove(device));
}

}  // namespace
}  // namespace te_fl
