// Fixture for staging: a device whose memory only the device can access, with host implementations
// and one native implementation.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "core/device/device_list.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::testing {

class Staging : public ::testing::Test {
 protected:
  void SetUp() override {
    far.keep_ranges = true;
    device = devices::add(&far.desc).value();
    native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    native.desc.provider = "far";
    native.desc.vendor = "acme";
    native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
    host.desc.flags |= TE_FL_OP_GRAPH_SAFE;
    for (Fake* f : {&host, &reference, &native}) f->run_body = sum;
  }
  void TearDown() override {
    kept.clear();
    ASSERT_OK(devices::remove(device));
    EXPECT_EQ(far.pinned.load(), 0);
  }

  // out = a + b + c + d on compact F32 tensors in host-readable memory.
  static te_fl_status sum(const te_fl_context& ctx, const void* raw) {
    const auto& args = *static_cast<const FiveArgs*>(raw);
    // The native implementation only counts its runs.
    if (ctx.device.type != TE_FL_DEVICE_CPU) return TE_FL_OK;
    const auto at = [](const te_fl_tensor* t) { return static_cast<float*>(t->dl.data); };
    const int64_t n = args.a->dl.shape[0];
    for (int64_t i = 0; i < n; ++i) {
      at(args.out)[i] = at(args.a)[i] + at(args.b)[i] + at(args.c)[i] + at(args.d)[i];
    }
    return TE_FL_OK;
  }
  void add(Fake& f) {
    ASSERT_OK(registry.register_op(f.desc, "test", "acme"));
    op = *registry.find(f.desc.op_name);
  }
  // Returns a compact device tensor with the values first, first + 1, ...; it lives until the test
  // ends.
  Tensor& on_device(int64_t count, float first) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
    Tensor t = Tensor::empty({count}, DType::kF32, device).value();
    if (count > 0) std::memcpy(far.real(t.raw_data()), values.data(), values.size() * 4);
    return kept.emplace_back(std::move(t));
  }
  float at(const Tensor& t, int64_t i) const {
    float value;
    std::memcpy(&value, far.real(t.raw_data()) + 4 * i, sizeof value);
    return value;
  }
  // Arguments with a[i] = i, b[i] = 10 + i, c[i] = 100 + i, d[i] = 1000 + i.
  FiveArgs five(int64_t count = 4) {
    FiveArgs args;
    args.a = on_device(count, 0).c();
    args.b = on_device(count, 10).c();
    args.c = on_device(count, 100).c();
    args.d = on_device(count, 1000).c();
    args.out = on_device(count, -1).c();
    return args;
  }
  Status call(const FiveArgs& args, void* stream = nullptr) {
    CallOptions options;
    options.stream = stream;
    return manager.call(op, &args, options);
  }
  OpUsage find_usage(const std::string& impl) {
    for (const OpUsage& use : manager.usage()) {
      if (use.impl_id == impl) return use;
    }
    return {};
  }

  FarDevice far;
  Device device;
  OpRegistry registry;
  OpManager manager{registry};
  Fake native{"vendor.native"}, host{"default.host"}, reference{"reference.host"};
  std::deque<Tensor> kept;  // a deque, so that the tensors do not move
  OpId op;
};

}  // namespace te_fl::testing
