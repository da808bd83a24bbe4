// Groups of collectives over a provider that starts them at the group's end, as NCCL does, and the
// watchdog's view of a group that hangs there.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "registry/comm_providers.hpp"
#include "support/expect.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

// A collectives provider with one rank; its broadcasts do nothing. A hanging group ends when the
// communicator is aborted, or successfully after five seconds.
struct Telegraph {
  std::atomic<bool> hangs{false}, aborted{false};
  std::atomic<int> open{0};
  std::atomic<bool> holds{false};  // while set, a broadcast waits
  std::atomic<int> running{0}, destroyed{0};
  std::atomic<bool> misused{false};  // true if the communicator was destroyed while a call ran, or
                                     // called after its destruction
  std::atomic<uint32_t> timeout_ms{0};
};
Telegraph g_wire;

te_fl_status group_start(void*, const te_fl_error_sink*) {
  ++g_wire.open;
  return TE_FL_OK;
}
te_fl_status group_end(void*, const te_fl_error_sink*) {
  --g_wire.open;
  const auto end = steady_clock::now() + seconds(5);
  while (g_wire.hangs && !g_wire.aborted && steady_clock::now() < end)
    std::this_thread::sleep_for(milliseconds(5));
  return g_wire.aborted ? TE_FL_COMM_FAILED : TE_FL_OK;
}
void broadcast(const te_fl_context&, const te_fl_broadcast_args&) {
  ++g_wire.running;
  while (g_wire.holds) std::this_thread::sleep_for(milliseconds(1));
  if (g_wire.destroyed > 0) g_wire.misused = true;
  --g_wire.running;
}

class Groups : public ::testing::Test {
 protected:
  void SetUp() override {
    g_wire.hangs = g_wire.aborted = g_wire.holds = g_wire.misused = false;
    g_wire.open = g_wire.running = g_wire.destroyed = 0;
    api.create = [](void*, const te_fl_comm_config* config, void** comm, const te_fl_error_sink*) {
      g_wire.timeout_ms = config->timeout_ms;
      *comm = &g_wire;
      return te_fl_status{TE_FL_OK};
    };
    api.destroy = [](void*) {
      if (g_wire.running > 0 || g_wire.open > 0) g_wire.misused = true;
      ++g_wire.destroyed;
    };
    api.abort = [](void*) { g_wire.aborted = true; };
    api.group_start = group_start;
    api.group_end = group_end;
    te_fl_comm_desc provider;
    provider.name = "telegraph";
    provider.kind = TE_FL_KIND_VENDOR;
    provider.device_types = 1u << TE_FL_DEVICE_CPU;
    provider.api = &api;
    const te_fl_comm_desc* const list[] = {&provider};
    ASSERT_OK(registry::add_comm_providers(list, "wires", "acme", "1.0", nullptr));
    const te_fl_op_desc op{
        .op_name = "broadcast",
        .impl_id = "vendor.telegraph",
        .kind = TE_FL_KIND_VENDOR,
        .flags = TE_FL_OP_THREAD_SAFE,
        .dtypes = TE_FL_BIT(TE_FL_F32),
        .scalings = TE_FL_BIT(TE_FL_SCALING_NONE),
        .device_types = uint64_t{1} << TE_FL_DEVICE_CPU,
        .run = backend::run_thunk<te_fl_broadcast_args, broadcast>,
    };
    ASSERT_OK(OpManager::instance().registry().register_op(op, "wires", "acme"));
  }
  void TearDown() override {
    EXPECT_OK(OpManager::instance().registry().unregister_owner("wires"));
    EXPECT_OK(registry::remove_comm_providers("wires"));
  }
  static Comm made(milliseconds timeout = milliseconds(100)) {
    CommOptions o;
    o.provider = "telegraph";
    o.name = "wire";
    o.timeout = timeout;
    Result<Comm> comm = Comm::create(o);
    EXPECT_OK(comm);
    return comm.ok() ? std::move(comm).value() : Comm();
  }
  static Status call(const Comm& comm, const Tensor& t) {
    return ops::broadcast({.data = t, .comm = comm.c()});
  }
  te_fl_comm_api api;
  Tensor data = Tensor::zeros({3}, DType::kF32).value();
};

