// Memory that a plugin gets from the host (R28).
#include <gtest/gtest.h>

#include <string>

#include "plugins/activate.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "te_fl/memory.hpp"

namespace te_fl::plugins {
namespace {

const te_fl_host_api* g_host = nullptr;

const te_fl_plugin_header* query(const te_fl_host_info*) {
  static te_fl_plugin_api api;
  api.create = [](const te_fl_host_api* host, void** instance, const te_fl_error_sink*) {
    g_host = host;
    *instance = &api;
    return te_fl_status{TE_FL_OK};
  };
  api.destroy = [](void*) {};
  static te_fl_plugin_header header;
  header.name = "keeper";
  header.vendor = "acme";
  header.api = &api;
  return &header;
}

class HostServices : public ::testing::Test {
 protected:
  HostServices() {
    device = devices::add(&far.desc).value();
    instance = activate(query, registry).value();
  }
  ~HostServices() override {
    instance.reset();
    EXPECT_OK(devices::remove(device));
  }
  te_fl_status allocate(const Device& on, uint64_t bytes, uint32_t kind = TE_FL_MEMORY_DEVICE) {
    text.clear();
    te_fl_error_sink sink{};
    sink.struct_size = sizeof sink;
    sink.host = &text;
    sink.write = [](void* host, const char* message) {
      *static_cast<std::string*>(host) += message;
    };
    te_fl_memory_desc memory;
    memory.bytes = bytes;
    memory.kind = kind;
    return g_host->allocate(g_host->host, on.to_c(), on.provider, &memory, &data, &sink);
  }
  void free(const Device& on, uint32_t kind = TE_FL_MEMORY_DEVICE) {
    g_host->free(g_host->host, on.to_c(), on.provider, data, kind, nullptr);
  }

  testing::FarDevice far{0, size_t{1} << 20};
  Device device;
  OpRegistry registry;
  std::shared_ptr<Instance> instance;
  void* data = nullptr;
  std::string text;
};

TEST_F(HostServices, MemoryIsTheDevicesAndCounted) {
  ASSERT_EQ(allocate(device, 4096), TE_FL_OK) << text;
  EXPECT_TRUE(far.owns(data));
  const auto account = devices::memory_account(device);
  ASSERT_OK(account);
  EXPECT_EQ(account->bytes, 4096u);
  EXPECT_EQ(account->holders.at(0).use, "plugin keeper");
  free(device);
  EXPECT_EQ(devices::memory_account(device)->bytes, 0u);
  ASSERT_EQ(allocate(device, 64, TE_FL_MEMORY_PINNED), TE_FL_OK) << text;
  EXPECT_EQ(far.pinned.load(), 1);
  free(device, TE_FL_MEMORY_PINNED);
  EXPECT_EQ(far.pinned.load(), 0);
  ASSERT_EQ(allocate(Device{}, 64), TE_FL_OK) << text;  // the host's own memory
  free(Device{});
  // NULL: does nothing.
  g_host->free(g_host->host, device.to_c(), device.provider, nullptr, 0, nullptr);
  ASSERT_OK(withdraw(instance, registry));
}

TEST_F(HostServices, MemoryComesFromAProgramsAllocator) {
  struct Framework {
    testing::FarDevice& far;
    int blocks = 0;
  } framework{far};
  te_fl_allocator api;
  api.name = "framework";
  api.self = &framework;
  api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                    const te_fl_error_sink* errors) {
    auto& f = *static_cast<Framework*>(self);
    ++f.blocks;
    return f.far.api.allocate(&f.far, memory, out, errors);
  };
  api.free = [](void* self, void* data, const te_fl_error_sink* errors) {
    auto& f = *static_cast<Framework*>(self);
    --f.blocks;
    return f.far.api.free(&f.far, data, TE_FL_MEMORY_DEVICE, nullptr, errors);
  };
  api.record_stream = [](void*, void*, void*, const te_fl_error_sink*) -> te_fl_status {
    return TE_FL_OK;
  };
  ASSERT_OK(devices::install_allocator(device, &api));
  ASSERT_EQ(allocate(device, 4096), TE_FL_OK) << text;
  EXPECT_EQ(framework.blocks, 1);
  free(device);
  EXPECT_EQ(framework.blocks, 0);
  ASSERT_OK(devices::install_allocator(device, nullptr));
}

TEST_F(HostServices, AFailureSaysWhy) {
  EXPECT_EQ(allocate(device, size_t{1} << 30), TE_FL_OUT_OF_MEMORY) << "not marked clean";
  EXPECT_HAS(text, "allocation of 1.0 GiB on ext:far:0: the far device is full");
  EXPECT_EQ(TE_FL_STATUS_CODE(allocate(device, 64, TE_FL_MEMORY_MANAGED)), TE_FL_UNSUPPORTED);
  EXPECT_EQ(TE_FL_STATUS_CODE(allocate(device, 64, 99)), TE_FL_INVALID_ARGUMENT);
  EXPECT_HAS(text, "kind 99");
  EXPECT_EQ(TE_FL_STATUS_CODE(allocate({TE_FL_DEVICE_EXT, 7, device.provider}, 64)),
            TE_FL_NOT_FOUND);
  EXPECT_HAS(text, "ext:far:7");
  void* out = nullptr;
  EXPECT_EQ(g_host->allocate(g_host->host, device.to_c(), device.provider, nullptr, &out, nullptr),
            TE_FL_INVALID_ARGUMENT);
  EXPECT_EQ(devices::live_objects(device), 0);
}

TEST_F(HostServices, ScalingModesAreDescribed) {
  const te_fl_scaling_desc* mx = g_host->scaling(g_host->host, TE_FL_SCALING_MXFP8);
  ASSERT_NE(mx, nullptr);
  EXPECT_STREQ(mx->name, "mxfp8");
  EXPECT_EQ(mx->block_rows * mx->block_cols, 32u);
  EXPECT_EQ(mx->scale_dtype, uint32_t{TE_FL_F8E8M0});
  EXPECT_EQ(mx->second_level, 0u);
  const te_fl_scaling_desc* nv = g_host->scaling(g_host->host, TE_FL_SCALING_NVFP4);
  ASSERT_NE(nv, nullptr);
  EXPECT_EQ(nv->second_level, 1u);
  EXPECT_EQ(nv->dtypes, TE_FL_BIT(TE_FL_F4E2M1));
  EXPECT_EQ(g_host->scaling(g_host->host, TE_FL_SCALING_NONE), nullptr);
  EXPECT_EQ(g_host->scaling(g_host->host, TE_FL_SCALING_COUNT), nullptr);
  for (uint32_t i = 1; i < TE_FL_SCALING_COUNT; ++i) {
    EXPECT_EQ(g_host->scaling(g_host->host, i)->scaling, i);
  }
}

TEST_F(HostServices, WhatIsLeftAtTheEndIsReported) {
  ASSERT_EQ(allocate(device, 4096), TE_FL_OK) << text;
  ::testing::internal::CaptureStderr();
  ASSERT_OK(withdraw(instance, registry));
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_HAS(log, "plugin keeper: 1 block of memory that it had from the host");
  EXPECT_HAS(log, "rule R28");
  free(device);
}

}  // namespace
}  // namespace te_fl::plugins
