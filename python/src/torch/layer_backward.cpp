#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "autograd/layer_call.hpp"
#include "ops/policy.hpp"
#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "te_fl/nn/autograd/saved_memory.hpp"
#include "te_fl/nn/fp8/autocast.hpp"
#include "torch/arguments.hpp"
#include "torch/layer.hpp"
#include "torch/layer_object.hpp"
#include "torch/layer_parameters.hpp"
#include "torch/layer_record.hpp"
#include "torch/rank_exchange.hpp"
#include "torch/result_tensors.hpp"

namespace te_fl::python {

namespace {

struct Gradients {
  std::vector<Tensor> inputs, parameters;
};

// The tensor that receives a weight's gradient in place. Undefined: the gradient is returned.
struct MainGrad {
  Tensor tensor;
  bool overwrites = false;
};

// Sets the destination of each gradient: main_grads, or new memory of the parameter's dtype.
Status open_gradients(Runner& runner, const std::vector<DType>& dtypes,
                      const std::vector<MainGrad>& main_grads) {
  const auto& own = runner.parameters();
  for (size_t i = 0; i < own.size(); ++i) {
    nn::Parameter& p = *own[i].parameter;
    p.take_grad();  // drops the gradient that an earlier, failed backward may have left
    p.grad_dtype = dtypes[i];
    const MainGrad& main = main_grads[i];
    if (main.tensor.defined() && p.requires_grad) {
      TE_FL_RETURN_IF_ERROR(p.give_grad(main.tensor, !main.overwrites));
    }
  }
  return {};
}

// Declares the parameters' gradients that will be returned, so the framework allocates them.
void expect_gradients(ResultTensors& results, const Layer& layer,
                      const std::vector<LentParameter>& parameters,
                      const std::vector<bool>& trained, const std::vector<MainGrad>& main_grads) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto shape = parameters[i].value.shape();
    if (trained[i] && !main_grads[i].tensor.defined()) {
      results.expect(Shape(shape.begin(), shape.end()), parameters[i].dtype);
    }
  }
  for (const auto& [of, shape] : layer.joined) results.expect(shape, parameters[of].dtype);
}

// Returns the gradients that were not written to main_grads.
std::vector<Tensor> take_gradients(Runner& runner, const std::vector<MainGrad>& main_grads) {
  const auto& own = runner.parameters();
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < own.size(); ++i) {
    Tensor grad = own[i].parameter->take_grad();
    gradients.push_back(main_grads[i].tensor.defined() ? Tensor() : std::move(grad));
  }
  return gradients;
}

// `kept`: the memory of dy, if deferred weight gradients will read it. `deterministic`: whether the
// backward must be deterministic; independent of the forward.
Result<Gradients> run_backward(Record& record, const Tensor& dy, std::vector<Lent> kept,
                               std::vector<LentParameter>& parameters,
                               const std::vector<MainGrad>& main_grads, ResultTensors& results,
                               void* stream, bool keep, bool input_grad, bool deterministic) {
  Layer& layer = *record.layer;
  const LayerLock lock(layer);
  TE_FL_RETURN_IF_ERROR(lend(*record.runner, parameters, record.numbers, &record.trained));
  const auto scopes = record.scopes.enter();
  const DeterministicScope policy(deterministic);
  const StreamScope on(dy.device(), stream);
  TE_FL_RETURN_IF_ERROR(open_gradients(*record.runner, dtypes_of(parameters), main_grads));
  const ResultScope framework(results);
  Gradients gradients;
  if (keep) {
    nn::Ctx copy = record.ctx;
    copy.input_grad = input_grad;
    TE_FL_ASSIGN_OR_RETURN(gradients.inputs, record.runner->backward(dy, copy));
  } else {
    record.ctx.input_grad = input_grad;
    TE_FL_ASSIGN_OR_RETURN(gradients.inputs, record.runner->backward(dy, record.ctx));
  }
  gradients.parameters = take_gradients(*record.runner, main_grads);
  if (layer.delays_wgrad) {
    kept.insert(kept.end(), record.lent.begin(), record.lent.end());
    layer.delayed.push_back({record.runner, record.runner->module().take_delayed_wgrad(),
                             record.numbers, record.trained, std::move(kept)});
  }
  return gradients;
}

