// Tensors of a framework as te-fl's, and te-fl's as the framework's, without copies.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "py/py.hpp"
#include "te_fl/device.hpp"
#include "te_fl/nn/autograd/saved_memory.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {

// The memory of `object`, a tensor of a framework that has DLPack's C exchange API. `keep`: the
// object lives as long as the result, which any thread may let go; else the caller sees to that.
// TypeError for other objects and te_fl's error for memory that it cannot describe, both naming
// `name`.
Tensor tensor_of(PyObject* object, const char* name, bool keep);
// The address of the first element of such an object. Errors as tensor_of().
void* memory_of(PyObject* object, const char* name);

// The memory of a tensor that a forward was given and may keep for its backward. It keeps the
// tensor's storage: programs free and refill that in between (untyped_storage().resize_()), which
// no version counter shows, and give the tensor another one (.data =), which the backward does not
// read.
class Lent {
 public:
  // `data`: of the tensor, `bytes` of the memory at `base`, which `object` has: the storage, or a
  // tensor without one. `name` stays.
  Lent(PyObject* object, bool is_storage, const char* name, const void* base, const void* data,
       int64_t bytes, const std::weak_ptr<void>& owner)
      : object_(object),
        is_storage_(is_storage),
        name_(name),
        base_(base),
        data_(data),
        bytes_(bytes),
        owner_(owner) {}
  // The memory's new place if it is kept and has moved since follow() was last called; none if it
  // lies where it lay. FAILED_PRECONDITION naming the tensor if there is none any more.
  std::optional<nn::MovedMemory> moved() const;
  // FAILED_PRECONDITION naming the tensor if it is kept and is not where it was.
  void check() const;
  // Takes the place that moved() has returned, once the forward's tensors have it.
  void follow(const nn::MovedMemory& place);
  // Borrowed: the tensor's storage, if it is kept and the tensor lies in these bytes; else null.
  PyObject* storage_in(const void* begin, int64_t bytes) const;
  // FAILED_PRECONDITION if an object still refers to memory that the tensor has left.
  void check_followed() const;

 private:
  [[noreturn]] void refuse() const;

  PyObject* object_;  // lives as long as its owner
  bool is_storage_;
  const char* name_;
  const void* base_;
  const void* data_;
  int64_t bytes_;
  std::weak_ptr<void> owner_;
  bool lost_ = false;  // an object still refers to memory that the tensor has left
};
// As tensor_of() with `keep`, noting it in `lent`; `name` lives as long as that.
Tensor tensor_of(PyObject* object, const char* name, std::vector<Lent>& lent);
// Notes in `lent` a result that the framework has made for a forward, whose memory `owner` owns;
// what keeps its storage, or null if it has none.
std::shared_ptr<void> lend_result(PyObject* object, const std::weak_ptr<void>& owner,
                                  std::vector<Lent>& lent);

// `tensor` as a tensor of the framework that `like` is of, sharing its memory.
Ref to_framework(const Tensor& tensor, PyObject* like);

// A tensor of the framework that `like` is of, int64 [1] on the host, whose element is `number`.
// `gone(number)` runs when the last tensor that shares its memory goes, on any thread and without
// the interpreter's lock.
Ref number_tensor(int64_t number, void (*gone)(int64_t), PyObject* like);
// A tensor of the framework that `like` is of, uint8 [0] on the host, whose storage has an address
// of its own.
Ref tensor_of_no_bytes(PyObject* like);

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
