// Converts the keyword arguments of a Python call into the op's argument struct.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <forward_list>
#include <optional>
#include <string>
#include <vector>

#include "ops/communicator.hpp"
#include "ops/function_op.hpp"
#include "ops/manager.hpp"
#include "ops/op_binding.hpp"
#include "ops/quantised_rows.hpp"
#include "ops/row_parts.hpp"
#include "ops/storage.hpp"
#include "py/dlpack.hpp"
#include "py/errors.hpp"
#include "py/exchange.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {

// The classes te_fl.Quantized, te_fl.Saved and te_fl.Rows; the package sets them when it is
// imported.
inline PyObject* g_quantized = nullptr;
inline PyObject* g_saved = nullptr;
inline PyObject* g_rows = nullptr;

// A saved record outlives the call that fills it: the backward op takes the forward's record.
struct SavedRecord {
  te_fl_saved saved;
  te_fl_tensor storage;
  int64_t bytes = 0;
};
constexpr const char* kSavedName = "te_fl.saved";

// Initial capacity of held_: enough for the parts of a GEMM's operands and of its result.
constexpr size_t kHeld = 16;

// The arguments of one call and the memory that they point to.
class Arguments {
 public:
  // matrices: see make_matrix_op().
  explicit Arguments(const OpBinding& op, bool matrices = false)
      : op_(op), matrices_(matrices), raw_(op.defaults), given_(op.args.size()) {
    if (matrices) held_.reserve(kHeld);
  }
  void set(PyObject* name, PyObject* value) {
    const int at = op_.find(name);
    if (at >= 0) return set(op_.args[static_cast<size_t>(at)], static_cast<size_t>(at), value);
    if (const std::string_view option = text_of(name, "a keyword"); option == "stream") {
      stream_ = stream_of(value);
    } else if (option == "seed") {
      if (PyLong_Check(value) == 0) return set_random(value);
      seed_ = PyLong_AsUnsignedLongLong(value);
      if (PyErr_Occurred() != nullptr) throw PythonError();
    } else if (option == "offset") {
      offset_ = PyLong_AsUnsignedLongLong(value);
      if (PyErr_Occurred() != nullptr) throw PythonError();
    } else {
      no_such_argument(option);
    }
  }
  const void* raw() const noexcept { return raw_.data(); }
  // Returns true if the call's communicator is implemented in Python. Then run() also needs the
  // arguments as a Python dict, by name.
  bool is_served() const noexcept { return server_ != nullptr; }
  // Runs the op by `manager` (null: the process's manager), without the interpreter's lock.
  // Throws te-fl's error, or the exception that the communicator's `serve` raised.
  void run(OpManager* manager, PyObject* by_name) const {
    const CallOptions options = this->options();
    const auto call = [&] {
      const WithoutLock unlocked;
      return (manager != nullptr ? *manager : OpManager::instance()).call(op_.id, raw(), options);
    };
    if (!is_served()) return check(call());
    if (stream_.has_value()) {
      throw_type_error(std::string(op_.schema->name) +
                       "(): 'stream' is given, and a process group's work is on PyTorch's current "
                       "stream; leave it out, in `with torch.cuda.stream(..)` for another one");
    }
    PythonCall served(server_, communicator_in(handle_), by_name);
    const Status status = call();
    if (status.ok()) return;
    served.raise_failure();
    throw_status(status);
  }
  CallOptions options() const {
    CallOptions options;
    options.rng.seed = seed_;
    options.rng.offset = offset_;
    if (random_.data != nullptr) {
      check_random_device();
      options.rng.seed_address = reinterpret_cast<const uint64_t*>(
          static_cast<const char*>(random_.data) + random_.byte_offset);
      options.rng.offset_address = options.rng.seed_address + 1;
    }
    if (stream_.has_value()) {
      options.stream = *stream_;
    } else if (device_.has_value()) {
      options.stream = borrowed_.stream(*device_);
    }
    return options;
  }

 private:
  [[noreturn]] void no_such_argument(std::string_view name) const {
    std::string text =
        std::string(op_.schema->name) + "() has no argument '" + std::string(name) + "'; it takes";
    for (const BoundArg& arg : op_.args) text += std::string(" ") + arg.desc->name + ",";
    throw_type_error(text + " and stream" +
                     ((op_.schema->flags & TE_FL_SCHEMA_USES_RNG) != 0 ? ", seed, offset" : ""));
  }

