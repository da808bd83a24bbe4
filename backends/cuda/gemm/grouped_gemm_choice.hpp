// Chooses how the GEMMs of a group run: in one kernel of the plugin, or by the library over a
// number of streams. Pure functions that the op's workspace, run and describe use. Plain C++, so
// tests run without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm/gemm_choice.hpp"

namespace te_fl::cuda {

// The variants of the kernel in grouped_kernel.cu, by the operands. In all but kBf16AcrossB and
// kBf16Across both operands have K contiguous.
enum class GroupedForm {
  kLibrary,        // not this kernel
  kBf16,           // forward
  kBf16AcrossB,    // input gradients: A has K contiguous, B does not
  kBf16Across,     // weight gradients: neither operand has K contiguous
  kCodes,          // FP8 with the tensor cores' own sums
  kCodesSplit,     // FP8, E4M3 on both sides, with sums in FP32
  kGradientCodes,  // FP8, A in E5M2 and B in E4M3, with sums in FP32
  kBlocks,         // E4M3, A scaled by 1x128 and B by 128x128
  kVectors,        // E4M3, both scaled by 1x128
};

inline const char* form_name(GroupedForm form) {
  switch (form) {
    case GroupedForm::kBf16:
      return "BF16";
    case GroupedForm::kBf16AcrossB:
      return "BF16, B with K across its rows";
    case GroupedForm::kBf16Across:
      return "BF16, A and B with K across their rows";
    case GroupedForm::kCodes:
      return "FP8";
    case GroupedForm::kCodesSplit:
      return "FP8 with sums in FP32";
    case GroupedForm::kGradientCodes:
      return "FP8 in E5M2 and E4M3 with sums in FP32";
    case GroupedForm::kBlocks:
      return "FP8 scaled by 1x128 and 128x128";
    case GroupedForm::kVectors:
      return "FP8 scaled by 1x128";
    case GroupedForm::kLibrary:
      break;
  }
  return "cuBLASLt";
}

struct GroupedPath {
  GroupedForm form = GroupedForm::kLibrary;
  const char* unfit = nullptr;  // kLibrary: why it is not the kernel; static text
  // The two blocks of a cluster compute tiles side by side, so that GEMMs of few rows waste less;
  // otherwise one tile is below the other.
  bool wide = false;
};

// Returns how the call runs, which has passed its op's checks. All GEMMs of a call run in the same
// way. `device`: architecture and has_tensor_maps are read.
GroupedPath choose_grouped_gemm(const te_fl_grouped_gemm_args& args, const GemmDevice& device);

// ---- the library

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
