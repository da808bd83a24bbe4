// Converts OpenCL error codes to te-fl statuses, and declares the checks that the plugin's entry
// points make first.
#pragma once

#include <CL/cl.h>

#include <string>

#include "te_fl/backend.hpp"

namespace te_fl::opencl {

// Returns a text such as "clEnqueueNDRangeKernel: CL_OUT_OF_RESOURCES (-5)".
std::string cl_error_text(cl_int error, const char* call);
[[noreturn]] void throw_error(cl_int error, const char* call, const std::string& more = "");

inline void check(cl_int error, const char* call) {
  if (error != CL_SUCCESS) throw_error(error, call);
}

// Throws if this process was forked after the plugin was opened, because drivers cannot be used
// after fork().
void refuse_after_fork();
void watch_forks();

}  // namespace te_fl::opencl
