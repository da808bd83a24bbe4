// Chooses the kernels of a layernorm or rmsnorm call: a pure function of the call's metadata and
// the device's limits, so tests run without a GPU. Kernels are named after their files:
// norm_plain16.cu, norm_rowwise.cu, norm_cluster.cu, norm_block128.cu and norm_grad.cu; the kernels
// of norm_general.cuh support all other calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::cuda {

// A call of layernorm_fwd or rmsnorm_fwd. mu NULL: RMS normalisation.
struct NormForward {
  const te_fl_tensor *x, *gamma, *beta, *z, *mu, *rsigma;
  const te_fl_tensor *residual, *sum;  // both NULL or both set
  float epsilon;
  bool zero_centered;
};
// A call of a layernorm or rmsnorm backward op. Absent tensors are NULL. mu NULL: RMS
// normalisation.
struct NormBackward {
  const te_fl_tensor *dz, *x, *add, *mu, *rsigma, *gamma, *dx, *dgamma, *dbeta;
  bool zero_centered;
};

// Returns the equivalent call without a residual, for use after x + residual has been written to
// `sum`: its x is `sum`.
inline NormForward summed(NormForward f) {
  if (f.sum != nullptr) f.x = f.sum;
  f.residual = f.sum = nullptr;
  return f;
}

// Describes clusters of `blocks` blocks of norm_cluster.cu's kernel.
struct NormCluster {
  int dtype, blocks;
  int64_t width;  // columns per block of the cluster
  bool residual;
};

// The limits of a GPU.
struct NormDevice {
  int index = 0;
  int compute_capability = 90;        // 10 * major version
  int64_t shared_memory = 227 << 10;  // maximum bytes per block
  // True if the device can run such clusters. Called last, because it may query the driver.
  bool (*grants)(int index, const NormCluster& cluster) = nullptr;
};

enum class NormKernel {
  kNone,
  kPlain16,
  kRowwise,
  kCluster,
  kBlock128,
  kGrad,
  kGeneralRows,
  kGeneral
};
constexpr const char* name_of(NormKernel kernel) noexcept {
  constexpr const char* kNames[] = {"none",     "plain16", "rowwise",      "cluster",
                                    "block128", "grad",    "general rows", "general"};
  return kNames[static_cast<int>(kernel)];
}

struct NormChoice {
  NormKernel result = NormKernel::kGeneral;  // writes z, or dx, dgamma and dbeta
  // The kernel of a launch before `result` that computes the statistics of the rows and, with a
  // residual, `sum`. If `amax`, it also computes the amax of the result for current scaling.
  NormKernel first = NormKernel::kNone;
  bool amax = false;
  // Reason for `result`: the kind of call that it is for, or why a preferred kernel does not
  // support this call. Static text.
  const char* reason = "";

  std::string text() const {
    std::string t;
    if (first != NormKernel::kNone) {
      t = std::string(amax ? "amax by " : "statistics by ") + name_of(first) + ", result by ";
    }
    return t + name_of(result) + ": " + reason;
  }
};

