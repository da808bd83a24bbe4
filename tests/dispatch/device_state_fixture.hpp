#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::testing {

// One implementation of test::five on a FarDevice, which runs enqueued work only when a caller
// waits.
class DeviceState : public ::testing::Test {
 protected:
  void SetUp() override {
    OpManager::instance();  // creates the manager, which installs the hooks that release devices
    device = devices::add(&far.desc).value();
    native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    native.desc.provider = "far";
    native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
  }
  void TearDown() override {
    tensor = out = Tensor();
    ASSERT_OK(devices::remove(device));
  }
  void add() {
    ASSERT_OK(registry.register_op(native.desc, "test", "far"));
    op = *registry.find(native.desc.op_name);
  }
  Status remove() { return registry.unregister_op(native.desc.op_name, native.desc.impl_id); }
  Status call(void* stream, int64_t n = 1) {
    if (!tensor.defined() || tensor.numel() != n) {
      tensor = Tensor::zeros({n}, DType::kF32, device).value();
      out = Tensor::zeros({n}, DType::kF32, device).value();
    }
    FiveArgs args;
    args.a = args.b = args.c = args.d = tensor.c();
    args.out = out.c();
    CallOptions options;
    options.stream = stream;
    return manager.call(op, &args, options);
  }

  FarDevice far;
  Device device;
  OpRegistry registry;
  OpManager manager{registry};
  Fake native{"vendor.far"};
  OpId op{};
  Tensor tensor, out;
};

}  // namespace te_fl::testing
