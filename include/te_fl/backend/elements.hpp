#pragma once

// Helpers for kernels that are templates over element types: C++ types for the formats that C++
// lacks, and a dispatch from the dtype of a tensor to its type. Header-only.
//
//   b::for_element_type<float, b::bfloat16>("input", *args.input, [&](auto type) {
//     using T = typename decltype(type)::type;
//     const T* x = b::data<T>(*args.input);
//     const float value = b::to_float(x[0]);
//     T* y = ...;
//     y[0] = b::from_float<T>(value * 2);
//   });

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "te_fl/backend.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/plugin.h"

namespace te_fl::backend {

// Element types with the size and the bits of the stored elements; te_fl/numeric/formats.hpp lists
// their ranges and rules. A byte of a packed 4-bit tensor has two elements, of which the first is
// in the low four bits; fp4e2m1 converts one of them.
using numeric::bfloat16;
using numeric::e8m0;
using numeric::fp4e2m1;
using numeric::fp8e4m3;
using numeric::fp8e5m2;
using numeric::half;

// Conversions of an element. to_float is exact for every type but double; from_float<T> rounds
// once, to nearest even, and saturates in the FP8 formats.
using numeric::from_float;
using numeric::to_float;

namespace detail {
template <int kIndexOfType, uint8_t kCode, uint8_t kBits>
struct ElementOf {
  static constexpr int kIndex = kIndexOfType;
  static constexpr bool matches(const te_fl_dtype& dtype) noexcept {
    return dtype.code == kCode && dtype.bits == kBits && dtype.lanes == 1;
  }
};
}  // namespace detail

// ElementType<T>::kIndex is the index (te_fl_dtype_index) of the dtype whose elements are of type
// T; kName is the dtype's name; matches(dtype) compares a tensor's dtype with it.
template <class T>
struct ElementType;
template <>
struct ElementType<double> : detail::ElementOf<TE_FL_F64, TE_FL_CODE_FLOAT, 64> {
  static constexpr const char* kName = "f64";
};
template <>
struct ElementType<float> : detail::ElementOf<TE_FL_F32, TE_FL_CODE_FLOAT, 32> {
  static constexpr const char* kName = "f32";
};
template <>
struct ElementType<half> : detail::ElementOf<TE_FL_F16, TE_FL_CODE_FLOAT, 16> {
  static constexpr const char* kName = "f16";
};
template <>
struct ElementType<bfloat16> : detail::ElementOf<TE_FL_BF16, TE_FL_CODE_BFLOAT, 16> {
  static constexpr const char* kName = "bf16";
};
template <>
struct ElementType<fp8e4m3> : detail::ElementOf<TE_FL_F8E4M3, TE_FL_CODE_FLOAT8_E4M3FN, 8> {
  static constexpr const char* kName = "f8e4m3";
};
template <>
struct ElementType<fp8e5m2> : detail::ElementOf<TE_FL_F8E5M2, TE_FL_CODE_FLOAT8_E5M2, 8> {
  static constexpr const char* kName = "f8e5m2";
};
template <>
struct ElementType<e8m0> : detail::ElementOf<TE_FL_F8E8M0, TE_FL_CODE_FLOAT8_E8M0FNU, 8> {
  static constexpr const char* kName = "f8e8m0";
};
template <>
struct ElementType<int8_t> : detail::ElementOf<TE_FL_I8, TE_FL_CODE_INT, 8> {
  static constexpr const char* kName = "i8";
};
template <>
struct ElementType<int16_t> : detail::ElementOf<TE_FL_I16, TE_FL_CODE_INT, 16> {
  static constexpr const char* kName = "i16";
};
template <>
struct ElementType<int32_t> : detail::ElementOf<TE_FL_I32, TE_FL_CODE_INT, 32> {
  static constexpr const char* kName = "i32";
};
template <>
struct ElementType<int64_t> : detail::ElementOf<TE_FL_I64, TE_FL_CODE_INT, 64> {
  static constexpr const char* kName = "i64";
};
template <>
struct ElementType<uint8_t> : detail::ElementOf<TE_FL_U8, TE_FL_CODE_UINT, 8> {
  static constexpr const char* kName = "u8";
};
template <>
struct ElementType<uint16_t> : detail::ElementOf<TE_FL_U16, TE_FL_CODE_UINT, 16> {
  static constexpr const char* kName = "u16";
};
template <>
struct ElementType<uint32_t> : detail::ElementOf<TE_FL_U32, TE_FL_CODE_UINT, 32> {
  static constexpr const char* kName = "u32";
};
template <>
struct ElementType<uint64_t> : detail::ElementOf<TE_FL_U64, TE_FL_CODE_UINT, 64> {
  static constexpr const char* kName = "u64";
};
template <>
struct ElementType<bool> : detail::ElementOf<TE_FL_BOOL, TE_FL_CODE_BOOL, 8> {
  static constexpr const char* kName = "bool";
};

// The mask of the types' dtypes, for te_fl_op_desc.dtypes.
template <class... Types>
inline constexpr uint64_t kElementMask = (TE_FL_BIT(ElementType<Types>::kIndex) | ...);

// Calls f(std::type_identity<T>{}) with that of `Types` which is the type of the tensor's elements.
// If it is none of them, refuses the call by throwing UNSUPPORTED, with the argument's name and the
// dtypes of `Types`. Call it before anything has been written.
template <class... Types, class F>
void for_element_type(const char* argument, const te_fl_tensor& tensor, F&& f) {
  static_assert(sizeof...(Types) > 0, "name the element types that f is for");
  const bool found = ((ElementType<Types>::matches(tensor.dl.dtype) &&
                       (static_cast<void>(f(std::type_identity<Types>{})), true)) ||
                      ...);
  if (found) return;
  std::string known;
  ((known += (known.empty() ? "" : ", ") + std::string(ElementType<Types>::kName)), ...);
  unsupported(std::string("the dtype of ") + argument + " must be one of " + known);
}

}  // namespace te_fl::backend
