// A host for plugins of any ABI version: loads a plugin, runs the requested ops, and prints the
// results. It is built with this te-fl's plugin.h and with headers that claim to be later versions
// (later_header.py).
//
// usage: meet PLUGIN [IMPL_ID...]
//   host|0.9
//   plugin|null|active|0.9|reason
//   op|relu: vendor.null|cpu|OK
//   end|deactivated|reason
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "te_fl/op_manager.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/plugins.hpp"
#include "te_fl/policy.hpp"
#include "te_fl/tensor.hpp"

namespace {

using namespace te_fl;

// Returns a status as a single line.
std::string to_text(const Status& status) {
  std::string text = status.to_string();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// Calls relu of {-1, 2, -3, 4} on the device; returns "OK" if the result is right, otherwise an
// error text.
std::string relu_on(const Device& device, const OpImplInfo& impl) {
  PolicySettings settings;
  settings.per_op["relu"] = {{PolicyToken::Type::kImpl, impl.kind, impl.impl_id}};
  const PolicyScope scope(settings);
  const float in[] = {-1, 2, -3, 4}, want[] = {0, 2, 0, 4};
  const auto input = Tensor::from_values({4}, in);
  const auto output = Tensor::from_values({4}, in);
  if (!input.ok() || !output.ok()) return "no memory";
  const auto there = input->to(device), result = output->to(device);
  if (!there.ok()) return to_text(there.status());
  if (!result.ok()) return to_text(result.status());
  te_fl_relu_args args;
  args.input = *there;
  args.output = *result;
  const Status status = OpManager::instance().call("relu", &args);
  if (!status.ok()) return to_text(status);
  const auto back = result->to(Device{});
  if (!back.ok()) return to_text(back.status());
  return std::equal(want, want + 4, back->data<float>()) ? "OK" : "wrong values";
}

void run(const OpImplInfo& impl, const plugins::PluginInfo& plugin) {
  std::vector<Device> devices;
  if ((impl.desc.device_types >> TE_FL_DEVICE_CPU & 1) != 0) devices.emplace_back();
  for (const std::string& name : plugin.devices) devices.push_back(parse_device(name).value());
  for (const Device& device : devices) {
    if ((impl.desc.device_types >> device.type & 1) == 0) continue;
    std::printf("op|%s: %s|%s|%s\n", impl.op.c_str(), impl.impl_id.c_str(),
                to_string(device).c_str(), relu_on(device, impl).c_str());
  }
}

void print(const plugins::PluginInfo& p) {
  std::printf("plugin|%s|%s|%s|%s\n", p.name.c_str(),
              std::string(plugins::to_string(p.state)).c_str(), p.abi.c_str(), p.reason.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  std::printf("host|%u.%u\n", TE_FL_ABI_MAJOR, TE_FL_ABI_MINOR);
  const auto loaded = plugins::load(argv[1]);
  if (!loaded.ok()) {
    for (const plugins::PluginInfo& p : plugins::list()) {
      if (p.path == argv[1]) print(p);
    }
    std::printf("status|%s\n", to_text(loaded.status()).c_str());
    return 1;
  }
  print(*loaded);
  const std::vector<std::string> wanted(argv + 2, argv + argc);
  for (const OpImplInfo& impl : OpRegistry::instance().snapshot()) {
    const bool asked = std::find(wanted.begin(), wanted.end(), impl.impl_id) != wanted.end();
    if (impl.owner == loaded->name && asked) run(impl, *loaded);
  }
  const Status ended = plugins::deactivate(loaded->name, true);
  std::printf("end|%s\n", ended.ok() ? "deactivated" : to_text(ended).c_str());
  return ended.ok() ? 0 : 1;
}
