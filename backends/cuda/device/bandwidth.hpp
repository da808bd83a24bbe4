// Measures how fast a device copies its own memory.
#pragma once

namespace te_fl::cuda {

// Bytes per second, read plus written; 0 until measure_copy_bandwidth() has succeeded for it.
double copy_bandwidth(int device) noexcept;

// Its value as measured by the first call in the process that succeeds, in some milliseconds: the
// best of a few copies between buffers that no cache holds. 0 where there is no memory for them, or
// they fail. Any thread, also one that is capturing; the current device is left as it was.
double measure_copy_bandwidth(int device) noexcept;

}  // namespace te_fl::cuda
