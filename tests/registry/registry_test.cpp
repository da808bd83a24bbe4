#include "te_fl/op_registry.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

#include "core/base/abi_struct.hpp"
#include "core/base/process_end.hpp"
#include "core/device/device_list.hpp"
#include "policy/current.hpp"
#include "registry/epoch.hpp"
#include "registry/registration.hpp"
#include "registry/registry_impl.hpp"
#include "registry/route_cache.hpp"
#include "registry/serial_lock.hpp"
#include "registry/thread_record.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/plain_device.hpp"
#include "support/rounds.hpp"
#include "support/threads.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::five_schema;
using testing::FiveArgs;
using testing::FiveCall;

TEST(Registry, StartsWithTheCatalogue) {
  OpRegistry registry;
  EXPECT_GE(registry.op_names().size(), 70u);
  EXPECT_TRUE(registry.snapshot().empty());
  const auto gelu = registry.find("gelu");
  ASSERT_OK(gelu);
  EXPECT_STREQ(registry.schema(*gelu)->name, "gelu");
  EXPECT_EQ(registry.schema(OpId{100000}), nullptr);
  EXPECT_FAILS(registry.find("gelo").status(), kNotFound, "'gelu'");
}

TEST(Registry, KeepsWhatItIsGiven) {
  OpRegistry registry;
  const uint64_t before = registry.epoch();
  Fake fake("vendor.acme");
  {
    // The descriptor and its strings may be freed after register_op().
    te_fl_op_desc copy = fake.desc;
    std::string id = "vendor.acme";
    copy.impl_id = id.c_str();
    ASSERT_OK(registry.register_op(copy, "plugin", "ACME"));
  }
  EXPECT_NE(registry.epoch(), before);
  const auto list = registry.snapshot();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].op, "test::five");
  EXPECT_EQ(list[0].impl_id, "vendor.acme");
  EXPECT_EQ(list[0].kind, Kind::kVendor);
  EXPECT_EQ(list[0].vendor, "acme");
  EXPECT_EQ(list[0].priority, TE_FL_PRIORITY_VENDOR);
  EXPECT_EQ(list[0].owner, "plugin");
  ASSERT_OK(registry.set_priority("test::five", "vendor.acme", 170));
  EXPECT_EQ(registry.snapshot()[0].priority, 170);
  EXPECT_FAILS(registry.set_priority("test::five", "vendor.acmee", 1), kNotFound, "'vendor.acme'");
  ASSERT_OK(registry.unregister_op("test::five", "vendor.acme"));
  EXPECT_TRUE(registry.snapshot().empty());
  EXPECT_FAILS(registry.unregister_op("test::five", "vendor.acme"), kNotFound, "vendor.acme");
  EXPECT_OK(registry.find("test::five"));  // ops stay declared
}

