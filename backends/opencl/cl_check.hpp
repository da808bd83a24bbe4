// OpenCL's error codes as te-fl statuses, and what every entry of the plugin does first.
#pragma once

#include <CL/cl.h>

#include <string>

#include "te_fl/backend.hpp"

namespace te_fl::opencl {

// "clEnqueueNDRangeKernel: CL_OUT_OF_RESOURCES (-5)"
std::string text_of(cl_int error, const char* call);
[[noreturn]] void throw_error(cl_int error, const char* call, const std::string& more = "");

inline void check(cl_int error, const char* call) {
  if (error != CL_SUCCESS) throw_error(error, call);
}

// Throws if this process is a child of the one that opened the plugin: drivers do not survive fork.
void refuse_after_fork();
void watch_forks();

}  // namespace te_fl::opencl
