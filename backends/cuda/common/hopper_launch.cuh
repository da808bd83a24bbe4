// Host code that launches kernels of hopper.cuh: tensor maps of matrices for bulk copies, and the
// number of two-block clusters that run at once.
#pragma once

#include <string>

#include "device/driver.hpp"
#include "device/per_device.hpp"
#include "device/shared_memory.hpp"

namespace te_fl::cuda {

// The tensor map of a row-major [rows, cols] matrix, in boxes of `box_rows` rows and 128 bytes.
inline CUtensorMap boxes(const void* data, bool codes, int64_t rows, int64_t cols, int box_rows) {
  const int64_t bytes = codes ? 1 : 2;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(cols * bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / bytes),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult result = driver().encode_tensor_map(
      &map, codes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
      const_cast<void*>(data), extents, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw backend::Error(TE_FL_UNSUPPORTED | TE_FL_CLEAN,
                         "cuTensorMapEncodeTiled: error " + std::to_string(result) + " for " +
                             std::to_string(rows) + " rows of " + std::to_string(cols) +
                             "; let another implementation run the op");
  }
  return map;
}

// Number of clusters of the kernel that the device runs at once. Throws UNSUPPORTED if it runs
// none.
template <auto kKernel>
int max_active_clusters(int device, int threads, size_t shared) {
  static constinit PerDevice kept;
  static constinit SharedMemory memory;
  const int clusters = kept.get(device, [&] {
    if (!memory.allow(device, kKernel, shared, shared)) return 0;
    cudaLaunchConfig_t config{};
    int sms = 0, held = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    config.gridDim = dim3(static_cast<unsigned>(sms / 2 * 2));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    check(cudaOccupancyMaxActiveClusters(&held, kKernel, &config),
          "cudaOccupancyMaxActiveClusters");
    return held;
  });
  if (clusters == 0) {
    throw backend::Error(TE_FL_UNSUPPORTED | TE_FL_CLEAN,
                         "the device runs no cluster of two blocks of " + std::to_string(threads) +
                             " threads with " + std::to_string(shared) +
                             " bytes of shared memory; let another implementation run the op");
  }
  return clusters;
}

}  // namespace te_fl::cuda