TEST_F(Groups, OneThatHangsFailsAfterTheTimeOut) {
  const Comm comm = made();
  ASSERT_TRUE(comm);
  CommGroup group = std::move(CommGroup::begin(comm)).value();
  ASSERT_OK(call(comm, data));
  g_wire.hangs = true;
  const auto start = steady_clock::now();
  EXPECT_FAILS(group.end(), kCommFailed, "");
  EXPECT_LT(steady_clock::now() - start, seconds(4));
  EXPECT_FAILS(comm.status(), kCommFailed,
               "broadcast number 1 of f32[3] did not end within 100 ms");
  EXPECT_FAILS(call(comm, data), kCommFailed, "did not end");
}

TEST_F(Groups, WithoutCollectivesAreNotWatched) {
  const Comm comm = made();
  ASSERT_TRUE(comm);
  CommGroup outer = std::move(CommGroup::begin(comm)).value();
  CommGroup inner = std::move(CommGroup::begin(comm)).value();
  EXPECT_OK(inner.end());
  EXPECT_OK(outer.end());
  EXPECT_EQ(g_wire.open, 0);
  EXPECT_OK(call(comm, data)) << "and what follows is in none";
  EXPECT_OK(comm.status());
}

TEST_F(Groups, EndOnTheThreadThatBeganThem) {
  const Comm comm = made();
  ASSERT_TRUE(comm);
  CommGroup group = std::move(CommGroup::begin(comm)).value();
  ASSERT_OK(call(comm, data));
  std::thread([&] {
    EXPECT_FAILS(group.end(), kFailedPrecondition, "end it on the thread of CommGroup::begin");
  }).join();
  EXPECT_OK(group.end());
  EXPECT_EQ(g_wire.open, 0);
}

// A Comm that is destroyed during another thread's call, or with an open group, lives until the
// last of them ends.
TEST_F(Groups, OutliveTheirComm) {
  {
    Comm comm = made(seconds(20));
    ASSERT_TRUE(comm);
    g_wire.holds = true;
    std::thread caller([&, c = comm.c()] { EXPECT_OK(ops::broadcast({.data = data, .comm = c})); });
    while (g_wire.running == 0) std::this_thread::yield();
    comm = Comm();
    EXPECT_EQ(g_wire.destroyed, 0);
    g_wire.holds = false;
    caller.join();
    EXPECT_EQ(g_wire.destroyed, 1) << "by the call that ended last";
  }
  g_wire.destroyed = 0;
  {
    Comm first = made(seconds(20)), second = made(seconds(20));
    CommGroup group = std::move(CommGroup::begin(first)).value();
    ASSERT_OK(call(first, data));
    ASSERT_OK(call(second, data));
    first = Comm();
    second = Comm();
    EXPECT_EQ(g_wire.destroyed, 0);
    EXPECT_OK(group.end());
    EXPECT_EQ(g_wire.destroyed, 2);
  }
  g_wire.destroyed = 0;
  { const Comm comm = made(); }
  EXPECT_EQ(g_wire.destroyed, 1) << "at once where nothing is under way";
  EXPECT_FALSE(g_wire.misused);
}

// A provider's time-out has 32 bits, and 0 means no time-out.
TEST_F(Groups, LongTimeOutsAreNotWrapped) {
  constexpr int64_t k32 = int64_t{1} << 32;
  for (const int64_t ms :
       {int64_t{1}, k32 - 2, k32 - 1, k32, k32 + 1, k32 * 3,
        std::numeric_limits<int64_t>::max() / 1000000, std::numeric_limits<int64_t>::max()}) {
    const Comm comm = made(milliseconds(ms));
    ASSERT_TRUE(comm) << ms;
    EXPECT_EQ(g_wire.timeout_ms, std::min(ms, k32 - 1)) << ms;
    EXPECT_OK(call(comm, data));
    EXPECT_OK(comm.status());
  }
}

}  // namespace
}  // namespace te_fl
