#include "cl_check.hpp"

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace te_fl::opencl {
namespace {

std::atomic<bool> g_forked{false};

const char* name_of(cl_int error) noexcept {
  switch (error) {
    case CL_DEVICE_NOT_FOUND:
      return "CL_DEVICE_NOT_FOUND";
    case CL_DEVICE_NOT_AVAILABLE:
      return "CL_DEVICE_NOT_AVAILABLE";
    case CL_COMPILER_NOT_AVAILABLE:
      return "CL_COMPILER_NOT_AVAILABLE";
    case CL_MEM_OBJECT_ALLOCATION_FAILURE:
      return "CL_MEM_OBJECT_ALLOCATION_FAILURE";
    case CL_OUT_OF_RESOURCES:
      return "CL_OUT_OF_RESOURCES";
    case CL_OUT_OF_HOST_MEMORY:
      return "CL_OUT_OF_HOST_MEMORY";
    case CL_BUILD_PROGRAM_FAILURE:
      return "CL_BUILD_PROGRAM_FAILURE";
    case CL_INVALID_VALUE:
      return "CL_INVALID_VALUE";
    case CL_INVALID_COMMAND_QUEUE:
      return "CL_INVALID_COMMAND_QUEUE";
    case CL_INVALID_EVENT:
      return "CL_INVALID_EVENT";
    case CL_INVALID_BINARY:
      return "CL_INVALID_BINARY";
    case CL_INVALID_KERNEL_NAME:
      return "CL_INVALID_KERNEL_NAME";
    case CL_INVALID_KERNEL_ARGS:
      return "CL_INVALID_KERNEL_ARGS";
    case CL_INVALID_ARG_VALUE:
      return "CL_INVALID_ARG_VALUE";
    case CL_INVALID_ARG_SIZE:
      return "CL_INVALID_ARG_SIZE";
    case CL_INVALID_WORK_GROUP_SIZE:
      return "CL_INVALID_WORK_GROUP_SIZE";
    case CL_INVALID_OPERATION:
      return "CL_INVALID_OPERATION";
    default:
      return "error";
  }
}

te_fl_status to_status(cl_int error) noexcept {
  switch (error) {
    case CL_MEM_OBJECT_ALLOCATION_FAILURE:
    case CL_OUT_OF_HOST_MEMORY:
      return TE_FL_OUT_OF_MEMORY;
    case CL_INVALID_COMMAND_QUEUE:
    case CL_INVALID_EVENT:
      return TE_FL_INVALID_ARGUMENT;
    case CL_DEVICE_NOT_AVAILABLE:
      return TE_FL_DEVICE_LOST;
    default:
      return TE_FL_INTERNAL;
  }
}

}  // namespace

std::string cl_error_text(cl_int error, const char* call) {
  return std::string(call) + ": " + name_of(error) + " (" + std::to_string(error) + ")";
}

void throw_error(cl_int error, const char* call, const std::string& more) {
  throw backend::Error(to_status(error), cl_error_text(error, call) + more);
}

void refuse_after_fork() {
  if (!g_forked.load(std::memory_order_relaxed)) return;
  throw backend::Error(TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN,
                       "OpenCL cannot be used in a child that was forked after the OpenCL plugin "
                       "was loaded: start the child by exec (spawn), or fork before the first use");
}

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });
  });
}

}  // namespace te_fl::opencl
