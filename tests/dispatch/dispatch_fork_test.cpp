#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "registry/registry_impl.hpp"
#include "registry/thread_record.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "te_fl/log.hpp"

// A forked child can dispatch, register and unregister, whatever other threads of the parent were
// doing at the fork.
namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveCall;

// Runs `body` in a child, which exits with its result; returns -1 if the child hangs for a minute,
// which is much more than a busy machine needs.
template <class F>
int in_child(F&& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > limit) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return -1;
    }
    usleep(1000);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

class Fork : public ::testing::Test {
 protected:
  void SetUp() override {
    TE_FL_SKIP_FORK_THEN_THREADS();
    log::set_level(log::Level::kError);  // hides warnings about the made-up vendors below
    serial.desc.flags &= ~uint32_t{TE_FL_OP_THREAD_SAFE};
    serial.desc.priority = 1000;
    serial.desc.workspace = [](void*, const te_fl_context*, const void*,
                               size_t* bytes) -> te_fl_status {
      *bytes = 4096;
      return TE_FL_OK;
    };
    serial.desc.prepare = [](void*, const te_fl_context*, const void*,
                             void** plan) -> te_fl_status {
      *plan = nullptr;
      return TE_FL_OK;
    };
    serial.desc.destroy_plan = [](void*, void*) {};
    ASSERT_OK(registry.register_op(serial.desc, "p"));
    ASSERT_OK(registry.register_op(portable.desc, "q"));
    op = *registry.find("test::five");
  }
  // Returns 0 if everything works.
  int exercise() {
    FiveCall five(DType::kF32, {3, 1 + static_cast<int64_t>(getpid() % 7)});
    if (!manager.call(op, &five.args).ok()) return 1;
    Fake more("vendor.more");
    more.desc.priority = 2000;
    if (!registry.register_op(more.desc, "more", "acme").ok()) return 2;
    if (!manager.call(op, &five.args).ok() || more.runs != 1) return 3;
    // The parent's other threads do not exist here and must not be waited for.
    if (!registry.unregister_owner("more").ok()) return 4;
    if (registry::thread_record_count() != 1) return 5;
    PolicySettings s;
    s.prefer = Kind::kReference;
    s.allow_vendors = {"v" + std::to_string(getpid())};  // a vendor name that is new and must be
                                                         // interned
    const PolicyScope scope(s);
    if (!manager.call(op, &five.args).ok()) return 6;
    if (manager.usage().empty()) return 7;
    std::atomic<int> other{1};
    std::thread([&] { other = manager.call(op, &five.args).ok() ? 0 : 8; }).join();
    return other;
  }

  OpRegistry registry;
  OpManager manager{registry};
  Fake serial{"default.serial"}, portable{"default.portable"};
  OpId op;
};

TEST_F(Fork, WhileOtherThreadsDispatch) {
  TE_FL_SKIP_FORK_WHILE_ALLOCATING();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      FiveCall five(DType::kF32, {t + 1, 2});
      for (int i = 0; !stop; ++i) {
        PolicySettings s;
        s.deny_vendors = {"d" + std::to_string(i % 100)};
        const PolicyScope scope(s);
        EXPECT_OK(manager.call(op, &five.args));
      }
    });
  }
  threads.emplace_back([&] {
    for (int32_t i = 0; !stop; ++i) {
      EXPECT_OK(registry.set_priority("test::five", "default.portable", 1 + i % 10));
    }
  });
  for (int round = 0; round < 50; ++round)
    ASSERT_EQ(in_child([&] { return exercise(); }), 0) << round;
  stop = true;
  for (std::thread& t : threads) t.join();
}

TEST_F(Fork, WhileAnotherThreadIsInsideASerialisedOp) {
  std::atomic<bool> inside{false}, release{false};
  const pid_t parent = getpid();
  serial.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    if (getpid() != parent) return TE_FL_OK;
    inside = true;
    while (!release) std::this_thread::yield();
    return TE_FL_OK;
  };
  std::thread thread([&] {
    FiveCall five;
    EXPECT_OK(manager.call(op, &five.args));
  });
  while (!inside) std::this_thread::yield();
  EXPECT_EQ(in_child([&] { return exercise(); }), 0);
  release = true;
  thread.join();
}

TEST_F(Fork, WhileAnotherThreadHoldsAnImplementation) {
  static std::atomic<bool> inside, release;
  static pid_t parent;
  inside = release = false;
  parent = getpid();
  Fake planned("default.planned");
  planned.desc.priority = 3000;
  planned.desc.prepare = serial.desc.prepare;
  planned.desc.destroy_plan = [](void*, void*) {
    if (getpid() != parent) return;
    inside = true;
    while (!release) std::this_thread::yield();
  };
  ASSERT_OK(registry.register_op(planned.desc, "planned"));
  FiveCall five;
  ASSERT_OK(manager.call(op, &five.args));
  std::thread thread([&] { registry.impl().drop_plans(Device{}); });
  while (!inside) std::this_thread::yield();
  EXPECT_EQ(in_child([&] { return registry.unregister_owner("planned").ok() ? exercise() : 20; }),
            0);
  release = true;
  thread.join();
}

TEST_F(Fork, FromInsideAnOp) {
  int in_op = -2;
  const pid_t parent = getpid();
  serial.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    if (getpid() != parent) return TE_FL_OK;
    in_op = in_child([&] {
      FiveCall five;
      PolicySettings s;  // this thread is still inside the serialised implementation
      s.per_op["test::five"] = {{PolicyToken::Type::kImpl, Kind::kDefault, "default.portable"}};
      const PolicyScope scope(s);
      if (!manager.call(op, &five.args).ok()) return 1;
      return registry.unregister_owner("q").code() == StatusCode::kBusy ? 0 : 2;
    });
    return TE_FL_OK;
  };
  FiveCall five;
  ASSERT_OK(manager.call(op, &five.args));
  EXPECT_EQ(in_op, 0);
}

TEST_F(Fork, ChildrenOfChildren) {
  FiveCall five;
  ASSERT_OK(manager.call(op, &five.args));
  EXPECT_EQ(in_child([&] {
              if (const int first = exercise()) return first;
              return in_child([&] { return exercise(); }) == 0 ? 0 : 50;
            }),
            0);
}

TEST(Threads, RecordsAreReclaimedWhenThreadsEnd) {
  OpRegistry registry;
  OpManager manager(registry);
  Fake fake("default.x");
  ASSERT_OK(registry.register_op(fake.desc));
  FiveCall five;
  ASSERT_OK(manager.call("test::five", &five.args));
  const size_t before = registry::thread_record_count();
  for (int i = 0; i < 100; ++i) {
    std::thread([&] { ASSERT_OK(manager.call("test::five", &five.args)); }).join();
  }
  EXPECT_EQ(registry::thread_record_count(), before);
  EXPECT_EQ(manager.usage()[0].calls, 101u);
}

}  // namespace
}  // namespace te_fl
