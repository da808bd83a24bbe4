// Threads that share a communicator: they run collectives, abort it, query its status, and run its
// watchdog. Meant for the thread sanitizer, which checks the shared state. A test synchronises two
// threads at chosen places by relaxed atomics: these order no memory, so the sanitizer sees only
// the ordering of te-fl's own locks.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/process_store.hpp"
#include "comm/state.hpp"
#include "registry/comm_providers.hpp"
#include "support/expect.hpp"
#include "support/plain_device.hpp"
#include "support/threads.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

using std::chrono::milliseconds;
using testing::PlainDevice;
using testing::together;

// A flag that one thread sets and others wait for, without ordering memory between the threads.
class Place {
 public:
  void reach() { reached_.store(true, std::memory_order_relaxed); }
  bool reached() const { return reached_.load(std::memory_order_relaxed); }
  void wait() const {
    while (!reached()) std::this_thread::sleep_for(milliseconds(1));
  }

 private:
  std::atomic<bool> reached_{false};
};

// A store that calls the test's on_look before it looks up a key.
class AskingStore final : public comm::ProcessStore {
 public:
  Status set(std::string_view key, std::string_view value) override {
    if (on_set) on_set(key);
    return ProcessStore::set(key, value);
  }
  Result<std::string> get(std::string_view key, milliseconds timeout) override {
    if (on_get) {
      if (auto answer = on_get(key)) return *answer;
    }
    return ProcessStore::get(key, timeout);
  }
  Result<std::optional<std::string>> look(std::string_view key) override {
    if (on_look) on_look(key);
    return ProcessStore::look(key);
  }
  std::function<void(std::string_view key)> on_set, on_look;
  std::function<std::optional<std::string>(std::string_view key)> on_get;
};

bool is_key(std::string_view key, std::string_view word) {
  return key.find(word) != std::string_view::npos;
}

// The collectives provider of these communicators. The test's functions implement its broadcast and
// abort.
struct Relay {
  std::function<te_fl_status()> on_run;
  std::function<void(int* comm)> on_abort;
};
Relay g_relay;

te_fl_status run_relay(void*, const te_fl_context*, const void*) {
  return g_relay.on_run ? g_relay.on_run() : te_fl_status{TE_FL_OK};
}

class CommThreads : public ::testing::Test {
 protected:
  void SetUp() override {
    g_relay = {};
    api.create = [](void*, const te_fl_comm_config* config, void** comm, const te_fl_error_sink*) {
      *comm = new int(config->rank);
      return te_fl_status{TE_FL_OK};
    };
    api.destroy = [](void* comm) { delete static_cast<int*>(comm); };
    api.abort = [](void* comm) {
      if (g_relay.on_abort) g_relay.on_abort(static_cast<int*>(comm));
    };
    api.group_start = [](void*, const te_fl_error_sink*) { return te_fl_status{TE_FL_OK}; };
    api.group_end = api.group_start;
    te_fl_comm_desc provider;
    provider.name = "relay";
    provider.kind = TE_FL_KIND_VENDOR;
    provider.device_types = TE_FL_BIT(TE_FL_DEVICE_CPU) | TE_FL_BIT(TE_FL_DEVICE_EXT);
    provider.api = &api;
    const te_fl_comm_desc* const list[] = {&provider};
    ASSERT_OK(registry::add_comm_providers(list, "relays", "acme", "1.0", nullptr));
    te_fl_op_desc op;
    op.op_name = "broadcast";
    op.impl_id = "vendor.relay";
    op.kind = TE_FL_KIND_VENDOR;
    op.flags = TE_FL_OP_THREAD_SAFE;
    op.dtypes = TE_FL_BIT(TE_FL_F32);
    op.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
    op.device_types = TE_FL_BIT(TE_FL_DEVICE_CPU);
    op.run = run_relay;
    ASSERT_OK(OpManager::instance().registry().register_op(op, "relays", "acme"));
    op.impl_id = "vendor.relay_device";
    op.device_types = TE_FL_BIT(TE_FL_DEVICE_EXT);
    op.provider = "relay";
    ASSERT_OK(OpManager::instance().registry().register_op(op, "relays", "acme"));
    log::set_level(log::Level::kOff);
  }
  void TearDown() override {
    log::set_level(level);
    EXPECT_OK(OpManager::instance().registry().unregister_owner("relays"));
    EXPECT_OK(registry::remove_comm_providers("relays"));
  }
  static Comm made(int rank = 0, int size = 1, std::shared_ptr<Store> store = nullptr,
                   const Device& device = {}) {
    CommOptions o;
    o.provider = "relay";
    o.name = "relayed";
    o.rank = rank;
    o.size = size;
    o.store = std::move(store);
    o.device = device;
    o.timeout = milliseconds(20000);
    Result<Comm> comm = Comm::create(o);
    EXPECT_OK(comm);
    return comm.ok() ? std::move(comm).value() : Comm();
  }
  // Returns both ranks of a communicator of two ranks.
  static std::vector<Comm> pair(const std::shared_ptr<Store>& store) {
    std::vector<Comm> ranks(2);
    together(1, {[&](int) { ranks[0] = made(0, 2, store); },
                 [&](int) { ranks[1] = made(1, 2, store); }});
    return ranks;
  }
  static Status call(const Comm& comm, const Tensor& t) {
    return ops::broadcast({.data = t, .comm = comm.c()});
  }

