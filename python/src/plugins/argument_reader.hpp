// Reads the argument struct of a call, also a shorter one of an older caller.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "ops/op_binding.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/plugin.h"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

class ArgumentReader {
 public:
  ArgumentReader(const OpBinding& op, const void* args)
      : op_(op), args_(static_cast<const std::byte*>(args)) {
    std::memcpy(&size_, args, sizeof size_);
  }

  // The member at `offset`. A caller compiled against an older schema passes a shorter struct;
  // later arguments keep their defaults.
  template <class T>
  T read(uint32_t offset) const {
    T value;
    const std::byte* from = offset + sizeof(T) <= size_ ? args_ : op_.defaults.data();
    std::memcpy(&value, from + offset, sizeof value);
    return value;
  }
  template <class T>
  std::span<const T> list(const te_fl_arg_desc& desc) const {
    return {read<const T*>(desc.offset), static_cast<size_t>(read<int64_t>(desc.count_offset))};
  }

 private:
  const OpBinding& op_;
  const std::byte* args_;
  uint32_t size_ = 0;
};

// Calls f(name, data, dtype, shape) for each part of a quantised tensor but its row-wise codes,
// by the names and in the order of te_fl.tensors.PARTS. The data of an absent part is null.
// `codes`: the tensor's dtype.
template <class F>
void for_each_part(const te_fl_tensor& t, const te_fl_quant& q, DType codes, F&& f) {
  const auto scaling = static_cast<Scaling>(q.scaling);
  const te_fl_scaling_desc& mode = te_fl::describe(scaling);
  const backend::Matrix m = backend::as_matrix(t);
  const auto factors = [&](bool columns) {
    const auto shape = scale_inv_shape(scaling, columns, m.rows, m.cols);
    return mode.block_rows == 0 ? std::vector<int64_t>{1}
                                : std::vector<int64_t>{shape[0], shape[1]};
  };
  const auto factor = static_cast<DType>(mode.scale_dtype);
  const std::vector<int64_t> one{1};
  const std::vector<int64_t> columns = mode.transposed != 0 ? std::vector<int64_t>{m.cols, m.rows}
                                                            : std::vector<int64_t>{m.rows, m.cols};
  f("columnwise_data", q.columnwise_data, codes, columns);
  f("scale_inv", q.scale_inv, factor, factors(false));
  f("columnwise_scale_inv", q.columnwise_scale_inv, factor, factors(true));
  f("amax", q.amax, DType::kF32, one);
  f("columnwise_amax", q.columnwise_amax, DType::kF32, one);
  f("scale", q.scale, DType::kF32, one);
}

}  // namespace te_fl::python
