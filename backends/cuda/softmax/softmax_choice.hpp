// Chooses the kernel of a scaled softmax call: a pure function of metadata and of the device's
// limits, so tests run without a GPU. The kernels are in softmax_kernels.cuh and
// softmax_streamed.cuh and have the same names.
#pragma once

#include <cstdint>
#include <string>

#include "te_fl/backend.hpp"

namespace te_fl::cuda {

// The tensors of a call on which the choice depends. A mask tensor does not influence it.
struct SoftmaxForward {
  const te_fl_tensor *input, *output;
};
struct SoftmaxBackward {
  const te_fl_tensor *output_grad, *softmax_results, *input_grad;
};

// The limits of a GPU.
struct SoftmaxDevice {
  int compute_capability = 90;        // 10 * major version
  int64_t shared_memory = 227 << 10;  // maximum bytes per block
};

enum class SoftmaxKernel {
  kNone,      // there is nothing to write
  kRows,      // each block holds some rows in registers
  kCluster,   // a cluster of blocks holds a row in registers
  kStreamed,  // rows pass through shared memory by bulk copies (TMA)
  kStaged,    // a row stays in shared memory until its sum is known
  kWide,      // a row is read twice
};
constexpr const char* name_of(SoftmaxKernel kernel) noexcept {
  constexpr const char* kNames[] = {"none", "rows", "cluster", "streamed", "staged", "wide"};
  return kNames[static_cast<int>(kernel)];
}

// The division of a row in the kernels kRows and kCluster: the number of a block's threads that
// share a row, and the number of 8-element runs per thread.
struct SoftmaxRow {
  int threads = 0, runs = 0;
  constexpr int64_t held() const { return int64_t{threads} * runs; }
  constexpr bool operator==(const SoftmaxRow&) const = default;
};

struct SoftmaxChoice {
  SoftmaxKernel kernel = SoftmaxKernel::kWide;
  SoftmaxRow row;           // for kRows and kCluster only
  int blocks = 1;           // per row; more than one form a cluster
  const char* reason = "";  // a string literal

