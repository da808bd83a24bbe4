#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/op/op_table.hpp"
#include "core/tensor/tensor_access.hpp"
#include "registry/arguments.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/tensor.hpp"

// The tensors of a call, and the elements of a tensor, one after the other.
namespace te_fl::dispatch {

// Calls f(argument's description, name, tensor) for each tensor of the call; the name of a list's
// tensor has its number.
template <class F>
void for_each_tensor(const core::CompiledOp& op, const void* args, F&& f) {
  const te_fl_op_schema& schema = op.schema();
  for (uint32_t a = 0; a < schema.arg_count; ++a) {
    const te_fl_arg_desc& arg = *schema.args[a];
    if (arg.type == TE_FL_ARG_TENSOR) {
      if (const te_fl_tensor* t = registry::tensor_argument(arg, args))
        f(arg, std::string(arg.name), *t);
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const registry::TensorList list = registry::list_argument(arg, args);
      for (int64_t i = 0; i < list.count; ++i) {
        f(arg, std::string(arg.name) + "[" + std::to_string(i) + "]", *list.data[i]);
      }
    }
  }
}

// Iterates over an array's elements as (index, offset from the base), both counted in elements.
class Walk {
 public:
  Walk(std::vector<int64_t> shape, std::vector<int64_t> strides)
      : shape_(std::move(shape)), strides_(std::move(strides)) {
    count_ = 1;
    for (const int64_t n : shape_) count_ *= n;
  }
  static Walk compact(std::vector<int64_t> shape) {
    std::vector<int64_t> strides = core::compact_strides(shape);
    return {std::move(shape), std::move(strides)};
  }
  int64_t count() const { return count_; }
  int64_t columns() const { return shape_.empty() ? 1 : shape_.back(); }
  template <class F>
  void each(F&& f) const {
    std::array<int64_t, kMaxRank> index{};
    int64_t at = 0;
    for (int64_t n = 0; n < count_; ++n) {
      f(n, at);
      for (size_t d = shape_.size(); d-- > 0;) {
        at += strides_[d];
        if (++index[d] < shape_[d]) break;
        at -= strides_[d] * shape_[d];
        index[d] = 0;
      }
    }
  }
  std::vector<int64_t> index(int64_t n) const {
    std::vector<int64_t> out(shape_);
    for (size_t d = shape_.size(); d-- > 0;) {
      out[d] = n % shape_[d];
      n /= shape_[d];
    }
    return out;
  }

 private:
  std::vector<int64_t> shape_, strides_;
  int64_t count_ = 0;
};

inline Walk plan_walk(const te_fl_tensor& t) {
  std::vector<int64_t> shape(t.dl.shape, t.dl.shape + t.dl.ndim);
  std::vector<int64_t> strides = t.dl.strides == nullptr
                                     ? core::compact_strides(shape)
                                     : std::vector<int64_t>(t.dl.strides, t.dl.strides + t.dl.ndim);
  return {std::move(shape), std::move(strides)};
}

// The magnitude from which on values are treated as infinities: many masks use the largest value of
// a dtype. Including such values in a root mean square would make every error of the other elements
// acceptable.
inline double huge_from(int dtype) { return dtype == TE_FL_F16 ? 65504.0 : 0x1p96; }

// Values of magnitude `huge` and more count as infinities. The root mean square of the others; if
// there are no others, that of all finite values. value(base, number, offset) returns one value.
template <class Value>
double rms(const Walk& walk, const char* base, double huge, Value&& value) {
  double sums[2] = {};  // of values below huge, and of the others
  int64_t counts[2] = {};
  walk.each([&](int64_t n, int64_t at) {
    const double v = value(base, n, at);
    if (!std::isfinite(v)) return;
    const int which = std::abs(v) < huge ? 0 : 1;
    sums[which] += v * v;
    ++counts[which];
  });
  const int which = counts[0] > 0 ? 0 : 1;
  return counts[which] == 0 ? 0 : std::sqrt(sums[which] / static_cast<double>(counts[which]));
}

}  // namespace te_fl::dispatch
