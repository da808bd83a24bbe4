#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "errors.hpp"
#include "framework_tensor.hpp"
#include "layer.hpp"
#include "te_fl/nn/autocast.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kScopeName = "te_fl.autocast";

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

nn::Recipe recipe_of(PyObject* dict) {
  if (!PyDict_Check(dict)) throw_type_error("the recipe must be a dict");
  const std::string_view kind = text_of(get(dict, "kind"), "the recipe's kind");
  const auto format = text_of(get(dict, "format"), "the recipe's format") == "e4m3"
                          ? nn::Fp8Format::kE4M3
                          : nn::Fp8Format::kHybrid;
  if (kind == "delayed") {
    PyObject* algorithm = get(dict, "amax_compute_algo");
    if (!PyUnicode_Check(algorithm)) {
      throw_status(Status(StatusCode::kUnsupported,
                          "DelayedScaling: amax_compute_algo is a function; te-fl computes 'max' "
                          "and 'most_recent' on the device"));
    }
    return nn::DelayedScaling{.margin = static_cast<int>(integer(dict, "margin")),
                              .format = format,
                              .amax_history_len = integer(dict, "amax_history_len"),
                              .amax_compute_algo = text_of(algorithm, "amax_compute_algo") == "max"
                                                       ? nn::AmaxAlgo::kMax
                                                       : nn::AmaxAlgo::kMostRecent,
                              .fp8_dpa = truth(get(dict, "fp8_dpa"))};
  }
  if (kind == "current") {
    return nn::Float8CurrentScaling{.format = format,
                                    .pow2_scale = truth(get(dict, "pow2_scale")),
                                    .amax_epsilon = real(dict, "amax_epsilon")};
  }
  if (kind == "block") {
    return nn::Float8BlockScaling{.pow2_scale = truth(get(dict, "pow2_scale")),
                                  .amax_epsilon = real(dict, "amax_epsilon")};
  }
  throw_value_error("the recipe's kind is '" + std::string(kind) +
                    "'; it is one of delayed, current, block");
}

// The recipe of the last dict. A program enters its autocasts with one or two recipes, whose dicts
// native_of() keeps, and leaves as they are. Under the interpreter's lock.
const nn::Recipe& checked_recipe_of(PyObject* dict) {
  static PyObject* last = nullptr;
  static auto* recipe = new nn::Recipe(nn::DelayedScaling{});
  if (dict == last) return *recipe;
  nn::Recipe made = recipe_of(dict);
  check(nn::validate(made));
  Py_INCREF(dict);
  *recipe = std::move(made);
  Py_XDECREF(std::exchange(last, dict));
  return *recipe;
}

}  // namespace

PyObject* begin_autocast(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept {
  return guarded([&] {
    check_count("begin_autocast", count, 3);
    const nn::AutocastOptions options{.enabled = truth(args[0]), .calibrating = truth(args[1])};
    // Without a recipe nothing computes in FP8, and none is asked for.
    auto scope = args[2] == Py_None
                     ? std::make_unique<nn::autocast>(options)
                     : std::make_unique<nn::autocast>(options, checked_recipe_of(args[2]));
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
    const FrameworkStreams streams;  // where the forwards have left their amaxes
    {
      const WithoutLock unlocked;
      status = scope->exit();
    }
    check(status);
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