  // Seed and offset as a tensor in the op's device memory, read when the op runs.
  void set_random(PyObject* value) {
    random_ = borrowed_.describe(value, false, "seed");
    const int dtype = dtype_index(random_.dtype);
    const bool integers = dtype == TE_FL_I64 || dtype == TE_FL_U64;
    if (!integers || random_.ndim != 1 || random_.shape[0] != 2 || random_.strides != nullptr) {
      throw_invalid("'seed' is an int, or a contiguous int64 tensor [2] of seed and offset");
    }
  }
  void check_random_device() const {
    if (!device_.has_value() ||
        (device_->type == random_.device.type && device_->index == random_.device.index)) {
      return;
    }
    throw_invalid("'seed' is a tensor on another device than the op's tensors");
  }

  static void* stream_of(PyObject* value) {
    if (value == Py_None) return nullptr;
    // Accepts the stream classes of PyTorch's device modules (torch.cuda.Stream and others) and
    // torch.Stream.
    PyObject* handle = nullptr;
    for (const char* name : {"cuda_stream", "native_handle"}) {
      if (handle == nullptr) handle = PyObject_GetAttrString(value, name);
      if (handle == nullptr) PyErr_Clear();
    }
    const Ref number = handle != nullptr ? Ref::take(handle) : Ref::share(value);
    void* stream = PyLong_AsVoidPtr(number.get());
    if (stream == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
    return stream;
  }

  template <class T>
  void write(uint32_t offset, const T& value) {
    std::memcpy(raw_.data() + offset, &value, sizeof value);
  }

  void set(const BoundArg& arg, size_t at, PyObject* value) {
    const te_fl_arg_desc& desc = *arg.desc;
    if (given_[at]) {
      throw_type_error(std::string(op_.schema->name) + "() got '" + desc.name + "' twice");
    }
    given_[at] = true;
    switch (desc.type) {
      case TE_FL_ARG_TENSOR:
        if (value != Py_None) write(desc.offset, tensor(value, arg));
        return;
      case TE_FL_ARG_TENSOR_LIST:
        return set_tensors(arg, value);
      case TE_FL_ARG_I64_LIST:
        return set_integers(desc, value);
      case TE_FL_ARG_SAVED:
        return set_saved(desc, value);
      case TE_FL_ARG_COMMUNICATOR:
        return set_communicator(desc, value);
      default:
        return set_scalar(arg, value);
    }
  }

  void set_scalar(const BoundArg& arg, PyObject* value) {
    const te_fl_arg_desc& desc = *arg.desc;
    switch (desc.type) {
      case TE_FL_ARG_BOOL: {
        const int truth = PyObject_IsTrue(value);
        check(truth);
        return write(desc.offset, static_cast<int32_t>(truth));
      }
      case TE_FL_ARG_ENUM:
        if (PyUnicode_Check(value)) return write(desc.offset, enumerator(arg, value));
        [[fallthrough]];
      case TE_FL_ARG_I32: {
        const long number = PyLong_AsLong(value);
        if (PyErr_Occurred() != nullptr) throw_wrong_scalar(desc, value, "an int");
        if (number != static_cast<int32_t>(number)) {
          throw_invalid(std::string("'") + desc.name + "' is " + std::to_string(number) +
                        ", which does not fit in 32 bits");
        }
        return write(desc.offset, static_cast<int32_t>(number));
      }
      case TE_FL_ARG_I64: {
        const int64_t number = PyLong_AsLongLong(value);
        if (PyErr_Occurred() != nullptr) throw_wrong_scalar(desc, value, "an int");
        return write(desc.offset, number);
      }
      default: {
        const double number = PyFloat_AsDouble(value);
        if (PyErr_Occurred() != nullptr) throw_wrong_scalar(desc, value, "a number");
        if (desc.type == TE_FL_ARG_F32) return write(desc.offset, static_cast<float>(number));
        return write(desc.offset, number);
      }
    }
  }
  [[noreturn]] static void throw_wrong_scalar(const te_fl_arg_desc& desc, PyObject* value,
                                              const char* wanted) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw PythonError();
    PyErr_Clear();
    throw_type_error(std::string("'") + desc.name + "' is a " + type_name(value) + ", not " +
                     wanted);
  }
  static int32_t enumerator(const BoundArg& arg, PyObject* value) {
    const std::string_view word = text_of(value, arg.desc->name);
    std::string all;
    for (size_t i = 0; i < arg.enum_names.size(); ++i) {
      if (arg.enum_names[i] == word) return static_cast<int32_t>(i);
      all += (i == 0 ? "" : ", ") + arg.enum_names[i];
    }
    throw_invalid(std::string("'") + arg.desc->name + "' is '" + std::string(word) +
                  "'; it is one of " + all);
  }

