// Chooses the GEMM kernel of a call: a pure function of the device's limits and the sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace te_fl::opencl {

enum class GemmKernel {
  kAuto,      // value of the setting: this file chooses
  kRows,      // gemm.cl without WIDE: vectorised along rows, for CPUs
  kTiles64,   // gemm.cl with WIDE: parallel work-items, for GPUs
  kTiles128,  // like kTiles64, with larger tiles: fewer loads per multiplication, fewer groups
  kClblast,   // CLBlast's Sgemm
};

struct GemmDevice {
  bool gpu = false;
  uint32_t compute_units = 1;
  size_t largest_group = 64;  // maximum work-items per group
  uint64_t local_memory = 0;  // size in bytes
  bool clblast = false;       // CLBlast is present, and its buffers can share te-fl's memory
  GemmKernel wanted = GemmKernel::kAuto;  // value of TE_FL_OPENCL_GEMM
};

struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  bool f32 = false;    // both operands are F32
  bool plain = false;  // F32 operands and result and no epilogue, as CLBlast requires
};

inline GemmKernel choose_gemm(const GemmDevice& device, const GemmProblem& p) noexcept {
  const auto tiles = [&](int64_t size) {
    return (p.m + size - 1) / size * ((p.n + size - 1) / size);
  };
  const int64_t units = device.compute_units;
  const bool library = device.clblast && p.plain && p.m > 0 && p.n > 0 && p.k > 0;
  constexpr size_t kGroup128 = 256, kLocal128 = size_t{17} << 10;  // same values as in gemm.cl
  const bool fits_128 = device.largest_group >= kGroup128 && device.local_memory >= kLocal128;
  if (device.wanted == GemmKernel::kClblast && library) return GemmKernel::kClblast;
  if (device.wanted == GemmKernel::kRows || device.wanted == GemmKernel::kTiles64) {
    return device.wanted;
  }
  if (device.wanted == GemmKernel::kTiles128) {
    return fits_128 ? GemmKernel::kTiles128 : GemmKernel::kTiles64;
  }
  if (!device.gpu) return GemmKernel::kRows;
  // Based on measurements on an H100 with 132 compute units (bench/README.md). If there are fewer
  // tiles than compute units, CLBlast is faster. 128 x 128 tiles are faster than 64 x 64 tiles if
  // they occupy at least half of the units, and always if operands are converted to F32.
  if (library && tiles(64) < units) return GemmKernel::kClblast;
  const bool filled = 2 * tiles(128) >= units;
  return fits_128 && (filled || !p.f32) ? GemmKernel::kTiles128 : GemmKernel::kTiles64;
}

// Returns the kernel that a value of TE_FL_OPENCL_GEMM names. The host has checked the value.
inline GemmKernel find_gemm_kernel(std::string_view name) noexcept {
  if (name == "rows") return GemmKernel::kRows;
  if (name == "tiles64") return GemmKernel::kTiles64;
  if (name == "tiles128") return GemmKernel::kTiles128;
  return name == "clblast" ? GemmKernel::kClblast : GemmKernel::kAuto;
}

// The name of a kernel.
constexpr const char* name_of(GemmKernel kernel) noexcept {
  constexpr const char* kNames[] = {"auto", "rows", "tiles64", "tiles128", "clblast"};
  return kNames[static_cast<int>(kernel)];
}

// Returns text that names the kernel and the reason for the choice.
inline std::string describe_choice(const GemmDevice& device, const GemmProblem& p) {
  const GemmKernel kernel = choose_gemm(device, p);
  const std::string name = kernel == GemmKernel::kClblast
                               ? "CLBlast's Sgemm"
                               : std::string("gemm.cl, ") + name_of(kernel);
  return name + (kernel == device.wanted ? ": requested by TE_FL_OPENCL_GEMM"
                                         : ": by the device and the extents");
}

}  // namespace te_fl::opencl
