// Chooses the number of streams for the GEMMs of a group: a pure function that the op's workspace,
// run and describe use. Plain C++, so tests run without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace te_fl::cuda {

// The default of the setting TE_FL_CUDA_GROUPED_STREAMS.
inline constexpr int kGroupedStreams = 4;

// The total size of a group's GEMMs.
struct GroupSize {
  int64_t products = 0;  // products whose M, N and K are not 0
  int64_t tiles = 0;     // 128 x 128 tiles in all results
  void add(int64_t m, int64_t n) {
    ++products;
    tiles += (m + 127) / 128 * ((n + 127) / 128);
  }
};

// Returns the number of streams, from 1 to `most`. A GEMM with fewer tiles than the GPU runs at
// once leaves multiprocessors idle, and so does the last wave of a larger GEMM; a concurrent GEMM
// can fill them. If every GEMM has many waves, concurrency gains nothing, and concurrent GEMMs
// would compete for the caches.
inline int choose_lanes(const GroupSize& group, int multiprocessors, int most) {
  constexpr int64_t kManyWaves = 16;
  if (group.products < 2) return 1;
  if (group.tiles >= kManyWaves * multiprocessors * group.products) return 1;
  return static_cast<int>(std::min<int64_t>(most, group.products));
}

}  // namespace te_fl::cuda
