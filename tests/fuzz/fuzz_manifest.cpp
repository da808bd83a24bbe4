// libFuzzer target: the manifest parser on arbitrary text.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "plugins/manifest.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace te_fl::plugins;
  const ManifestResult result =
      parse_manifest({reinterpret_cast<const char*>(data), size}, "/fuzz/manifest.json");
  if (result.ok()) {
    // An accepted manifest obeys the rules that the loader relies on.
    const Manifest& m = result.manifest;
    if (m.name.empty() || m.vendor.empty() || m.arch.empty()) std::abort();
    if (!m.library_path.starts_with('/') || m.library_path.find('\0') != std::string::npos)
      std::abort();
    for (const te_fl::core::PluginSetting& setting : m.settings) {
      if (!te_fl::core::check_declaration(m.name, setting).ok()) std::abort();
    }
  } else if (!std::string_view(result.error).starts_with("/fuzz/manifest.json:")) {
    std::abort();
  }
  return 0;
}