  te_fl_comm_api api;
  const log::Level level = log::level();
  Tensor data = Tensor::zeros({3}, DType::kF32).value();
};

// The watchdog checks the events behind collectives on a device while another thread enqueues more
// collectives.
TEST_F(CommThreads, CallOnADeviceUnderTheWatchdog) {
  PlainDevice plain("relay");
  const Device device = devices::add(&plain.desc).value();
  {
    const Tensor there = Tensor::zeros({3}, DType::kF32, device).value();
    const Comm comm = made(0, 1, nullptr, device);
    ASSERT_TRUE(comm);
    const auto end = std::chrono::steady_clock::now() + milliseconds(400);
    while (std::chrono::steady_clock::now() < end) ASSERT_OK(call(comm, there));
    EXPECT_OK(comm.status());
  }
  EXPECT_OK(devices::remove(device));
}

// The watchdog thread ends when the last communicator is destroyed; the next communicator starts a
// new watchdog.
TEST_F(CommThreads, ComeAndGoUnderTheWatchdog) {
  for (int i = 0; i < 2; ++i) {
    {
      const Comm comm = made();
      std::this_thread::sleep_for(milliseconds(120));
    }
    std::this_thread::sleep_for(milliseconds(120));
  }
}

// Each thread opens and closes groups on a communicator of its own.
TEST_F(CommThreads, HaveGroupsOfTheirOwn) {
  std::vector<Comm> comms;
  for (int t = 0; t < 3; ++t) comms.push_back(made());
  const auto use = [&](const Comm& comm) {
    return [&](int) {
      Result<CommGroup> group = CommGroup::begin(comm);
      ASSERT_OK(group);
      EXPECT_OK(call(comm, data));
      EXPECT_OK(group->end());
      EXPECT_OK(call(comm, data));
    };
  };
  together(300, {use(comms[0]), use(comms[1]), use(comms[2])});
}

// Several threads abort one communicator at the same time: every thread then sees the reason of the
// first abort.
TEST_F(CommThreads, AbortItTogether) {
  for (int round = 0; round < 60; ++round) {
    Comm comm = made();
    ASSERT_TRUE(comm);
    const auto abort = [&](int) { comm.abort("a reason that is long enough for the heap"); };
    together(1, {abort, abort, abort, abort});
    EXPECT_FAILS(comm.status(), kCommFailed, "long enough for the heap");
  }
}

// The abort of one communicator aborts the process's others as well. Here another communicator is
// destroyed after the first abort and before its own.
TEST_F(CommThreads, DestroyOneThatAnotherOnesFailureAborts) {
  Comm first = made(), other = made();
  Place aborting, destroyed;
  g_relay.on_abort = [&](int*) {
    aborting.reach();
    destroyed.wait();
  };
  std::thread destroying([&] {
    aborting.wait();
    other = Comm();
    destroyed.reach();
  });
  first.abort("the first");
  destroying.join();
}

// A thread queries a communicator's status while the failure of another communicator is still being
// recorded: it gets a preliminary error text, which the recording thread replaces afterwards.
TEST_F(CommThreads, ReadTheStatusOfAFailureThatIsBeingReported) {
  Comm first = made(), other = made();
  Place aborting, asked;
  g_relay.on_abort = [&](int*) {
    aborting.reach();
    asked.wait();
  };
  std::thread asking([&] {
    aborting.wait();
    EXPECT_FAILS(other.status(), kCommFailed, "was aborted with the process's others");
    asked.reach();
  });
  first.abort("the first");
  asking.join();
  EXPECT_FAILS(other.status(), kCommFailed, "the first");
}

