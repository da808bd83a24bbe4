#include "torch/result_tensors.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "py/interpreter.hpp"
#include "py/new_tensor.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"

namespace te_fl::python {
namespace {

int64_t count_elements(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

Ref to_tuple(std::span<const int64_t> shape) {
  Ref tuple = Ref::take(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  for (size_t i = 0; i < shape.size(); ++i) {
    check(PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), to_python(shape[i]).release()));
  }
  return tuple;
}

// Converts the framework's Python exception that is set to a status; the exception is raised again
// if the call ends with this status.
Status refusal() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  std::string text = "the framework made no memory for a result";
  if (value != nullptr) {
    if (PyObject* words = PyObject_Str(value)) {
      Py_ssize_t size = 0;
      if (const char* utf8 = PyUnicode_AsUTF8AndSize(words, &size)) {
        text.assign(utf8, static_cast<size_t>(size));
      }
      Py_DECREF(words);
    }
    PyErr_Clear();
    note_cause(value, text);
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return Status(StatusCode::kOutOfMemory, std::move(text));
}

}  // namespace

void ResultTensors::expect(Shape shape, DType dtype) {
  const int64_t count = count_elements({shape.data(), shape.size()});
  if (count > 0) expected_.push_back({std::move(shape), dtype, count});
}

const ResultTensors::Expected* ResultTensors::expected_for(std::span<const int64_t> shape,
                                                           DType dtype) const {
  const int64_t count = count_elements(shape);
  const Expected* found = nullptr;
  for (const Expected& e : expected_) {
    if (e.dtype != dtype || e.count != count) continue;
    if (std::equal(shape.begin(), shape.end(), e.shape.begin(), e.shape.end())) return &e;
    if (found == nullptr) found = &e;
  }
  return found;
}

Result<std::shared_ptr<void>> ResultTensors::make(std::span<const int64_t> shape, DType dtype,
                                                  const Device& device) {
  if (!has_empty() || device != device_) return std::shared_ptr<void>();
  const Expected* const expected = expected_for(shape, dtype);
  if (expected == nullptr) return std::shared_ptr<void>();
  const InterpreterLock lock;
  if (!lock.held()) return std::shared_ptr<void>();
  try {
    Ref object = new_tensor(like_, {expected->shape.data(), expected->shape.size()}, dtype);
    void* const first = data_address(object.get(), "a result");
    std::shared_ptr<void> memory(first, [kept = object.get()](void*) {
      const InterpreterLock last;
      if (last.held()) Py_DECREF(kept);
    });
    made_.push_back({object.release(), memory, expected});
    return memory;
  } catch (const PythonError&) {
    return refusal();
  }
}

Ref ResultTensors::take(Tensor result, PyObject* exchanged) {
  const Shape extents(result.shape().begin(), result.shape().end());
  for (const Made& made : made_) {
    const std::shared_ptr<void> memory = made.memory.lock();
    if (memory == nullptr || !result.contiguous() || result.dtype() != made.expected->dtype)
      continue;
    const auto first = static_cast<const char*>(memory.get());
    const auto begin = static_cast<const char*>(result.raw_data());
    const auto size = static_cast<int64_t>(bytes_for(result.dtype(), 1));
    const int64_t offset = (begin - first) / size;
    if (begin < first || offset + result.numel() > made.expected->count) continue;
    Ref object = Ref::share(made.object);
    result = Tensor();
    if (extents == made.expected->shape && memory.use_count() == 1) return object;
    // Returns a view without autograd history, for two reasons. A tensor that te-fl also keeps must
    // not keep the autograd graph of the result alive. And consecutive parameters each get a slice
    // of one gradient array.
    Shape strides(extents.size(), 1);
    for (size_t d = extents.size(); d-- > 1;) strides[d - 1] = strides[d] * extents[d];
    const Ref wanted = to_tuple({extents.data(), extents.size()});
    const Ref steps = to_tuple({strides.data(), strides.size()});
    object = Ref::take(PyObject_CallMethod(object.get(), "as_strided", "OOL", wanted.get(),
                                           steps.get(), static_cast<long long>(offset)));
    return Ref::take(PyObject_CallMethod(object.get(), "detach", nullptr));
  }
  const bool permitted = std::ranges::any_of(permitted_, [&](const auto& memory) {
    return memory.first <= result.raw_data() && result.raw_data() < memory.second;
  });
  if (has_empty() && result.numel() > 0 && !permitted) {
    const std::string text =
        "a layer's result " + result.describe() +
        " was not made by the framework, so record_stream() does not hold for it";
    if (value_or_throw(environment::get_bool("TE_FL_VALIDATE"))) throw_status(internal_error(text));
    static std::atomic_flag logged;
    if (!logged.test_and_set()) log::warning(text);
  }
  return to_framework(result, exchanged);
}

std::weak_ptr<void> ResultTensors::kept(const void* data) const {
  for (const Made& made : made_) {
    if (made.memory.lock().get() == data && data != nullptr) return made.memory;
  }
  return {};
}

}  // namespace te_fl::python
