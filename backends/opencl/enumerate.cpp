// Selects the drivers' devices that te-fl uses.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstring>

#include "cl_check.hpp"
#include "clblast.hpp"
#include "device.hpp"
#include "device_api.hpp"

namespace te_fl::opencl {
namespace {

template <class Id, class Get>
std::string text(Get get, Id id, cl_uint what) {
  size_t bytes = 0;
  if (get(id, what, 0, nullptr, &bytes) != CL_SUCCESS || bytes == 0) return "";
  std::string value(bytes, '\0');
  get(id, what, bytes, value.data(), nullptr);
  value.resize(std::strlen(value.c_str()));
  return value;
}

template <class T>
T info(cl_device_id id, cl_device_info what) {
  T value{};
  return clGetDeviceInfo(id, what, sizeof value, &value, nullptr) == CL_SUCCESS ? value : T{};
}

std::vector<cl_platform_id> platforms() {
  cl_uint count = 0;  // without any driver the loader returns an error
  if (clGetPlatformIDs(0, nullptr, &count) != CL_SUCCESS || count == 0) return {};
  std::vector<cl_platform_id> list(count);
  check(clGetPlatformIDs(count, list.data(), nullptr), "clGetPlatformIDs");
  return list;
}

std::vector<cl_device_id> list_devices(cl_platform_id platform) {
  cl_uint count = 0;
  if (clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, nullptr, &count) != CL_SUCCESS) return {};
  std::vector<cl_device_id> list(count);
  if (count > 0) {
    check(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, count, list.data(), nullptr),
          "clGetDeviceIDs");
  }
  return list;
}

// Returns why the device is not usable; empty if it is.
std::string refusal(cl_device_id id) {
  if (info<cl_bool>(id, CL_DEVICE_AVAILABLE) == CL_FALSE) return "its driver says unavailable";
  if (info<cl_bool>(id, CL_DEVICE_COMPILER_AVAILABLE) == CL_FALSE) return "it has no compiler";
  if (info<cl_bool>(id, CL_DEVICE_ENDIAN_LITTLE) == CL_FALSE) return "it is not little-endian";
  const auto svm = info<cl_device_svm_capabilities>(id, CL_DEVICE_SVM_CAPABILITIES);
  if ((svm & CL_DEVICE_SVM_COARSE_GRAIN_BUFFER) == 0) {
    return "it has no coarse-grained shared virtual memory (OpenCL 2.0), which te-fl's device "
           "addresses are";
  }
  if (info<size_t>(id, CL_DEVICE_MAX_WORK_GROUP_SIZE) < 64) {
    return "its work-groups have fewer than 64 work-items";
  }
  return "";
}

std::string lower(std::string s) {
  for (char& c : s) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return s;
}

// True if `word`, an element of the list TE_FL_OPENCL_DEVICE, matches a device. A word is either
// the device's number in the drivers' order, or part of the device's name or of its platform's
// name.
bool names(const std::string& word, size_t number, const Device& d) {
  size_t index = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, index);
  if (error == std::errc() && stop == end) return index == number;
  return lower(d.platform + " " + d.name).find(lower(word)) != std::string::npos;
}

std::vector<std::string> words(const std::string& list) {
  std::vector<std::string> result;
  for (size_t at = 0; at <= list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    std::string word = list.substr(at, comma - at);
    word.erase(0, word.find_first_not_of(" \t"));
    word.erase(word.find_last_not_of(" \t") + 1);
    if (!word.empty()) result.push_back(word);
    at = comma + 1;
  }
  return result;
}

void choose(const std::string& wanted, Devices& found) {
  std::vector<bool> chosen(found.size(), false);
  for (const std::string& word : words(wanted)) {
    bool any = false;
    for (size_t i = 0; i < found.size(); ++i) {
      if (names(word, i, *found[i])) chosen[i] = any = true;
    }
    if (any) continue;
    std::string there;
    for (size_t i = 0; i < found.size(); ++i) {
      there += (i == 0 ? "" : "; ") + std::to_string(i) + ": " + found[i]->name + " (" +
               found[i]->platform + ")";
    }
    throw backend::Error(TE_FL_NOT_FOUND | TE_FL_CLEAN,
                         "TE_FL_OPENCL_DEVICE has '" + word +
                             "', which is no OpenCL device's number and no part "
                             "of its name; there " +
                             (found.empty() ? "is none" : "is " + there));
  }
  Devices kept;
  for (size_t i = 0; i < found.size(); ++i) {
    if (chosen[i]) kept.push_back(std::move(found[i]));
  }
  found = std::move(kept);
}