// Removes and returns the gradients deferred by the earliest backward.
Result<DelayedGradients> take_delayed(Layer& layer) {
  const WithoutLock unlocked;
  const LayerLock lock(layer);
  if (layer.delayed.empty()) {
    return Status(StatusCode::kFailedPrecondition,
                  "backward_dw(): no backward has left gradients of weights; it is called once "
                  "after each backward");
  }
  DelayedGradients left = std::move(layer.delayed.front());
  layer.delayed.pop_front();
  return left;
}

Result<std::vector<Tensor>> run_backward_dw(Layer& layer, const DelayedGradients& left,
                                            std::vector<LentParameter>& parameters,
                                            const std::vector<MainGrad>& main_grads,
                                            ResultTensors& results, void* stream) {
  const LayerLock lock(layer);
  const Device device = parameters.at(0).value.device();
  TE_FL_RETURN_IF_ERROR(lend(*left.runner, parameters, left.numbers, &left.trained));
  TE_FL_RETURN_IF_ERROR(open_gradients(*left.runner, dtypes_of(parameters), main_grads));
  const StreamScope on(device, stream);
  const ResultScope framework(results);
  TE_FL_RETURN_IF_ERROR(left.compute());
  return take_gradients(*left.runner, main_grads);
}

// Parses Python's main_grads, one for each parameter.
std::vector<MainGrad> read_main_grads(PyObject* tuple, size_t parameters) {
  std::vector<MainGrad> grads(parameters);
  if (tuple == Py_None) return grads;
  const auto listed = list_items(tuple, "main_grads");
  for (size_t i = 0; i < grads.size() && i < listed.size(); ++i) {
    if (listed[i] == Py_None) continue;
    PyObject* tensor = nullptr;
    int overwrites = 0;
    if (PyArg_ParseTuple(listed[i], "Op", &tensor, &overwrites) == 0) throw PythonError();
    grads[i] = {to_tensor(tensor, "main_grad", false), overwrites != 0};
  }
  return grads;
}

// Updates a forward's record with the current addresses of its inputs' storages.
void follow_memory(Record& record) {
  std::vector<Lent*> lent;
  std::vector<nn::MovedMemory> places;
  for (Lent& each : record.lent) {
    std::optional<nn::MovedMemory> place = each.moved();
    if (!place.has_value()) continue;
    lent.push_back(&each);
    places.push_back(*std::move(place));
  }
  if (places.empty()) return;
  nn::move_saved_memory(record.ctx, places);
  for (auto& [begin, end] : record.memory) {
    const auto place = std::ranges::find(places, begin, &nn::MovedMemory::from);
    if (place == places.end()) continue;
    begin = place->to;
    end = static_cast<char*>(place->to) + place->bytes;
  }
  for (size_t i = 0; i < places.size(); ++i) lent[i]->follow(places[i]);
  for (const Lent* each : lent) each->check_followed();
}

Ref to_tuple(std::vector<Tensor> tensors, ResultTensors& results, PyObject* like) {
  Ref tuple = Ref::take(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t i = 0; i < tensors.size(); ++i) {
    Ref item =
        tensors[i].defined() ? results.take(std::move(tensors[i]), like) : Ref::share(Py_None);
    check(PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), item.release()));
  }
  return tuple;
}

constexpr const char* kEndName = "te_fl.backward_end";
PyObject* g_backward_end = nullptr;  // the argument of set_backward_end(); never freed

// The function end() of set_backward_end().
PyObject* end_backward(PyObject* capsule, PyObject*) noexcept {
  return guarded([&] {
    auto* scopes = static_cast<nn::CapturedContext*>(PyCapsule_GetPointer(capsule, kEndName));
    if (scopes == nullptr) throw PythonError();
    Status status;
    {
      const WithoutLock unlocked;
      const auto entered = scopes->enter();
      status = nn::backward_end();
    }
    check(status);
    return Ref::share(Py_None);
  });
}