TEST(Registry, RefusesMalformedDescriptors) {
  OpRegistry registry;
  const auto with = [](auto&& change) {
    static Fake fake("default.x");
    te_fl_op_desc d = fake.desc;
    change(d);
    return d;
  };
  const auto add = [&](auto&& change) { return registry.register_op(with(change)); };
  EXPECT_FAILS(add([](auto& d) { d.struct_size = 8; }), kInvalidArgument, "R3");
  EXPECT_FAILS(add([](auto& d) { d.struct_size = 0x7fffffff; }), kInvalidArgument, "R3");
  // Refuses a struct_size that ends inside a function pointer.
  EXPECT_FAILS(
      add([](auto& d) { d.struct_size = offsetof(te_fl_op_desc, supports) + 4; }), kInvalidArgument,
      "struct_size " + std::to_string(offsetof(te_fl_op_desc, supports) + 4) + ", must be from");
  EXPECT_FAILS(add([](auto& d) { d.op_name = nullptr; }), kInvalidArgument, "op_name");
  EXPECT_FAILS(add([](auto& d) { d.impl_id = nullptr; }), kInvalidArgument, "R16");
  EXPECT_FAILS(add([](auto& d) { d.impl_id = "vendor.x"; }), kInvalidArgument, "R16");
  EXPECT_FAILS(add([](auto& d) { d.impl_id = "default.X"; }), kInvalidArgument, "R16");
  EXPECT_FAILS(add([](auto& d) { d.impl_id = "default."; }), kInvalidArgument, "R16");
  EXPECT_FAILS(add([](auto& d) { d.kind = 7; }), kInvalidArgument, "kind 7");
  EXPECT_FAILS(add([](auto& d) { d.run = nullptr; }), kInvalidArgument, "R4");
  EXPECT_FAILS(add([](auto& d) {
                 d.prepare = [](void*, const te_fl_context*, const void*, void**) -> te_fl_status {
                   return 0;
                 };
               }),
               kInvalidArgument, "destroy_plan");
  EXPECT_FAILS(add([](auto& d) { d.min_arch = 90, d.max_arch = 80; }), kInvalidArgument,
               "no architecture lies between min_arch 90 and max_arch 80");
  EXPECT_FAILS(add([](auto& d) { d.device_types = 0; }), kInvalidArgument, "device_types");
  EXPECT_FAILS(add([](auto& d) { d.device_types = uint64_t{1} << TE_FL_DEVICE_EXT; }),
               kInvalidArgument, "R18");
  EXPECT_FAILS(add([](auto& d) { d.schema = nullptr; }), kInvalidArgument, "R17");
  EXPECT_FAILS(add([](auto& d) { d.op_name = "test::six"; }), kInvalidArgument, "R17");
  EXPECT_FAILS(add([](auto& d) { d.op_name = "gelo", d.schema = nullptr; }), kNotFound, "'gelu'");
  EXPECT_TRUE(registry.snapshot().empty());
}

TEST(Registry, ReadsDescriptorsOfOtherSizes) {
  OpRegistry registry;
  Fake fake("default.long");
  struct Longer {
    te_fl_op_desc desc;
    char more[64];
  } longer{fake.desc, {}};
  std::memset(longer.more, 0xee, sizeof longer.more);
  longer.desc.struct_size = sizeof longer;
  ASSERT_OK(registry.register_op(longer.desc));
  // A catalogue op needs no member after run(); the bytes behind it must not be read.
  te_fl_op_desc shorter = fake.desc;
  shorter.struct_size = offsetof(te_fl_op_desc, run) + sizeof shorter.run;
  shorter.op_name = "gelu";
  std::memset(reinterpret_cast<char*>(&shorter) + shorter.struct_size, 0xee,
              sizeof shorter - shorter.struct_size);
  ASSERT_OK(registry.register_op(shorter));
  for (const OpImplInfo& info : registry.snapshot()) {
    if (info.op == "gelu") {
      EXPECT_EQ(info.desc.supports, nullptr);
      EXPECT_EQ(info.vendor, "te-fl");
    }
  }
}

// A copy contains whole members only, for every struct size that passes the check.
TEST(Registry, NoReaderTakesHalfAMember) {
  te_fl_op_desc desc;
  std::memset(static_cast<void*>(&desc), 0xee, sizeof desc);
  for (uint32_t size = offsetof(te_fl_op_desc, supports); size < sizeof desc; ++size) {
    desc.struct_size = size;
    const auto copy = core::copy_struct<te_fl_op_desc>(&desc);
    const auto* pointers = reinterpret_cast<const unsigned char*>(&copy);
    for (uint32_t at = offsetof(te_fl_op_desc, supports); at < sizeof desc; at += 8) {
      const te_fl_op_desc neutral;
      const bool whole = std::memcmp(pointers + at, reinterpret_cast<char*>(&desc) + at, 8) == 0,
                 absent = std::memcmp(pointers + at, reinterpret_cast<const char*>(&neutral) + at,
                                      8) == 0;
      EXPECT_TRUE(at + 8 <= size ? whole : absent) << "size " << size << ", at " << at;
    }
  }
}

