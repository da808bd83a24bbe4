// Converts a framework's tensors to te_fl::Tensor and back, without copies.
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

// Wraps the memory of `object`, a tensor whose type has an exchange table. `keep`: the result
// keeps the object alive, and any thread may drop the result; otherwise the caller keeps the object
// alive. Throws TypeError for other objects, and te-fl's error for memory that it cannot describe;
// both name `name`.
Tensor to_tensor(PyObject* object, const char* name, bool keep);
// The address of the object's first element. Throws the errors of to_tensor().
void* data_address(PyObject* object, const char* name);

// The memory of an input that a forward may save for its backward. Keeps the tensor's storage
// alive, not the tensor. Between forward and backward, programs may free and refill the storage
// (untyped_storage().resize_()), which PyTorch's version counter does not show, or assign the
// tensor another storage (.data =), which the backward ignores.
class Lent {
 public:
  // `data`: the tensor's address. `base` and `bytes`: the memory of `object`, which is the storage,
  // or a tensor without a storage. `name` must outlive this.
  Lent(PyObject* object, bool is_storage, const char* name, const void* base, const void* data,
       int64_t bytes, const std::weak_ptr<void>& owner)
      : object_(object),
        is_storage_(is_storage),
        name_(name),
        base_(base),
        data_(data),
        bytes_(bytes),
        owner_(owner) {}
  // Returns the memory's new address if te-fl still keeps the memory and the program has moved it
  // since the last follow(); none if it has not moved. Throws FAILED_PRECONDITION, naming the
  // tensor, if the program has freed the memory.
  std::optional<nn::MovedMemory> moved() const;
  // Throws FAILED_PRECONDITION, naming the tensor, if te-fl still keeps the memory but the program
  // has moved or freed it.
  void check() const;
  // Records the address that moved() has returned, after the forward's tensors were updated to it.
  void follow(const nn::MovedMemory& place);
  // Returns a borrowed reference to the tensor's storage if te-fl still keeps the memory and these
  // bytes lie in the storage; else null.
  PyObject* storage_in(const void* begin, int64_t bytes) const;
  // Throws FAILED_PRECONDITION if an object still refers to the memory's old address.
  void check_followed() const;

 private:
  [[noreturn]] void refuse() const;

  PyObject* object_;  // owned by owner_
  bool is_storage_;
  const char* name_;
  const void* base_;
  const void* data_;
  int64_t bytes_;
  std::weak_ptr<void> owner_;
  bool lost_ = false;  // some object still refers to the old address
};
// As to_tensor() with keep=true; also appends to `lent`. `name` must outlive `lent`.
Tensor to_tensor(PyObject* object, const char* name, std::vector<Lent>& lent);
// Appends to `lent` a forward's result that the framework allocated and whose memory `owner` owns.
// Returns the object that keeps its storage alive; null if it has no storage.
std::shared_ptr<void> lend_result(PyObject* object, const std::weak_ptr<void>& owner,
                                  std::vector<Lent>& lent);

// Converts `tensor` to a tensor of the framework of `like`, sharing memory.
Ref to_framework(const Tensor& tensor, PyObject* like);

// An int64 [1] host tensor of the framework of `like` that holds `number`. When the last tensor
// that shares its memory is freed, gone(number) runs, on any thread and without the interpreter's
// lock.
Ref number_tensor(int64_t number, void (*gone)(int64_t), PyObject* like);
// A uint8 [0] host tensor of the framework of `like`, whose storage has a unique address.
Ref tensor_of_no_bytes(PyObject* like);

// The framework's current stream of the device; null for the host.
void* find_current_stream(PyObject* like, const Device& device);

// While this object lives, this thread's work goes to the framework's current stream on each device
// for which find_current_stream() was called. For calls without a tensor argument.
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
