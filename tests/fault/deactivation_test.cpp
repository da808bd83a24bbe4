// Deactivation of plugins: during calls, from inside an op, with live tensors, plans and policies,
// and loading again afterwards.
#include <atomic>
#include <thread>

#include "fault_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::test {
namespace {

using plugins::State;

class Deactivation : public FaultTest {
 protected:
  static Device fault_device() { return parse_device("ext:fault:0").value(); }
};

TEST_F(Deactivation, TakesOpsAndDestroysInOrder) {
  load("good");
  Events::clear();
  EXPECT_OK(plugins::deactivate("good"));
  EXPECT_EQ(Events::take(), (std::vector<std::string>{"quiesce", "destroy"}));
  EXPECT_EQ(info("good").state, State::kDeactivated);
  EXPECT_TRUE(owned_by("good").empty());
  EXPECT_TRUE(in_maps(fault_path("good"))) << "the mapping stays unless asked otherwise";
  EXPECT_EQ(plugins::deactivate("good").code(), StatusCode::kNotFound);
  expect_host_works();
  const PolicyScope scope(only("relu", "vendor.fault"));
  const Status status = call_relu(floats({1}), floats({0}));
  EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.to_string();
}

TEST_F(Deactivation, UnmapsOnRequest) {
  load("clean_failure");
  EXPECT_OK(plugins::deactivate("clean_failure", true));
  EXPECT_FALSE(in_maps(fault_path("clean_failure")));
  expect_host_works();
}

TEST_F(Deactivation, CanBeLoadedAgain) {
  for (const bool unmap : {false, true, false}) {
    load("custom_op");
    EXPECT_EQ(owned_by("custom_op").size(), 1u);
    EXPECT_OK(plugins::deactivate("custom_op", unmap));
    EXPECT_TRUE(owned_by("custom_op").empty());
  }
  EXPECT_EQ(Events::count("create"), 3);
  EXPECT_EQ(Events::count("destroy"), 3);
  const auto list = plugins::list();
  EXPECT_EQ(
      std::count_if(list.begin(), list.end(), [](const auto& p) { return p.name == "custom_op"; }),
      1);
}

TEST_F(Deactivation, WaitsForLiveTensors) {
  load("device");
  Tensor on_device = floats({-1, 2}, fault_device());
  Tensor view = on_device.view({2, 1}).value();
  const Tensor out = Tensor::zeros({2}, DType::kF32, fault_device()).value();
  ASSERT_OK(call_relu(on_device, out));
  EXPECT_EQ(values_of(out), (std::vector<float>{0, 2}));

  Events::clear();
  EXPECT_OK(plugins::deactivate("device", true));
  EXPECT_EQ(Events::take(), (std::vector<std::string>{"quiesce"})) << "not destroyed yet";
  plugins::PluginInfo retired = info("device");
  EXPECT_EQ(retired.state, State::kRetired);
  EXPECT_HAS(retired.reason, "still referenced by 2 live objects");

  // A withdrawn device makes no new objects, but its existing tensors can still be copied to the
  // host.
  EXPECT_FALSE(Tensor::zeros({2}, DType::kF32, fault_device()).ok());
  EXPECT_EQ(values_of(out), (std::vector<float>{0, 2}));
  EXPECT_EQ(call_relu(on_device, out).code(), StatusCode::kUnsupported);
  const auto again = plugins::load(fault_path("device"));
  EXPECT_EQ(again.status().code(), StatusCode::kBusy) << again.status().to_string();
  expect_host_works();

  on_device = Tensor();
  EXPECT_EQ(info("device").state, State::kRetired);
  EXPECT_EQ(Events::count("destroy"), 0);
  view = Tensor();
  EXPECT_EQ(Events::count("destroy"), 0) << "`out` still lives";
  const_cast<Tensor&>(out) = Tensor();
  EXPECT_EQ(Events::take(), (std::vector<std::string>{"free", "free", "destroy"}));
  EXPECT_EQ(info("device").state, State::kDeactivated);
  EXPECT_FALSE(in_maps(fault_path("device")));
  EXPECT_FALSE(devices::find(fault_device()).ok());

  load("device");
  EXPECT_EQ(values_of(floats({3}, fault_device())), (std::vector<float>{3}));
}

TEST_F(Deactivation, TheLastTensorMayGoOnAnotherThread) {
  load("device");
  auto tensor = std::make_unique<Tensor>(floats({1}, fault_device()));
  EXPECT_OK(plugins::deactivate("device", true));
  std::thread([&] { tensor.reset(); }).join();
  EXPECT_EQ(info("device").state, State::kDeactivated);
  EXPECT_EQ(Events::count("destroy"), 1);
  EXPECT_FALSE(in_maps(fault_path("device")));
}

TEST_F(Deactivation, DestroysPlansFirst) {
  load("throw_destroy_plan");  // this plugin has plans
  {
    const PolicyScope scope(only("relu", "vendor.fault"));
    for (int64_t n = 1; n <= 3; ++n) {
      const Tensor in = Tensor::zeros({n}, DType::kF32).value();
      EXPECT_OK(call_relu(in, in.clone().value()));
    }
  }
  Events::clear();
  EXPECT_OK(plugins::deactivate("throw_destroy_plan", true));
  EXPECT_EQ(Events::take(), (std::vector<std::string>{"destroy_plan", "destroy_plan",
                                                      "destroy_plan", "quiesce", "destroy"}));
}

TEST_F(Deactivation, IsRefusedFromInsideAnOp) {
  load("good");
  te_fl_op_desc desc;
  desc.op_name = "relu";
  desc.impl_id = "vendor.deactivates";
  desc.kind = TE_FL_KIND_VENDOR;
  desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT;
  desc.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  static Status inside;
  desc.run = [](void*, const te_fl_context*, const void*) -> te_fl_status {
    inside = plugins::deactivate("good");
    return TE_FL_OK;
  };
  ASSERT_OK(OpRegistry::instance().register_op(desc, "test", "test"));
  {
    const PolicyScope scope(only("relu", "vendor.deactivates"));
    EXPECT_OK(call_relu(floats({1}), floats({0})));
  }
  EXPECT_OK(OpRegistry::instance().unregister_owner("test"));
  EXPECT_EQ(inside.code(), StatusCode::kBusy) << inside.to_string();
  EXPECT_EQ(info("good").state, State::kActive) << "nothing was changed";
  const PolicyScope scope(only("relu", "vendor.fault"));
  EXPECT_OK(call_relu(floats({1}), floats({0})));
}

TEST_F(Deactivation, CapturedPoliciesOutliveTheirPlugin) {
  load("good");
  CapturedPolicy captured;
  {
    PolicySettings settings;
    settings.prefer = Kind::kVendor;
    settings.per_op["relu"] = {{PolicyToken::Type::kImpl, Kind::kVendor, "vendor.fault"},
                               {PolicyToken::Type::kKind, Kind::kReference, ""}};
    const PolicyScope scope(settings);
    captured = CapturedPolicy::capture();
    EXPECT_OK(call_relu(floats({1}), floats({0})));
  }
  EXPECT_OK(plugins::deactivate("good", true));
  EXPECT_FALSE(in_maps(fault_path("good")));
  std::thread([&] {
    const auto scope = captured.enter();
    expect_host_works();  // the call uses the next entry of the policy's list
  }).join();
  load("good");
  Events::clear();
  std::thread([&] {
    const auto scope = captured.enter();
    expect_host_works();
  }).join();
  EXPECT_EQ(Events::take(), (std::vector<std::string>{"run"}))
      << "and by the plugin when it is back";
}

TEST_F(Deactivation, APreparedHandleFollows) {
  load("good");
  PolicySettings settings;
  settings.per_op["relu"] = {{PolicyToken::Type::kImpl, Kind::kVendor, "vendor.fault"},
                             {PolicyToken::Type::kKind, Kind::kReference, ""}};
  const PolicyScope scope(settings);
  const Tensor in = floats({-1, 2}), out = floats({9, 9});
  te_fl_relu_args args;
  args.input = in;
  args.output = out;
  const auto handle = OpManager::instance().prepare(op::relu, &args);
  ASSERT_OK(handle);
  ASSERT_OK(handle->call(&args));
  EXPECT_OK(plugins::deactivate("good", true));
  ASSERT_OK(handle->call(&args));
  EXPECT_EQ(values_of(out), (std::vector<float>{0, 2}));
}

TEST_F(Deactivation, WhileOtherThreadsCall) {
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  std::atomic<int> calls{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      PolicySettings settings;
      settings.prefer = Kind::kVendor;
      const PolicyScope scope(settings);
      const Tensor in = floats({-1, 2}), out = floats({9, 9});
      while (!stop.load()) {
        if (!call_relu(in, out).ok()) ++failures;
        ++calls;
      }
    });
  }
  for (int round = 0; round < 20; ++round) {
    load("good");
    for (const int now = calls.load(); calls.load() < now + 20;) std::this_thread::yield();
    EXPECT_OK(plugins::deactivate("good", true));
    EXPECT_FALSE(in_maps(fault_path("good")));
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures, 0);
}

