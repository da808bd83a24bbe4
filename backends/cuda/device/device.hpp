// The CUDA devices of this process and their te_fl_device_api.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/memory.hpp"
#include "te_fl/plugin.h"

namespace te_fl::cuda {

struct Device {
  int index = 0;
  te_fl_device_desc desc{};
  std::unique_ptr<Memory> memory;
};

// Fills `devices` with the devices that the driver reports. If there is no driver or no GPU, leaves
// it empty and writes the reason to `why`. The descriptors point into the vector. `cache_bytes`:
// freed memory that each device may keep for later allocations.
void enumerate(size_t cache_bytes, std::vector<Device>& devices, std::string& why);

// 10 * major + minor of the compute capability of each GPU; empty without a driver or a GPU.
std::vector<int> gpu_architectures();

// Frees the device's memory. Called before the device is removed, when none of its memory is in
// use.
void give_back_memory(Device& device) noexcept;

// 10 * major + minor of the compute capability; 0 for a device that enumerate() did not find.
int architecture(int index) noexcept;

// Waits for all work on a device.
te_fl_status synchronize_device(int index, const te_fl_error_sink* errors) noexcept;

}  // namespace te_fl::cuda
