// Results of layers as a framework's own tensors: the framework allocates them, nn writes them.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "py/py.hpp"
#include "te_fl/result_memory.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

// For the time of one call: nn's tensors of an expected size and dtype are the framework's, among
// them the results. Made and destroyed under the interpreter's lock; nn runs without it.
class ResultTensors {
 public:
  // `like`: a tensor of the framework; results lie on its device, `device`.
  ResultTensors(PyObject* like, const Device& device) : like_(like), device_(device) {}
  ResultTensors(const ResultTensors&) = delete;
  ResultTensors& operator=(const ResultTensors&) = delete;

  // The call may return a tensor of this shape and dtype.
  void expect(Shape shape, DType dtype);
  // A result may lie in this memory, which is the framework's.
  void permit(const void* begin, const void* end) { permitted_.emplace_back(begin, end); }
  // For ResultMemory: memory of a new tensor of the framework, if one of this size is expected.
  // OUT_OF_MEMORY, whose cause is the framework's exception, if it cannot be made.
  Result<std::shared_ptr<void>> make(std::span<const int64_t> shape, DType dtype,
                                     const Device& device);
  // `result` as a tensor of the framework that `exchanged` is of: the one whose memory it is, or
  // else one that shares te-fl's memory by DLPack.
  Ref take(Tensor result, PyObject* exchanged);
  // Returns what owns the memory of a result that take() has returned, whose first element is at
  // `data`, if te-fl keeps that memory; else none.
  std::weak_ptr<void> kept(const void* data) const;

 private:
  struct Expected {
    Shape shape;
    DType dtype;
    int64_t count;
  };
  struct Made {
    PyObject* object;  // lives as long as its memory's owner
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

// While it lives, nn's calls on this thread make their results by `results`.
class ResultScope {
 public:
  explicit ResultScope(ResultTensors& results)
      : memory_([&results](std::span<const int64_t> shape, DType dtype, const Device& device) {
          return results.make(shape, dtype, device);
        }) {}

 private:
  ResultMemory memory_;
};

// set_empty(function): function(like, shape, dtype) is a new tensor on like's device; shape: a
// tuple; dtype: an index in te_fl.tensors.DTYPES.
PyObject* set_empty(PyObject*, PyObject* function) noexcept;

}  // namespace te_fl::python
