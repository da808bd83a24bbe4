// Results of layers in tensors that the framework allocates and nn writes.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "py/py.hpp"
#include "te_fl/result_memory.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

// For one call: whenever nn allocates a tensor of an expected size and dtype, the framework
// allocates it. Construct and destroy under the interpreter's lock; nn runs without the lock.
class ResultTensors {
 public:
  // `like`: a tensor of the framework. Results lie on its device, `device`.
  ResultTensors(PyObject* like, const Device& device) : like_(like), device_(device) {}
  ResultTensors(const ResultTensors&) = delete;
  ResultTensors& operator=(const ResultTensors&) = delete;

  // Declares that the call may return a tensor of this shape and dtype.
  void expect(Shape shape, DType dtype);
  // Declares that a result may be placed in this memory, which belongs to the framework.
  void permit(const void* begin, const void* end) { permitted_.emplace_back(begin, end); }
  // Allocator for ResultMemory: memory of a new framework tensor, if a tensor of this size is
  // expected. If the allocation fails: OUT_OF_MEMORY, with the framework's exception as its cause.
  Result<std::shared_ptr<void>> make(std::span<const int64_t> shape, DType dtype,
                                     const Device& device);
  // Converts `result` to a tensor of the framework of `exchanged`: the framework tensor that owns
  // the memory if there is one, else a tensor that shares te-fl's memory by DLPack.
  Ref take(Tensor result, PyObject* exchanged);
  // The owner of the memory of a result that take() has returned, if te-fl also keeps that memory;
  // else none. `data`: the address of the result's first element.
  std::weak_ptr<void> kept(const void* data) const;

 private:
  struct Expected {
    Shape shape;
    DType dtype;
    int64_t count;
  };
  struct Made {
    PyObject* object;  // lives as long as the memory's owner
    std::weak_ptr<void> memory;
    const Expected* expected;
  };
  const Expected* expected_for(std::span<const int64_t> shape, DType dtype) const;

  PyObject* like_;
  Device device_;
  std::vector<Expected> expected_;
  std::vector<Made> made_;
  std::vector<std::pair<const void*, const void*>> permitted_;
};

// While this object lives, nn's calls on this thread allocate their results through `results`.
class ResultScope {
 public:
  explicit ResultScope(ResultTensors& results)
      : memory_([&results](std::span<const int64_t> shape, DType dtype, const Device& device) {
          return results.make(shape, dtype, device);
        }) {}

 private:
  ResultMemory memory_;
};

}  // namespace te_fl::python
