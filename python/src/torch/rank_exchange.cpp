#include "torch/rank_exchange.hpp"

#include <string>
#include <utility>
#include <vector>

#include "py/errors.hpp"
#include "py/interpreter.hpp"
#include "te_fl/watch.hpp"
#include "torch/callback.hpp"

namespace te_fl::python {
namespace {

PyObject* g_backward_boundary = nullptr;  // never freed

std::vector<std::string> texts_in(PyObject* list) {
  std::vector<std::string> texts;
  const Py_ssize_t count = PyList_Size(list);
  if (count < 0) throw PythonError();
  for (Py_ssize_t i = 0; i < count; ++i)
    texts.emplace_back(to_text(PyList_GetItem(list, i), "a rank's text"));
  return texts;
}

}  // namespace

PyObject* step_boundary(PyObject*, PyObject*) noexcept {
  return guarded([] {
    check(without_lock([] { return te_fl::step_boundary(); }));
    return Ref::share(Py_None);
  });
}

PyObject* set_rank_exchange(PyObject*, PyObject* function) noexcept {
  return guarded([&] {
    Py_INCREF(function);  // never released: the exchange may be used until the process ends
    te_fl::set_rank_exchange(
        [function](const std::string& own) -> Result<std::vector<std::string>> {
          const InterpreterLock lock;
          if (!lock.held()) return not_found("the Python interpreter has ended");
          const ErrorAside aside;
          try {
            const Ref text = to_python(std::string_view(own));
            const Ref all = Ref::take(PyObject_CallFunctionObjArgs(function, text.get(), nullptr));
            if (all.get() == Py_None) return not_found("there is no process group");
            return texts_in(all.get());
          } catch (const PythonError&) {
            return collective_failed();
          }
        });
    return Ref::share(Py_None);
  });
}

PyObject* ranks_exchange_quarantines(PyObject*, PyObject*) noexcept {
  return guarded(
      [] { return Ref::share(te_fl::ranks_exchange_quarantines() ? Py_True : Py_False); });
}

PyObject* held_quarantines(PyObject*, PyObject*) noexcept {
  return guarded([] { return to_python(std::string_view(te_fl::held_quarantines())); });
}

PyObject* take_quarantines(PyObject*, PyObject* texts) noexcept {
  return guarded([&] {
    const std::vector<std::string> all = texts_in(texts);
    check(without_lock([&] { return te_fl::take_quarantines(all); }));
    return Ref::share(Py_None);
  });
}

PyObject* set_backward_boundary(PyObject*, PyObject* function) noexcept {
  return guarded([&] {
    Py_INCREF(function);
    Py_XDECREF(std::exchange(g_backward_boundary, function));
    return Ref::share(Py_None);
  });
}

void note_backward() {
  if (!te_fl::ranks_exchange_quarantines() || g_backward_boundary == nullptr) return;
  Ref::take(PyObject_CallFunctionObjArgs(g_backward_boundary, nullptr));
}

}  // namespace te_fl::python