namespace norm_choice {

constexpr int64_t kGroupSize = 8;  // elements that a thread processes at once: kGroup of
                                   // element.cuh
constexpr int64_t kMostCols = 16384, kMostRows = int64_t{1} << 30;
constexpr int64_t kMostShared = 200 << 10;  // upper bound of the kernels' dynamic shared memory

inline int dtype_in(const te_fl_tensor& t) noexcept { return dtype_index(t.dl.dtype); }
inline int bytes_in(const te_fl_tensor& t) noexcept { return t.dl.dtype.bits / 8; }
inline bool at_multiple(const void* p, uintptr_t bytes) noexcept {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}
inline const void* data(const te_fl_tensor& t) noexcept { return backend::data<const void>(t); }
inline const void* columns(const te_fl_tensor& t) noexcept {
  return t.quant != nullptr ? t.quant->columnwise_data : nullptr;
}

// Returns why a tensor has another dtype or cannot be accessed in 16-byte vectors; NULL if all can.
template <class... Tensor>
const char* refuse_vectors(int dtype, const Tensor*... tensors) {
  for (const te_fl_tensor* t : {static_cast<const te_fl_tensor*>(tensors)...}) {
    if (t == nullptr) continue;
    if (dtype_in(*t) != dtype) return "tensors of another dtype than x";
    if (!at_multiple(data(*t), 16)) return "a tensor is not aligned to 16 bytes";
  }
  return nullptr;
}
inline const char* refuse_shape(const backend::Matrix& m, int64_t most_cols) {
  if (m.rows == 0 || m.cols == 0) return "a tensor without elements";
  if (m.rows > kMostRows) return "more than 2^30 rows";
  if (m.cols % kGroupSize != 0) return "rows of no multiple of 8 elements";
  if (m.cols > most_cols) return "rows of too many elements";
  return nullptr;
}
// Returns why a block cannot have `wanted` bytes of dynamic shared memory; NULL if it can. `held`:
// bytes of the kernel's static shared arrays.
inline const char* refuse_shared(const NormDevice& device, int64_t wanted, int64_t held) {
  const int64_t granted = std::min(device.shared_memory - held, kMostShared);
  return wanted > granted ? "a row does not fit this GPU's shared memory" : nullptr;
}

// ---- norm_rowwise.cu: a row is in the registers of some warps of a block

constexpr int kRowThreads = 512;
constexpr int64_t kRowStatic = 28 * kRowThreads / 32;  // bytes of the kernel's static shared arrays
constexpr int row_groups(int64_t cols, int element_bytes) {  // groups per thread
  const int few = element_bytes == 2 ? 2 : 1;
  const int64_t groups = (cols + kRowThreads * kGroupSize - 1) / (kRowThreads * kGroupSize);
  return groups <= few ? few : groups <= 3 ? 3 : 4;
}
constexpr int row_stages(int groups, int element_bytes) {
  return groups * element_bytes <= 4 ? 2 : 1;
}
// Shared memory for FP32 weights, if used, and for staged rows.
constexpr int64_t row_shared(int64_t cols, int groups, int element_bytes, bool weighs,
                             bool residual) {
  return (weighs ? 8 * cols : 0) + int64_t{kRowThreads} * 8 * groups * element_bytes *
                                       row_stages(groups, element_bytes) * (residual ? 2 : 1);
}

enum class Task { kStatistics, kAmax, kPlain, kCodes };
inline const char* refuse_rowwise(const NormForward& f, Task task, const NormDevice& device) {
  const int dtype = dtype_in(*f.x);
  const int64_t cols = backend::as_matrix(*f.x).cols;
  const int64_t most = f.sum != nullptr && dtype == TE_FL_F32 ? 3 * kMostCols / 4 : kMostCols;
  if (const char* why = refuse_shape(backend::as_matrix(*f.x), most)) return why;
  const te_fl_tensor* plain = task == Task::kPlain ? f.z : nullptr;
  if (const char* why = refuse_vectors(dtype, f.x, f.residual, f.sum, plain)) return why;
  if (task == Task::kCodes) {
    if (columns(*f.z) != nullptr) return "column-wise codes";
    if (!at_multiple(data(*f.z), 8)) return "codes that are not aligned to 8 bytes";
  }
  const int bytes = bytes_in(*f.x);
  return refuse_shared(device,
                       row_shared(cols, row_groups(cols, bytes), bytes, task != Task::kStatistics,
                                  f.residual != nullptr),
                       kRowStatic);
}

// ---- norm_plain16.cu and norm_block128.cu: some warps hold a row, four groups per thread

constexpr int64_t kHeldCols = 16 * 32 * 4 * kGroupSize;  // columns that 16 warps hold
inline const char* refuse_plain16(const NormForward& f, bool amax) {
  const int dtype = dtype_in(*f.x);
  if (const char* why = refuse_shape(backend::as_matrix(*f.x), kHeldCols)) return why;
  if (dtype == TE_FL_F32) return "x is FP32";
  if (f.sum != nullptr) return "there is a residual";
  return refuse_vectors(dtype, f.x, f.gamma, f.beta, amax ? nullptr : f.z);
}
inline const char* refuse_block128(const NormForward& f) {
  const backend::Matrix m = backend::as_matrix(*f.z);
  const int dtype = dtype_in(*f.x);
  if (const char* why = refuse_shape(m, kHeldCols)) return why;
  if (m.rows < 16) return "fewer than 16 rows";
  if (dtype == TE_FL_F32) return "x is FP32";
  if (const char* why = refuse_vectors(dtype, f.x, f.residual, f.sum)) return why;
  if (!at_multiple(data(*f.z), 8)) return "codes that are not aligned to 8 bytes";
  if (columns(*f.z) != nullptr && (!at_multiple(columns(*f.z), 16) || m.rows % 16 != 0)) {
    return "column-wise codes that are not aligned to 16 bytes";
  }
  return nullptr;
}

// ---- norm_cluster.cu: the blocks of a cluster share some rows

constexpr int kMostBlocks = 16;
// Number of blocks that share a row: with up to 512 columns each if eight blocks suffice, else up
// to 1024.
constexpr int cluster_blocks(int64_t cols) {
  constexpr int64_t kFew = 2 * 32 * kGroupSize;
  for (int blocks = 1; blocks <= 8; blocks *= 2) {
    if (cols <= blocks * kFew) return blocks;
  }
  return cols <= 8 * 2 * kFew ? 8 : kMostBlocks;
}
constexpr int64_t cluster_width(int64_t cols) {
  const int64_t blocks = cluster_blocks(cols), each = (cols + blocks - 1) / blocks;
  return (each + kGroupSize - 1) / kGroupSize * kGroupSize;
}
inline const char* refuse_cluster(const NormForward& f, const NormDevice& device) {
  const backend::Matrix m = backend::as_matrix(*f.z);
  const int dtype = dtype_in(*f.x);
  if (device.compute_capability < 90) return "clusters need compute capability 9.0";
  if (const char* why = refuse_shape(m, kMostCols)) return why;
  if (dtype == TE_FL_F32) return "x is FP32";
  if (m.rows % 16 != 0 || !at_multiple(columns(*f.z), 16) || !at_multiple(data(*f.z), 8)) {
    return "column-wise codes that are not aligned to 16 bytes";
  }
  if (const char* why = refuse_vectors(dtype, f.x, f.residual, f.sum)) return why;
  const NormCluster cluster{dtype, cluster_blocks(m.cols), cluster_width(m.cols),
                            f.residual != nullptr};
  return device.grants(device.index, cluster) ? nullptr : "the device grants no such cluster";
}

// ---- norm_general.cuh

// the longest row that a block can hold in registers, and so reads only once
constexpr int64_t kRegisterCols = 256 * kGroupSize * 4;
inline NormChoice general(const NormForward& f, const NormDevice& device, const char* reason) {
  const backend::Matrix m = backend::as_matrix(*f.x);
  NormChoice c;
  c.reason = reason;
  if (backend::scaling(*f.z) == TE_FL_SCALING_NONE && f.sum == nullptr && m.rows > 0 &&
      m.rows <= INT32_MAX && m.cols > 0 && m.cols <= kRegisterCols) {
    c.result = NormKernel::kGeneralRows;
    return c;
  }
  c.first = refuse_rowwise(f, Task::kStatistics, device) == nullptr ? NormKernel::kRowwise
                                                                    : NormKernel::kGeneral;
  return c;
}

// ---- results by scaling mode

// Returns why a call whose scale or amax is known cannot use the fused kernels that write FP8; NULL
// if it can.
inline const char* refuse_codes(const NormForward& f, const NormDevice& device) {
  return columns(*f.z) != nullptr ? refuse_cluster(f, device)
                                  : refuse_rowwise(f, Task::kCodes, device);
}
inline NormChoice scaled(const NormForward& f, const NormDevice& device) {
  const bool both = columns(*f.z) != nullptr;
  const NormKernel codes = both ? NormKernel::kCluster : NormKernel::kRowwise;
  if ((f.z->quant->flags & TE_FL_QUANT_COMPUTE_SCALE) == 0) {
    if (const char* why = refuse_codes(f, device)) return general(f, device, why);
    return {codes, NormKernel::kNone, false,
            both ? "column-wise codes under a given scale" : "row-wise codes under a given scale"};
  }
  const char* reason = "row-wise codes under current scaling";
  if (both) {
    reason = refuse_block128(f);
    if (reason == nullptr) reason = refuse_plain16(f, true);
    if (reason == nullptr) {
      return {NormKernel::kBlock128, NormKernel::kPlain16, true,
              "column-wise codes under current scaling"};
    }
  }
  if (const char* why = refuse_rowwise(f, Task::kAmax, device)) return general(f, device, why);
  if (const char* why = refuse_codes(summed(f), device)) {
    return {NormKernel::kGeneral, NormKernel::kRowwise, false, why};
  }
  return {codes, NormKernel::kRowwise, true, reason};
}

}  // namespace norm_choice

