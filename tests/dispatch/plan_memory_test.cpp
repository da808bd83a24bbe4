// Plans that own device memory (rule R26) are destroyed only after the device has finished the work
// of every call that used them. This holds for every way to drop a plan, and if the streams are
// destroyed or captured.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "dispatch/device_state_fixture.hpp"
#include "plugins/activate.hpp"
#include "registry/plan_cache.hpp"

namespace te_fl {
namespace {

using testing::DeviceState;
using testing::FarDevice;
using testing::FiveArgs;

struct TestPlan {
  int pending = 0;  // units of device work that still use the plan
  bool destroyed = false;
  int late = 0;  // units of device work that ran after the plan was destroyed
};
std::deque<TestPlan> g_plans;  // destroyed plans stay allocated, so that late work can write to
                               // them
int g_destroyed = 0, g_early = 0;
std::function<void()> g_on_destroy;  // called when the next plan is destroyed

class PlanMemory : public DeviceState {
 protected:
  void SetUp() override {
    DeviceState::SetUp();
    g_plans.clear();
    g_destroyed = g_early = 0;
    g_on_destroy = nullptr;
    native.desc.flags |= TE_FL_OP_PLAN_MEMORY;
    native.desc.prepare = [](void*, const te_fl_context*, const void*,
                             void** plan) -> te_fl_status {
      *plan = &g_plans.emplace_back();
      return TE_FL_OK;
    };
    native.desc.destroy_plan = [](void*, void* plan) {
      auto& mine = *static_cast<TestPlan*>(plan);
      mine.destroyed = true;
      ++g_destroyed;
      if (mine.pending != 0) ++g_early;
      if (g_on_destroy) std::exchange(g_on_destroy, nullptr)();
    };
    native.run_body = [this](const te_fl_context& ctx, const void*) -> te_fl_status {
      work_with(*static_cast<TestPlan*>(ctx.plan), ctx.stream);
      return TE_FL_OK;
    };
  }
  void work_with(TestPlan& plan, void* stream) {
    ++plan.pending;
    far.enqueue(stream, [&plan] { --plan.pending; });
  }
  // Makes plans, one per call, until the cache drops the oldest.
  void make_many(void* stream) {
    for (int64_t n = 2; n < static_cast<int64_t>(registry::PlanCache::kMaxMemoryPlans) + 40; ++n) {
      ASSERT_OK(call(stream, n));
    }
  }
};

TEST_F(PlanMemory, ADroppedPlanGoesBehindItsWork) {
  add();
  void* const stream = devices::create_stream(device).value();
  for (int i = 0; i < 3; ++i) ASSERT_OK(call(stream));
  make_many(nullptr);
  EXPECT_GT(g_destroyed, 0);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(remove());
  EXPECT_EQ(static_cast<size_t>(g_destroyed), g_plans.size());
  EXPECT_EQ(g_early, 0);
  devices::destroy_stream(device, stream);
}

// Without the flag TE_FL_OP_PLAN_MEMORY, unregistering does not wait for work that is still
// running, and destroys its plans.
TEST_F(PlanMemory, APlanThatOwnsNoneDoesNotWait) {
  native.desc.flags &= ~uint32_t{TE_FL_OP_PLAN_MEMORY};
  add();
  ASSERT_OK(call(nullptr));
  ASSERT_OK(remove());
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 1);
}

TEST_F(PlanMemory, ItsWorkIsWaitedForOnEveryStream) {
  add();
  std::vector<void*> streams{nullptr};
  for (int i = 0; i < 6; ++i) streams.push_back(devices::create_stream(device).value());
  for (int round = 0; round < 2; ++round) {
    for (void* stream : streams) ASSERT_OK(call(stream));
  }
  EXPECT_EQ(g_plans.at(0).pending, 14);
  ASSERT_OK(remove());
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 0);
  for (void* stream : streams) devices::destroy_stream(device, stream);
}

TEST_F(PlanMemory, AStreamThatGoesIsWaitedFor) {
  add();
  void* const others = far.queues.make_stream();
  ASSERT_OK(call(others));
  ASSERT_OK(devices::retire_stream(device, others));
  EXPECT_EQ(g_plans.at(0).pending, 0);
  far.queues.destroy(others);
  void* const own = devices::create_stream(device).value();
  EXPECT_EQ(own, others) << "the handle comes again";
  ASSERT_OK(call(own));
  EXPECT_EQ(g_plans.size(), 1u);
  devices::destroy_stream(device, own);
  EXPECT_EQ(g_plans.at(0).pending, 0);
  ASSERT_OK(remove());
  EXPECT_FALSE(far.queues.exists(own)) << "nothing is asked of streams that are gone";
}

