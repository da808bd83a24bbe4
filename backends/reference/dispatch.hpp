// Maps a te_fl_dtype_index to the element type, and reads and writes elements in memory.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "te_fl/backend.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::reference {

template <class T>
inline constexpr bool is_fp4 = std::is_same_v<T, numeric::fp4e2m1>;

// Element `index` of an array of T. FP4 is packed two to a byte, low nibble first.
template <class T>
T load(const void* base, int64_t index) noexcept {
  if constexpr (is_fp4<T>) {
    const auto byte = static_cast<const uint8_t*>(base)[index / 2];
    return T::from_bits(static_cast<uint8_t>(index % 2 == 0 ? byte & 0xF : byte >> 4));
  } else {
    return static_cast<const T*>(base)[index];
  }
}
template <class T>
void save(void* base, int64_t index, T value) noexcept {
  if constexpr (is_fp4<T>) {
    auto& byte = static_cast<uint8_t*>(base)[index / 2];
    byte = static_cast<uint8_t>(index % 2 == 0 ? (byte & 0xF0) | value.bits
                                               : (byte & 0x0F) | value.bits << 4);
  } else {
    static_cast<T*>(base)[index] = value;
  }
}

// Calls f(std::type_identity<T>{}) with the float type of a dtype. Throws UNSUPPORTED for other
// dtypes.
template <class F>
decltype(auto) visit_float(int dtype, F&& f) {
  switch (dtype) {
    case TE_FL_F64:
      return f(std::type_identity<double>{});
    case TE_FL_F32:
      return f(std::type_identity<float>{});
    case TE_FL_F16:
      return f(std::type_identity<numeric::half>{});
    case TE_FL_BF16:
      return f(std::type_identity<numeric::bfloat16>{});
    case TE_FL_F8E4M3:
      return f(std::type_identity<numeric::fp8e4m3>{});
    case TE_FL_F8E5M2:
      return f(std::type_identity<numeric::fp8e5m2>{});
    case TE_FL_F4E2M1:
      return f(std::type_identity<numeric::fp4e2m1>{});
    case TE_FL_F8E8M0:
      return f(std::type_identity<numeric::e8m0>{});
    default:
      backend::unsupported("not a float dtype: index " + std::to_string(dtype));
  }
}

}  // namespace te_fl::reference