TEST(Registry, ASchemaOfHalfAMemberIsRefused) {
  OpRegistry registry;
  te_fl_op_schema schema = five_schema();
  schema.struct_size = offsetof(te_fl_op_schema, rules) + 4;
  EXPECT_FAILS(registry.declare_op(schema).status(), kInvalidArgument, "a multiple of 8");
  schema = five_schema();
  te_fl_arg_desc a = *schema.args[0];
  a.struct_size = offsetof(te_fl_arg_desc, extents) + 4;
  const te_fl_arg_desc* args[6];
  std::copy(schema.args, schema.args + 6, args);
  args[0] = &a;
  schema.args = args;
  EXPECT_FAILS(registry.declare_op(schema).status(), kInvalidArgument, "a multiple of 8");
}

// A schema whose struct_size covers only struct_size itself must be refused without a read beyond
// it; a guard page follows it here.
TEST(Registry, ASchemaOfNothingButASizeIsRefused) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const pages =
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(mprotect(static_cast<char*>(pages) + page, page, PROT_NONE), 0);
  char* const at = static_cast<char*>(pages) + page - 8;
  const uint32_t size = 8;
  std::memcpy(at, &size, sizeof size);
  OpRegistry registry;
  Fake fake("default.short");
  fake.desc.schema = reinterpret_cast<const te_fl_op_schema*>(at);
  EXPECT_FAILS(registry.register_op(fake.desc), kInvalidArgument, "its schema has");
  EXPECT_TRUE(registry.snapshot().empty());
  munmap(pages, 2 * page);
}

// C code that forgets to set the masks leaves them 0.
TEST(Registry, MasksThatNoTensorMatchesAreRefused) {
  OpRegistry registry;
  Fake none("default.none"), unscaled("default.unscaled");
  none.desc.dtypes = 0;
  EXPECT_FAILS(registry.register_op(none.desc), kInvalidArgument, "dtypes is 0");
  unscaled.desc.scalings = 0;
  EXPECT_FAILS(registry.register_op(unscaled.desc), kInvalidArgument, "scalings is 0");
  EXPECT_TRUE(registry.snapshot().empty());
}

TEST(Registry, SeveralAreAllOrNothing) {
  OpRegistry registry;
  Fake a("default.a"), b("default.b");
  Fake bad("default.bad");
  bad.desc.run = nullptr;
  const te_fl_op_desc* with_bad[] = {&a.desc, &bad.desc};
  EXPECT_FAILS(registry.register_ops(with_bad, "p", "v"), kInvalidArgument, "default.bad");
  EXPECT_TRUE(registry.snapshot().empty());
  const te_fl_op_desc* twice[] = {&a.desc, &b.desc, &a.desc};
  EXPECT_FAILS(registry.register_ops(twice, "p", "v"), kAlreadyExists, "default.a");
  EXPECT_TRUE(registry.snapshot().empty());
  const te_fl_op_desc* null_one[] = {&a.desc, nullptr};
  EXPECT_FAILS(registry.register_ops(null_one, "p", "v"), kInvalidArgument, "null");
  const te_fl_op_desc* good[] = {&a.desc, &b.desc};
  ASSERT_OK(registry.register_ops(good, "p", "v"));
  EXPECT_FAILS(registry.register_op(a.desc, "q"), kAlreadyExists, "by p");
  ASSERT_OK(registry.unregister_owner("p"));
  EXPECT_TRUE(registry.snapshot().empty());
}

