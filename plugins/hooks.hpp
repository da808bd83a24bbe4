#pragma once

#include <atomic>

#include "te_fl/device.hpp"
#include "te_fl/op_registry.hpp"

// What the rooms above offer to plugins, and the other way round, without either including the
// other.
namespace te_fl::plugins {

struct Hooks {
  // Set by the registry. A device came (or came back): forget that it was lost and its properties.
  std::atomic<void (*)(const Device&)> device_added{nullptr};
  // Set by the registry. Frees what dispatch itself holds on a device, before its removal.
  std::atomic<void (*)(const Device&)> release_device{nullptr};
  // Set by the loader. Loads what the settings and the manifests name; called once, by the first
  // use of OpManager::instance(), after the built-in backends are registered.
  std::atomic<void (*)(OpRegistry&)> discover{nullptr};
};

inline constinit Hooks g_hooks;

}  // namespace te_fl::plugins
