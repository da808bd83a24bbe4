// Treats a list of tensors as one long array, so that many small tensors can be divided evenly
// among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor_view.hpp"

namespace te_fl::cpu {

using TensorList = const te_fl_tensor* const*;

inline bool list_dense(TensorList list, int64_t count) noexcept {
  for (int64_t t = 0; t < count; ++t) {
    if (!dense(list[t])) return false;
  }
  return true;
}

class JointArray {
 public:
  JointArray(TensorList list, int64_t count) : starts_(1, 0) {
    starts_.reserve(static_cast<size_t>(count) + 1);
    for (int64_t t = 0; t < count; ++t)
      starts_.push_back(starts_.back() + backend::numel(*list[t]));
  }
  int64_t size() const noexcept { return starts_.back(); }

  // Calls f(tensor, first, n) for each tensor that has elements in [begin, end) of the joint array:
  // elements [first, first + n) of the tensor.
  template <class F>
  void runs(int64_t begin, int64_t end, F&& f) const {
    auto next = std::upper_bound(starts_.begin(), starts_.end(), begin);
    while (begin < end) {
      const int64_t stop = std::min(end, *next);
      if (stop > begin) f(next - starts_.begin() - 1, begin - *(next - 1), stop - begin);
      begin = stop;
      ++next;
    }
  }

 private:
  std::vector<int64_t> starts_;
};

}  // namespace te_fl::cpu
