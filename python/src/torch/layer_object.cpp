#include "torch/layer_object.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include "py/errors.hpp"
#include "py/interpreter.hpp"
#include "te_fl/nn/modules/init.hpp"
#include "te_fl/op_manager.hpp"
#include "torch/arguments.hpp"
#include "torch/layer.hpp"

namespace te_fl::python {

namespace {

constexpr const char* kLayerName = "te_fl.layer";

Result<std::shared_ptr<Runner>> new_runner(const Layer& layer, DType activation) {
  const nn::init::WithoutValues borrowed;
  TE_FL_ASSIGN_OR_RETURN(auto made, layer.make(activation));
  made->module().set_delay_wgrad(layer.delays_wgrad);
  for (const auto& [prefix, states] : layer.states) {
    TE_FL_RETURN_IF_ERROR(made->module().share_fp8_states(states->fp8, prefix));
  }
  return std::shared_ptr<Runner>(std::move(made));
}

// Parameters with equal name stems and shapes may be slices of one array (parameters_split), and so
// may their gradients. Returns the shapes of the possible arrays, which are concatenations of
// consecutive parameters.
std::vector<std::pair<size_t, Shape>> joined_parameters(
    const std::vector<std::pair<std::string, Shape>>& parameters) {
  std::map<std::pair<std::string, Shape>, std::vector<size_t>> groups;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, shape] = parameters[i];
    const std::string key = name.substr(0, name.rfind('.') + 1) + name.substr(name.rfind('_') + 1);
    groups[{key, Shape(shape.begin() + (shape.empty() ? 0 : 1), shape.end())}].push_back(i);
  }
  std::vector<std::pair<size_t, Shape>> joined;
  for (const auto& [key, members] : groups) {
    for (size_t first = 0; first < members.size(); ++first) {
      Shape sum = parameters[members[first]].second;
      for (size_t next = first + 1; next < members.size() && !sum.empty(); ++next) {
        sum[0] += parameters[members[next]].second[0];
        joined.emplace_back(members[first], sum);
      }
    }
  }
  return joined;
}

}  // namespace

const std::shared_ptr<Layer>& unwrap_layer(PyObject* capsule) {
  auto* layer = static_cast<std::shared_ptr<Layer>*>(PyCapsule_GetPointer(capsule, kLayerName));
  if (layer == nullptr) throw PythonError();
  return *layer;
}

LayerLock::LayerLock(Layer& layer) : mutexes_(layer.mutexes) {
  uint32_t interruptions = 0;
  for (Mutex* mutex : mutexes_) {
    mutex->lock();
    interruptions += mutex->interruptions();
  }
  if (interruptions == layer.interruptions) return;
  layer.interruptions = interruptions;
  // Leaks the objects that a thread of the parent was changing at the fork: their destructors could
  // read half-changed state.
  new std::map(std::move(layer.runners));
  new std::deque(std::move(layer.delayed));
  layer.runners.clear();
  layer.delayed.clear();
}

Result<std::shared_ptr<Runner>> runner_for(Layer& layer, DType dtype) {
  std::shared_ptr<Runner>& runner = layer.runners[dtype];
  if (runner == nullptr) {
    TE_FL_ASSIGN_OR_RETURN(runner, new_runner(layer, dtype));
  }
  return runner;
}

PyObject* make_layer(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *kind = nullptr, *options = nullptr, *states = nullptr;
    int delays_wgrad = 0;
    if (PyArg_ParseTuple(args, "OOOp", &kind, &options, &states, &delays_wgrad) == 0)
      throw PythonError();
    // Layers freed earlier have queued decrefs of their weak references.
    drop_dropped();
    // The first use loads plugins, which may be Python modules.
    without_lock([] { OpManager::instance(); });
    auto layer = std::make_shared<Layer>();
    layer->make = make_runner(to_text(kind, "the kind of layer"), options);
    layer->delays_wgrad = delays_wgrad != 0;
    for (PyObject* entry : list_items(states, "states")) {
      PyObject *prefix = nullptr, *capsule = nullptr;
      if (PyArg_ParseTuple(entry, "OO", &prefix, &capsule) == 0) throw PythonError();
      layer->states.emplace_back(to_text(prefix, "a prefix"), unwrap_states(capsule));
    }
    if (layer->states.empty()) layer->states.emplace_back("", std::make_shared<ModuleStates>());
    for (const auto& [prefix, shared] : layer->states) layer->mutexes.push_back(&shared->mutex);
    std::ranges::sort(layer->mutexes, std::less<>());
    const auto same = std::ranges::unique(layer->mutexes);
    layer->mutexes.erase(same.begin(), same.end());
    auto runner = value_or_throw([&]() -> Result<std::shared_ptr<Runner>> {
      const WithoutLock unlocked;
      const LayerLock lock(*layer);
      return new_runner(*layer, DType::kF32);
    }());
    for (const nn::NamedParameter& p : runner->module().parameters()) {
      const auto shape = p.value().shape();
      layer->parameters.emplace_back(p.name, Shape(shape.begin(), shape.end()));
    }
    layer->joined = joined_parameters(layer->parameters);
    layer->runners.emplace(DType::kF32, std::move(runner));
    layer->seen.resize(layer->parameters.size());
    auto owner = std::make_unique<std::shared_ptr<Layer>>(std::move(layer));
    Ref capsule = Ref::take(PyCapsule_New(owner.get(), kLayerName, [](PyObject* c) {
      delete static_cast<std::shared_ptr<Layer>*>(PyCapsule_GetPointer(c, kLayerName));
      drop_dropped();
    }));
    owner.release();
    return capsule;
  });
}

PyObject* layer_parameters(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    return make_list(unwrap_layer(capsule)->parameters, [](const auto& parameter) {
      const Ref shape = make_list(parameter.second, [](int64_t n) { return to_python(n); });
      const Ref name = to_python(std::string_view(parameter.first));
      return Ref::take(PyTuple_Pack(2, name.get(), shape.get()));
    });
  });
}

}  // namespace te_fl::python
