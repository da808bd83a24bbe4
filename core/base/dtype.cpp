#include "te_fl/dtype.hpp"

#include <array>
#include <vector>

#include "core/base/text.hpp"

namespace te_fl {
namespace {

struct DTypeRow {
  std::string_view name;
  te_fl_dtype c;
};

// Rows in the order of te_fl_dtype_index.
constexpr std::array<DTypeRow, TE_FL_DTYPE_COUNT> kRows = {{
    {"f64", {TE_FL_CODE_FLOAT, 64, 1}},
    {"f32", {TE_FL_CODE_FLOAT, 32, 1}},
    {"f16", {TE_FL_CODE_FLOAT, 16, 1}},
    {"bf16", {TE_FL_CODE_BFLOAT, 16, 1}},
    {"f8e4m3", {TE_FL_CODE_FLOAT8_E4M3FN, 8, 1}},
    {"f8e5m2", {TE_FL_CODE_FLOAT8_E5M2, 8, 1}},
    {"f4e2m1", {TE_FL_CODE_FLOAT4_E2M1FN, 4, 1}},
    {"f8e8m0", {TE_FL_CODE_FLOAT8_E8M0FNU, 8, 1}},
    {"i8", {TE_FL_CODE_INT, 8, 1}},
    {"i16", {TE_FL_CODE_INT, 16, 1}},
    {"i32", {TE_FL_CODE_INT, 32, 1}},
    {"i64", {TE_FL_CODE_INT, 64, 1}},
    {"u8", {TE_FL_CODE_UINT, 8, 1}},
    {"u16", {TE_FL_CODE_UINT, 16, 1}},
    {"u32", {TE_FL_CODE_UINT, 32, 1}},
    {"u64", {TE_FL_CODE_UINT, 64, 1}},
    {"bool", {TE_FL_CODE_BOOL, 8, 1}},
}};

struct Alias {
  std::string_view name;
  DType dtype;
};
constexpr Alias kAliases[] = {
    {"fp64", DType::kF64},
    {"float64", DType::kF64},
    {"double", DType::kF64},
    {"fp32", DType::kF32},
    {"float32", DType::kF32},
    {"float", DType::kF32},
    {"fp16", DType::kF16},
    {"float16", DType::kF16},
    {"half", DType::kF16},
    {"bfloat16", DType::kBF16},
    {"fp8e4m3", DType::kF8E4M3},
    {"e4m3", DType::kF8E4M3},
    {"float8_e4m3", DType::kF8E4M3},
    {"float8_e4m3fn", DType::kF8E4M3},
    {"fp8e5m2", DType::kF8E5M2},
    {"e5m2", DType::kF8E5M2},
    {"float8_e5m2", DType::kF8E5M2},
    {"fp4e2m1", DType::kF4E2M1},
    {"e2m1", DType::kF4E2M1},
    {"float4_e2m1", DType::kF4E2M1},
    {"float4_e2m1fn", DType::kF4E2M1},
    {"fp8e8m0", DType::kF8E8M0},
    {"e8m0", DType::kF8E8M0},
    {"float8_e8m0fnu", DType::kF8E8M0},
    {"int8", DType::kI8},
    {"int16", DType::kI16},
    {"int32", DType::kI32},
    {"int", DType::kI32},
    {"int64", DType::kI64},
    {"long", DType::kI64},
    {"uint8", DType::kU8},
    {"byte", DType::kU8},
    {"uint16", DType::kU16},
    {"uint32", DType::kU32},
    {"uint64", DType::kU64},
};

constexpr std::array<te_fl_scaling_desc, TE_FL_SCALING_COUNT> kScalings = {{
    {.scaling = TE_FL_SCALING_NONE, .name = "none"},
    {.scaling = TE_FL_SCALING_TENSOR,
     .name = "tensor",
     .dtypes = TE_FL_MASK_FP8,
     .scale_dtype = TE_FL_F32,
     .transposed = 1},
    {.scaling = TE_FL_SCALING_BLOCK_1X128,
     .name = "block1x128",
     .dtypes = TE_FL_MASK_FP8,
     .scale_dtype = TE_FL_F32,
     .block_rows = 1,
     .block_cols = 128,
     .layout = TE_FL_SCALE_LAYOUT_COLUMNS,
     .pad_rows = 4,
     .transposed = 1},
    {.scaling = TE_FL_SCALING_BLOCK_128X128,
     .name = "block128x128",
     .dtypes = TE_FL_MASK_FP8,
     .scale_dtype = TE_FL_F32,
     .block_rows = 128,
     .block_cols = 128,
     .pad_cols = 4,
     .transposed = 1},
    {.scaling = TE_FL_SCALING_MXFP8,
     .name = "mxfp8",
     .dtypes = TE_FL_MASK_FP8,
     .scale_dtype = TE_FL_F8E8M0,
     .block_rows = 1,
     .block_cols = 32,
     .pad_rows = 128,
     .pad_cols = 4},
    {.scaling = TE_FL_SCALING_NVFP4,
     .name = "nvfp4",
     .dtypes = TE_FL_BIT(TE_FL_F4E2M1),
     .scale_dtype = TE_FL_F8E4M3,
     .second_level = 1,
     .block_rows = 1,
     .block_cols = 16,
     .pad_rows = 128,
     .pad_cols = 4,
     .transposed = 1},
}};
struct ScalingAlias {
  std::string_view name;
  Scaling scaling;
};
constexpr ScalingAlias kScalingAliases[] = {
    {"delayed", Scaling::kTensor},
    {"current", Scaling::kTensor},
    {"block1d", Scaling::kBlock1x128},
    {"block2d", Scaling::kBlock128x128},
};

template <class Rows, class GetName>
std::vector<std::string> list_names(const Rows& rows, GetName get_name) {
  std::vector<std::string> names;
  for (const auto& row : rows) names.emplace_back(get_name(row));
  return names;
}

// The error for an unknown name. The suggestion may be a name or an alias; the list of accepted
// words shows names only.
Status unknown(std::string_view what, std::string_view text, std::vector<std::string> names,
               const std::vector<std::string>& aliases) {
  std::string list = core::join(names);
  names.insert(names.end(), aliases.begin(), aliases.end());
  return invalid_argument("unknown " + std::string(what) + " '" + std::string(text) + "'" +
                          core::did_you_mean(text, names) + " (accepted: " + list + ")");
}

}  // namespace

te_fl_dtype to_c(DType dtype) noexcept { return kRows[static_cast<size_t>(dtype)].c; }

Result<DType> dtype_from_c(te_fl_dtype dtype) {
  const int index = dtype_index(dtype);
  if (index != kInvalidDType) return static_cast<DType>(index);
  const std::string what = "DLPack dtype {code " + std::to_string(dtype.code) + ", bits " +
                           std::to_string(dtype.bits) + ", lanes " + std::to_string(dtype.lanes) +
                           "}";
  if (dtype.lanes != 1) {
    return invalid_argument(what + " is a vector type; lanes must be 1: add a dimension instead");
  }
  const auto names = list_names(kRows, [](const DTypeRow& r) { return r.name; });
  return invalid_argument(what + " is not supported by te-fl; convert to one of " +
                          core::join(names));
}

int bits(DType dtype) noexcept { return to_c(dtype).bits; }

int64_t bytes_for(DType dtype, int64_t count) noexcept {
  const int width = bits(dtype);
  return width == 4 ? count / 2 + count % 2 : count * (width / 8);
}

std::string_view name(DType dtype) noexcept { return kRows[static_cast<size_t>(dtype)].name; }

Result<DType> parse_dtype(std::string_view text) {
  const std::string word = core::lower(core::trim(text));
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (word == kRows[i].name) return static_cast<DType>(i);
  }
  for (const Alias& alias : kAliases) {
    if (word == alias.name) return alias.dtype;
  }
  return unknown("dtype", text, list_names(kRows, [](const DTypeRow& r) { return r.name; }),
                 list_names(kAliases, [](const Alias& a) { return a.name; }));
}

const te_fl_scaling_desc& describe(Scaling scaling) noexcept {
  return kScalings[static_cast<size_t>(scaling)];
}
std::string_view name(Scaling scaling) noexcept { return describe(scaling).name; }

Result<Scaling> parse_scaling(std::string_view text) {
  const std::string word = core::lower(core::trim(text));
  for (size_t i = 0; i < kScalings.size(); ++i) {
    if (word == kScalings[i].name) return static_cast<Scaling>(i);
  }
  for (const ScalingAlias& alias : kScalingAliases) {
    if (word == alias.name) return alias.scaling;
  }
  return unknown("scaling mode", text,
                 list_names(kScalings, [](const te_fl_scaling_desc& s) { return s.name; }),
                 list_names(kScalingAliases, [](const ScalingAlias& a) { return a.name; }));
}

}  // namespace te_fl
