// Integer tensors of row numbers or targets, whose width (32 or 64 bits) is known at run time.
#pragma once

#include "common/element.cuh"

namespace te_fl::cuda {

struct Integers {
  const void* data;
  bool wide;
  explicit Integers(const te_fl_tensor& t)
      : data(backend::data<const void>(t)), wide(dtype_of(t) == TE_FL_I64) {}
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace te_fl::cuda
