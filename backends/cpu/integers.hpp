// Reads the elements of a dense I32 or I64 tensor.
#pragma once

#include "tensor_view.hpp"

namespace te_fl::cpu {

class Integers {
 public:
  explicit Integers(const te_fl_tensor& t)
      : wide_(dtype_of(t) == TE_FL_I64), data_(backend::data<const char>(t)) {}
  int64_t operator[](int64_t i) const {
    return wide_ ? reinterpret_cast<const int64_t*>(data_)[i]
                 : reinterpret_cast<const int32_t*>(data_)[i];
  }

 private:
  bool wide_;
  const char* data_;
};

}  // namespace te_fl::cpu
