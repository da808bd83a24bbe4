#include "torch/scale_functions.hpp"

#include <string>
#include <utility>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "py/interpreter.hpp"
#include "te_fl/device.hpp"
#include "torch/callback.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kName = "te_fl.scale_functions";
using Functions = std::shared_ptr<const nn::AmaxFunction>;

// Calls function(first, second, [fp8_max,] stream) with tensors of the framework of `like`.
Status call(const Kept& function, const Kept& like, const Tensor& first, const Tensor& second,
            const float* fp8_max) {
  const InterpreterLock lock;
  if (!lock.held()) {
    return failed_precondition(
        "the interpreter has ended, so the recipe's functions of amaxes and scales cannot run");
  }
  try {
    const Ref a = to_framework(first, like.get()), b = to_framework(second, like.get());
    const Ref stream = Ref::take(PyLong_FromVoidPtr(devices::current_stream(first.device())));
    const Ref most = to_python(fp8_max == nullptr ? 0.0 : static_cast<double>(*fp8_max));
    PyObject* const done =
        fp8_max == nullptr
            ? PyObject_CallFunctionObjArgs(function.get(), a.get(), b.get(), stream.get(), nullptr)
            : PyObject_CallFunctionObjArgs(function.get(), a.get(), b.get(), most.get(),
                                           stream.get(), nullptr);
    if (done == nullptr) return callback_failed();
    Py_DECREF(done);
    return {};
  } catch (const PythonError&) {
    return callback_failed();
  }
}

}  // namespace

PyObject* make_scale_functions(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *name = nullptr, *amax = nullptr, *scale = nullptr, *of = nullptr;
    if (PyArg_ParseTuple(args, "OOOO", &name, &amax, &scale, &of) == 0) throw PythonError();
    const auto find_amax = std::make_shared<Kept>(amax), like = std::make_shared<Kept>(of);
    nn::AmaxFunction made{.name = std::string(to_text(name, "the name")),
                          .compute = [find_amax, like](const Tensor& history, const Tensor& out) {
                            return call(*find_amax, *like, history, out, nullptr);
                          }};
    if (scale != Py_None) {
      made.compute_scale = [find_scale = std::make_shared<Kept>(scale), like](
                               const Tensor& found, const Tensor& out, float fp8_max) {
        return call(*find_scale, *like, found, out, &fp8_max);
      };
    }
    auto owner =
        std::make_unique<Functions>(std::make_shared<const nn::AmaxFunction>(std::move(made)));
    Ref capsule = Ref::take(PyCapsule_New(owner.get(), kName, [](PyObject* c) {
      delete static_cast<Functions*>(PyCapsule_GetPointer(c, kName));
    }));
    owner.release();
    return capsule;
  });
}

Functions read_scale_functions(PyObject* described) {
  const Ref module = Ref::take(PyImport_ImportModule("te_fl.pytorch.fp8.scale_functions"));
  const Ref bound = Ref::take(PyObject_CallMethod(module.get(), "native_of", "O", described));
  auto* functions = static_cast<Functions*>(PyCapsule_GetPointer(bound.get(), kName));
  if (functions == nullptr) throw PythonError();
  return *functions;
}

}  // namespace te_fl::python
