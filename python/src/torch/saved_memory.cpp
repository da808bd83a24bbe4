#include "te_fl/nn/autograd/saved_memory.hpp"

#include <array>
#include <memory>
#include <vector>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "torch/arguments.hpp"
#include "torch/layer.hpp"
#include "torch/layer_record.hpp"

namespace te_fl::python {

namespace {

// The program's storage that the memory lies in; None if te-fl has allocated it.
Ref find_storage(const Record& record, const nn::SavedMemory& memory) {
  for (const Lent& lent : record.lent) {
    PyObject* const storage = lent.storage_in(memory.data, memory.bytes);
    if (storage != nullptr) return Ref::share(storage);
  }
  return Ref::share(Py_None);
}

}  // namespace

PyObject* saved_memory(PyObject*, PyObject* token) noexcept {
  return guarded([&] {
    const std::shared_ptr<Record> record = record_that_waits(token);
    if (record == nullptr) return Ref::share(Py_None);
    const auto memory = nn::saved_memory(record->ctx, record->device);
    return make_list(memory, [&](const nn::SavedMemory& m) {
      const std::array<int64_t, 1> shape{m.bytes};
      const Ref tensor = to_framework(
          value_or_throw(Tensor::wrap(m.data, shape, {}, DType::kU8, record->device, m.owner)),
          token);
      const Ref storage = find_storage(*record, m);
      return Ref::take(PyTuple_Pack(2, tensor.get(), storage.get()));
    });
  });
}

PyObject* move_saved_memory(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    PyObject *token = nullptr, *entries = nullptr;
    if (PyArg_ParseTuple(args, "OO", &token, &entries) == 0) throw PythonError();
    const std::shared_ptr<Record> record = find_record(token);
    std::vector<nn::MovedMemory> moved;
    for (PyObject* entry : list_items(entries, "memory")) {
      unsigned long long from = 0;
      long long bytes = 0;
      PyObject* to = nullptr;
      if (PyArg_ParseTuple(entry, "KLO", &from, &bytes, &to) == 0) throw PythonError();
      auto owner = std::make_shared<Tensor>(to_tensor(to, "memory", true));
      if (owner->numel() * bits(owner->dtype()) < bytes * 8 || !owner->contiguous()) {
        throw_type_error("the new memory is " + owner->describe() + "; it must be " +
                         std::to_string(bytes) + " bytes");
      }
      void* const data = owner->raw_data();
      // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that saved_memory() gave
      moved.push_back({reinterpret_cast<const void*>(from), bytes, data, std::move(owner)});
    }
    nn::move_saved_memory(record->ctx, moved);
    return Ref::share(Py_None);
  });
}

}  // namespace te_fl::python
