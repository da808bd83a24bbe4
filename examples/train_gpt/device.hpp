#pragma once

#include <string>

#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

namespace train_gpt {

// The device that a run trains on.
struct DeviceChoice {
  te_fl::Device device;
  std::string name;    // "cuda:0"
  std::string reason;  // reason for the choice; a clause without a full stop
  // True if the device has implementations of its own for the model's ops. If false (on the host,
  // or if some ops run in host implementations on staged copies), the smaller model is the default.
  bool native = false;
};

// Chooses the device of a run. "auto" selects the first device other than the host that has
// implementations of the model's ops, otherwise the host. Any other text is a device's name; an
// error if no such device exists. If the job has several ranks on this machine, each uses the
// device with its local number: FAILED_PRECONDITION if there are too few devices of the kind,
// INVALID_ARGUMENT if the name has an index. Loads plugins.
te_fl::Result<DeviceChoice> choose_device(const std::string& wanted);

}  // namespace train_gpt
