#include "device.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "te_fl/comm.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/te_fl.hpp"

namespace train_gpt {
namespace {

using te_fl::Device;
using te_fl::Result;

// One op of each kind that a training step of the model uses.
constexpr const char* kOps[] = {"embedding_fwd",  "generic_gemm",      "rmsnorm_fwd",
                                "fused_attn_fwd", "fused_attn_bwd",    "quantize",
                                "swiglu",         "cross_entropy_fwd", "multi_tensor_adam"};

// Returns the first op of kOps that has only host implementations for the device, or that has no
// implementation; empty if there is none.
Result<std::string> left_to_host(const Device& device) {
  te_fl::OpManager& manager = te_fl::OpManager::instance();
  for (const char* name : kOps) {
    TE_FL_ASSIGN_OR_RETURN(const te_fl::OpId op, manager.registry().find(name));
    TE_FL_ASSIGN_OR_RETURN(const te_fl::Decision decision, manager.explain(op, {device, {}, {}}));
    bool native = false;
    for (const te_fl::Candidate& c : decision.candidates) native |= c.chosen && !c.staged;
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
      return DeviceChoice{device, name,
                          "--device auto found that it supports the model's ops itself", true};
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

// Returns the number of ranks on this machine: torchrun and tools/launch.py set LOCAL_WORLD_SIZE;
// other launchers imply at least this rank's number plus one.
int local_ranks(const te_fl::Job& job) {
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  return std::max(job.local_rank + 1, text == nullptr ? 1 : std::atoi(text));
}

bool same_kind(const Device& a, const Device& b) {
  return a.type == b.type && a.provider == b.provider;
}

// Returns the kind of a device: "cuda" for "cuda:1".
std::string kind_of(const Device& device) {
  const std::string name = te_fl::to_string(device);
  return name.substr(0, name.rfind(':'));
}

// Returns this rank's device: of the kind of `first`, with the rank's number on this machine.
Result<Device> device_of_rank(const Device& first, const te_fl::Job& job) {
  if (first.is_host()) return first;
  int count = 0;
  Device own = first;
  for (const Device& device : te_fl::devices::list()) {
    if (same_kind(device, first) && count++ == job.local_rank) own = device;
  }
  const int ranks = local_ranks(job);
  if (ranks <= count) return own;
  return te_fl::failed_precondition(
      "this machine has " + std::to_string(count) + " " + kind_of(first) +
      (count == 1 ? " device and " : " devices and ") + std::to_string(ranks) +
      " ranks of the job, each of which needs one of its own; start at most " +
      std::to_string(count) + " here, or give --device cpu");
}

// Refuses a device index if several ranks of this machine would share that device.
te_fl::Status check_index(const std::string& wanted, const te_fl::Job& job) {
  if (std::isdigit(static_cast<unsigned char>(wanted.back())) == 0 || local_ranks(job) == 1) {
    return {};
  }
  const std::string kind = wanted.substr(0, wanted.rfind(':'));
  return te_fl::invalid_argument("--device " + wanted + " names one device, and the job has " +
                                 std::to_string(local_ranks(job)) +
                                 " ranks on this machine; with --device " + kind +
                                 " each takes the one of its number");
}

}  // namespace

Result<DeviceChoice> choose_device(const std::string& wanted) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Job job, te_fl::Job::from_environment());
  if (wanted == "auto") {
    TE_FL_ASSIGN_OR_RETURN(DeviceChoice found, find_device());
    TE_FL_ASSIGN_OR_RETURN(found.device, device_of_rank(found.device, job));
    if (!found.device.is_host()) found.name = te_fl::to_string(found.device);
    return found;
  }
  const auto device = te_fl::parse_device(wanted);
  if (!device.ok()) {
    if (te_fl::environment::nearest(wanted, {"auto"}).empty()) return device.status();
    return device.status().wrap("--device " + wanted + ": did you mean 'auto'?");
  }
  TE_FL_RETURN_IF_ERROR(te_fl::devices::find(*device).status());
  if (!device->is_host()) TE_FL_RETURN_IF_ERROR(check_index(wanted, job));
  TE_FL_ASSIGN_OR_RETURN(const Device own, device_of_rank(*device, job));
  DeviceChoice choice{own, te_fl::to_string(own), "--device names it", false};
  if (local_ranks(job) > 1 && !own.is_host()) choice.reason = "this rank's, by its number";
  if (!own.is_host()) {
    TE_FL_ASSIGN_OR_RETURN(const std::string op, left_to_host(own));
    choice.native = op.empty();
    if (!choice.native) choice.reason += "; it leaves " + op + " to the host";
  }
  return choice;
}

}  // namespace train_gpt