std::string base_options(const Device& d) {
  std::string options = "-cl-std=CL1.2";
  const auto fp = info<cl_device_fp_config>(d.id, CL_DEVICE_SINGLE_FP_CONFIG);
  if ((fp & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT) != 0) {
    options += " -cl-fp32-correctly-rounded-divide-sqrt";
  }
  if ((fp & CL_FP_FMA) != 0) options += " -DHAS_FMA";
  return options;
}

void open(Device& d, size_t cache_bytes) {
  cl_int error = CL_SUCCESS;
  d.context = clCreateContext(nullptr, 1, &d.id, nullptr, nullptr, &error);
  check(error, "clCreateContext");
  d.queue = clCreateCommandQueueWithProperties(d.context, d.id, nullptr, &error);
  check(error, "clCreateCommandQueueWithProperties");
  const auto fp = info<cl_device_fp_config>(d.id, CL_DEVICE_SINGLE_FP_CONFIG);
  d.exact = (fp & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT) != 0 && (fp & CL_FP_DENORM) != 0;
  d.gemm.gpu = (info<cl_device_type>(d.id, CL_DEVICE_TYPE) & CL_DEVICE_TYPE_GPU) != 0;
  d.gemm.compute_units = info<cl_uint>(d.id, CL_DEVICE_MAX_COMPUTE_UNITS);
  d.gemm.largest_group = info<size_t>(d.id, CL_DEVICE_MAX_WORK_GROUP_SIZE);
  d.gemm.local_memory = info<cl_ulong>(d.id, CL_DEVICE_LOCAL_MEM_SIZE);
  d.memory = std::make_unique<Memory>(d.context, d.id, d.queue, cache_bytes);
  d.programs = std::make_unique<Programs>(d.context, d.id, base_options(d));
  d.nothing = d.memory->allocate(256, d.queue);
}

}  // namespace

Device::~Device() {
  if (queue != nullptr) clFinish(queue);
  clblast_forget();
  programs.reset();
  memory.reset();
  if (queue != nullptr) clReleaseCommandQueue(queue);
  if (context != nullptr) clReleaseContext(context);
}

Enumeration enumerate(const char* wanted, size_t cache_bytes) {
  Enumeration found;
  for (const cl_platform_id platform : platforms()) {
    for (const cl_device_id id : list_devices(platform)) {
      auto d = std::make_unique<Device>();
      d->id = id;
      d->name = text(clGetDeviceInfo, id, CL_DEVICE_NAME);
      d->driver = text(clGetDeviceInfo, id, CL_DRIVER_VERSION);
      d->platform = text(clGetPlatformInfo, platform, CL_PLATFORM_NAME);
      if (const std::string why = refusal(id); !why.empty()) {
        found.left_out.push_back(d->name + ": " + why);
        continue;
      }
      found.devices.push_back(std::move(d));
    }
  }
  if (wanted != nullptr && *wanted != '\0') choose(wanted, found.devices);
  for (size_t i = 0; i < found.devices.size(); ++i) {
    Device& d = *found.devices[i];
    open(d, cache_bytes);
    d.index = static_cast<int>(i);
    d.desc.struct_size = sizeof(te_fl_device_desc);
    d.desc.device = {TE_FL_DEVICE_OPENCL, d.index};
    d.desc.provider = "opencl";
    d.desc.self = &d;
    d.desc.api = &kDeviceApi;
  }
  if (found.devices.empty()) {
    found.why_none = found.left_out.empty()
                         ? "no driver is installed (pocl-opencl-icd runs on CPUs)"
                         : found.left_out.front();
  }
  return found;
}

}  // namespace te_fl::opencl
