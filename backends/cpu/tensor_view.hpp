// Tensor helpers that every family uses: metadata checks for supports(), and the division of work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "te_fl/backend/refusal.hpp"
#include "te_fl/dtype.hpp"
#include "thread_pool.hpp"

namespace te_fl::cpu {

inline constexpr const char* kNotContiguous =
    "needs contiguous tensors; make a compact copy with strided_copy";
inline constexpr const char* kOverlaps =
    "the output shares memory with an input other than element by element";

inline int dtype_of(const te_fl_tensor& t) noexcept { return dtype_index(t.dl.dtype); }
// True for F32, F16 and BF16.
inline bool is_high(const te_fl_tensor& t) noexcept {
  return (TE_FL_MASK_HIGH >> dtype_of(t) & 1) != 0;
}
inline bool is_fp8_dtype(int dtype) noexcept {
  return dtype == TE_FL_F8E4M3 || dtype == TE_FL_F8E5M2;
}
inline bool is_fp8(const te_fl_tensor& t) noexcept { return is_fp8_dtype(dtype_of(t)); }
inline int64_t element_bytes(const te_fl_tensor& t) noexcept { return t.dl.dtype.bits / 8; }

using backend::all_dense;
using backend::dense;
using backend::overlaps;
using backend::overlaps_askew;

// Minimum number of elements per thread: about 10 us of work for a memory-bound kernel. For less
// work it does not pay to wake another thread.
inline constexpr int64_t kGrain = 1 << 15;

inline int64_t grain_of_rows(int64_t cols, int64_t elements = kGrain) noexcept {
  return std::max<int64_t>(1, elements / std::max<int64_t>(1, cols));
}

// Divides [0, n) into ranges ("parts") for the thread pool. The division depends only on the
// arguments and the number of threads, so reductions with one partial sum per part are
// deterministic.
class Parts {
 public:
  Parts(int64_t n, int64_t grain)
      : n_(n), count_(n <= 0 ? 0 : ThreadPool::instance().num_ranges(n, grain)) {}
  int64_t count() const noexcept { return count_; }
  int64_t begin(int64_t part) const noexcept {
    return part * (n_ / count_) + std::min(part, n_ % count_);
  }
  // Calls f(part, begin, end) for every part, on the pool.
  template <class F>
  void run(F&& f) const {
    ThreadPool::instance().parallel_tasks(
        count_, [&](int64_t part) { f(part, begin(part), begin(part + 1)); });
  }

 private:
  int64_t n_;
  int64_t count_;
};

}  // namespace te_fl::cpu