TEST(Registry, TwoDescriptionsUnderOneNameAreRefused) {
  OpRegistry registry;
  ASSERT_OK(registry.declare_op(five_schema()));
  EXPECT_EQ(*registry.declare_op(five_schema()), *registry.find("test::five"));
  te_fl_op_schema other = five_schema();
  te_fl_arg_desc a = *other.args[0];
  a.dtypes = TE_FL_BIT(TE_FL_F32);
  const te_fl_arg_desc* args[6];
  std::copy(other.args, other.args + 6, args);
  args[0] = &a;
  other.args = args;
  EXPECT_FAILS(registry.declare_op(other).status(), kAlreadyExists,
               "in which argument 'a': dtypes is ");
  EXPECT_FAILS(registry.declare_op(other).status(), kAlreadyExists, "R17");
  te_fl_op_schema backward = five_schema();
  backward.gradient = "test::five_backward a=d_a";
  EXPECT_FAILS(registry.declare_op(backward).status(), kAlreadyExists,
               "in which gradient is none, not 'test::five_backward a=d_a'");
  // An op name that a plugin declares must have the vendor's prefix. A program may declare an op
  // under any name; policies may list the name from then on.
  te_fl_op_schema plain = five_schema();
  plain.name = "five";
  const Fake fake("default.five", plain);
  EXPECT_FAILS(registry.register_op(fake.desc), kInvalidArgument,
               "op 'five' is not in the catalogue; a custom op is named 'vendor::op' (rule R17)");
  PolicySettings settings;
  settings.per_op["five"];
  EXPECT_FAILS(policy::settings_error(settings), kInvalidArgument, "op 'five'");
  ASSERT_OK(registry.declare_op(plain));
  EXPECT_OK(policy::settings_error(settings));
  EXPECT_OK(registry.register_op(fake.desc));
}

TEST(Registry, HoldsKeepAliveUntilRemoved) {
  OpRegistry registry;
  Fake fake("default.x");
  auto alive = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = alive;
  ASSERT_OK(registry.register_op(fake.desc, "p", "v", std::move(alive)));
  for (int i = 0; i < 10; ++i) ASSERT_OK(registry.set_priority("test::five", "default.x", 10 + i));
  EXPECT_FALSE(watch.expired());
  ASSERT_OK(registry.unregister_owner("p"));
  EXPECT_TRUE(watch.expired());
}

TEST(Registry, FailedRegistrationReleasesKeepAlive) {
  OpRegistry registry;
  Fake fake("default.x");
  auto alive = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = alive;
  ASSERT_OK(registry.register_op(fake.desc));
  EXPECT_FAILS(registry.register_op(fake.desc, "q", "v", std::move(alive)), kAlreadyExists,
               "default.x");
  EXPECT_TRUE(watch.expired());
}

// Objects are freed in two steps: a thread asks which retired objects may be freed, and frees them
// later. It must not free objects that other threads retire in between, because a thread that has
// entered since then may still read them.
TEST(Registry, WhatIsRetiredLaterIsNotTakenForGone) {
  ASSERT_FALSE(registry::inside_op());
  const uint64_t asked = registry::oldest_inside();
  EXPECT_LE(asked, registry::retire());
  EXPECT_GT(registry::oldest_inside(), asked);
}

// Calls continue while implementations are registered and unregistered: an implementation does not
// run after unregister has returned, and no call uses a freed implementation.
TEST(Registry, UnregisterWaitsForThreadsInside) {
  OpRegistry registry;
  OpManager manager(registry);
  Fake stays("default.stays");
  ASSERT_OK(registry.register_op(stays.desc));
  const OpId op = *registry.find("test::five");
  std::atomic<bool> stop{false};
  std::atomic<int> errors{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      FiveCall call;
      while (!stop.load(std::memory_order_relaxed)) {
        if (!manager.call(op, &call.args).ok()) errors.fetch_add(1);
      }
    });
  }
  int served = 0, rounds = 0;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  for (; rounds < 400 && (rounds < 20 || std::chrono::steady_clock::now() < limit); ++rounds) {
    auto fake = std::make_unique<Fake>("vendor.comes");
    std::atomic<bool> gone{false};
    std::atomic<int> late{0};
    fake->desc.priority = 1000;
    fake->run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
      if (gone.load(std::memory_order_acquire)) late.fetch_add(1);
      return TE_FL_OK;
    };
    ASSERT_OK(registry.register_op(fake->desc, "comes", "acme"));
    if (rounds % 4 == 0) {
      while (fake->runs.load(std::memory_order_relaxed) == 0) std::this_thread::yield();
    }
    ASSERT_OK(registry.unregister_owner("comes"));
    gone.store(true, std::memory_order_release);
    served += fake->runs.load() > 0 ? 1 : 0;
    EXPECT_EQ(late.load(), 0);
    fake.reset();  // a thread still inside would touch freed memory
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(errors.load(), 0);
  EXPECT_GE(served, rounds / 4);
}