// Chooses the kernels of a call that has passed its op's checks.
inline NormChoice choose_norm(const NormForward& f, const NormDevice& device) {
  using namespace norm_choice;
  const uint32_t scaling = backend::scaling(*f.z);
  const backend::Matrix m = backend::as_matrix(*f.x);
  if (m.rows == 0 || m.cols == 0) return general(f, device, "a tensor without elements");
  if (scaling == TE_FL_SCALING_TENSOR) return scaled(f, device);
  if (scaling == TE_FL_SCALING_MXFP8) return general(f, device, "codes of MXFP8");
  if (scaling != TE_FL_SCALING_NONE) {
    if (const char* why = refuse_block128(f)) return general(f, device, why);
    return {NormKernel::kBlock128, NormKernel::kNone, false, "scales of 128 blocks"};
  }
  if (dtype_in(*f.z) != dtype_in(*f.x)) return general(f, device, "z is of another dtype than x");
  const char* reason = refuse_plain16(f, false);
  if (reason == nullptr) {
    return {NormKernel::kPlain16, NormKernel::kNone, false, "rows of 16-bit elements, in and out"};
  }
  if (const char* why = refuse_rowwise(f, Task::kPlain, device)) return general(f, device, why);
  return {NormKernel::kRowwise, NormKernel::kNone, false, reason};
}

