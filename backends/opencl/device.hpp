// The OpenCL devices of this process and their te_fl_device_api.
#pragma once

#include <CL/cl.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gemm_choice.hpp"
#include "memory.hpp"
#include "program.hpp"
#include "te_fl/plugin.h"

namespace te_fl::opencl {

// A device that te-fl uses. Streams are in-order command queues; the default stream is `queue`.
struct Device {
  ~Device();

  int index = 0;
  std::string name, platform, driver;
  cl_device_id id = nullptr;
  cl_context context = nullptr;
  cl_command_queue queue = nullptr;
  void* nothing = nullptr;  // device memory that is passed to kernels in place of an absent tensor
  // True if division is correctly rounded and subnormals are kept, which exact FP8 needs.
  bool exact = false;
  GemmDevice gemm;  // limits for the choice of a GEMM kernel
  std::unique_ptr<Memory> memory;
  std::unique_ptr<Programs> programs;
  te_fl_device_desc desc{};
  std::mutex streams_mutex;
  std::set<cl_command_queue> streams;  // the streams that create_stream() made

  cl_command_queue queue_of(void* stream) const {
    return stream == nullptr ? queue : static_cast<cl_command_queue>(stream);
  }
};
using Devices = std::vector<std::unique_ptr<Device>>;

struct Enumeration {
  Devices devices;
  std::vector<std::string> left_out;  // devices that are not usable, with reasons
  std::string why_none;               // reason if `devices` is empty
};

// Returns the devices, of all platforms, that have a compiler and coarse-grained shared virtual
// memory, in the drivers' order. Each device has its own context. `wanted`: TE_FL_OPENCL_DEVICE, or
// NULL for all devices. `cache_bytes`: freed memory that each device may keep. Throws
// backend::Error if `wanted` matches no device.
Enumeration enumerate(const char* wanted, size_t cache_bytes);

// Waits for all work on the device's default stream and on the streams that it created.
te_fl_status synchronize_device(Device& device, const te_fl_error_sink* errors) noexcept;

}  // namespace te_fl::opencl
