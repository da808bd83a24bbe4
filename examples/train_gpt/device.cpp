#include "device.hpp"

#include "te_fl/environment.hpp"
#include "te_fl/te_fl.hpp"

namespace train_gpt {
namespace {

using te_fl::Device;
using te_fl::Result;

// One op of each kind that a step of the model needs.
constexpr const char* kOps[] = {"embedding_fwd",  "generic_gemm",      "rmsnorm_fwd",
                                "fused_attn_fwd", "fused_attn_bwd",    "quantize",
                                "swiglu",         "cross_entropy_fwd", "multi_tensor_adam"};

// The first op of kOps that the device leaves to the host, or that nothing serves; empty if none.
Result<std::string> left_to_host(const Device& device) {
  te_fl::OpManager& manager = te_fl::OpManager::instance();
  for (const char* name : kOps) {
    TE_FL_ASSIGN_OR_RETURN(const te_fl::OpId op, manager.registry().find(name));
    TE_FL_ASSIGN_OR_RETURN(const te_fl::Resolution resolution,
                           manager.explain(op, {device, {}, {}}));
    bool native = false;
    for (const te_fl::Candidate& c : resolution.candidates) native |= c.chosen && !c.staged;
    if (!native) return std::string(name);
  }
  return std::string();
}

Result<DeviceChoice> find_device() {
  std::string passed_over;
  for (const Device& device : te_fl::devices::list()) {
    if (device.is_host()) continue;
    TE_FL_ASSIGN_OR_RETURN(const std::string op, left_to_host(device));
    const std::string name = te_fl::to_string(device);
    if (op.empty()) {
      return DeviceChoice{device, name, "--device auto found that it serves the model's ops itself",
                          true};
    }
    passed_over += (passed_over.empty() ? "" : ", ") + name + " (it leaves " + op + " to the host)";
  }
  return DeviceChoice{Device{}, "cpu",
                      passed_over.empty() ? "--device auto found no other device; where there is "
                                            "one, te-fl doctor says what it lacks"
                                          : "--device auto passed over " + passed_over +
                                                "; --device NAME takes one all the same",
                      false};
}

}  // namespace

Result<DeviceChoice> choose_device(const std::string& wanted) {
  if (wanted == "auto") return find_device();
  const auto device = te_fl::parse_device(wanted);
  if (!device.ok()) {
    if (te_fl::environment::nearest(wanted, {"auto"}).empty()) return device.status();
    return device.status().wrap("--device " + wanted + ": did you mean 'auto'?");
  }
  TE_FL_RETURN_IF_ERROR(te_fl::devices::find(*device).status());
  DeviceChoice choice{*device, te_fl::to_string(*device), "--device names it", false};
  if (!device->is_host()) {
    TE_FL_ASSIGN_OR_RETURN(const std::string op, left_to_host(*device));
    choice.native = op.empty();
    if (!choice.native) choice.reason += "; it leaves " + op + " to the host";
  }
  return choice;
}

}  // namespace train_gpt