  std::string text() const {
    std::string t = name_of(kernel);
    if (row.threads > 0) {
      t += " of " + (blocks > 1 ? std::to_string(blocks) + " x " : std::string()) +
           std::to_string(row.threads) + " threads with " + std::to_string(8 * row.runs) +
           " elements each";
    }
    return t + ": " + reason;
  }
};

namespace softmax_choice {

constexpr int64_t kRunElements = 8;  // equals kGroup of element.cuh
constexpr SoftmaxRow kRows[] = {{8, 1},   {32, 1},  {32, 2},  {32, 4},  {128, 2},
                                {128, 4}, {256, 4}, {512, 4}, {1024, 4}};
constexpr SoftmaxRow kWidest = {1024, 4};  // for 16-bit elements: FP32 needs too many registers
// Above this number of runs, two blocks with rows in shared memory overlap better than one block
// with a row in registers.
constexpr int64_t kWidestForward = 2048;
constexpr int kClusterBlocks = 4;
constexpr SoftmaxRow kClusterRow = {256, 4};
constexpr int64_t kStreamedBytes = 64 << 10;  // per row; a block has three rows
constexpr int64_t kStreamedShared = 3 * kStreamedBytes;
constexpr int64_t kOwnArrays = 1 << 10;  // upper bound of the static shared arrays of
                                         // softmax_streamed
constexpr int kWideThreads = 512;
constexpr int64_t kMostStaged = 96 << 10;  // maximum bytes per row

inline int64_t element_bytes(const te_fl_tensor& t) noexcept { return t.dl.dtype.bits / 8; }
inline bool aligned16(const te_fl_tensor& t) noexcept {
  return reinterpret_cast<uintptr_t>(backend::data<const void>(t)) % 16 == 0;
}
inline int64_t divided_up(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }
// Returns an upper bound of the number of 8-element runs that the 16-byte packs of a row cover.
inline int64_t count_runs(const te_fl_tensor& t) noexcept {
  const int64_t keys = backend::as_matrix(t).cols;
  if (keys % kRunElements == 0 && aligned16(t)) return keys / kRunElements;
  return divided_up(keys + kRunElements - 1, kRunElements);
}
inline bool is_empty(const te_fl_tensor& t) noexcept { return backend::numel(t) == 0; }
// Returns the division with the fewest threads that can hold a row of `runs` runs; its `threads` is
// 0 if there is none.
inline SoftmaxRow row_for(int64_t runs, int64_t element_bytes) noexcept {
  for (const SoftmaxRow& row : kRows) {
    if (row == kWidest && element_bytes != 2) break;
    if (runs <= row.held()) return row;
  }
  return {};
}
// Bytes of shared memory for a staged row of `runs` runs.
constexpr int64_t staged_bytes(int64_t runs, int64_t element_bytes) noexcept {
  const int64_t packs = runs * kRunElements * element_bytes / 16;
  return (packs + kWideThreads - 1) / kWideThreads * kWideThreads * 16;
}

// Returns why softmax_streamed does not support the call; nullptr if it does.
inline const char* refuse_streamed(const SoftmaxForward& f, const SoftmaxDevice& device) {
  const int64_t row_bytes = backend::as_matrix(*f.input).cols * element_bytes(*f.input);
  if (row_bytes > kStreamedBytes) return "rows of more than 64 KiB";
  if (row_bytes % 16 != 0 || !aligned16(*f.input) || !aligned16(*f.output)) {
    return "rows that are not aligned to 16 bytes";
  }
  if (device.compute_capability < 90) return "bulk copies need compute capability 9.0";
  const bool fits = kStreamedShared + kOwnArrays <= device.shared_memory;
  return fits ? nullptr : "three rows do not fit this GPU's shared memory";
}

constexpr const char* kHeld = "the row stays in registers";
constexpr const char* kEmpty = "a tensor without elements";

}  // namespace softmax_choice

// Choose the kernels of calls that have passed their ops' checks.
inline SoftmaxChoice choose_softmax(const SoftmaxForward& f, const SoftmaxDevice& device) {
  using namespace softmax_choice;
  if (is_empty(*f.input)) return {SoftmaxKernel::kNone, {}, 1, kEmpty};
  const int64_t runs = softmax_choice::count_runs(*f.input), bytes = element_bytes(*f.input);
  if (runs <= kWidestForward) return {SoftmaxKernel::kRows, row_for(runs, bytes), 1, kHeld};
  const char* why = refuse_streamed(f, device);
  if (why == nullptr) {
    return {SoftmaxKernel::kStreamed, {}, 1, "rows of up to 64 KiB, loaded one row ahead"};
  }
  const bool staged = staged_bytes(runs, bytes) <= kMostStaged;
  return {staged ? SoftmaxKernel::kStaged : SoftmaxKernel::kWide, {}, 1, why};
}
inline SoftmaxChoice choose_softmax(const SoftmaxBackward& b, const SoftmaxDevice& device) {
  using namespace softmax_choice;
  if (is_empty(*b.output_grad)) return {SoftmaxKernel::kNone, {}, 1, kEmpty};
  const int64_t runs = softmax_choice::count_runs(*b.output_grad);
  const int64_t bytes = element_bytes(*b.output_grad);
  const bool wide = runs > kWidest.held() / 2 && runs <= kWidest.held() && bytes == 2;
  if (wide && device.compute_capability >= 90) {
    return {SoftmaxKernel::kCluster, kClusterRow, kClusterBlocks,
            "a row of more than 16384 elements stays in the registers of a cluster"};
  }
  const SoftmaxRow row = row_for(runs, bytes);
  if (row.threads > 0) return {SoftmaxKernel::kRows, row, 1, kHeld};
  return {SoftmaxKernel::kWide, {}, 1, "a row does not fit the registers of a block"};
}

}  // namespace te_fl::cuda
