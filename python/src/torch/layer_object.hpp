// The object that Python holds of a layer: its modules in C++, one for each dtype of activations,
// and what is known of the framework's parameters.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "py/framework_tensor.hpp"
#include "py/mutex.hpp"
#include "py/py.hpp"
#include "py/weak_ref.hpp"
#include "torch/fp8_states.hpp"
#include "torch/layer_kinds.hpp"

namespace te_fl::python {

// A framework's parameter as the last forward saw it.
struct Seen {
  const PyObject* object = nullptr;  // compared only; it may have gone
  WeakRef life;                      // of it: another one may lie at its address since
  const void* data = nullptr;
  long version = -1;
  uint64_t number = 0;  // of its contents, as Parameter::borrow() wants it
};

// The weights' gradients that a backward has left.
struct DelayedGradients {
  std::shared_ptr<Runner> runner;
  std::function<Status()> compute;
  std::vector<uint64_t> numbers;
  std::vector<bool> trained;
  std::vector<Lent> lent;  // the operands of the gradients, among others
};

struct Layer {
  MakeRunner make;
  std::map<DType, std::shared_ptr<Runner>> runners;  // by the activations' dtype
  std::vector<std::pair<std::string, std::shared_ptr<ModuleStates>>> states;  // by prefix
  std::vector<Mutex*> mutexes;  // of the states, in the order in which they are taken
  // The mutexes' interruptions at the last call: another number says that a fork cut short the call
  // of a thread which this process does not have.
  uint32_t interruptions = 0;
  std::vector<std::pair<std::string, Shape>> parameters;
  // The tensors that the gradients of parameters may be parts of, each with one of those
  // parameters.
  std::vector<std::pair<size_t, Shape>> joined;
  std::vector<Seen> seen;
  uint64_t numbers = 0;   // the last number that was given
  long long caching = 0;  // the last scope in which quantised weights were kept
  bool delays_wgrad = false;
  std::deque<DelayedGradients> delayed;  // in the order of their backwards
};

// One layer's call at a time, of all layers that share states with it. In a forked child a layer
// keeps its parameters and FP8 states. If the fork cut short a call of another thread, it makes its
// nn modules anew, since that call may have left them half changed.
class LayerLock {
 public:
  explicit LayerLock(Layer& layer);
  ~LayerLock() {
    for (Mutex* mutex : mutexes_) mutex->unlock();
  }
  LayerLock(const LayerLock&) = delete;
  LayerLock& operator=(const LayerLock&) = delete;

 private:
  const std::vector<Mutex*>& mutexes_;
};

// The layer that the capsule of make_layer() holds; a PythonError for another object.
const std::shared_ptr<Layer>& layer_of(PyObject* capsule);
// The module for activations of `dtype`, made at its first use. Under a LayerLock.
Result<std::shared_ptr<Runner>> runner_for(Layer& layer, DType dtype);

}  // namespace te_fl::python
