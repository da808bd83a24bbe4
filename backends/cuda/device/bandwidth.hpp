// Measures how fast a device copies its own memory.
#pragma once

namespace te_fl::cuda {

// Returns the measured bandwidth of device-to-device copies in bytes per second, reads plus writes;
// 0 until measure_copy_bandwidth() has succeeded for the device.
double copy_bandwidth(int device) noexcept;

// Returns copy_bandwidth(), measuring it first if no call in the process has done so. A measurement
// takes some milliseconds and keeps the best of a few copies between buffers that exceed the
// caches. Returns 0 if the buffers cannot be allocated or the copies fail. May be called from any
// thread, also one that is capturing; does not change the current device.
double measure_copy_bandwidth(int device) noexcept;

}  // namespace te_fl::cuda
