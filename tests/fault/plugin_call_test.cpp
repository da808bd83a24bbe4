// Plugins that load successfully and whose calls misbehave: they throw, fail cleanly or not, or
// have an older or newer ABI.
#include <dlfcn.h>

#include <cstring>

#include "fault_fixture.hpp"
#include "fault_ops.hpp"
#include "support/expect.hpp"

namespace te_fl::test {
namespace {

class PluginCall : public FaultTest {
 protected:
  static Status call(const char* op, const void* args) {
    return OpManager::instance().call(op, args);
  }

  // Calls relu with vendor.fault as the only choice; it must fail with `code` and `text`.
  static void expect_failure(StatusCode code, const std::string& text) {
    const PolicyScope scope(only("relu", "vendor.fault"));
    const Status status = call_relu(floats({-1, 2}), floats({9, 9}));
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_HAS(status.to_string(), text);
  }
};

TEST_F(PluginCall, AGoodPluginRuns) {
  const plugins::PluginInfo loaded = load("good");
  EXPECT_EQ(loaded.state, plugins::State::kActive);
  EXPECT_EQ(loaded.vendor, "fault");
  EXPECT_EQ(loaded.version, "1.2.3");
  EXPECT_EQ(loaded.abi, "0.9");
  EXPECT_FALSE(loaded.build_id.empty()) << "the ELF build id stands in for one that is not given";
  EXPECT_EQ(loaded.ops, (std::vector<std::string>{"relu: vendor.fault"}));
  EXPECT_GT(loaded.load_ms, 0);
  const PolicyScope scope(only("relu", "vendor.fault"));
  Events::clear();
  const Tensor out = floats({9, 9});
  ASSERT_OK(call_relu(floats({-1, 2}), out));
  EXPECT_EQ(values_of(out), (std::vector<float>{0, 2}));
  EXPECT_EQ(Events::take(), (std::vector<std::string>{"run"}));
}

TEST_F(PluginCall, LargerAndSmallerStructsWork) {
  for (const char* name : {"larger_structs", "smaller_structs"}) {
    load(name);
    const PolicyScope scope(only("relu", "vendor.fault"));
    const Tensor out = floats({9, 9});
    const Status status = call_relu(floats({-1, 2}), out);
    EXPECT_OK(status) << name << ": " << status.to_string();
    EXPECT_EQ(values_of(out), (std::vector<float>{0, 2})) << name;
    EXPECT_OK(plugins::deactivate(name, true));
  }
}

// A device whose provider is not a plugin, with host memory.
struct Stranger {
  te_fl_device_api api{};
  te_fl_device_desc desc{};
  Stranger() {
    api.struct_size = sizeof api;
    api.allocate = [](void*, const te_fl_memory_desc* memory, void** out, const te_fl_error_sink*) {
      if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
      const size_t bytes = memory->bytes;
      *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.free = [](void*, void* data, uint32_t, void*, const te_fl_error_sink*) {
      std::free(data);
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.copy = [](void*, void* dst, const void* src, size_t bytes, uint32_t, void*,
                  const te_fl_error_sink*) {
      std::memcpy(dst, src, bytes);
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.fill = [](void*, void* dst, uint8_t value, size_t bytes, void*, const te_fl_error_sink*) {
      std::memset(dst, value, bytes);
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.synchronize = [](void*, void*, const te_fl_error_sink*) {
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    api.properties = [](void*, te_fl_device_props*, const te_fl_error_sink*) {
      return static_cast<te_fl_status>(TE_FL_OK);
    };
    desc.struct_size = sizeof desc;
    desc.device = {TE_FL_DEVICE_EXT, 0};
    desc.provider = "stranger";
    desc.api = &api;
  }
};

TEST_F(PluginCall, AnImplementationIsGivenOneProvidersMemory) {
  const Stranger stranger;
  const Device theirs = devices::add(&stranger.desc).value();
  load("device");  // provides relu for kDLExtDev, and a device of provider 'fault'
  const Device own = parse_device("ext:fault:0").value();
  const auto relu_on = [](const Device& device) {
    const PolicyScope scope(only("relu", "vendor.fault"));
    const Tensor out = floats({9, 9}, device);
    const Status status = call_relu(floats({-1, 2}, device), out);
    if (status.ok()) {
      EXPECT_EQ(values_of(out), (std::vector<float>{0, 2}));
    }
    return status;
  };
  EXPECT_OK(relu_on(own));
  const Status refused = relu_on(theirs);
  EXPECT_FAILS(refused, kUnsupported,
               "the tensors are on ext:stranger:0, it supports ext of fault");
  EXPECT_OK(plugins::deactivate("device", true));

  load("names_provider");  // provides relu for the devices of provider 'stranger'
  EXPECT_OK(relu_on(theirs));
  EXPECT_OK(plugins::deactivate("names_provider", true));
  EXPECT_OK(devices::remove(theirs));
}

TEST_F(PluginCall, APluginOfTwoProvidersSaysWhoseMemoryEachImplementationIsGiven) {
  // Without a provider name, the ops could belong to either device: load_failure_test tests that
  // with two_providers.
  load("two_providers_named");
  for (const auto& [name, impl] : {std::pair("ext:fault:0", "vendor.fault"),
                                   std::pair("ext:second:0", "vendor.fault_second")}) {
    const PolicyScope scope(only("relu", impl));
    const Device where = parse_device(name).value();
    const Tensor out = floats({9, 9}, where);
    const Status status = call_relu(floats({-1, 2}, where), out);
    ASSERT_OK(status);
    EXPECT_EQ(values_of(out), (std::vector<float>{0, 2})) << name;
  }
  EXPECT_OK(plugins::deactivate("two_providers_named", true));
}

TEST_F(PluginCall, ExceptionsOfEveryEntryAreErrors) {
  for (const char* name : {"throw_run", "throw_supports", "throw_workspace", "throw_prepare"}) {
    load(name);
    expect_failure(StatusCode::kInternal, std::string("thrown by ") + name);
    EXPECT_OK(plugins::deactivate(name, true));
    EXPECT_FALSE(in_maps(fault_path(name))) << name;
    expect_host_works();
  }
  load("throw_int_run");
  expect_failure(StatusCode::kInternal, "R5");
}

TEST_F(PluginCall, AThrowingDestroyPlanDoesNotStopTheDeactivation) {
  load("throw_destroy_plan");
  {
    const PolicyScope scope(only("relu", "vendor.fault"));
    EXPECT_OK(call_relu(floats({-1, 2}), floats({0, 0})));
  }
  Events::clear();
  EXPECT_OK(plugins::deactivate("throw_destroy_plan", true));
  EXPECT_EQ(Events::take(), (std::vector<std::string>{"destroy_plan", "quiesce", "destroy"}));
  EXPECT_FALSE(in_maps(fault_path("throw_destroy_plan")));
  expect_host_works();
}

TEST_F(PluginCall, AnUncleanFailureIsNotFollowedByAnotherImplementation) {
  load("half_written");
  PolicySettings settings;
  settings.per_op["relu"] = {{PolicyToken::Type::kImpl, Kind::kVendor, "vendor.fault"},
                             {PolicyToken::Type::kKind, Kind::kReference, ""}};
  const PolicyScope scope(settings);
  const Tensor out = floats({9, 9, 9, 9});
  const Status status = call_relu(floats({1, 2, 3, 4}), out);
  EXPECT_FAILS(status, kInternal, "stopped in the middle");
  EXPECT_EQ(values_of(out), (std::vector<float>{1, 2, 9, 9}))
      << "another implementation ran over it";
}

TEST_F(PluginCall, ACleanFailureIs) {
  load("clean_failure");
  PolicySettings settings;
  settings.per_op["relu"] = {{PolicyToken::Type::kImpl, Kind::kVendor, "vendor.fault"},
                             {PolicyToken::Type::kKind, Kind::kReference, ""}};
  {
    const PolicyScope scope(settings);
    Events::clear();
    const Tensor out = floats({9, 9});
    const Status status = call_relu(floats({-1, 2}), out);
    EXPECT_OK(status);
    EXPECT_EQ(values_of(out), (std::vector<float>{0, 2}));
    EXPECT_EQ(Events::take(), (std::vector<std::string>{"run"})) << "the plugin had its turn first";
  }
  expect_failure(StatusCode::kInternal, "not today");  // no other implementation is allowed
  settings.strict = true;
  const PolicyScope scope(settings);
  EXPECT_HAS(call_relu(floats({-1}), floats({9})).to_string(), "not today");
}

TEST_F(PluginCall, AStatusOfNoKnownCodeIsInternal) {
  load("garbage_status");
  expect_failure(StatusCode::kInternal, "vendor.fault");
}

TEST_F(PluginCall, ACustomOpRunsAndItsImplementationsAge) {
  load("custom_op");
  const Tensor in = floats({1, 2}), out = floats({0, 0});
  fault::ScaleArgs args;
  args.input = in;
  args.output = out;
  args.factor = 3;
  args.bias = 10;
  ASSERT_OK(call("fault::scale", &args));
  EXPECT_EQ(values_of(out), (std::vector<float>{13, 16}));
  ASSERT_OK(plugins::deactivate("custom_op", true));
  EXPECT_EQ(call("fault::scale", &args).code(), StatusCode::kUnsupported)
      << "the op is known, without implementation";

  load("old_parameters");  // its implementation does not know the bias
  const Status refused = call("fault::scale", &args);
  EXPECT_FAILS(refused, kUnsupported, "bias");
  EXPECT_EQ(values_of(out), (std::vector<float>{13, 16})) << "nothing was written";
  args.bias = 0;
  ASSERT_OK(call("fault::scale", &args));
  EXPECT_EQ(values_of(out), (std::vector<float>{3, 6}));
}

TEST_F(PluginCall, ACustomOpWithAnotherDescriptionIsRefused) {
  static te_fl_op_schema other = fault::kScale;
  other.least_args_size = sizeof(fault::ScaleArgs);
  load("custom_op");
  te_fl_op_desc desc;
  desc.op_name = "fault::scale";
  desc.impl_id = "default.other";
  desc.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  desc.schema = &other;
  desc.run = [](void*, const te_fl_context*, const void*) -> te_fl_status { return TE_FL_OK; };
  const Status status = OpRegistry::instance().register_op(desc, "test");
  EXPECT_FAILS(status, kAlreadyExists, "R17");
  EXPECT_HAS(status.to_string(), "in which ");
}

TEST_F(PluginCall, AnOpaqueRecordGoesBackToItsProducer) {
  load("opaque_record");
  // An implementation with a higher priority, which dispatch would choose if the record's producer
  // did not determine the choice.
  te_fl_op_desc rival;
  rival.op_name = "fault::backward";
  rival.impl_id = "default.rival";
  rival.priority = 1000;
  rival.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT;
  rival.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  rival.run = [](void*, const te_fl_context*, const void* raw) -> te_fl_status {
    static_cast<float*>(static_cast<const fault::RecordArgs*>(raw)->output->dl.data)[0] = -1;
    return TE_FL_OK;
  };
  rival.schema = &fault::kBackward;
  ASSERT_OK(OpRegistry::instance().register_op(rival, "rival"));
  const Tensor in = floats({5}), out = floats({0});
  te_fl_saved saved;
  fault::RecordArgs args;
  args.input = in;
  args.output = out;
  ASSERT_OK(call("fault::backward", &args));
  EXPECT_EQ(values_of(out)[0], -1) << "without a record the policy decides";
  args.saved = &saved;
  ASSERT_OK(call("fault::forward", &args));
  EXPECT_EQ(saved.opaque, 1u);
  EXPECT_STREQ(saved.producer, "vendor.fault");
  {
    const PolicyScope scope(only("fault::backward", "default.rival"));
    ASSERT_OK(call("fault::backward", &args));
  }
  EXPECT_EQ(values_of(out)[0], 1005) << "only the producer adds 1000";
  ASSERT_OK(plugins::deactivate("opaque_record", true));
  const Status gone = call("fault::backward", &args);
  EXPECT_FAILS(gone, kFailedPrecondition, "vendor.fault");
  EXPECT_OK(OpRegistry::instance().unregister_owner("rival"));
}

TEST_F(PluginCall, AThrowingDeviceGivesErrors) {
  load("throw_device");
  const Device device = parse_device("ext:fault:0").value();
  const auto memory = devices::allocate(device, 64);
  EXPECT_FAILS(memory, kInternal, "thrown by throw_device");
  char byte = 0;
  EXPECT_EQ(devices::copy(device, &byte, Device{}, &byte, 1).code(), StatusCode::kInternal);
  EXPECT_EQ(devices::fill(device, &byte, 0, 1).code(), StatusCode::kInternal);
  EXPECT_EQ(devices::synchronize(device).code(), StatusCode::kInternal);
  EXPECT_EQ(devices::properties(device).status().code(), StatusCode::kInternal);
  EXPECT_EQ(devices::live_objects(device), 0);
  expect_host_works();
}

TEST_F(PluginCall, TwoPluginsCarryTwoVersionsOfOneLibraryAndOfSpdlog) {
  load("versioned1");
  load("versioned2");
  for (int version : {1, 2, 1}) {
    const PolicyScope scope(only("fault::scale", "vendor.versioned" + std::to_string(version)));
    const Tensor in = floats({1, 1}), out = floats({0, 0});
    fault::ScaleArgs args;
    args.input = in;
    args.output = out;
    const Status status = call("fault::scale", &args);
    ASSERT_OK(status);
    const float v = static_cast<float>(version);
    EXPECT_EQ(values_of(out), (std::vector<float>{v, v}));
  }
  EXPECT_EQ(dlsym(RTLD_DEFAULT, "fault_shared_version"), nullptr) << "nothing became global";
}

}  // namespace
}  // namespace te_fl::test
