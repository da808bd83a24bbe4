#include "torch/quantisers.hpp"

#include <memory>
#include <string>
#include <utility>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "py/interpreter.hpp"
#include "te_fl/device.hpp"
#include "te_fl/wrap_quantized.hpp"
#include "torch/callback.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kQuantisersName = "te_fl.quantisers";

Tensor operand_part(PyObject* quantised, const char* name) {
  const Ref held = Ref::take(PyObject_GetAttrString(quantised, name));
  return held.get() == Py_None ? Tensor() : to_tensor(held.get(), name, true);
}

// The codes of an operand. NVFP4's are uint8 with two codes a byte.
Tensor operand_codes(PyObject* quantised, const char* name, Scaling scaling) {
  Tensor bytes = operand_part(quantised, name);
  if (!bytes.defined() || scaling != Scaling::kNVFP4 || bytes.dtype() != DType::kU8) return bytes;
  Shape shape(bytes.shape().begin(), bytes.shape().end());
  shape.back() *= 2;
  auto codes = Tensor::wrap(bytes.raw_data(), shape, {}, DType::kF4E2M1, bytes.device(),
                            std::make_shared<Tensor>(bytes));
  if (!codes.ok()) throw_status(codes.status().wrap(name));
  return *std::move(codes);
}

// Converts an operand that a quantiser returned.
Tensor read_operand(PyObject* object) {
  if (object == Py_None) return {};
  if (PyObject_HasAttrString(object, "_scaling") == 0) {
    return to_tensor(object, "a quantiser's result", true);
  }
  const Ref number = Ref::take(PyObject_GetAttrString(object, "_scaling"));
  const long scaling = PyLong_AsLong(number.get());
  if (scaling == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  const auto mode = static_cast<Scaling>(scaling);
  auto made =
      wrap_quantized(mode, {.codes = operand_codes(object, "data", mode),
                            .columns = operand_codes(object, "columnwise_data", mode),
                            .scale_inv = operand_part(object, "scale_inv"),
                            .columnwise_scale_inv = operand_part(object, "columnwise_scale_inv"),
                            .amax = operand_part(object, "amax"),
                            .columnwise_amax = operand_part(object, "columnwise_amax")});
  if (!made.ok()) throw_status(made.status().wrap("a quantiser's result"));
  return *std::move(made);
}

Result<nn::QuantisedOperand> call_quantiser(const Kept& function, const Kept& like,
                                            const Tensor& values, bool rowwise, bool columnwise) {
  const InterpreterLock lock;
  if (!lock.held()) {
    return failed_precondition("the interpreter has ended, so the recipe's quantisers cannot run");
  }
  try {
    const Ref x = to_framework(values, like.get());
    const Ref stream = Ref::take(PyLong_FromVoidPtr(devices::current_stream(values.device())));
    const Ref made = Ref::take(
        PyObject_CallFunctionObjArgs(function.get(), x.get(), rowwise ? Py_True : Py_False,
                                     columnwise ? Py_True : Py_False, stream.get(), nullptr));
    PyObject *rows = nullptr, *columns = nullptr;
    if (PyArg_ParseTuple(made.get(), "OO", &rows, &columns) == 0) throw PythonError();
    return nn::QuantisedOperand{read_operand(rows), read_operand(columns)};
  } catch (const PythonError&) {
    return callback_failed();
  }
}

std::shared_ptr<const nn::TensorQuantiser> read_quantiser(PyObject* item, PyObject* of) {
  if (item == Py_None) return nullptr;
  PyObject *name = nullptr, *function = nullptr;
  if (PyArg_ParseTuple(item, "OO", &name, &function) == 0) throw PythonError();
  const auto held = std::make_shared<Kept>(function), like = std::make_shared<Kept>(of);
  return std::make_shared<const nn::TensorQuantiser>(nn::TensorQuantiser{
      .name = std::string(to_text(name, "the quantiser's name")),
      .quantise = [held, like](const Tensor& values, bool rowwise, bool columnwise) {
        return call_quantiser(*held, *like, values, rowwise, columnwise);
      }});
}

nn::LinearQuantisers read_linear(PyObject* item, PyObject* of) {
  PyObject *input = nullptr, *weight = nullptr, *gradient = nullptr;
  if (PyArg_ParseTuple(item, "OOO", &input, &weight, &gradient) == 0) throw PythonError();
  return {read_quantiser(input, of), read_quantiser(weight, of), read_quantiser(gradient, of)};
}

}  // namespace

nn::BackwardOverride read_override(PyObject* value) {
  if (value == Py_None) return nn::BackwardOverride::kNone;
  return to_text(value, "backward_override") == "dequantized"
             ? nn::BackwardOverride::kDequantized
             : nn::BackwardOverride::kHighPrecision;
}

PyObject* make_quantisers(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *name = nullptr, *all = nullptr, *fc2 = nullptr, *backward_override = nullptr,
             *of = nullptr;
    if (PyArg_ParseTuple(args, "OOOOO", &name, &all, &fc2, &backward_override, &of) == 0) {
      throw PythonError();
    }
    auto made = std::make_unique<nn::CustomScaling>(
        nn::CustomScaling{.name = std::string(to_text(name, "the recipe's name")),
                          .quantisers = read_linear(all, of),
                          .backward_override = read_override(backward_override)});
    if (fc2 != Py_None) {
      made->fc2 = std::make_shared<const nn::LinearQuantisers>(read_linear(fc2, of));
    }
    Ref capsule = Ref::take(PyCapsule_New(made.get(), kQuantisersName, [](PyObject* c) {
      delete static_cast<nn::CustomScaling*>(PyCapsule_GetPointer(c, kQuantisersName));
    }));
    made.release();
    return capsule;
  });
}

nn::CustomScaling read_quantisers(PyObject* described) {
  const Ref module = Ref::take(PyImport_ImportModule("te_fl.pytorch.fp8.operands"));
  const Ref bound = Ref::take(PyObject_CallMethod(module.get(), "native_of", "O", described));
  const auto* made =
      static_cast<nn::CustomScaling*>(PyCapsule_GetPointer(bound.get(), kQuantisersName));
  if (made == nullptr) throw PythonError();
  return *made;
}

}  // namespace te_fl::python
