// Kernels: compiled when first used, and kept on disk for the next process.
#pragma once

#include <CL/cl.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace te_fl::opencl {

// A kernel object holds its arguments, so one launch at a time: `mutex` is held from the first
// argument until it is enqueued.
struct Kernel {
  cl_kernel kernel = nullptr;
  std::mutex mutex;
};

// The programs of one device; thread-safe. A program is one file of kernels/ with common.cl before
// it, compiled with options.
class Programs {
 public:
  Programs(cl_context context, cl_device_id device, std::string base_options);
  ~Programs();
  Programs(const Programs&) = delete;
  Programs& operator=(const Programs&) = delete;

  // Compiles if need be; throws backend::Error with the compiler's log.
  Kernel& kernel(const char* file, const std::string& options, const char* name);

 private:
  cl_program program(const char* file, const std::string& options);
  cl_program compile(const std::string& source, const std::string& options);

  const cl_context context_;
  const cl_device_id device_;
  const std::string base_options_;
  std::string device_key_;  // the ground on which a binary is used again
  std::mutex mutex_;
  std::map<std::string, cl_program> programs_;  // by file and options
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

}  // namespace te_fl::opencl
