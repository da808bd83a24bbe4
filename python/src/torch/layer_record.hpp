// The forwards that wait for their backwards, by the number that a token holds.
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

// One forward that waits for its backward.
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
  std::vector<std::pair<Shape, DType>> inputs;              // whose gradients the backward returns
  std::vector<std::pair<const void*, const void*>> memory;  // of inputs, where results may lie
  Device device;                                            // of the activations
  const void* token = nullptr;                              // memory of the token; compared only
};

// Keeps the record until drop_record(); its number. From any thread.
int64_t add_record(std::shared_ptr<Record> record);
void drop_record(int64_t number);
// The record that a token, an int64 tensor of the host, names; FailedPrecondition for one that has
// gone.
std::shared_ptr<Record> record_of(PyObject* token);
// The record if `object` is a token that a forward gave, and no copy of one; else null, also for
// tensors that are no tokens.
std::shared_ptr<Record> record_that_waits(PyObject* object);

}  // namespace te_fl::python
