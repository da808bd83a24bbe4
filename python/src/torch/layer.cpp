#include "torch/layer.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "ops/policy.hpp"
#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/nn/fp8/autocast.hpp"
#include "te_fl/nn/modules/init.hpp"
#include "te_fl/op_manager.hpp"
#include "torch/layer_kinds.hpp"
#include "torch/lent_parameter.hpp"
#include "torch/recompute.hpp"
#include "torch/result_tensors.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kLayerName = "te_fl.layer";
constexpr const char* kStatesName = "te_fl.fp8_states";

// What the layers of one module have in common.
struct ModuleStates {
  nn::Fp8States fp8;
  std::mutex mutex;  // taken without the interpreter's lock, which others wait for inside
};

// A framework's parameter as the last forward saw it.
struct Seen {
  const PyObject* object = nullptr;  // compared only; it may have gone
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
  std::vector<Lent> lent;  // what it is computed of, among others
  bool first = false;      // as Record's
};

struct Layer {
  MakeRunner make;
  std::map<DType, std::shared_ptr<Runner>> runners;  // by the activations' dtype
  std::vector<std::pair<std::string, std::shared_ptr<ModuleStates>>> states;  // by prefix
  std::vector<std::mutex*> mutexes;  // of the states, in the order in which they are taken
  std::vector<std::pair<std::string, Shape>> parameters;
  // What the gradients of parameters may be parts of, each with one of those parameters.
  std::vector<std::pair<size_t, Shape>> joined;
  std::vector<Seen> seen;
  uint64_t numbers = 0;   // the last number that was given
  long long caching = 0;  // the last scope in which quantised weights were kept
  bool delays_wgrad = false;
  std::deque<DelayedGradients> delayed;  // in the order of their backwards
};

// One layer's call at a time, of all layers that share states with it.
class LayerLock {
 public:
  explicit LayerLock(const Layer& layer) : mutexes_(layer.mutexes) {
    for (std::mutex* mutex : mutexes_) mutex->lock();
  }
  ~LayerLock() {
    for (std::mutex* mutex : mutexes_) mutex->unlock();
  }
  LayerLock(const LayerLock&) = delete;
  LayerLock& operator=(const LayerLock&) = delete;

 private:
  const std::vector<std::mutex*>& mutexes_;
};

// One forward that waits for its backward.
struct Record {
  std::shared_ptr<Layer> layer;
  std::shared_ptr<Runner> runner;
  nn::Ctx ctx;
  nn::CapturedContext scopes;
  std::vector<uint64_t> numbers;
  std::vector<bool> trained;
  std::vector<Lent> lent;
  bool first = false;  // is_first_microbatch: gradients overwrite main_grad
  std::vector<std::pair<Shape, DType>> inputs;  // whose gradients the backward returns
};

// The forwards that wait, by number. A token that was copied elsewhere names one that has gone.
struct Records {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Record>> by_number;
  int64_t last = 0;
};
Records& records() {
  static auto* all = new Records();
  return *all;
}

int64_t add_record(std::shared_ptr<Record> record) {
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  all.by_number.emplace(++all.last, std::move(record));
  return all.last;
}
void drop_record(int64_t number) {
  std::shared_ptr<Record> dropped;  // goes after the lock
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_number.find(number);
  if (found == all.by_number.end()) return;
  dropped = std::move(found->second);
  all.by_number.erase(found);
}

std::shared_ptr<Record> record_of(PyObject* token) {
  const Tensor number = tensor_of(token, "token", false);
  if (!number.device().is_host() || number.dtype() != DType::kI64 || number.numel() != 1) {
    throw_type_error("the token is " + number.describe() + "; it must be the int64 of a forward");
  }
  Records& all = records();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_number.find(*number.data<int64_t>());
    if (found != all.by_number.end()) return found->second;
  }
  throw_status(Status(StatusCode::kFailedPrecondition,
                      "what this forward kept for its backward has gone: a hook for saved tensors "
                      "replaced it by a copy, or the process was forked since; run the forward "
                      "again"));
}

const std::shared_ptr<Layer>& layer_of(PyObject* capsule) {
  auto* layer = static_cast<std::shared_ptr<Layer>*>(PyCapsule_GetPointer(capsule, kLayerName));
  if (layer == nullptr) throw PythonError();
  return *layer;
}

