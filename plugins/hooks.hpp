#pragma once

#include <atomic>

#include "te_fl/device.hpp"

// What the room above offers to plugins without being included by them.
namespace te_fl::plugins {

struct Hooks {
  // Set by dispatch. Frees what dispatch itself holds on a device, before its removal.
  std::atomic<void (*)(const Device&)> release_device{nullptr};
};

inline constinit Hooks g_hooks;

}  // namespace te_fl::plugins
