// A collectives provider fails to create its communicator on one rank: the other ranks get the
// error before the time-out.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "registry/comm_providers.hpp"
#include "support/expect.hpp"
#include "te_fl/comm.hpp"

namespace te_fl {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

te_fl_status refuse(const te_fl_error_sink* errors, const char* why) {
  if (errors != nullptr) errors->write(errors->host, why);
  return TE_FL_FAILED_PRECONDITION;
}

// A provider that fails on rank 1; on the other ranks, creation waits for rank 1 without blocking,
// as NCCL does.
te_fl_comm_api without_rank_1() {
  te_fl_comm_api api;
  api.create = [](void*, const te_fl_comm_config* config, void** comm,
                  const te_fl_error_sink* errors) {
    if (config->rank == 1) return refuse(errors, "its library is not on this machine");
    *comm = new int(config->rank);
    return te_fl_status{TE_FL_OK};
  };
  api.ready = [](void*, int32_t* done, const te_fl_error_sink*) {
    *done = 0;
    return te_fl_status{TE_FL_OK};
  };
  api.destroy = [](void* comm) { delete static_cast<int*>(comm); };
  api.abort = [](void*) {};
  return api;
}

// A provider whose rank 0 cannot make the unique id.
te_fl_comm_api without_id() {
  te_fl_comm_api api = without_rank_1();
  api.unique_id = [](void*, void*, size_t, size_t*, const te_fl_error_sink* errors) {
    return refuse(errors, "its library gives no id");
  };
  return api;
}

class RefusedComms : public ::testing::Test {
 protected:
  // Creates a communicator of three ranks with the provider; returns each rank's status.
  std::array<Status, 3> make(const te_fl_comm_api& api) {
    te_fl_comm_desc desc;
    desc.name = "refusing";
    desc.kind = TE_FL_KIND_VENDOR;
    desc.device_types = TE_FL_BIT(TE_FL_DEVICE_CPU);
    desc.api = &api;
    const te_fl_comm_desc* const list[] = {&desc};
    EXPECT_OK(registry::add_comm_providers(list, "refusing_plugin", "acme", "1", nullptr));
    const std::shared_ptr<Store> store = Store::in_process();
    std::array<Status, 3> got;
    std::vector<std::thread> threads;
    const auto start = steady_clock::now();
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        CommOptions o;
        o.rank = rank;
        o.size = 3;
        o.store = store;
        o.provider = "refusing";
        o.timeout = milliseconds(30000);
        got[static_cast<size_t>(rank)] = Comm::create(o).status();
      });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_LT(steady_clock::now() - start, milliseconds(10000)) << "nobody waits for the time-out";
    EXPECT_OK(registry::remove_comm_providers("refusing_plugin"));
    return got;
  }
};

TEST_F(RefusedComms, OnOneRankAreRefusedOnAll) {
  const std::array<Status, 3> got = make(without_rank_1());
  EXPECT_FAILS(got[1], kFailedPrecondition, "its library is not on this machine");
  for (const size_t rank : {size_t{0}, size_t{2}})
    EXPECT_FAILS(got[rank], kCommFailed, "rank 1: ") << rank;
  EXPECT_HAS(got[2].to_string(), "its library is not on this machine");
}

TEST_F(RefusedComms, WithoutAnIdOfRank0) {
  const std::array<Status, 3> got = make(without_id());
  EXPECT_FAILS(got[0], kFailedPrecondition, "its library gives no id");
  for (const size_t rank : {size_t{1}, size_t{2}})
    EXPECT_FAILS(got[rank], kCommFailed, "rank 0: ") << rank;
}

}  // namespace
}  // namespace te_fl