const std::shared_ptr<ModuleStates>& states_of(PyObject* capsule) {
  auto* states =
      static_cast<std::shared_ptr<ModuleStates>*>(PyCapsule_GetPointer(capsule, kStatesName));
  if (states == nullptr) throw PythonError();
  return *states;
}

Result<std::shared_ptr<Runner>> new_runner(const Layer& layer, DType activation) {
  const nn::init::WithoutValues borrowed;
  TE_FL_ASSIGN_OR_RETURN(auto made, layer.make(activation));
  made->module().set_delay_wgrad(layer.delays_wgrad);
  for (const auto& [prefix, states] : layer.states) {
    TE_FL_RETURN_IF_ERROR(made->module().share_fp8_states(states->fp8, prefix));
  }
  return std::shared_ptr<Runner>(std::move(made));
}

// The module for activations of `dtype`.
Result<std::shared_ptr<Runner>> runner_for(Layer& layer, DType dtype) {
  std::shared_ptr<Runner>& runner = layer.runners[dtype];
  if (runner == nullptr) {
    TE_FL_ASSIGN_OR_RETURN(runner, new_runner(layer, dtype));
  }
  return runner;
}

long long integer_of(PyObject* value) {
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return number;
}

std::vector<PyObject*> items_of(PyObject* tuple, const char* what) {
  if (!PyTuple_Check(tuple)) throw_type_error(std::string(what) + " must be a tuple");
  const auto count = static_cast<size_t>(PyTuple_Size(tuple));
  std::vector<PyObject*> items(count);
  for (size_t i = 0; i < count; ++i) {
    items[i] = PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(i));
  }
  return items;
}

// The parameters in the layer's order.
std::vector<LentParameter> parameters_of(const Layer& layer, const std::vector<PyObject*>& objects,
                                         bool training) {
  if (objects.size() != layer.parameters.size()) {
    throw_type_error("the layer has " + std::to_string(layer.parameters.size()) + " parameters; " +
                     std::to_string(objects.size()) + " were given");
  }
  std::vector<LentParameter> lent;
  lent.reserve(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    lent.push_back(lent_parameter(objects[i], layer.parameters[i].first.c_str(), training));
  }
  return lent;
}

// The mode of a forward: whether it keeps what a backward needs, and else the number of the scope
// in which quantised weights are kept.
constexpr long long kTraining = 0, kUncached = 1;

// PyTorch's count of writes to the tensor; -1 of one that has none, as those made in its inference
// mode.
long version_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_version");
  PyObject* version = PyObject_GetAttr(tensor, name);
  if (version == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw PythonError();
    PyErr_Clear();
    return -1;
  }
  const Ref owner = Ref::take(version);
  const long number = PyLong_AsLong(version);
  if (number == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return number;
}

// The parameters' contents now. Under the interpreter's lock.
Contents number_contents(Layer& layer, const std::vector<PyObject*>& objects,
                         const std::vector<LentParameter>& lent, long long mode, bool reused) {
  // Parameters are written in ways that PyTorch does not count (`data`, views of NumPy's, FSDP2's
  // gathering), and a new one may lie where the last one was. So contents are the same only where
  // the caller says that they are: by is_first_microbatch, or by a scope.
  const bool caching = mode > kUncached;
  const bool changed = caching ? layer.caching != mode : !reused;
  if (caching) layer.caching = mode;
  Contents contents{std::vector<uint64_t>(objects.size()), std::vector<long>(objects.size())};
  for (size_t i = 0; i < objects.size(); ++i) {
    const long now = version_of(objects[i]);
    Seen& seen = layer.seen[i];
    const void* data = lent[i].value.raw_data();
    const bool moved = caching && data != seen.data;
    if (changed || moved || seen.object != objects[i] || seen.version != now) {
      seen.number = ++layer.numbers;
    }
    seen.object = objects[i], seen.version = now, seen.data = data;
    contents.numbers[i] = seen.number;
    contents.versions[i] = now;
  }
  return contents;
}

Status lend(Runner& runner, std::vector<LentParameter>& lent, const std::vector<uint64_t>& numbers,
            const std::vector<bool>* trained) {
  const auto& parameters = runner.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    nn::Parameter& p = *parameters[i].parameter;
    if (Status status = p.borrow(std::move(lent[i].value), numbers[i]); !status.ok()) {
      return status.wrap(parameters[i].name);
    }
    if (trained != nullptr && p.requires_grad != (*trained)[i]) {
      p.set_requires_grad((*trained)[i]);
    }
  }
  return {};
}