// Threads make every kind of change to one registry at once: no change is lost, and what a thread
// has registered stays until it unregisters it.
TEST(Registry, ThreadsChangeItTogether) {
  OpRegistry registry;
  OpManager manager(registry);
  Fake stays("default.stays");
  ASSERT_OK(registry.register_op(stays.desc));
  const auto holds = [&](const std::string& id, int32_t priority) {
    for (const OpImplInfo& info : registry.snapshot()) {
      if (info.impl_id == id) return info.priority == priority;
    }
    return false;
  };
  constexpr int kThreads = 4;
  std::atomic<int> lost{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const std::string id = "vendor.thread" + std::to_string(t),
                        owner = "owner" + std::to_string(t);
      FiveCall call;
      for (int round = 0; round < testing::rounds(2400); ++round) {
        Fake fake(id.c_str());
        const std::string declared = "test::of_" + std::to_string(t) + "_" + std::to_string(round);
        te_fl_op_schema schema = five_schema();
        schema.name = declared.c_str();
        bool right = registry.register_op(fake.desc, owner, "acme").ok();
        right = right && registry.set_priority("test::five", id, round).ok() && holds(id, round);
        right = right && (round % 8 != 0 ||
                          (registry.declare_op(schema).ok() && registry.find(declared).ok()));
        right = right && manager.call("test::five", &call.args).ok();
        right = right && (round % 2 == 0 ? registry.unregister_op("test::five", id)
                                         : registry.unregister_owner(owner))
                             .ok();
        right = right && !holds(id, round);
        lost.fetch_add(right ? 0 : 1);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(lost.load(), 0);
  EXPECT_EQ(registry.snapshot().size(), 1u);
}

TEST(Registry, SeveralComeAndGoWhileAllAreNotifiedOfAChange) {
  std::atomic<bool> stop{false};
  std::thread choosing([&] {
    while (!stop.load(std::memory_order_relaxed)) registry::choose_again();
  });
  std::thread telling([&] {
    const Device device{TE_FL_DEVICE_EXT, 77};
    while (!stop.load(std::memory_order_relaxed)) {
      core::g_device_hooks.on_lost.load()(device, "the test");
      core::g_device_hooks.on_added.load()(device);
      core::g_device_hooks.on_barred.load()(device);
      core::g_device_hooks.on_added.load()(device);
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) {
        OpRegistry registry;
        EXPECT_OK(registry.find("gelu"));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  choosing.join();
  telling.join();
}

// te-fl queries a device's architecture once, and again after the device was removed and added
// again.
TEST(Registry, ThreadsAskForArchitectures) {
  testing::PlainDevice plain("relay");
  const Device device = devices::add(&plain.desc).value();
  OpRegistry registry;
  const auto ask = [&](int) {
    const Result<uint32_t> arch = registry.impl().arch(device);
    ASSERT_OK(arch);
    EXPECT_EQ(*arch, 7u);
  };
  testing::together(200, {ask, ask, ask, [&](int) { registry.impl().restore(device); }});
  EXPECT_OK(devices::remove(device));
}

TEST(Registry, ThreadsComeAndGoWhileTheyAreLookedAt) {
  OpRegistry registry;
  OpManager manager(registry);
  Fake fake("default.x");
  ASSERT_OK(registry.register_op(fake.desc));
  const auto come_and_go = [&](int) {
    std::thread([&] {
      FiveCall call;
      EXPECT_OK(manager.call("test::five", &call.args));
    }).join();
  };
  const auto look = [&](int) {
    EXPECT_GT(registry::thread_record_count(), 0u);
    registry::oldest_inside();
    core::g_wait_for_calls.load()(core::EndClock::now());
    const uint32_t counter = registry::allocate_counter();
    EXPECT_EQ(registry::read_counter(counter), 0u);
    registry::free_counter(counter);
  };
  testing::together(100, {come_and_go, come_and_go, look, look});
}

TEST(Registry, ThreadsKeepTheSameStrings) {
  const auto keep = [](int round) {
    const std::string text = "a text that is kept, number " + std::to_string(round);
    EXPECT_EQ(registry::intern_string(text), registry::intern_string(text));
  };
  testing::together(200, {keep, keep, keep});
}

// Each thread holds a lock of its own while it waits for a lock that all threads share.
TEST(Registry, ThreadsThatHoldALockWaitForAnother) {
  registry::SerialLock shared;
  int plain = 0;  // not atomic: a data race here shows an error of the lock
  const auto take = [&](int) {
    const registry::ThreadRecord* self = &registry::this_thread();
    registry::SerialLock own;
    ASSERT_EQ(own.lock(self, 0, false), registry::SerialLock::Taken::kYes);
    ASSERT_EQ(shared.lock(self, 1, true), registry::SerialLock::Taken::kYes);
    ++plain;
    std::this_thread::yield();
    shared.unlock();
    own.unlock();
  };
  testing::together(200, {take, take, take});
  EXPECT_EQ(plain, 600);
}

TEST(Registry, RemovingFromInsideAnOpIsBusy) {
  OpRegistry registry;
  OpManager manager(registry);
  Fake fake("default.x");
  Status inside;
  fake.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    inside = registry.unregister_owner("built-in");
    return TE_FL_OK;
  };
  ASSERT_OK(registry.register_op(fake.desc));
  FiveCall call;
  ASSERT_OK(manager.call("test::five", &call.args));
  EXPECT_FAILS(inside, kBusy, "inside an op");
  EXPECT_EQ(registry.snapshot().size(), 1u);
  ASSERT_OK(registry.unregister_owner("built-in"));
}

TEST(Registry, RegisteringFromInsideAnOpWorks) {
  OpRegistry registry;
  OpManager manager(registry);
  Fake fake("default.x"), other("default.y");
  other.desc.priority = 1000;
  Status inside;
  fake.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    inside = registry.register_op(other.desc);
    return TE_FL_OK;
  };
  ASSERT_OK(registry.register_op(fake.desc));
  FiveCall call;
  ASSERT_OK(manager.call("test::five", &call.args));
  ASSERT_OK(inside);
  ASSERT_OK(manager.call("test::five", &call.args));
  EXPECT_EQ(other.runs.load(), 1);
}

// Two handles share an entry of the thread's handle cache. They must not replace it at every call,
// because caching a call costs more than it saves if the entry is replaced before the call is
// repeated.
TEST(Handles, ThatShareAPlaceDoNotTakeItAtEveryCall) {
  registry::HandleCache cache;
  const uint64_t one = 5, other = one + registry::HandleCache::kEntries;
  ASSERT_EQ(&cache.at(one), &cache.at(other));
  int taken = 0;
  for (int i = 0; i < 640; ++i) {
    const uint64_t number = i % 2 == 0 ? one : other;
    registry::HandleEntry& entry = cache.at(number);
    if (entry.handle == number || !entry.yields_to(number)) continue;
    entry.take(number);
    ++taken;
  }
  EXPECT_GT(taken, 2);  // an entry that is no longer used is replaced
  EXPECT_LT(taken, 64);
}

}  // namespace
}  // namespace te_fl
