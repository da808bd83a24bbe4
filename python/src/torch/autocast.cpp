#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "py/interpreter.hpp"
#include "te_fl/device.hpp"
#include "te_fl/nn/fp8/autocast.hpp"
#include "torch/callback.hpp"
#include "torch/layer.hpp"
#include "torch/process_group.hpp"
#include "torch/quantisers.hpp"
#include "torch/scale_functions.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kScopeName = "te_fl.autocast";
constexpr const char* kReductionName = "te_fl.amax_reduction";

// A cache of the framework's tensors that view lists of amaxes. The list is the same in every step
// until FP8 sites are added or removed. The tensors keep the amaxes' memory alive. Use under the
// interpreter's lock.
class KnownRows {
 public:
  Ref find(std::span<const Tensor> amaxes, PyObject* like) {
    const auto same = [](const Tensor& a, const Tensor& b) {
      return a.raw_data() == b.raw_data() && a.numel() == b.numel() && a.device() == b.device();
    };
    const auto found = std::ranges::find_if(
        all_, [&](const Rows& known) { return std::ranges::equal(known.amaxes, amaxes, same); });
    if (found != all_.end()) return Ref::share(found->list->get());
    const Ref made = make_list(amaxes, [&](const Tensor& row) { return to_framework(row, like); });
    if (all_.size() == kMost) all_.pop_front();
    all_.push_back({{amaxes.begin(), amaxes.end()}, std::make_unique<Kept>(made.get())});
    return Ref::share(made.get());
  }

 private:
  static constexpr size_t kMost = 4;  // forward and backward, each eager and captured in a graph
  struct Rows {
    std::vector<Tensor> amaxes;
    std::unique_ptr<Kept> list;
  };
  std::deque<Rows> all_;
};

PyObject* get(PyObject* dict, const char* key) {
  PyObject* value = PyDict_GetItemString(dict, key);
  if (value == nullptr) throw_type_error(std::string("the recipe lacks '") + key + "'");
  return value;
}
long integer(PyObject* dict, const char* key) {
  const long value = PyLong_AsLong(get(dict, key));
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}
float real(PyObject* dict, const char* key) {
  const double value = PyFloat_AsDouble(get(dict, key));
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return static_cast<float>(value);
}
bool truth(PyObject* value) {
  const int is = PyObject_IsTrue(value);
  check(is);
  return is != 0;
}

nn::Recipe read_recipe(PyObject* dict) {
  if (!PyDict_Check(dict)) throw_type_error("the recipe must be a dict");
  const std::string_view kind = to_text(get(dict, "kind"), "the recipe's kind");
  const auto format = to_text(get(dict, "format"), "the recipe's format") == "e4m3"
                          ? nn::Fp8Format::kE4M3
                          : nn::Fp8Format::kHybrid;
  if (kind == "delayed") {
    PyObject* const functions = get(dict, "functions");
    const bool newest = functions == Py_None &&
                        to_text(get(dict, "amax_compute_algo"), "amax_compute_algo") != "max";
    return nn::DelayedScaling{
        .margin = static_cast<int>(integer(dict, "margin")),
        .format = format,
        .amax_history_len = integer(dict, "amax_history_len"),
        .amax_compute_algo = newest ? nn::AmaxAlgo::kMostRecent : nn::AmaxAlgo::kMax,
        .fp8_dpa = truth(get(dict, "fp8_dpa")),
        .amax_function = functions == Py_None ? nullptr : read_scale_functions(functions)};
  }
  if (kind == "current") {
    return nn::Float8CurrentScaling{
        .format = format,
        .pow2_scale = truth(get(dict, "pow2_scale")),
        .amax_epsilon = real(dict, "amax_epsilon"),
        .backward_override = read_override(get(dict, "backward_override"))};
  }
  if (kind == "mxfp8" && !truth(get(dict, "square_weights"))) {
    return nn::MXFP8BlockScaling{
        .format = format, .backward_override = read_override(get(dict, "backward_override"))};
  }
  if (kind == "block") {
    return nn::Float8BlockScaling{
        .pow2_scale = truth(get(dict, "pow2_scale")),
        .amax_epsilon = real(dict, "amax_epsilon"),
        .format = format,
        .backward_override = read_override(get(dict, "backward_override"))};
  }
  return read_quantisers(dict);
}