  static uint32_t provider_of(const te_fl_tensor& t, std::string_view name) {
    if (t.dl.device.type != TE_FL_DEVICE_EXT) return 0;
    const Result<Device> device = device_of(t.dl.device);
    if (!device.ok()) throw_status(device.status().wrap(std::string(name)));
    return device->provider;
  }

  void note(const te_fl_tensor& t, const te_fl_arg_desc& desc) {
    const bool anywhere = (desc.flags & (TE_FL_ARG_HOST | TE_FL_ARG_ANY_MEMORY)) != 0;
    if (!anywhere && !device_.has_value()) device_ = t.dl.device;
  }

  const te_fl_tensor* tensor(PyObject* value, const BoundArg& arg) {
    const te_fl_arg_desc& desc = *arg.desc;
    if (matrices_) {
      if (const StorageClass* kind = storage_class_of(Py_TYPE(value))) {
        StorageView& view = views_.emplace_front();
        read_storage(value, *kind, nullptr, desc.role != TE_FL_IN, desc.name, borrowed_, held_,
                     view);
        return noted(view.tensor, desc);
      }
      if (is_storage_target(value)) {
        StorageView& view = views_.emplace_front();
        read_storage_target(value, desc.role != TE_FL_IN, desc.name, borrowed_, held_, view);
        return noted(view.tensor, desc);
      }
    }
    const int quantised = PyObject_IsInstance(value, g_quantized);
    check(quantised);
    if (quantised != 0) return &quantised_tensor(value, desc).tensor;
    te_fl_tensor& t = tensors_.emplace_front();
    t.dl = borrowed_.describe(value, desc.role != TE_FL_IN, desc.name);
    if (matrices_) see_as_matrix(t, value, arg);
    return noted(t, desc);
  }
  const te_fl_tensor* noted(te_fl_tensor& t, const te_fl_arg_desc& desc) {
    t.provider = provider_of(t, desc.name);
    note(t, desc);
    return &t;
  }

  // A non-contiguous input is copied first; an output keeps its strides.
  void see_as_matrix(te_fl_tensor& t, PyObject* value, const BoundArg& arg) {
    if (t.dl.strides != nullptr && arg.desc->role == TE_FL_IN) {
      held_.push_back(Ref::take(PyObject_CallMethod(value, "contiguous", nullptr)));
      t.dl = borrowed_.describe(held_.back().get(), false, arg.desc->name);
    }
    if (!arg.is_matrix || t.dl.ndim == 2 || t.dl.strides != nullptr) return;
    std::array<int64_t, 2>& shape = matrix_shapes_.emplace_front(std::array<int64_t, 2>{1, 1});
    if (t.dl.ndim > 0) shape[1] = t.dl.shape[t.dl.ndim - 1];
    for (int32_t d = 0; d + 1 < t.dl.ndim; ++d) shape[0] *= t.dl.shape[d];
    t.dl.ndim = 2;
    t.dl.shape = shape.data();
  }

