// The C++ object behind a Python layer: the te_fl::nn modules, one for each activation dtype, and
// cached information about the framework's parameters.
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

// The identity and the memory of a framework's parameter in the last forward, to detect changes.
struct Seen {
  const PyObject* object = nullptr;  // only for comparison; the object may have been freed
  WeakRef life;                      // detects that another object has reused the address
  const void* data = nullptr;
  long version = -1;
  uint64_t number = 0;  // version number of the contents, for Parameter::borrow()
};

// Weight gradients that a backward has deferred.
struct DelayedGradients {
  std::shared_ptr<Runner> runner;
  std::function<Status()> compute;
  std::vector<uint64_t> numbers;
  std::vector<bool> trained;
  std::vector<Lent> lent;  // includes the operands from which the gradients are computed
};

struct Layer {
  MakeRunner make;
  std::map<DType, std::shared_ptr<Runner>> runners;                           // by activation dtype
  std::vector<std::pair<std::string, std::shared_ptr<ModuleStates>>> states;  // by prefix
  std::vector<Mutex*> mutexes;  // the mutexes of the states, in locking order
  // The sum of the mutexes' interruptions() at the last call. A change means that a fork
  // interrupted the call of a thread that does not exist in this process.
  uint32_t interruptions = 0;
  std::vector<std::pair<std::string, Shape>> parameters;
  // Arrays of which the parameters' gradients may be slices: (index of one such parameter, shape).
  std::vector<std::pair<size_t, Shape>> joined;
  std::vector<Seen> seen;
  uint64_t numbers = 0;   // the last version number that was issued
  long long caching = 0;  // number of the last scope in which quantised weights were cached
  bool delays_wgrad = false;
  std::deque<DelayedGradients> delayed;  // oldest backward first
};

// Serialises calls of a layer and of all layers that share states with it. In a forked child the
// layer keeps its parameters and FP8 states. If the fork interrupted a call of another thread, the
// layer rebuilds its nn modules, since that call may have left them half changed.
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

// The layer in a capsule of make_layer(); throws PythonError for other objects.
const std::shared_ptr<Layer>& unwrap_layer(PyObject* capsule);
// The module for activations of `dtype`, created on first use. Needs a LayerLock.
Result<std::shared_ptr<Runner>> runner_for(Layer& layer, DType dtype);

}  // namespace te_fl::python