// An input of a forward that trains, noted in `lent`, or of another, which keeps nothing.
Tensor input_of(PyObject* object, const char* name, bool training, std::vector<Lent>& lent) {
  return training ? tensor_of(object, name, lent) : tensor_of(object, name, false);
}

void set_field(nn::AttentionInputs& in, std::string_view name, PyObject* value, bool training,
               std::vector<Lent>& lent) {
  struct Field {
    std::string_view name;
    Tensor nn::AttentionInputs::*tensor;
  };
  static constexpr Field fields[] = {
      {"attn_mask", &nn::AttentionInputs::attn_mask},
      {"bias", &nn::AttentionInputs::bias},
      {"alibi_slopes", &nn::AttentionInputs::alibi_slopes},
      {"cu_seqlens_q", &nn::AttentionInputs::cu_seqlens_q},
      {"cu_seqlens_kv", &nn::AttentionInputs::cu_seqlens_kv},
      {"cu_seqlens_q_padded", &nn::AttentionInputs::cu_seqlens_q_padded},
      {"cu_seqlens_kv_padded", &nn::AttentionInputs::cu_seqlens_kv_padded},
      {"rotary_angles", &nn::AttentionInputs::rotary_angles},
      {"rotary_start_positions", &nn::AttentionInputs::rotary_start_positions},
  };
  for (const Field& field : fields) {
    if (field.name != name) continue;
    in.*field.tensor = input_of(value, std::string(name).c_str(), training, lent);
    return;
  }
  if (name == "max_seqlen_q") {
    in.max_seqlen_q = integer_of(value);
  } else if (name == "max_seqlen_kv") {
    in.max_seqlen_kv = integer_of(value);
  } else {
    throw_type_error("attention has no input '" + std::string(name) + "'");
  }
}

nn::AttentionInputs attention_of(PyObject* dict, bool training, std::vector<Lent>& lent) {
  nn::AttentionInputs inputs;
  if (dict == Py_None) return inputs;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    if (value == Py_None) continue;
    set_field(inputs, text_of(key, "an input's name"), value, training, lent);
  }
  return inputs;
}

nn::ForwardOptions microbatch_of(PyObject* value) {
  nn::ForwardOptions options;
  if (value == Py_True || value == Py_False) {
    options.is_first_microbatch = value == Py_True;
  } else if (value != Py_None) {
    options.reuse_weights = tensor_of(value, "is_first_microbatch", true);
  }
  return options;
}

// The generator's two numbers, as te-fl reads them.
Result<nn::Context> context_of(const Tensor& random) {
  if (random.dtype() != DType::kI64 || random.numel() != 2) {
    return Status(StatusCode::kInvalidArgument,
                  "random is " + random.describe() + "; it must be int64 [2]");
  }
  auto owner = std::make_shared<Tensor>(random);
  const std::array<int64_t, 1> two{2};
  TE_FL_ASSIGN_OR_RETURN(Tensor position, Tensor::wrap(owner->raw_data(), two, {}, DType::kU64,
                                                       random.device(), owner));
  return nn::Context::with_random(std::move(position));
}

// What a forward is given, read under the interpreter's lock.
struct Forward {
  std::vector<Tensor> inputs;
  std::vector<LentParameter> parameters;
  std::vector<uint64_t> numbers;
  std::vector<bool> trained;
  std::vector<Lent> lent;
  nn::AttentionInputs attention;
  nn::ForwardOptions options;
  Tensor random;
  DType activation = DType::kF32;
  void* stream = nullptr;
  long long mode = kTraining;
};

std::vector<std::pair<Shape, DType>> kinds_of(const Forward& f) {
  std::vector<std::pair<Shape, DType>> kinds;
  const auto add = [&](const Tensor& t) {
    kinds.emplace_back(Shape(t.shape().begin(), t.shape().end()), t.dtype());
  };
  for (const Tensor& input : f.inputs) add(input);
  if (f.attention.bias.defined()) add(f.attention.bias);
  return kinds;
}