  QuantisedTensor& quantised_tensor(PyObject* value, const te_fl_arg_desc& desc) {
    const bool written = desc.role != TE_FL_IN;
    QuantisedTensor& q = quantised_.emplace_front();
    q.tensor = te_fl_tensor{};
    q.quant = te_fl_quant{};
    q.quant.scaling = static_cast<uint32_t>(number(value, "_scaling"));
    q.quant.flags = static_cast<uint32_t>(number(value, "_flags"));
    q.quant.amax_epsilon = static_cast<float>(number(value, "amax_epsilon"));
    std::optional<te_fl_device> device;  // the device of the first part that was described
    for (const Part& part : kParts) {
      const Ref member = Ref::take(PyObject_GetAttrString(value, part.name));
      if (member.get() == Py_None) continue;
      const std::string name = std::string(desc.name) + "." + part.name;
      const te_fl_dltensor t = borrowed_.describe(member.get(), written, name.c_str());
      if (t.strides != nullptr) throw_invalid("'" + name + "' is not contiguous");
      if (!device.has_value()) device = t.device;
      check_part_device(t.device, *device, "'" + name + "'");
      void* data = static_cast<char*>(t.data) + t.byte_offset;
      std::memcpy(reinterpret_cast<char*>(&q.quant) + part.offset, &data, sizeof data);
      q.part_bytes[static_cast<size_t>(&part - kParts)] = bytes_of(t);
      if (part.offset == offsetof(te_fl_quant, columnwise_data)) describe_columnwise(q, value, t);
    }
    const Ref data = Ref::take(PyObject_GetAttrString(value, "data"));
    if (data.get() != Py_None) {
      q.tensor.dl = borrowed_.describe(data.get(), written, desc.name);
      if (device.has_value()) {
        check_part_device(q.tensor.dl.device, *device, "'" + std::string(desc.name) + ".data'");
      }
    }
    if (q.tensor.dl.shape == nullptr && q.tensor.dl.ndim != 0) {
      throw_invalid(std::string("'") + desc.name + "' has neither data nor columnwise_data");
    }
    q.tensor.quant = &q.quant;
    q.tensor.provider = provider_of(q.tensor, desc.name);
    note(q.tensor, desc);
    return q;
  }
  static int64_t bytes_of(const te_fl_dltensor& t) {
    int64_t bits = t.dtype.bits * t.dtype.lanes;
    for (int32_t d = 0; d < t.ndim; ++d) bits *= t.shape[d];
    return bits / 8;
  }
  // Describes a tensor without row-wise data; its logical shape is the Python object's `shape`.
  static void describe_columnwise(QuantisedTensor& q, PyObject* value,
                                  const te_fl_dltensor& columns) {
    const Ref shape = Ref::take(PyObject_GetAttrString(value, "shape"));
    const Ref list = Ref::take(PySequence_List(shape.get()));
    q.shape.resize(static_cast<size_t>(PyList_Size(list.get())));
    for (size_t i = 0; i < q.shape.size(); ++i) {
      q.shape[i] = PyLong_AsLongLong(PyList_GetItem(list.get(), static_cast<Py_ssize_t>(i)));
    }
    if (PyErr_Occurred() != nullptr) throw PythonError();
    q.tensor.dl = columns;
    q.tensor.dl.data = nullptr;
    q.tensor.dl.byte_offset = 0;
    q.tensor.dl.ndim = static_cast<int32_t>(q.shape.size());
    q.tensor.dl.shape = q.shape.data();
    q.tensor.dl.strides = nullptr;
  }
  static double number(PyObject* value, const char* name) {
    const Ref member = Ref::take(PyObject_GetAttrString(value, name));
    const double number = PyFloat_AsDouble(member.get());
    if (PyErr_Occurred() != nullptr) throw PythonError();
    return number;
  }

  void set_tensors(const BoundArg& arg, PyObject* value) {
    if (value == Py_None) return;
    auto& list = lists_.emplace_front();
    const int rows = PyObject_IsInstance(value, g_rows);
    check(rows);
    if (rows != 0) {
      cut_rows(arg, value, list);
    } else {
      const Ref items = Ref::take(PySequence_List(value));
      const Py_ssize_t count = PyList_Size(items.get());
      list.reserve(static_cast<size_t>(count));
      for (Py_ssize_t i = 0; i < count; ++i) {
        list.push_back(tensor(PyList_GetItem(items.get(), i), arg));
      }
    }
    const te_fl_tensor* const* data = list.data();
    write(arg.desc->offset, data);
    write(arg.desc->count_offset, static_cast<int64_t>(list.size()));
  }

