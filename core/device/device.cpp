#include "te_fl/device.hpp"

#include <algorithm>
#include <charconv>

#include "core/base/text.hpp"

namespace te_fl {
namespace {

struct TypeName {
  int32_t type;
  std::string_view name;
};
constexpr TypeName kTypes[] = {
    {TE_FL_DEVICE_CPU, "cpu"},
    {TE_FL_DEVICE_CUDA, "cuda"},
    {TE_FL_DEVICE_CUDA_HOST, "cuda_host"},
    {TE_FL_DEVICE_OPENCL, "opencl"},
    {TE_FL_DEVICE_VULKAN, "vulkan"},
    {TE_FL_DEVICE_METAL, "metal"},
    {TE_FL_DEVICE_ROCM, "rocm"},
    {TE_FL_DEVICE_ROCM_HOST, "rocm_host"},
    {TE_FL_DEVICE_EXT, "ext"},
    {TE_FL_DEVICE_ONEAPI, "oneapi"},
};

Status bad_device(std::string_view text, const std::string& why) {
  return invalid_argument("'" + std::string(text) + "' is not a device: " + why +
                          "; write for example cpu, cuda:0 or ext:PROVIDER:0");
}

Result<int32_t> parse_index(std::string_view text, std::string_view digits) {
  int32_t index = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, index);
  if (error != std::errc() || stop != end || index < 0 || digits.empty()) {
    return bad_device(text, "'" + std::string(digits) + "' is not an index");
  }
  return index;
}

Result<Device> parse_ext(std::string_view text, std::string_view rest) {
  const size_t colon = rest.find(':');
  const std::string_view provider = rest.substr(0, colon);
  if (provider.empty()) return bad_device(text, "the provider is missing");
  Device device{TE_FL_DEVICE_EXT, 0, devices::intern_provider(provider)};
  if (colon == std::string_view::npos) return device;
  TE_FL_ASSIGN_OR_RETURN(device.index, parse_index(text, rest.substr(colon + 1)));
  return device;
}

}  // namespace

std::string to_string(const Device& device) {
  std::string text;
  for (const TypeName& t : kTypes) {
    if (t.type == device.type) text = t.name;
  }
  if (text.empty()) text = "dlpack" + std::to_string(device.type);
  if (device.type == TE_FL_DEVICE_EXT) text += ":" + devices::provider_name(device.provider);
  if (device.type == TE_FL_DEVICE_CPU && device.index == 0) return text;
  return text + ":" + std::to_string(device.index);
}

Result<Device> parse_device(std::string_view text) {
  const std::string word = core::lower(core::trim(text));
  const std::string_view view = word;
  const size_t colon = view.find(':');
  const std::string_view type = view.substr(0, colon);
  const std::string_view rest =
      colon == std::string_view::npos ? std::string_view() : view.substr(colon + 1);
  std::vector<std::string> names;
  for (const TypeName& t : kTypes) {
    names.emplace_back(t.name);
    if (t.name != type) continue;
    if (t.type == TE_FL_DEVICE_EXT) return parse_ext(text, rest);
    if (colon == std::string_view::npos) return Device{t.type, 0, 0};
    TE_FL_ASSIGN_OR_RETURN(const int32_t index, parse_index(text, rest));
    return Device{t.type, index, 0};
  }
  return bad_device(text, "unknown type '" + std::string(type) + "'" +
                              core::did_you_mean(type, names) + " (types: " + core::join(names) +
                              ")");
}

}  // namespace te_fl