Result<Tensor> run(Layer& layer, Forward& f, ResultTensors& results,
                   std::shared_ptr<Record>& record) {
  const LayerLock lock(layer);
  TE_FL_ASSIGN_OR_RETURN(auto runner, runner_for(layer, f.activation));
  const bool training = f.mode == kTraining;
  TE_FL_RETURN_IF_ERROR(lend(*runner, f.parameters, f.numbers, training ? &f.trained : nullptr));
  std::optional<nn::ContextScope> random;
  if (f.random.defined()) {
    TE_FL_ASSIGN_OR_RETURN(nn::Context context, context_of(f.random));
    random.emplace(context.with_stream(f.inputs[0].device(), f.stream));
  }
  const StreamScope stream(f.inputs[0].device(), f.stream);
  // A forward with random numbers keeps what a backward reads, wanted or not: without, it would
  // draw none.
  const bool keeps = training || f.random.defined();
  nn::Ctx ctx;
  results.expect(runner->output_shape(f.inputs), f.activation);
  const ResultScope framework(results);
  TE_FL_ASSIGN_OR_RETURN(Tensor y,
                         runner->forward(f.inputs, keeps ? &ctx : nullptr, f.attention, f.options));
  if (!training) return y;
  record = std::make_shared<Record>(Record{.layer = nullptr,
                                           .runner = std::move(runner),
                                           .ctx = std::move(ctx),
                                           .scopes = nn::CapturedContext::capture(),
                                           .numbers = std::move(f.numbers),
                                           .trained = std::move(f.trained),
                                           .lent = std::move(f.lent),
                                           .first = f.options.is_first_microbatch == true,
                                           .inputs = kinds_of(f)});
  return y;
}

struct Gradients {
  std::vector<Tensor> inputs, parameters;
};

// Where a weight's gradient goes instead of being returned; undefined: it is returned.
struct MainGrad {
  Tensor tensor;
  bool overwrites = false;
};

// Says where gradients go: into main_grads, or new memory of the parameters' dtypes. `first`: in
// main_grads they overwrite what is there.
Status open_gradients(Runner& runner, const std::vector<DType>& dtypes,
                      const std::vector<MainGrad>& main_grads, bool first) {
  const auto& own = runner.parameters();
  for (size_t i = 0; i < own.size(); ++i) {
    nn::Parameter& p = *own[i].parameter;
    p.take_grad();  // what an earlier backward, which failed, may have left
    p.grad_dtype = dtypes[i];
    const MainGrad& main = main_grads[i];
    if (main.tensor.defined() && p.requires_grad) {
      TE_FL_RETURN_IF_ERROR(p.give_grad(main.tensor, !main.overwrites && !first));
    }
  }
  return {};
}

// Parameters of one module and one kind may be parts of one array (parameters_split), and then so
// are their gradients: the sums of neighbours, of which some are such arrays.
std::vector<std::pair<size_t, Shape>> joined_of(
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

// The gradients of parameters that are returned.
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

// Those that did not go into main_grads.
std::vector<Tensor> take_gradients(Runner& runner, const std::vector<MainGrad>& main_grads) {
  const auto& own = runner.parameters();
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < own.size(); ++i) {
    Tensor grad = own[i].parameter->take_grad();
    gradients.push_back(main_grads[i].tensor.defined() ? Tensor() : std::move(grad));
  }
  return gradients;
}

std::vector<DType> dtypes_of(const std::vector<LentParameter>& parameters) {
  std::vector<DType> dtypes;
  for (const LentParameter& p : parameters) dtypes.push_back(p.dtype);
  return dtypes;
}

// `kept`: the gradient, if what is delayed is computed of it. `deterministic`: asked for now,
// whatever the forward had.
Result<Gradients> run_backward(Record& record, const Tensor& dy, std::vector<Lent> kept,
                               std::vector<LentParameter>& parameters,
                               const std::vector<MainGrad>& main_grads, ResultTensors& results,
                               void* stream, bool keep, bool deterministic) {
  Layer& layer = *record.layer;
  const LayerLock lock(layer);
  TE_FL_RETURN_IF_ERROR(lend(*record.runner, parameters, record.numbers, &record.trained));
  const auto scopes = record.scopes.enter();
  const DeterministicScope policy(deterministic);
  const StreamScope on(dy.device(), stream);
  TE_FL_RETURN_IF_ERROR(
      open_gradients(*record.runner, dtypes_of(parameters), main_grads, record.first));
  const ResultScope framework(results);
  Gradients gradients;
  if (keep) {
    nn::Ctx copy = record.ctx;
    TE_FL_ASSIGN_OR_RETURN(gradients.inputs, record.runner->backward(dy, copy));
  } else {
    TE_FL_ASSIGN_OR_RETURN(gradients.inputs, record.runner->backward(dy, record.ctx));
  }
  gradients.parameters = take_gradients(*record.runner, main_grads);
  if (layer.delays_wgrad) {
    kept.insert(kept.end(), record.lent.begin(), record.lent.end());
    layer.delayed.push_back({record.runner, record.runner->module().take_delayed_wgrad(),
                             record.numbers, record.trained, std::move(kept), record.first});
  }
  return gradients;
}

