// libFuzzer target: the safetensors header parser on arbitrary bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "te_fl/nn/files/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto header = te_fl::nn::parse_safetensors_header(bytes, size, "fuzz");
  if (!header.ok()) {
    if (header.status().message().empty()) std::abort();
    return 0;
  }
  // Accepted tensors lie within the file.
  for (const auto& entry : header->entries) {
    if (entry.begin > entry.end || header->data_offset + entry.end > size) std::abort();
  }
  return 0;
}