TEST_F(PlanMemory, ADeviceWithoutEventsIsWaitedFor) {
  far.api.create_event = nullptr;
  add();
  make_many(nullptr);
  EXPECT_GT(g_destroyed, 0);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(remove());
  EXPECT_EQ(g_early, 0);
}

TEST_F(PlanMemory, WorkThatIsBeingCapturedIsNotWaitedFor) {
  add();
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  auto capture = Capture::begin(device, stream);
  ASSERT_OK(capture);
  make_many(nullptr);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(capture->end());
  ASSERT_OK(remove());
  EXPECT_EQ(static_cast<size_t>(g_destroyed), g_plans.size());
  EXPECT_EQ(g_early, 0);
  devices::destroy_stream(device, stream);
}

// Each launch of a graph uses the plans of its calls, on whichever stream it runs, and also after
// the stream of its capture was destroyed.
TEST_F(PlanMemory, ALaunchOnAnotherStreamIsWaitedFor) {
  add();
  void* const captured = devices::create_stream(device).value();
  void* const other = devices::create_stream(device).value();
  void* const third = devices::create_stream(device).value();
  ASSERT_OK(call(captured));
  ASSERT_OK(devices::synchronize(device, captured));
  g_plans.at(0).pending = 0;
  native.run_body = [this](const te_fl_context& ctx, const void*) -> te_fl_status {
    auto& plan = *static_cast<TestPlan*>(ctx.plan);
    far.enqueue(ctx.stream, [&plan] { plan.late += plan.destroyed; });  // runs at each launch
    return TE_FL_OK;
  };
  auto capture = Capture::begin(device, captured);
  ASSERT_OK(capture);
  ASSERT_OK(call(captured));
  auto graph = capture->end();
  ASSERT_OK(graph);
  ASSERT_OK(graph->launch(other));
  ASSERT_OK(graph->launch(other));
  devices::destroy_stream(device, captured);
  ASSERT_OK(graph->launch(third));
  devices::destroy_stream(device, third);  // destroy_stream waits for the launch
  void* const again = devices::create_stream(device).value();
  ASSERT_OK(graph->launch(again));
  ASSERT_OK(remove());
  EXPECT_EQ(g_destroyed, 1);
  ASSERT_OK(devices::synchronize(device, other));
  ASSERT_OK(devices::synchronize(device, again));
  EXPECT_EQ(g_plans.at(0).late, 0) << "work of a launch ran after destroy_plan()";
  *graph = Graph();
  for (void* stream : {other, again}) devices::destroy_stream(device, stream);
}

// A framework's stream may be destroyed while a plan of an already unregistered implementation
// waits for the stream's work.
TEST_F(PlanMemory, AStreamMayGoWhileItsPlansAreDestroyed) {
  add();
  void* const stream = far.queues.make_stream();
  for (const int64_t n : {2, 3, 4}) ASSERT_OK(call(stream, n));
  static std::atomic<int> asked_gone;
  static void* gone;
  asked_gone = 0;
  gone = nullptr;
  static te_fl_status (*record)(void*, void*, void*, const te_fl_error_sink*);
  record = far.api.record_event;
  far.api.record_event = [](void* self, void* event, void* on, const te_fl_error_sink* errors) {
    if (gone != nullptr && on == gone) ++asked_gone;
    return record(self, event, on, errors);
  };
  g_on_destroy = [&] {
    EXPECT_OK(devices::retire_stream(device, stream));
    far.queues.destroy(stream);
    gone = stream;
  };
  ASSERT_OK(remove());
  EXPECT_EQ(gone, stream);
  EXPECT_EQ(asked_gone.load(), 0) << "a handle may be another stream's by now";
  EXPECT_EQ(g_destroyed, 3);
  EXPECT_EQ(g_early, 0);
}

TEST_F(PlanMemory, IsNotUnregisteredWhileAStreamOfItIsCaptured) {
  add();
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  {
    auto capture = Capture::begin(device, stream);
    ASSERT_OK(capture);
    EXPECT_FAILS(remove(), kBusy, "end the capture first");
    EXPECT_FAILS(registry.unregister_owner("test"), kBusy, "implementation 'vendor.far' of op");
    EXPECT_EQ(g_destroyed, 0);
    ASSERT_OK(call(stream)) << "nothing was changed";
    ASSERT_OK(capture->end());
  }
  ASSERT_OK(remove());
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_plans.at(0).pending, 1) << "the captured call's, which is never launched";
  devices::destroy_stream(device, stream);
}

