// Plugins that are loaded when a device of theirs is first requested (a manifest's "load_for"). A
// process that uses no such device does not load the driver.
#pragma once

#include "plugins/manifest.hpp"
#include "te_fl/device.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::plugins::on_demand {

// Adds a manifest to the waiting plugins. Discovery calls this instead of loading it.
void wait(const Manifest& manifest);
// Removes a plugin from the waiting plugins, because it is loaded in another way.
void forget(const std::string& name);
// True if any plugin is waiting. Costs one atomic load.
bool any() noexcept;
// Loads the waiting plugins for devices of this type and provider, or all if `device` is null.
// Waits for plugins that another thread is loading. Records and logs failures. Does nothing on a
// thread that is inside an op or a plugin function; the plugins then stay waiting.
void load(const Device* device, OpRegistry& registry);

}  // namespace te_fl::plugins::on_demand