  // Splits a te_fl.Rows into its slices. Each slice is a tensor that views the full tensor's
  // memory.
  void cut_rows(const BoundArg& arg, PyObject* value, std::vector<const te_fl_tensor*>& list) {
    const te_fl_arg_desc& desc = *arg.desc;
    held_.push_back(Ref::take(PyObject_GetAttrString(value, "tensor")));
    PyObject* const tensor = held_.back().get();
    const int quantised = PyObject_IsInstance(tensor, g_quantized);
    check(quantised);
    if (quantised != 0) {
      QuantisedRows parts(quantised_tensor(tensor, desc), desc.name);
      for_each_size(value, list, [&](int64_t size) {
        QuantisedTensor& part = quantised_.emplace_front();
        parts.next(size, part);
        list.push_back(&part.tensor);
      });
      return parts.end();
    }
    te_fl_tensor whole{};
    whole.dl = borrowed_.describe(tensor, desc.role != TE_FL_IN, desc.name);
    if (matrices_) see_as_matrix(whole, tensor, arg);
    noted(whole, desc);
    RowParts parts(whole, desc.name);
    for_each_size(value, list, [&](int64_t size) {
      const te_fl_tensor part = parts.next(size, part_shapes_.emplace_front());
      list.push_back(&tensors_.emplace_front(part));
    });
    parts.end();
  }
  // Calls f(size) for each size of a te_fl.Rows.
  template <class F>
  static void for_each_size(PyObject* rows, std::vector<const te_fl_tensor*>& list, F&& f) {
    const Ref sizes = Ref::take(PyObject_GetAttrString(rows, "sizes"));
    const Ref items = Ref::take(PySequence_List(sizes.get()));
    const Py_ssize_t count = PyList_Size(items.get());
    list.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      const int64_t size = PyLong_AsLongLong(PyList_GetItem(items.get(), i));
      if (PyErr_Occurred() != nullptr) throw PythonError();
      f(size);
    }
  }

  void set_integers(const te_fl_arg_desc& desc, PyObject* value) {
    if (value == Py_None) return;
    const Ref items = Ref::take(PySequence_List(value));
    auto& list = integers_.emplace_front();
    const Py_ssize_t count = PyList_Size(items.get());
    for (Py_ssize_t i = 0; i < count; ++i) {
      list.push_back(PyLong_AsLongLong(PyList_GetItem(items.get(), i)));
      if (PyErr_Occurred() != nullptr) throw PythonError();
    }
    const int64_t* data = list.data();
    write(desc.offset, data);
    write(desc.count_offset, static_cast<int64_t>(count));
  }

  void set_communicator(const te_fl_arg_desc& desc, PyObject* value) {
    handle_ = handle_of(value, desc.name);
    server_ = value;
    const te_fl_communicator* communicator = communicator_in(handle_);
    write(desc.offset, communicator);
  }

  void set_saved(const te_fl_arg_desc& desc, PyObject* value) {
    if (value == Py_None) return;
    const int right = PyObject_IsInstance(value, g_saved);
    check(right);
    if (right == 0) {
      throw_type_error(std::string("'") + desc.name + "' is a " + type_name(value) +
                       ", not a te_fl.Saved");
    }
    Ref capsule = Ref::take(PyObject_GetAttrString(value, "_record"));
    if (capsule.get() == Py_None) {
      auto record = std::make_unique<SavedRecord>();
      capsule = Ref::take(PyCapsule_New(record.get(), kSavedName, [](PyObject* c) {
        delete static_cast<SavedRecord*>(PyCapsule_GetPointer(c, kSavedName));
      }));
      record.release();
      check(PyObject_SetAttrString(value, "_record", capsule.get()));
    }
    auto* record = static_cast<SavedRecord*>(PyCapsule_GetPointer(capsule.get(), kSavedName));
    if (record == nullptr) throw PythonError();
    const Ref storage = Ref::take(PyObject_GetAttrString(value, "storage"));
    record->saved.storage = nullptr;
    if (storage.get() != Py_None) {
      record->storage = te_fl_tensor{};
      record->storage.dl =
          borrowed_.describe(storage.get(), desc.role != TE_FL_IN, "saved.storage");
      record->storage.provider = provider_of(record->storage, "saved.storage");
      record->saved.storage = &record->storage;
    }
    write(desc.offset, &record->saved);
  }

  const OpBinding& op_;
  const bool matrices_;
  std::vector<std::byte> raw_;
  std::vector<bool> given_;
  Borrowed borrowed_;
  std::vector<Ref> held_;  // objects that borrowed_ describes; this may be their only reference
  std::forward_list<te_fl_tensor> tensors_;  // a list, so addresses of its elements stay valid
  std::forward_list<QuantisedTensor> quantised_;
  std::forward_list<StorageView> views_;
  std::forward_list<std::array<int64_t, 2>> matrix_shapes_;
  std::forward_list<std::vector<const te_fl_tensor*>> lists_;
  std::forward_list<std::vector<int64_t>> part_shapes_;
  std::forward_list<std::vector<int64_t>> integers_;
  std::optional<te_fl_device> device_;
  std::optional<void*> stream_;
  // The Python object that implements the communicator. handle_ is the communicator's handle.
  PyObject* server_ = nullptr;
  Ref handle_;
  uint64_t seed_ = 0, offset_ = 0;
  te_fl_dltensor random_{};  // its data is NULL if the seed and offset are the numbers above
};

}  // namespace te_fl::python
