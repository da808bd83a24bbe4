#pragma once

#include <string>

#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

namespace train_gpt {

// The device that a run trains on.
struct DeviceChoice {
  te_fl::Device device;
  std::string name;    // "cuda:0"
  std::string reason;  // says why this one; a clause without a full stop
  // True if implementations of the device itself serve the model's ops. Where copies in host memory
  // serve some of them, or on the host, the smaller model is the default.
  bool native = false;
};

// "auto": the first device, other than the host, that serves the model's ops itself, else the host.
// Anything else is a device's name, and an error if no such device is there. Of a job with several
// ranks on this machine each takes the device of its number among them: FAILED_PRECONDITION if
// there are fewer devices of the kind, INVALID_ARGUMENT if the name has an index. Loads plugins.
te_fl::Result<DeviceChoice> choose_device(const std::string& wanted);

}  // namespace train_gpt