// The plans of one registry do not block another registry from removing its own.
TEST_F(PlanMemory, ACaptureConcernsThePlansOfItsStreamsAlone) {
  add();
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  OpRegistry other;
  ASSERT_OK(other.register_op(native.desc, "test", "far"));
  OpManager others{other};
  FiveArgs args;
  args.a = args.b = args.c = args.d = tensor.c();
  args.out = out.c();
  ASSERT_OK(others.call(*other.find(native.desc.op_name), &args));
  auto capture = Capture::begin(device, stream);
  ASSERT_OK(capture);
  EXPECT_OK(other.unregister_owner("test"));
  EXPECT_EQ(g_destroyed, 1);
  ASSERT_OK(capture->end());
  ASSERT_OK(remove());
  EXPECT_EQ(g_early, 0);
  devices::destroy_stream(device, stream);
}

// A framework's capture is no object of te-fl's, so the running is_capturing() query itself must
// keep the device alive.
TEST_F(PlanMemory, ADeviceStaysWhileAStreamOfAPlanIsCaptured) {
  add();
  void* const stream = far.queues.make_stream();
  ASSERT_OK(call(stream));
  tensor = out = Tensor();
  ASSERT_EQ(far.api.begin_capture(&far, stream, nullptr), TE_FL_OK);
  EXPECT_FAILS(devices::remove(device), kBusy, "end the capture first");
  EXPECT_TRUE(devices::find(device).ok());
  EXPECT_EQ(g_destroyed, 0);
  void* graph = nullptr;
  ASSERT_EQ(far.api.end_capture(&far, stream, &graph, nullptr), TE_FL_OK);
  ASSERT_EQ(far.api.destroy_graph(&far, graph, nullptr), TE_FL_OK);
  ASSERT_OK(devices::remove(device));
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 0);
  device = devices::add(&far.desc).value();
}

TEST_F(PlanMemory, ADeviceIsRemovedBehindTheWorkOfItsPlans) {
  add();
  for (void* stream : {static_cast<void*>(nullptr), far.queues.make_stream()}) {
    ASSERT_OK(call(stream));
  }
  tensor = out = Tensor();
  EXPECT_EQ(g_plans.at(0).pending, 2);
  ASSERT_OK(devices::remove(device));
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 0);
  device = devices::add(&far.desc).value();
}

TEST_F(PlanMemory, APluginIsNotWithdrawnWhileAStreamOfItsPlansIsCaptured) {
  const auto query = [](const te_fl_host_info*) -> const te_fl_plugin_header* {
    static te_fl_plugin_api api;
    api.create = [](const te_fl_host_api*, void** instance, const te_fl_error_sink*) {
      *instance = &api;
      return te_fl_status{TE_FL_OK};
    };
    api.destroy = [](void*) {};
    static te_fl_plugin_header header;
    header.name = "far_ops";
    header.vendor = "far";
    header.api = &api;
    return &header;
  };
  auto instance = plugins::activate(query, registry).value();
  ASSERT_OK(registry.register_op(native.desc, "far_ops", "far"));
  op = *registry.find(native.desc.op_name);
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  {
    auto capture = Capture::begin(device, stream);
    ASSERT_OK(capture);
    EXPECT_FAILS(plugins::withdraw(instance, registry), kBusy,
                 "plugin 'far_ops' cannot be withdrawn");
    EXPECT_FALSE(instance->withdrawn());
    ASSERT_OK(call(stream)) << "nothing was changed";
    ASSERT_OK(capture->end());
  }
  ASSERT_OK(plugins::withdraw(instance, registry));
  EXPECT_EQ(g_destroyed, 1);
  devices::destroy_stream(device, stream);
}

