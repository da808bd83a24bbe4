// Tensors of a framework as te-fl's, and te-fl's as the framework's, without copies.
#pragma once

#include <memory>
#include <vector>

#include "py.hpp"
#include "te_fl/device.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

// The memory of `object`, a tensor of a framework that has DLPack's C exchange API. `keep`: the
// object lives as long as the result, which any thread may let go; else the caller sees to that.
// TypeError for other objects and te_fl's error for memory that it cannot describe, both naming
// `name`.
Tensor tensor_of(PyObject* object, const char* name, bool keep);

// `tensor` as a tensor of the framework that `like` is of, sharing its memory.
Ref to_framework(const Tensor& tensor, PyObject* like);

// A tensor of the framework that `like` is of, int64 [1] on the host, whose element is `number`.
// `gone(number)` runs when the last tensor that shares its memory goes, on any thread and without
// the interpreter's lock.
Ref number_tensor(int64_t number, void (*gone)(int64_t), PyObject* like);

// The framework's current stream of the device; null on the host.
void* current_stream_of(PyObject* like, const Device& device);

// While it lives, this thread's work on each device that current_stream_of() was asked for goes to
// the framework's current stream there. For calls without a tensor that says which device.
class FrameworkStreams {
 public:
  FrameworkStreams();
  ~FrameworkStreams();
  FrameworkStreams(const FrameworkStreams&) = delete;
  FrameworkStreams& operator=(const FrameworkStreams&) = delete;

 private:
  std::vector<std::unique_ptr<StreamScope>> scopes_;
};

}  // namespace te_fl::python