// A thread queries the status of the communicator that failed first, while another thread looks up
// in the store whether another rank aborted it and which call each rank began last. The error then
// contains these facts.
TEST_F(CommThreads, ReadTheStatusDuringAStoreRequest) {
  for (const char* word : {"aborted", "last/"}) {
    const auto store = std::make_shared<AskingStore>();
    std::vector<Comm> ranks = pair(store);
    const std::shared_ptr<Comm::State> rep = comm::find(ranks[0].c()->id);
    ASSERT_NE(rep, nullptr);
    if (word == std::string("aborted")) comm::publish_abort(*rep, "rank 1 gave it up");
    Place telling, asked;
    store->on_look = [&](std::string_view key) {
      if (!is_key(key, word)) return;
      telling.reach();
      asked.wait();
    };
    std::thread asking([&] {
      telling.wait();
      EXPECT_FAILS(ranks[0].status(), kCommFailed, "the test's");
      asked.reach();
    });
    comm::fail_all(rep, Status(StatusCode::kCommFailed, "the test's"));
    asking.join();
    EXPECT_HAS(ranks[0].status().to_string(),
               word == std::string("aborted") ? "rank 1 gave it up" : "rank 0 had begun no coll");
  }
}

// A call that is interrupted by another communicator's failure adds its own name to the error text,
// while another thread reads that text.
TEST_F(CommThreads, AskForTheStatusWhileACallNamesItself) {
  Comm comm = made(), other = made();
  Place running, aborted, ended;
  g_relay.on_run = [&] {
    running.reach();
    aborted.wait();
    return te_fl_status{TE_FL_COMM_FAILED};
  };
  g_relay.on_abort = [&](int*) { aborted.reach(); };
  std::thread calling([&] {
    EXPECT_FAILS(call(comm, data), kCommFailed, "broadcast number 1 of f32[3] failed");
    ended.reach();
  });
  std::thread asking([&] {
    running.wait();
    other.abort("the other");
    while (!ended.reached()) EXPECT_FAILS(comm.status(), kCommFailed, "the other");
    EXPECT_FAILS(comm.status(), kCommFailed, "broadcast number 1");
  });
  calling.join();
  asking.join();
}

// A thread publishes this rank's last call number for the other ranks, while this rank's call is
// refused and its number is given back to the next call.
TEST_F(CommThreads, PublishTheLastCallWhileItIsRefused) {
  const auto store = std::make_shared<AskingStore>();
  std::vector<Comm> ranks = pair(store);
  Place running, told, ended;
  store->on_set = [&](std::string_view key) {
    if (is_key(key, "last/0")) told.reach();
  };
  store->on_look = [&](std::string_view key) {
    if (is_key(key, "last/")) ended.wait();
  };
  g_relay.on_run = [&] {
    running.reach();
    told.wait();
    return te_fl_status{TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN};
  };
  std::thread calling([&] {
    EXPECT_EQ(call(ranks[0], data).code(), StatusCode::kInvalidArgument);
    ended.reach();
  });
  running.wait();
  ranks[0].abort("enough");
  calling.join();
}

// A thread publishes this rank's last call number while a call begins that has waited for the other
// ranks' calls (TE_FL_VALIDATE).
TEST_F(CommThreads, PublishTheLastCallWhileOneBegins) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  const auto store = std::make_shared<AskingStore>();
  std::vector<Comm> ranks = pair(store);
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
  Place comparing, told;
  store->on_set = [&](std::string_view key) {
    if (is_key(key, "last/0")) told.reach();
  };
  store->on_get = [&](std::string_view key) -> std::optional<std::string> {
    if (!is_key(key, "step/1/1")) return std::nullopt;
    comparing.reach();
    told.wait();
    return "broadcast number 1 of f32[3], root 0";  // simulates an equal call of rank 1
  };
  g_relay.on_run = [] { return te_fl_status{TE_FL_COMM_FAILED}; };
  std::thread calling([&] { EXPECT_FAILS(call(ranks[0], data), kCommFailed, "enough"); });
  comparing.wait();
  ranks[0].abort("enough");
  calling.join();
}

// A forked child neither aborts its parent's communicator nor waits for a thread of the parent.
TEST_F(CommThreads, AForkedChildLeavesTheParentsAlone) {
  Comm comm = made();
  const std::shared_ptr<Comm::State> rep = comm::find(comm.c()->id);
  ASSERT_TRUE(rep != nullptr && rep->mark_failed(Status(StatusCode::kCommFailed, "the parent's")));
  g_relay.on_abort = [](int*) { _exit(1); };
  const std::lock_guard lock(rep->mutex);  // simulates a lock that another thread held at the fork
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    comm.abort("the child's");
    _exit(comm.status().code() == StatusCode::kFailedPrecondition ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace te_fl
