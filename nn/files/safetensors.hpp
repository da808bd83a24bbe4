#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "te_fl/nn/files/safetensors.hpp"

namespace te_fl::nn::detail {

inline constexpr uint64_t kLengthBytes = 8;
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // limit of the format

// True if the text is UTF-8. JSON cannot represent other bytes: they would be read back as
// different names.
bool is_text(const std::string& text);
// The format's name of a dtype, such as "F32"; empty if it has none.
std::string_view safetensors_dtype(DType dtype);
// The header's length from the first 8 bytes of the file, checked against the file's size.
Result<uint64_t> header_length(std::span<const std::byte> prefix, uint64_t file_size,
                               std::string_view source);

}  // namespace te_fl::nn::detail
