#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

namespace te_fl {

// {DLPack device type, provider, index}. A plain value; Device() is the host.
struct Device {
  int32_t type = TE_FL_DEVICE_CPU;
  int32_t index = 0;
  uint32_t provider = 0;  // interned; 0 unless type is kDLExtDev

  bool is_host() const noexcept {
    return type == TE_FL_DEVICE_CPU || type == TE_FL_DEVICE_CUDA_HOST ||
           type == TE_FL_DEVICE_ROCM_HOST;
  }
  te_fl_device to_c() const noexcept { return {type, index}; }
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda:0", "opencl:1", "ext:acme:0". parse_device takes the same.
TE_FL_API std::string to_string(const Device& device);
TE_FL_API Result<Device> parse_device(std::string_view text);

// The devices that are there: the host and those that plugins provide. Thread-safe.
namespace devices {

// All devices, the host first.
TE_FL_API std::vector<Device> list();
// The functions of a device; NOT_FOUND names the devices that exist. The pointer stays valid as
// long as the device is registered or any memory of it is alive.
TE_FL_API Result<const te_fl_device_desc*> find(const Device& device);
TE_FL_API Result<te_fl_device_props> properties(const Device& device);
// Registers a device (R18: ALREADY_EXISTS names the present provider). The descriptor must outlive
// the registration. `provider` ids are interned by name.
TE_FL_API Result<Device> add(const te_fl_device_desc* desc);
// Takes a device out of the list. BUSY if memory or streams of it are alive.
TE_FL_API Status remove(const Device& device);
// Live allocations (memory, streams, events) made through te-fl on a device.
TE_FL_API int64_t live_objects(const Device& device);
TE_FL_API uint32_t intern_provider(std::string_view name);
TE_FL_API std::string provider_name(uint32_t id);

TE_FL_API Result<void*> allocate(const Device& device, size_t bytes, void* stream = nullptr);
TE_FL_API void free(const Device& device, void* data, void* stream = nullptr) noexcept;
TE_FL_API Result<void*> allocate_pinned(const Device& device, size_t bytes);
TE_FL_API void free_pinned(const Device& device, void* data) noexcept;
// Host to device, device to host, within a device, host to host. Ordered on `stream`.
TE_FL_API Status copy(const Device& dst_device, void* dst, const Device& src_device,
                      const void* src, size_t bytes, void* stream = nullptr);
TE_FL_API Status fill(const Device& device, void* dst, uint8_t value, size_t bytes,
                      void* stream = nullptr);
TE_FL_API Status synchronize(const Device& device, void* stream = nullptr);

}  // namespace devices
}  // namespace te_fl
