// Compiles kernels on first use and caches the binaries on disk for later processes.
#pragma once

#include <CL/cl.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace te_fl::opencl {

// A kernel object stores its arguments, so only one launch can use it at a time: `mutex` must be
// held from the first argument until the launch is enqueued.
struct Kernel {
  cl_kernel kernel = nullptr;
  std::mutex mutex;
};

// The programs of one device. Thread-safe. A program consists of common.cl and one other file of
// kernels/, compiled with options.
class Programs {
 public:
  Programs(cl_context context, cl_device_id device, std::string base_options);
  ~Programs();
  Programs(const Programs&) = delete;
  Programs& operator=(const Programs&) = delete;

  // Compiles the kernel if necessary. Throws backend::Error with the compiler's log.
  Kernel& kernel(const char* file, const std::string& options, const char* name);

 private:
  cl_program program(const char* file, const std::string& options);
  cl_program compile(const std::string& source, const std::string& options);

  const cl_context context_;
  const cl_device_id device_;
  const std::string base_options_;
  std::string device_key_;  // the part of a binary's cache key that describes the device
  std::mutex mutex_;
  std::map<std::string, cl_program> programs_;  // keyed by file and options
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

}  // namespace te_fl::opencl
