// Records of forwards that await their backward, by the number in the forward's token.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "py/framework_tensor.hpp"
#include "py/py.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "torch/layer_object.hpp"

namespace te_fl::python {

// One forward that awaits its backward.
struct Record {
  std::shared_ptr<Layer> layer;
  std::shared_ptr<Runner> runner;
  nn::Ctx ctx;
  nn::CapturedContext scopes;
  std::vector<uint64_t> numbers;
  std::vector<bool> trained;
  std::vector<Lent> lent;
  std::shared_ptr<void> output =
      nullptr;  // the storage of an output that the backward reads, if it does
  // The backward computes gradients of these shapes and dtypes, and returns the first `followed`.
  std::vector<std::pair<Shape, DType>> inputs;
  size_t followed = 0;
  // Memory of the inputs, in which results may be placed.
  std::vector<std::pair<const void*, const void*>> memory;
  Device device;                // device of the activations
  const void* token = nullptr;  // the token's address, only for comparison
};

// Stores the record until drop_record(), and returns its number. Thread-safe.
int64_t add_record(std::shared_ptr<Record> record);
void drop_record(int64_t number);
// The record of a token, an int64 host tensor. FailedPrecondition if the record was dropped.
std::shared_ptr<Record> find_record(PyObject* token);
// Returns the record if `object` is a token that a forward returned, and not a copy of a token;
// null for all other tensors.
std::shared_ptr<Record> record_that_waits(PyObject* object);

}  // namespace te_fl::python