TEST_F(Deactivation, AFailingQuiesceKeepsThePluginInPlace) {
  const plugins::PluginInfo loaded = load("quiesce_fails");
  EXPECT_EQ(loaded.devices, (std::vector<std::string>{"ext:fault:0"}));
  const Status status = plugins::deactivate("quiesce_fails", true);
  EXPECT_FAILS(status, kDeviceLost, "a kernel hangs");
  EXPECT_EQ(info("quiesce_fails").state, State::kRetired);
  EXPECT_HAS(info("quiesce_fails").reason, "a kernel hangs");
  EXPECT_EQ(Events::count("destroy"), 0) << "its work may still be running";
  EXPECT_TRUE(in_maps(fault_path("quiesce_fails")));
  EXPECT_TRUE(owned_by("quiesce_fails").empty());
  expect_host_works();
}

// kBusy means that deactivate() has changed nothing. If a plugin's quiesce() reports busy during
// the removal, deactivate() therefore returns another code.
TEST_F(Deactivation, ABusyQuiesceIsDistinguishedFromABusyDeactivation) {
  load("quiesce_busy");
  const Status status = plugins::deactivate("quiesce_busy");
  EXPECT_FAILS(status, kInternal, "a queue is busy");
  EXPECT_EQ(info("quiesce_busy").state, State::kRetired);
  EXPECT_TRUE(owned_by("quiesce_busy").empty());
  const auto again = plugins::load(fault_path("quiesce_busy"));
  EXPECT_FAILS(again, kFailedPrecondition, "its quiesce() failed");
  EXPECT_HAS(again.status().message(), "a queue is busy");
  EXPECT_HAS(again.status().message(), "new process");
  expect_host_works();
}

TEST_F(Deactivation, ExceptionsOfQuiesceAndDestroyAreCaught) {
  load("throw_destroy");
  EXPECT_OK(plugins::deactivate("throw_destroy", true));
  EXPECT_FALSE(in_maps(fault_path("throw_destroy")));
  load("throw_quiesce");
  const Status status = plugins::deactivate("throw_quiesce", true);
  EXPECT_FAILS(status, kInternal, "thrown by throw_quiesce");
  expect_host_works();
}

TEST_F(Deactivation, OfABuiltInIsRefused) {
  for (const plugins::PluginInfo& p : plugins::list()) {
    if (p.origin != "built-in") continue;
    EXPECT_EQ(plugins::deactivate(p.name).code(), StatusCode::kFailedPrecondition);
    return;
  }
  FAIL() << "no built-in plugin is listed";
}

TEST_F(Deactivation, OfAnUnknownNameNamesTheNearest) {
  load("good");
  const Status status = plugins::deactivate("godo");
  EXPECT_FAILS(status, kNotFound, "good");
}

}  // namespace
}  // namespace te_fl::test