// Asks the framework to call end_backward() when its backward pass ends, if scales await that.
void queue_backward_end(const nn::CapturedContext& scopes) {
  const void* const awaiting = scopes.awaits_backward_end();
  if (awaiting == nullptr || g_backward_end == nullptr) return;
  static PyMethodDef method = {"end_backward", end_backward, METH_NOARGS, "end_backward()"};
  auto owner = std::make_unique<nn::CapturedContext>(scopes);
  const Ref capsule = Ref::take(PyCapsule_New(owner.get(), kEndName, [](PyObject* c) {
    delete static_cast<nn::CapturedContext*>(PyCapsule_GetPointer(c, kEndName));
  }));
  owner.release();
  const Ref end = Ref::take(PyCFunction_New(&method, capsule.get()));
  const Ref key = Ref::take(PyLong_FromVoidPtr(const_cast<void*>(awaiting)));
  Ref::take(PyObject_CallFunctionObjArgs(g_backward_end, key.get(), end.get(), nullptr));
}

}  // namespace

PyObject* layer_backward(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept {
  return guarded([&] {
    using Argument = layer_call::BackwardArgument;
    check_least("layer_backward", count, Argument::kParameters);
    const std::shared_ptr<Record> record = find_record(args[Argument::kToken]);
    follow_memory(*record);
    std::vector<Lent> kept;
    const bool delays = record->layer->delays_wgrad;
    const Tensor dy = delays ? to_tensor(args[Argument::kGradient], "gradient", kept)
                             : to_tensor(args[Argument::kGradient], "gradient", false);
    auto parameters =
        lend_parameters(*record->layer, {args + Argument::kParameters, args + count}, true);
    const auto main_grads = read_main_grads(args[Argument::kMainGrads], parameters.size());
    void* const stream = find_current_stream(args[Argument::kGradient], dy.device());
    ResultTensors results(args[Argument::kGradient], dy.device());
    for (const auto& [begin, end] : record->memory) results.permit(begin, end);
    const bool input_grad = args[Argument::kInputGrad] == Py_True;
    if (input_grad) {
      for (const auto& [shape, dtype] : record->inputs) results.expect(shape, dtype);
    }
    expect_gradients(results, *record->layer, parameters, record->trained, main_grads);
    const bool deterministic = wants_deterministic();
    std::optional<Result<Gradients>> gradients;
    {
      const WithoutLock unlocked;
      gradients.emplace(run_backward(*record, dy, std::move(kept), parameters, main_grads, results,
                                     stream, args[Argument::kKeep] == Py_True, input_grad,
                                     deterministic));
    }
    Gradients made = value_or_throw(*std::move(gradients));
    gradients.reset();
    if (!input_grad) made.inputs.clear();
    made.inputs.resize(record->followed);
    std::ranges::move(made.parameters, std::back_inserter(made.inputs));
    Ref all = to_tuple(std::move(made.inputs), results, args[Argument::kGradient]);
    queue_backward_end(record->scopes);
    note_backward();
    return all;
  });
}

PyObject* layer_backward_dw(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *capsule = nullptr, *objects = nullptr, *wanted = nullptr, *like = nullptr;
    if (PyArg_ParseTuple(args, "OOOO", &capsule, &objects, &wanted, &like) == 0)
      throw PythonError();
    const std::shared_ptr<Layer> layer = unwrap_layer(capsule);
    const auto items = list_items(objects, "parameters");
    auto parameters = lend_parameters(*layer, items, true);
    const auto main_grads = read_main_grads(wanted, parameters.size());
    const DelayedGradients left = value_or_throw(take_delayed(*layer));
    for (const Lent& lent : left.lent) lent.check();
    const Device device = parameters.at(0).value.device();
    void* const stream = find_current_stream(like, device);
    ResultTensors results(items.front(), device);
    expect_gradients(results, *layer, parameters, left.trained, main_grads);
    const DeterministicScope deterministic;
    std::optional<Result<std::vector<Tensor>>> gradients;
    {
      const WithoutLock unlocked;
      gradients.emplace(run_backward_dw(*layer, left, parameters, main_grads, results, stream));
    }
    auto made = value_or_throw(*std::move(gradients));
    gradients.reset();
    return to_tuple(std::move(made), results, like);
  });
}

PyObject* set_backward_end(PyObject*, PyObject* function) noexcept {
  return guarded([&] {
    Py_INCREF(function);
    Py_XDECREF(std::exchange(g_backward_end, function));
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