// Takes what the earliest of the backwards has left.
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
  TE_FL_RETURN_IF_ERROR(
      open_gradients(*left.runner, dtypes_of(parameters), main_grads, left.first));
  const StreamScope on(device, stream);
  const ResultScope framework(results);
  TE_FL_RETURN_IF_ERROR(left.compute());
  return take_gradients(*left.runner, main_grads);
}

// main_grads as Python gives them, one for each parameter.
std::vector<MainGrad> main_grads_of(PyObject* tuple, size_t parameters) {
  std::vector<MainGrad> grads(parameters);
  if (tuple == Py_None) return grads;
  const auto given = items_of(tuple, "main_grads");
  for (size_t i = 0; i < grads.size() && i < given.size(); ++i) {
    if (given[i] == Py_None) continue;
    PyObject* tensor = nullptr;
    int overwrites = 0;
    if (PyArg_ParseTuple(given[i], "Op", &tensor, &overwrites) == 0) throw PythonError();
    grads[i] = {tensor_of(tensor, "main_grad", false), overwrites != 0};
  }
  return grads;
}

Ref tuple_of(std::vector<Tensor> tensors, ResultTensors& results, PyObject* like) {
  Ref tuple = Ref::take(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t i = 0; i < tensors.size(); ++i) {
    Ref item =
        tensors[i].defined() ? results.take(std::move(tensors[i]), like) : Ref::share(Py_None);
    check(PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), item.release()));
  }
  return tuple;
}

std::vector<bool> trained_of(const std::vector<PyObject*>& parameters) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  std::vector<bool> trained(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    trained[i] = Ref::take(PyObject_GetAttr(parameters[i], name)).get() == Py_True;
  }
  return trained;
}

}  // namespace

PyObject* make_fp8_states(PyObject*, PyObject*) noexcept {
  return guarded([&] {
    auto states = std::make_unique<std::shared_ptr<ModuleStates>>(std::make_shared<ModuleStates>());
    Ref capsule = Ref::take(PyCapsule_New(states.get(), kStatesName, [](PyObject* c) {
      delete static_cast<std::shared_ptr<ModuleStates>*>(PyCapsule_GetPointer(c, kStatesName));
    }));
    states.release();
    return capsule;
  });
}

PyObject* make_layer(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *kind = nullptr, *options = nullptr, *states = nullptr;
    if (PyArg_ParseTuple(args, "OOO", &kind, &options, &states) == 0) throw PythonError();
    without_lock([] { OpManager::instance(); });  // the first use loads plugins, perhaps Python's
    auto layer = std::make_shared<Layer>();
    layer->make = runner_of(text_of(kind, "the kind of layer"), options);
    for (PyObject* given : items_of(states, "states")) {
      PyObject *prefix = nullptr, *capsule = nullptr;
      if (PyArg_ParseTuple(given, "OO", &prefix, &capsule) == 0) throw PythonError();
      layer->states.emplace_back(text_of(prefix, "a prefix"), states_of(capsule));
    }
    if (layer->states.empty()) layer->states.emplace_back("", std::make_shared<ModuleStates>());
    for (const auto& [prefix, shared] : layer->states) layer->mutexes.push_back(&shared->mutex);
    std::ranges::sort(layer->mutexes, std::less<>());
    const auto same = std::ranges::unique(layer->mutexes);
    layer->mutexes.erase(same.begin(), same.end());
    auto runner = value_of([&]() -> Result<std::shared_ptr<Runner>> {
      const WithoutLock unlocked;
      const LayerLock lock(*layer);
      return new_runner(*layer, DType::kF32);
    }());
    for (const nn::NamedParameter& p : runner->module().parameters()) {
      const auto shape = p.value().shape();
      layer->parameters.emplace_back(p.name, Shape(shape.begin(), shape.end()));
    }
    layer->joined = joined_of(layer->parameters);
    layer->runners.emplace(DType::kF32, std::move(runner));
    layer->seen.resize(layer->parameters.size());
    auto owner = std::make_unique<std::shared_ptr<Layer>>(std::move(layer));
    Ref capsule = Ref::take(PyCapsule_New(owner.get(), kLayerName, [](PyObject* c) {
      delete static_cast<std::shared_ptr<Layer>*>(PyCapsule_GetPointer(c, kLayerName));
    }));
    owner.release();
    return capsule;
  });
}

