#include "program.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "binary_cache.hpp"
#include "cl_check.hpp"
#include "kernel_sources.hpp"

namespace te_fl::opencl {
namespace {

const char* text_of_file(const char* name) {
  for (const KernelSource* s = kKernelSources; s->name != nullptr; ++s) {
    if (std::strcmp(s->name, name) == 0) return s->text;
  }
  throw backend::Error(TE_FL_INTERNAL, std::string("the plugin has no kernels/") + name + ".cl");
}

std::string device_text(cl_device_id device, cl_device_info what) {
  size_t bytes = 0;
  if (clGetDeviceInfo(device, what, 0, nullptr, &bytes) != CL_SUCCESS || bytes == 0) return "";
  std::string text(bytes, '\0');
  clGetDeviceInfo(device, what, bytes, text.data(), nullptr);
  text.resize(std::strlen(text.c_str()));
  return text;
}

std::string build_log(cl_program program, cl_device_id device) {
  size_t bytes = 0;
  clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, 0, nullptr, &bytes);
  std::string log(bytes, '\0');
  clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, bytes, log.data(), nullptr);
  log.resize(std::min(std::strlen(log.c_str()), size_t{4000}));
  return log;
}

// Returns NULL if the driver rejects the binary.
cl_program from_binary(cl_context context, cl_device_id device, const std::string& options,
                       const std::vector<unsigned char>& binary) {
  const unsigned char* data = binary.data();
  const size_t bytes = binary.size();
  cl_int accepted = CL_SUCCESS, error = CL_SUCCESS;
  cl_program program =
      clCreateProgramWithBinary(context, 1, &device, &bytes, &data, &accepted, &error);
  if (error != CL_SUCCESS) return nullptr;
  if (accepted == CL_SUCCESS &&
      clBuildProgram(program, 1, &device, options.c_str(), nullptr, nullptr) == CL_SUCCESS) {
    return program;
  }
  clReleaseProgram(program);
  return nullptr;
}

void keep(cl_program program, const std::string& key) {
  size_t bytes = 0;
  if (clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof bytes, &bytes, nullptr) !=
          CL_SUCCESS ||
      bytes == 0) {
    return;
  }
  std::vector<unsigned char> binary(bytes);
  unsigned char* data = binary.data();
  if (clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof data, &data, nullptr) == CL_SUCCESS) {
    write_binary(key, binary);
  }
}

}  // namespace

Programs::Programs(cl_context context, cl_device_id device, std::string base_options)
    : context_(context), device_(device), base_options_(std::move(base_options)) {
  for (const cl_device_info what :
       {CL_DEVICE_NAME, CL_DEVICE_VENDOR, CL_DEVICE_VERSION, CL_DRIVER_VERSION}) {
    device_key_ += device_text(device, what) + "\n";
  }
}

Programs::~Programs() {
  for (const auto& [key, kernel] : kernels_) {
    if (kernel != nullptr) clReleaseKernel(kernel->kernel);
  }
  for (const auto& [key, program] : programs_) {
    if (program != nullptr) clReleaseProgram(program);
  }
}

Kernel& Programs::kernel(const char* file, const std::string& options, const char* name) {
  const std::string key = std::string(file) + " " + options + " " + name;
  const std::lock_guard lock(mutex_);
  auto& slot = kernels_[key];
  if (slot == nullptr) {
    cl_int error = CL_SUCCESS;
    auto made = std::make_unique<Kernel>();
    made->kernel = clCreateKernel(program(file, options), name, &error);
    check(error, "clCreateKernel");
    slot = std::move(made);
  }
  return *slot;
}

cl_program Programs::program(const char* file, const std::string& options) {
  cl_program& slot = programs_[std::string(file) + " " + options];
  if (slot == nullptr) {
    const std::string source = std::string(text_of_file("common")) + text_of_file(file);
    slot = compile(source, base_options_ + " " + options);
  }
  return slot;
}

cl_program Programs::compile(const std::string& source, const std::string& options) {
  const std::string key = device_key_ + options + "\n" + source;
  if (const auto binary = read_binary(key); !binary.empty()) {
    if (cl_program program = from_binary(context_, device_, options, binary)) return program;
  }
  cl_int error = CL_SUCCESS;
  const char* text = source.c_str();
  cl_program program = clCreateProgramWithSource(context_, 1, &text, nullptr, &error);
  check(error, "clCreateProgramWithSource");
  error = clBuildProgram(program, 1, &device_, options.c_str(), nullptr, nullptr);
  if (error != CL_SUCCESS) {
    const std::string log = build_log(program, device_);
    clReleaseProgram(program);
    throw_error(error, "clBuildProgram", " with " + options + ":\n" + log);
  }
  keep(program, key);
  return program;
}

}  // namespace te_fl::opencl