// Converts a recipe's dict, with a cache for the last one. A program enters its autocasts with one
// or two recipes, whose dicts native_of() keeps alive and unchanged. Use under the interpreter's
// lock.
const nn::Recipe& find_checked_recipe(PyObject* dict) {
  static PyObject* last = nullptr;
  static auto* recipe = new nn::Recipe(nn::DelayedScaling{});
  if (dict == last) return *recipe;
  nn::Recipe made = read_recipe(dict);
  check(nn::validate(made));
  Py_INCREF(dict);
  *recipe = std::move(made);
  Py_XDECREF(std::exchange(last, dict));
  return *recipe;
}

// True if PyTorch's gradient mode is enabled on this thread.
bool gradients_wanted() {
  static PyObject* const wanted = [] {
    const Ref torch = Ref::take(PyImport_ImportModule("torch"));
    return Ref::take(PyObject_GetAttrString(torch.get(), "is_grad_enabled")).release();
  }();
  return truth(Ref::take(PyObject_CallNoArgs(wanted)).get());
}

// The result of find(group); null for None.
std::shared_ptr<nn::AmaxReduction> make_reduction(PyObject* find, PyObject* group) {
  if (find == Py_None) return nullptr;
  const Ref found = Ref::take(PyObject_CallFunctionObjArgs(find, group, nullptr));
  if (found.get() == Py_None) return nullptr;
  auto* own = static_cast<std::shared_ptr<nn::AmaxReduction>*>(
      PyCapsule_GetPointer(found.get(), kReductionName));
  if (own == nullptr) throw PythonError();
  return *own;
}

}  // namespace

PyObject* make_amax_reduction(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *reduce = nullptr, *like = nullptr, *ranks = nullptr;
    if (PyArg_ParseTuple(args, "OOO", &reduce, &like, &ranks) == 0) throw PythonError();
    const auto held_reduce = std::make_shared<const Kept>(reduce);
    const auto held_like = std::make_shared<const Kept>(like);
    const auto known = std::make_shared<KnownRows>();
    const auto call = [held_reduce, held_like, known](std::span<const Tensor> amaxes) -> Status {
      const InterpreterLock lock;
      if (!lock.held()) return {};
      PyObject* const like = held_like->get();
      try {
        const Device& device = amaxes.front().device();
        const Ref stream = other_stream(like, device, devices::current_stream(device));
        const Ref rows = known->find(amaxes, like);
        PyObject* const done =
            PyObject_CallFunctionObjArgs(held_reduce->get(), rows.get(), stream.get(), nullptr);
        if (done == nullptr) return collective_failed().wrap("torch.distributed.all_reduce");
        Py_DECREF(done);
      } catch (const PythonError&) {
        return callback_failed().wrap("amaxes as tensors");
      }
      return {};
    };
    auto reduction = std::make_unique<std::shared_ptr<nn::AmaxReduction>>(
        std::make_shared<GroupReduction>(call, to_ranks(ranks)));
    Ref capsule = Ref::take(PyCapsule_New(reduction.get(), kReductionName, [](PyObject* c) {
      delete static_cast<std::shared_ptr<nn::AmaxReduction>*>(
          PyCapsule_GetPointer(c, kReductionName));
      drop_dropped();
    }));
    reduction.release();
    return capsule;
  });
}

PyObject* begin_autocast(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept {
  return guarded([&] {
    check_count("begin_autocast", count, 5);
    const nn::AutocastOptions options{.enabled = truth(args[0]),
                                      .calibrating = truth(args[1]),
                                      .amax_reduction = make_reduction(args[3], args[4])};
    // A scope without a recipe neither enables FP8 nor calibrates, so it needs no recipe.
    auto scope = args[2] == Py_None
                     ? std::make_unique<nn::autocast>(options)
                     : std::make_unique<nn::autocast>(options, find_checked_recipe(args[2]));
    Ref capsule = Ref::take(PyCapsule_New(scope.get(), kScopeName, [](PyObject* c) {
      delete static_cast<nn::autocast*>(PyCapsule_GetPointer(c, kScopeName));
    }));
    scope.release();
    return capsule;
  });
}

PyObject* end_autocast(PyObject*, PyObject* capsule) noexcept {
  return guarded([&] {
    auto* scope = static_cast<nn::autocast*>(PyCapsule_GetPointer(capsule, kScopeName));
    if (scope == nullptr) throw PythonError();
    Status status;
    const bool updates = gradients_wanted();
    const FrameworkStreams streams;  // the streams on which the forwards computed their amaxes
    {
      const WithoutLock unlocked;
      status = scope->exit(updates);
    }
    check(status);
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
