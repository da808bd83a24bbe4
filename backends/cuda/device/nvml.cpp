#include "device/nvml.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "device/open_library.hpp"
#include "device/per_device.hpp"

namespace te_fl::cuda {
namespace {

// The NVML functions that are used here. Statuses are ints; 0 is success.
struct Nvml {
  int (*init)() = nullptr;
  int (*device_by_bus)(const char* bus, void** device) = nullptr;
  int (*enforced_limit)(void* device, unsigned* milliwatts) = nullptr;
  bool ready = false;

  Nvml() {
    std::string reason;
    void* handle = open_library({"libnvidia-ml.so.1"}, reason);
    if (handle == nullptr) return;
    const auto find = [handle](auto& slot, const char* name) {
      slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(handle, name));
      return slot != nullptr;
    };
    ready = find(init, "nvmlInit_v2") && find(device_by_bus, "nvmlDeviceGetHandleByPciBusId_v2") &&
            find(enforced_limit, "nvmlDeviceGetEnforcedPowerLimit") && init() == 0;
  }
};

int ask(int device) {
  static const Nvml nvml;
  char bus[32] = {};
  if (!nvml.ready) return 0;
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  void* found = nullptr;
  unsigned milliwatts = 0;
  const bool is_known =
      nvml.device_by_bus(bus, &found) == 0 && nvml.enforced_limit(found, &milliwatts) == 0;
  return is_known ? static_cast<int>((milliwatts + 500) / 1000) : 0;
}

}  // namespace

int power_limit(int device) {
  static constinit PerDevice known;
  return known.get(device, [device] { return ask(device); });
}

}  // namespace te_fl::cuda