// Plans that other plugins made for a plugin's device keep the device, too.
TEST_F(PlanMemory, APluginIsNotWithdrawnWhileAStreamOfItsDeviceIsCaptured) {
  static FarDevice* second;
  FarDevice far_second(1);
  second = &far_second;
  const auto query = [](const te_fl_host_info*) -> const te_fl_plugin_header* {
    static te_fl_plugin_api api;
    api.create = [](const te_fl_host_api*, void** instance, const te_fl_error_sink*) {
      *instance = &api;
      return te_fl_status{TE_FL_OK};
    };
    api.destroy = [](void*) {};
    api.devices = [](void*, uint32_t* count, const te_fl_device_desc* const** list,
                     const te_fl_error_sink*) -> te_fl_status {
      static const te_fl_device_desc* all[1];
      all[0] = &second->desc;
      *count = 1;
      *list = all;
      return TE_FL_OK;
    };
    static te_fl_plugin_header header;
    header.name = "far";
    header.vendor = "far";
    header.api = &api;
    return &header;
  };
  auto instance = plugins::activate(query, registry).value();
  add();
  const Device first = std::exchange(device, Device{device.type, 1, device.provider});
  native.run_body = [&](const te_fl_context& ctx, const void*) -> te_fl_status {
    auto& plan = *static_cast<TestPlan*>(ctx.plan);
    ++plan.pending;
    far_second.enqueue(ctx.stream, [&plan] { --plan.pending; });
    return TE_FL_OK;
  };
  void* const stream = far_second.queues.make_stream();
  ASSERT_OK(call(stream));
  ASSERT_EQ(far_second.api.begin_capture(&far_second, stream, nullptr), TE_FL_OK);
  EXPECT_FAILS(plugins::withdraw(instance, registry), kBusy, "end the capture first");
  ASSERT_OK(call(nullptr)) << "nothing was changed";
  void* graph = nullptr;
  ASSERT_EQ(far_second.api.end_capture(&far_second, stream, &graph, nullptr), TE_FL_OK);
  ASSERT_EQ(far_second.api.destroy_graph(&far_second, graph, nullptr), TE_FL_OK);
  ASSERT_OK(plugins::withdraw(instance, registry));
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 0);
  tensor = out = Tensor();
  instance.reset();
  device = first;
}

// Another thread begins a capture after te-fl has queried whether the stream is being captured.
TEST_F(PlanMemory, ACaptureThatBeginsMeanwhileIsWaitedFor) {
  add();
  void* const stream = devices::create_stream(device).value();
  for (const int64_t n : {2, 3}) ASSERT_OK(call(stream, n));
  static std::atomic<int> asked;
  asked = 0;
  static te_fl_status (*is_capturing)(void*, void*, int32_t*, const te_fl_error_sink*);
  is_capturing = far.api.is_capturing;
  far.api.is_capturing = [](void* self, void* on, int32_t* yes, const te_fl_error_sink* errors) {
    ++asked;
    return is_capturing(self, on, yes, errors);
  };
  std::atomic<bool> removed{false};
  std::thread other;
  g_on_destroy = [&] {
    const auto left = std::find_if(g_plans.begin(), g_plans.end(),
                                   [](const TestPlan& plan) { return !plan.destroyed; });
    ASSERT_NE(left, g_plans.end());
    work_with(*left, stream);
    ASSERT_EQ(far.api.begin_capture(&far, stream, nullptr), TE_FL_OK);
    other = std::thread([&, before = asked.load()] {
      while (asked.load() < before + 3 && !removed.load()) std::this_thread::yield();
      void* graph = nullptr;
      EXPECT_EQ(far.api.end_capture(&far, stream, &graph, nullptr), TE_FL_OK);
      EXPECT_EQ(far.api.destroy_graph(&far, graph, nullptr), TE_FL_OK);
    });
  };
  EXPECT_OK(remove());
  removed = true;
  other.join();
  EXPECT_EQ(g_destroyed, 2);
  EXPECT_EQ(g_early, 0);
  devices::destroy_stream(device, stream);
}

// A running query delays the destruction of its stream; in a forked child, where the querying
// thread does not exist, the stream can be destroyed at once.
TEST_F(PlanMemory, AStreamGoesInAForkedChildWhateverTheParentAsks) {
  add();
  static void* stream;
  stream = far.queues.make_stream();
  ASSERT_OK(call(stream));
  static pid_t parent;
  parent = getpid();
  static std::atomic<bool> asking, go_on;
  asking = go_on = false;
  static te_fl_status (*is_capturing)(void*, void*, int32_t*, const te_fl_error_sink*);
  is_capturing = far.api.is_capturing;
  far.api.is_capturing = [](void* self, void* on, int32_t* yes, const te_fl_error_sink* errors) {
    while (getpid() == parent && on == stream && !go_on.load()) {
      asking = true;
      std::this_thread::yield();
    }
    return is_capturing(self, on, yes, errors);
  };
  std::thread other([&] { EXPECT_OK(remove()); });
  while (!asking.load()) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // ends the child if it deadlocks
    _exit(devices::retire_stream(device, stream).ok() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  go_on = true;
  other.join();
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 0);
}

