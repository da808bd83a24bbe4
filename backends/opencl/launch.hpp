// One launch of a kernel. The caller sets the kernel's arguments in order and then calls items() or
// groups().
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "cl_check.hpp"
#include "device.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::opencl {

// Returns "-DNAME=value ", a compile option of a program.
inline std::string define(const char* name, int64_t value) {
  return std::string("-D") + name + "=" + std::to_string(value) + " ";
}
// Defines a tensor's dtype for kernels, which use the numbers of te_fl_dtype_index. An absent
// tensor counts as F32.
inline std::string define(const char* name, const te_fl_tensor* t) {
  return define(name, t == nullptr ? int64_t{TE_FL_F32} : int64_t{dtype_index(t->dl.dtype)});
}

class Launch {
 public:
  Launch(const Device& device, void* stream, const char* file, const std::string& options,
         const char* name)
      : device_(device),
        queue_(device.queue_of(stream)),
        name_(name),
        kernel_(device.programs->kernel(file, options, name)),
        lock_(kernel_.mutex) {}

  // Sets the next argument to a pointer to device memory. NULL is replaced by Device::nothing, a
  // valid pointer that the kernel does not access.
  Launch& memory(const void* data) {
    check(
        clSetKernelArgSVMPointer(kernel_.kernel, next_++, data == nullptr ? device_.nothing : data),
        "clSetKernelArgSVMPointer");
    return *this;
  }
  Launch& data(const te_fl_tensor* t) {
    return memory(t == nullptr ? nullptr : backend::data<const void>(*t));
  }
  // Sets the next argument to an int32_t, uint32_t, int64_t, uint64_t or float, or to a struct with
  // the same layout as in the kernel.
  template <class T>
  Launch& value(T v) {
    check(clSetKernelArg(kernel_.kernel, next_++, sizeof v, &v), "clSetKernelArg");
    return *this;
  }

  // Runs `items` work-items, rounded up to a multiple of `group`. Does nothing for 0.
  void items(int64_t items, size_t group = 64) {
    groups((items + static_cast<int64_t>(group) - 1) / static_cast<int64_t>(group), group);
  }
  void groups(int64_t groups, size_t group = 64) {
    const size_t global = static_cast<size_t>(groups) * group;
    if (global == 0) return;
    check(clEnqueueNDRangeKernel(queue_, kernel_.kernel, 1, nullptr, &global, &group, 0, nullptr,
                                 nullptr),
          name_);
  }

 private:
  const Device& device_;
  const cl_command_queue queue_;
  const char* name_;
  Kernel& kernel_;
  const std::lock_guard<std::mutex> lock_;
  cl_uint next_ = 0;
};

}  // namespace te_fl::opencl
