#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "te_fl/export.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

namespace te_fl {

// Element types. The values are those of te_fl_dtype_index.
enum class DType : uint8_t {
  kF64 = TE_FL_F64,
  kF32 = TE_FL_F32,
  kF16 = TE_FL_F16,
  kBF16 = TE_FL_BF16,
  kF8E4M3 = TE_FL_F8E4M3,
  kF8E5M2 = TE_FL_F8E5M2,
  kF4E2M1 = TE_FL_F4E2M1,
  kF8E8M0 = TE_FL_F8E8M0,
  kI8 = TE_FL_I8,
  kI16 = TE_FL_I16,
  kI32 = TE_FL_I32,
  kI64 = TE_FL_I64,
  kU8 = TE_FL_U8,
  kU16 = TE_FL_U16,
  kU32 = TE_FL_U32,
  kU64 = TE_FL_U64,
  kBool = TE_FL_BOOL,
};

enum class Scaling : uint8_t {
  kNone = TE_FL_SCALING_NONE,
  kTensor = TE_FL_SCALING_TENSOR,
  kBlock1x128 = TE_FL_SCALING_BLOCK_1X128,
  kBlock128x128 = TE_FL_SCALING_BLOCK_128X128,
  kMXFP8 = TE_FL_SCALING_MXFP8,
  kNVFP4 = TE_FL_SCALING_NVFP4,
};

inline constexpr int kInvalidDType = -1;

// Index (te_fl_dtype_index) of a DLPack dtype; kInvalidDType if te-fl does not support the dtype or
// lanes != 1. Runs on every call, so it takes only a few instructions.
inline int dtype_index(te_fl_dtype t) noexcept {
  // One row per DLPack code, one column per log2 of the bit width (1, 2, 4, ... 64).
  struct Table {
    int8_t v[18][7];
    constexpr Table() : v() {
      for (auto& row : v)
        for (auto& cell : row) cell = kInvalidDType;
      v[TE_FL_CODE_INT][3] = TE_FL_I8, v[TE_FL_CODE_INT][4] = TE_FL_I16;
      v[TE_FL_CODE_INT][5] = TE_FL_I32, v[TE_FL_CODE_INT][6] = TE_FL_I64;
      v[TE_FL_CODE_UINT][3] = TE_FL_U8, v[TE_FL_CODE_UINT][4] = TE_FL_U16;
      v[TE_FL_CODE_UINT][5] = TE_FL_U32, v[TE_FL_CODE_UINT][6] = TE_FL_U64;
      v[TE_FL_CODE_FLOAT][4] = TE_FL_F16, v[TE_FL_CODE_FLOAT][5] = TE_FL_F32;
      v[TE_FL_CODE_FLOAT][6] = TE_FL_F64;
      v[TE_FL_CODE_BFLOAT][4] = TE_FL_BF16;
      v[TE_FL_CODE_BOOL][3] = TE_FL_BOOL;
      v[TE_FL_CODE_FLOAT8_E4M3FN][3] = TE_FL_F8E4M3, v[TE_FL_CODE_FLOAT8_E5M2][3] = TE_FL_F8E5M2;
      v[TE_FL_CODE_FLOAT8_E8M0FNU][3] = TE_FL_F8E8M0;
      v[TE_FL_CODE_FLOAT4_E2M1FN][2] = TE_FL_F4E2M1;
    }
  };
  static constexpr Table table;
  if (t.code >= 18 || t.lanes != 1 || t.bits == 0 || (t.bits & (t.bits - 1)) != 0 || t.bits > 64) {
    return kInvalidDType;
  }
  return table.v[t.code][__builtin_ctz(t.bits)];
}

TE_FL_API te_fl_dtype to_c(DType dtype) noexcept;
TE_FL_API Result<DType> dtype_from_c(te_fl_dtype dtype);
// Bits of one element: 4 for F4E2M1, else a multiple of 8.
TE_FL_API int bits(DType dtype) noexcept;
// Bytes that `count` compact elements occupy. 4-bit elements are packed two to a byte, low nibble
// first.
TE_FL_API int64_t bytes_for(DType dtype, int64_t count) noexcept;
// name() returns the name of a dtype: "f32", "bf16", "f8e4m3", ... parse_dtype() accepts these
// names in any case, and common aliases ("fp32", "float32", "e4m3"). Its error for an unknown name
// suggests the nearest name.
TE_FL_API std::string_view name(DType dtype) noexcept;
TE_FL_API Result<DType> parse_dtype(std::string_view text);
// name() returns the name of a scaling mode: "none", "tensor", "block1x128", "block128x128",
// "mxfp8", "nvfp4". parse_scaling() also accepts the aliases delayed, current, block1d and block2d.
TE_FL_API std::string_view name(Scaling scaling) noexcept;
TE_FL_API Result<Scaling> parse_scaling(std::string_view text);
// The description of a scaling mode: block shape, scale factors, second level and layout. The
// description of kNone has no dtypes.
TE_FL_API const te_fl_scaling_desc& describe(Scaling scaling) noexcept;
inline constexpr bool is_fp8(DType t) { return t == DType::kF8E4M3 || t == DType::kF8E5M2; }
inline constexpr bool is_high(DType t) {
  return t == DType::kF32 || t == DType::kF16 || t == DType::kBF16;
}

}  // namespace te_fl