PyObject* layer_parameters(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    return list_of(layer_of(capsule)->parameters, [](const auto& parameter) {
      const Ref shape = list_of(parameter.second, [](int64_t n) { return to_python(n); });
      const Ref name = to_python(std::string_view(parameter.first));
      return Ref::take(PyTuple_Pack(2, name.get(), shape.get()));
    });
  });
}

PyObject* layer_forward(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept {
  return guarded([&] {
    check_count("layer_forward", count, 8);
    const std::shared_ptr<Layer>& layer = layer_of(args[0]);
    Forward f;
    f.mode = integer_of(args[2]);
    const bool training = f.mode == kTraining;
    for (PyObject* input : items_of(args[4], "inputs")) {
      f.inputs.push_back(input_of(input, "input", training, f.lent));
    }
    if (f.inputs.empty()) throw_type_error("a layer takes at least one input");
    const auto objects = items_of(args[5], "parameters");
    f.parameters = parameters_of(*layer, objects, training);
    f.options = microbatch_of(args[3]);
    const bool reused = f.options.is_first_microbatch == false || f.options.reuse_weights.defined();
    Contents contents = number_contents(*layer, objects, f.parameters, f.mode, reused);
    f.numbers = contents_in_piece(layer.get(), std::move(contents)).numbers;
    if (training) f.trained = trained_of(objects);
    f.attention = attention_of(args[6], training, f.lent);
    if (args[7] != Py_None) f.random = tensor_of(args[7], "random", true);
    const long long activation = integer_of(args[1]);
    f.activation = activation < 0 ? f.inputs[0].dtype() : static_cast<DType>(activation);
    PyObject* like = PyTuple_GetItem(args[4], 0);
    f.stream = current_stream_of(like, f.inputs[0].device());
    ResultTensors results(like, f.inputs[0].device());
    const DeterministicScope deterministic;
    std::shared_ptr<Record> record;
    std::optional<Result<Tensor>> y;
    {
      const WithoutLock unlocked;
      y.emplace(run(*layer, f, results, record));
    }
    Tensor made = value_of(*std::move(y));
    y.reset();
    const Ref output = results.take(std::move(made), like);
    Ref token = Ref::share(Py_None);
    if (record != nullptr) {
      record->layer = layer;
      token = number_tensor(add_record(std::move(record)), drop_record, like);
    }
    return Ref::take(PyTuple_Pack(2, output.get(), token.get()));
  });
}

PyObject* layer_backward(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept {
  return guarded([&] {
    check_count("layer_backward", count, 5);
    const std::shared_ptr<Record> record = record_of(args[0]);
    for (const Lent& lent : record->lent) lent.check();
    std::vector<Lent> kept;
    const bool delays = record->layer->delays_wgrad;
    const Tensor dy =
        delays ? tensor_of(args[1], "gradient", kept) : tensor_of(args[1], "gradient", false);
    auto parameters = parameters_of(*record->layer, items_of(args[2], "parameters"), true);
    const auto main_grads = main_grads_of(args[3], parameters.size());
    void* const stream = current_stream_of(args[1], dy.device());
    ResultTensors results(args[1], dy.device());
    for (const auto& [shape, dtype] : record->inputs) results.expect(shape, dtype);
    expect_gradients(results, *record->layer, parameters, record->trained, main_grads);
    const bool deterministic = wants_deterministic();
    std::optional<Result<Gradients>> gradients;
    {
      const WithoutLock unlocked;
      gradients.emplace(run_backward(*record, dy, std::move(kept), parameters, main_grads, results,
                                     stream, args[4] == Py_True, deterministic));
    }
    Gradients made = value_of(*std::move(gradients));
    gradients.reset();
    const Ref inputs = tuple_of(std::move(made.inputs), results, args[1]);
    const Ref own = tuple_of(std::move(made.parameters), results, args[1]);
    return Ref::take(PyTuple_Pack(2, inputs.get(), own.get()));
  });
}

PyObject* delay_layer_wgrad(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    Layer& layer = *layer_of(capsule);
    const WithoutLock unlocked;
    const LayerLock lock(layer);
    layer.delays_wgrad = true;
    for (const auto& [dtype, runner] : layer.runners) runner->module().set_delay_wgrad(true);
    return Ref::share(Py_None);
  });
}

