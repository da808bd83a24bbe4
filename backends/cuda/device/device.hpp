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

// Fills `devices` with what the driver shows; none, with the reason in `why`, where there is no
// driver or no GPU. The descriptors point into the vector.
// cache_bytes: how much freed memory each may keep for the next allocation.
void enumerate(size_t cache_bytes, std::vector<Device>& devices, std::string& why);

// Before the device goes: nothing of it is in use.
void give_back_memory(Device& device) noexcept;

// 10 * major + minor of the compute capability; 0 for a device that enumerate() has not seen.
int architecture(int index) noexcept;

// Waits for all work of a device.
te_fl_status synchronize_device(int index, const te_fl_error_sink* errors) noexcept;

}  // namespace te_fl::cuda