// The result of query_event: the device's own (kDevices), an error, or always "not done".
enum class Answer { kDevices, kError, kNotDone };
std::atomic<Answer> g_answer{Answer::kDevices};
te_fl_status (*g_query)(void*, void*, int32_t*, const te_fl_error_sink*) = nullptr;

class PlanEvents : public PlanMemory {
 protected:
  void SetUp() override {
    PlanMemory::SetUp();
    g_answer = Answer::kDevices;
    g_query = far.api.query_event;
    far.api.query_event = [](void* self, void* event, int32_t* done,
                             const te_fl_error_sink* errors) -> te_fl_status {
      if (g_answer == Answer::kError) return TE_FL_INTERNAL;
      if (g_answer == Answer::kDevices) return g_query(self, event, done, errors);
      *done = 0;
      return TE_FL_OK;
    };
  }
};

TEST_F(PlanEvents, ThatCannotBeQueriedSayNothing) {
  g_answer = Answer::kError;
  add();
  void* const stream = devices::create_stream(device).value();
  for (int i = 0; i < 3; ++i) ASSERT_OK(call(stream));
  make_many(nullptr);
  EXPECT_GT(g_destroyed, 0);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(remove());
  EXPECT_EQ(static_cast<size_t>(g_destroyed), g_plans.size());
  EXPECT_EQ(g_early, 0);
  devices::destroy_stream(device, stream);
}

// The capturing thread itself makes plans during the capture. It must not wait for the capture's
// end, because only it can end the capture.
TEST_F(PlanEvents, ThatCannotBeQueriedAnyMoreDoNotWaitForTheThreadsOwnCapture) {
  add();
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  g_answer = Answer::kNotDone;
  make_many(nullptr);  // the first plan is dropped, and its events are recorded
  EXPECT_EQ(g_destroyed, 0);
  ASSERT_EQ(g_plans.at(0).pending, 1);
  auto capture = Capture::begin(device, stream);
  ASSERT_OK(capture);
  g_answer = Answer::kError;
  ASSERT_OK(call(nullptr, 5000));
  EXPECT_FALSE(g_plans.at(0).destroyed);
  ASSERT_OK(capture->end());
  ASSERT_OK(call(nullptr, 5001));
  EXPECT_TRUE(g_plans.at(0).destroyed);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(remove());
  devices::destroy_stream(device, stream);
}

// Rule R12: an error that an op left on a stream is returned to the caller that synchronises that
// stream, and not consumed by te-fl's own waits.
TEST_F(PlanMemory, AWaitForItsWorkLeavesErrorsToTheirOwner) {
  add();
  void* const stream = devices::create_stream(device).value();
  ASSERT_OK(call(stream));
  far.queues.enqueue(stream, []() -> te_fl_status { return TE_FL_INVALID_ARGUMENT; });
  ASSERT_OK(remove());
  EXPECT_EQ(g_destroyed, 1);
  EXPECT_EQ(g_early, 0);
  EXPECT_FAILS(devices::synchronize(device, stream), kInvalidArgument, "has failed");
  devices::destroy_stream(device, stream);
}

// For the thread sanitizer: two threads change the streams of plans.
TEST_F(PlanMemory, StreamsGoWhileOtherPlansAreReaped) {
  add();
  ASSERT_OK(call(nullptr));
  std::atomic<bool> done{false};
  std::thread other([&] {
    do {
      void* const mine = far.queues.make_stream();
      EXPECT_OK(devices::retire_stream(device, mine));
      far.queues.destroy(mine);
    } while (!done.load());
  });
  make_many(nullptr);
  // Makes plans until one is destroyed: no plan is destroyed while the other thread is inside a
  // call that started before the plan was dropped.
  for (int64_t n = 1000; g_destroyed == 0 && n < 20000; ++n) EXPECT_OK(call(nullptr, n));
  done = true;
  other.join();
  EXPECT_GT(g_destroyed, 0);
  EXPECT_EQ(g_early, 0);
  ASSERT_OK(remove());
  EXPECT_EQ(static_cast<size_t>(g_destroyed), g_plans.size());
}

}  // namespace
}  // namespace te_fl
