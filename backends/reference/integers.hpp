// Reads and writes integer tensors of any width and strides.
#pragma once

#include <vector>

#include "dispatch.hpp"
#include "element.hpp"

namespace te_fl::reference {

// Calls f(std::type_identity<T>{}) with the integer type of a dtype. bool is a byte.
template <class F>
decltype(auto) visit_integer(int dtype, F&& f) {
  switch (dtype) {
    case TE_FL_U8:
    case TE_FL_BOOL:
      return f(std::type_identity<uint8_t>{});
    case TE_FL_I16:
      return f(std::type_identity<int16_t>{});
    case TE_FL_I32:
      return f(std::type_identity<int32_t>{});
    case TE_FL_I64:
      return f(std::type_identity<int64_t>{});
    default:
      backend::unsupported("not an integer dtype: index " + std::to_string(dtype));
  }
}

// Returns all values of an I16, I32, I64, U8 or bool tensor in row-major order.
inline std::vector<int64_t> integers(const te_fl_tensor& t) {
  const int64_t size = backend::numel(t);
  std::vector<int64_t> values(static_cast<size_t>(size));
  int64_t* next = values.data();
  visit_integer(dtype_of(t), [&]<class T>(std::type_identity<T>) {
    const T* data = backend::data<const T>(t);
    for_each_run(t, 0, size, [&](int64_t offset, int64_t stride, int64_t count) {
      for (int64_t j = 0; j < count; ++j) *next++ = data[offset + j * stride];
    });
  });
  return values;
}

// Writes values to an I16, I32, I64, U8 or bool tensor. Values that do not fit are truncated.
inline void write_integers(const te_fl_tensor& t, const std::vector<int64_t>& values) {
  const int64_t* next = values.data();
  visit_integer(dtype_of(t), [&]<class T>(std::type_identity<T>) {
    T* data = backend::data<T>(t);
    for_each_run(t, 0, backend::numel(t), [&](int64_t offset, int64_t stride, int64_t count) {
      for (int64_t j = 0; j < count; ++j) data[offset + j * stride] = static_cast<T>(*next++);
    });
  });
}

}  // namespace te_fl::reference
