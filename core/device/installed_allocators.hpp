#pragma once

#include <memory>

#include "te_fl/device.hpp"

// The allocators that programs have installed (R25), by device. Thread-safe. Takes no lock while no
// allocator is installed.
namespace te_fl::core {

class Allocator;  // declared in core/device/allocator.hpp
using AllocatorRef = std::shared_ptr<const Allocator>;

// The allocator that is installed for a device; null if there is none.
AllocatorRef find_allocator(const Device& device) noexcept;
// Installs `next` for the device, or none if it is null. Returns the previous allocator, so that
// the caller destroys it outside of the lock.
AllocatorRef exchange_allocator(const Device& device, AllocatorRef next);
// Removes the allocator of a device that was removed.
void drop_allocator(const Device& device) noexcept;

}  // namespace te_fl::core
