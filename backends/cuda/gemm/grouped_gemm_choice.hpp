// Over how many streams the products of a group go: a pure function, which workspace, run and
// describe share. Plain C++, so that it can be tested where there is no GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace te_fl::cuda {

// The streams that TE_FL_CUDA_GROUPED_STREAMS stands at unless it is set.
inline constexpr int kGroupedStreams = 4;

// A group's products together.
struct GroupSize {
  int64_t products = 0;  // with something to multiply
  int64_t tiles = 0;     // of 128 x 128 in all results
  void add(int64_t m, int64_t n) {
    ++products;
    tiles += (m + 127) / 128 * ((n + 127) / 128);
  }
};

// A product of fewer tiles than the GPU runs at once leaves a part of it idle, and so does the last
// wave of each other one, which another product can fill. Where every product has many waves there
// is nothing to win, and streams would share the caches. `most`: at least 1.
inline int choose_lanes(const GroupSize& group, int multiprocessors, int most) {
  constexpr int64_t kManyWaves = 16;
  if (group.products < 2) return 1;
  if (group.tiles >= kManyWaves * multiprocessors * group.products) return 1;
  return static_cast<int>(std::min<int64_t>(most, group.products));
}

}  // namespace te_fl::cuda
