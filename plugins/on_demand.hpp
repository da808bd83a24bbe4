// Plugins that wait until somebody asks for a device of theirs (a manifest's "load_for"), so that a
// process which uses none pays for none of their drivers.
#pragma once

#include "plugins/manifest.hpp"
#include "te_fl/device.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::plugins::on_demand {

// Discovery leaves a manifest here instead of loading it.
void wait(const Manifest& manifest);
// Takes the plugin of a name out, since it is loaded in another way.
void forget(const std::string& name);
// True if any plugin waits. One atomic load.
bool any() noexcept;
// Loads those that serve a device of this one's type and provider, or all if `device` is null, and
// waits for those that another thread is loading. A failure is recorded and logged. Does nothing on
// a thread that is inside an op or inside a plugin's entry: they go on waiting.
void load(const Device* device, OpRegistry& registry);

}  // namespace te_fl::plugins::on_demand