PyObject* layer_backward_dw(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *capsule = nullptr, *objects = nullptr, *given = nullptr, *like = nullptr;
    if (PyArg_ParseTuple(args, "OOOO", &capsule, &objects, &given, &like) == 0) throw PythonError();
    const std::shared_ptr<Layer> layer = layer_of(capsule);
    const auto items = items_of(objects, "parameters");
    auto parameters = parameters_of(*layer, items, true);
    const auto main_grads = main_grads_of(given, parameters.size());
    const DelayedGradients left = value_of(take_delayed(*layer));
    for (const Lent& lent : left.lent) lent.check();
    const Device device = parameters.at(0).value.device();
    void* const stream = current_stream_of(like, device);
    ResultTensors results(items.front(), device);
    expect_gradients(results, *layer, parameters, left.trained, main_grads);
    const DeterministicScope deterministic;
    std::optional<Result<std::vector<Tensor>>> gradients;
    {
      const WithoutLock unlocked;
      gradients.emplace(run_backward_dw(*layer, left, parameters, main_grads, results, stream));
    }
    auto made = value_of(*std::move(gradients));
    gradients.reset();
    return tuple_of(std::move(made), results, like);
  });
}

PyObject* end_backward(PyObject*, PyObject* token) noexcept {
  return guarded([&] {
    const std::shared_ptr<Record> record = record_of(token);
    Status status;
    {
      const WithoutLock unlocked;
      const auto scopes = record->scopes.enter();
      status = nn::backward_end();
    }
    check(status);
    return Ref::share(Py_None);
  });
}

PyObject* fp8_state(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *capsule = nullptr, *like = nullptr;
    if (PyArg_ParseTuple(args, "OO", &capsule, &like) == 0) throw PythonError();
    ModuleStates& states = *states_of(capsule);
    std::vector<nn::NamedTensor> state;
    {
      const WithoutLock unlocked;
      const std::lock_guard lock(states.mutex);
      state = states.fp8.state();
    }
    return list_of(state, [&](const nn::NamedTensor& t) {
      const Ref name = to_python(std::string_view(t.name));
      const Ref tensor = to_framework(t.tensor, like);
      return Ref::take(PyTuple_Pack(2, name.get(), tensor.get()));
    });
  });
}

PyObject* load_fp8_state(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *capsule = nullptr, *given = nullptr;
    if (PyArg_ParseTuple(args, "OO", &capsule, &given) == 0) throw PythonError();
    ModuleStates& states = *states_of(capsule);
    std::vector<nn::NamedTensor> state;
    const Ref items = Ref::take(PySequence_List(given));
    for (Py_ssize_t i = 0; i < PyList_Size(items.get()); ++i) {
      PyObject *name = nullptr, *tensor = nullptr;
      if (PyArg_ParseTuple(PyList_GetItem(items.get(), i), "OO", &name, &tensor) == 0) {
        throw PythonError();
      }
      state.push_back({std::string(text_of(name, "a name")), tensor_of(tensor, "state", true)});
    }
    Status status;
    bool sites = false;
    const FrameworkStreams streams;
    {
      const WithoutLock unlocked;
      const std::lock_guard lock(states.mutex);
      sites = !states.fp8.empty();
      if (sites) status = states.fp8.load(state, "FP8 state");
    }
    check(status);
    return Ref::share(sites ? Py_True : Py_False);
  });
}

PyObject* retire_fp8_states(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    ModuleStates& states = *states_of(capsule);
    const WithoutLock unlocked;
    const std::lock_guard lock(states.mutex);
    states.fp8.retire();
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
