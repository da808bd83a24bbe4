#pragma once

#include <memory>

#include "te_fl/device.hpp"

// The allocators that programs have installed (R25), by device. Thread-safe; where there is none,
// no lock is taken.
namespace te_fl::core {

class Allocator;  // core/device/allocator.hpp
using AllocatorRef = std::shared_ptr<const Allocator>;

// The one that is installed for a device; null if there is none.
AllocatorRef allocator_of(const Device& device) noexcept;
// Puts `next`, or none if it is null, in the place of the device's allocator, which is returned so
// that it goes outside the lock.
AllocatorRef exchange_allocator(const Device& device, AllocatorRef next);
// The device has gone.
void drop_allocator(const Device& device) noexcept;

}  // namespace te_fl::core
