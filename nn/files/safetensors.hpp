#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "te_fl/nn/files/safetensors.hpp"

namespace te_fl::nn::detail {

inline constexpr uint64_t kLengthBytes = 8;
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

// True if JSON can hold the text: it is UTF-8, and other bytes would come back as other names.
bool is_text(const std::string& text);
// "F32", ...; empty for a dtype that the format has no name for.
std::string_view safetensors_dtype(DType dtype);
// The header's length from the first 8 bytes, checked against the file's size.
Result<uint64_t> header_length(std::span<const std::byte> prefix, uint64_t file_size,
                               std::string_view source);

}  // namespace te_fl::nn::detail