namespace norm_choice {

// ---- norm_grad.cu

constexpr int64_t kGradCols = 512 * kGroupSize;  // columns of a block with one group per thread
constexpr int grad_groups(int64_t cols, int element_bytes) {
  const int64_t groups = (cols + kGradCols - 1) / kGradCols;
  if (groups == 1) return 1;
  return element_bytes == 2 && groups >= 3 ? static_cast<int>(groups) : 2;
}
constexpr int grad_stages(int groups, int element_bytes) {
  return groups * element_bytes <= 6 ? 2 : 1;
}
constexpr int grad_threads(int groups, int element_bytes) {
  return groups * element_bytes <= 2 ? 1024 : 512;
}
constexpr int64_t grad_static(int threads) { return 16 * threads / 32; }
// Shared memory for gamma, followed by staged rows.
constexpr int64_t grad_shared(int64_t cols, int groups, int element_bytes, bool add) {
  return 4 * cols + int64_t{grad_threads(groups, element_bytes)} * 8 * groups * element_bytes *
                        grad_stages(groups, element_bytes) * (add ? 3 : 2);
}

}  // namespace norm_choice

inline NormChoice choose_norm(const NormBackward& b, const NormDevice& device) {
  using namespace norm_choice;
  const backend::Matrix m = backend::as_matrix(*b.x);
  const int dtype = dtype_in(*b.x), bytes = bytes_in(*b.x);
  const char* why = refuse_shape(m, dtype == TE_FL_F32 ? 2 * kGradCols : kMostCols);
  if (why == nullptr) why = refuse_vectors(dtype, b.x, b.dz, b.add, b.dx);
  if (why == nullptr) {
    const int groups = grad_groups(m.cols, bytes);
    why = refuse_shared(device, grad_shared(m.cols, groups, bytes, b.add != nullptr),
                        grad_static(grad_threads(groups, bytes)));
  }
  if (why != nullptr) return {NormKernel::kGeneral, NormKernel::kNone, false, why};
  return {NormKernel::kGrad, NormKernel::kNone, false, "rows that a block holds, all of one dtype"};
}

}  // namespace te_fl::cuda
