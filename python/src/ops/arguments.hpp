// Converts the keyword arguments of a Python call into the op's argument struct.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <forward_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/communicator.hpp"
#include "ops/function_op.hpp"
#include "ops/manager.hpp"
#include "ops/op_binding.hpp"
#include "ops/quantised.hpp"
#include "ops/quantised_rows.hpp"
#include "ops/row_parts.hpp"
#include "py/dlpack.hpp"
#include "py/errors.hpp"
#include "py/exchange.hpp"
#include "py/new_tensor.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/status.hpp"

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

// Says how a callable of an op takes its arguments. kNamed: by keywords. kPositional: inputs may be
// positional, and non-contiguous ones are copied first. kMatrices: tensors also become matrices,
// see make_matrix_op().
enum class CallForm { kNamed, kPositional, kMatrices };

// The arguments of one call and the memory that they point to.
class Arguments {
 public:
  explicit Arguments(const OpBinding& op, CallForm form = CallForm::kNamed)
      : op_(op),
        form_(form),
        raw_(op.defaults),
        given_(op.args.size()),
        missing_(op.required_outputs) {
    if (form != CallForm::kNamed) held_.reserve(kHeld);
  }
  void set(PyObject* name, PyObject* value) {
    const int at = op_.find(name);
    if (at >= 0) return set(op_.args[static_cast<size_t>(at)], static_cast<size_t>(at), value);
    if (const std::string_view option = to_text(name, "a keyword"); option == "stream") {
      stream_ = to_stream(value);
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
  // Sets the op's inputs in the order of the specification.
  void set_inputs(PyObject* const* values, size_t count) {
    if (count > op_.inputs.size()) {
      throw_type_error(std::string(op_.schema->name) + "() takes " +
                       std::to_string(op_.inputs.size()) + " inputs, got " + std::to_string(count));
    }
    for (size_t i = 0; i < count; ++i) set(op_.args[op_.inputs[i]], op_.inputs[i], values[i]);
  }
  // Sets a tensor without memory to its (rank, dtype), or the length of a list of tensors. Only
  // op_.rules may read such arguments.
  void set_form(PyObject* name, PyObject* form) {
    const int at = op_.find(name);
    if (at < 0) no_such_argument(to_text(name, "a keyword"));
    const te_fl_arg_desc& desc = *op_.args[static_cast<size_t>(at)].desc;
    if (desc.type == TE_FL_ARG_TENSOR_LIST) {
      write(desc.count_offset, static_cast<int64_t>(PyLong_AsLongLong(form)));
      if (PyErr_Occurred() != nullptr) throw PythonError();
      return;
    }
    int rank = 0, dtype = 0;
    if (PyArg_ParseTuple(form, "ii", &rank, &dtype) == 0) throw PythonError();
    te_fl_tensor& t = tensors_.emplace_front();
    t.dl.ndim = rank;
    t.dl.dtype = to_c(static_cast<DType>(dtype));
    write<const te_fl_tensor*>(desc.offset, &t);
  }
  // Allocates the outputs that the call lacks, by the library of its first tensor. Returns None if
  // there are none, the only one, or a tuple in the order of the specification. Leaves outputs
  // missing if that library has no functions for it (new_tensor.hpp). `by_name`: null, or a dict to
  // which the outputs are added.
  Ref make_outputs(PyObject* by_name) {
    if (missing_ == 0 || model_ == nullptr || !is_framework_tensor(model_)) {
      return Ref::share(Py_None);
    }
    std::vector<Ref> made;
    for (const uint32_t i : op_.outputs) {
      if ((missing_ >> i & 1) == 0) continue;
      made.push_back(make_output(i));
      if (by_name != nullptr) check(PyDict_SetItem(by_name, op_.args[i].name, made.back().get()));
    }
    if (made.size() == 1) return std::move(made[0]);
    Ref all = Ref::take(PyTuple_New(static_cast<Py_ssize_t>(made.size())));
    for (size_t i = 0; i < made.size(); ++i) {
      check(PyTuple_SetItem(all.get(), static_cast<Py_ssize_t>(i), made[i].release()));
    }
    return all;
  }
  // Makes the call's tensors matrices. No tensor may be set afterwards.
  void flatten() {
    for (te_fl_tensor* t : flat_) flatten(*t);
  }
  const void* raw() const noexcept { return raw_.data(); }
  // Returns true if the call's communicator is implemented in Python. Then run() also needs the
  // arguments as a Python dict, by name.
  bool is_python_collective() const noexcept { return server_ != nullptr; }
  // Runs the op by `manager` (null: the process's manager), without the interpreter's lock.
  // Throws te-fl's error, or the exception that the communicator's `serve` raised.
  void run(OpManager* manager, PyObject* by_name) const {
    const CallOptions options = this->options();
    const auto call = [&] {
      const WithoutLock unlocked;
      return (manager != nullptr ? *manager : OpManager::instance()).call(op_.id, raw(), options);
    };
    if (!is_python_collective()) return check(call());
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

  static void* to_stream(PyObject* value) {
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
        if (value == Py_None || (desc.role == TE_FL_OUT && is_request(value, at))) return;
        missing_ &= ~(uint64_t{1} << at);
        return write(desc.offset, tensor(value, arg));
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

  // Returns true if `value` requests that an output be allocated: True, or the dtype that it is to
  // have.
  bool is_request(PyObject* value, size_t at) {
    const std::optional<DType> dtype = value == Py_True ? std::nullopt : dtype_of_object(value);
    if (value != Py_True && !dtype) return false;
    missing_ |= uint64_t{1} << at;
    if (dtype) dtypes_.emplace_back(at, *dtype);
    return true;
  }
  Ref make_output(uint32_t index) {
    const BoundArg& arg = op_.args[index];
    const OutputForm form = op_.rules->form(raw(), index);
    std::optional<DType> dtype = form.dtype;
    for (const auto& [at, requested] : dtypes_) {
      if (at == index) dtype = requested;
    }
    if (form.rank < 0 || !dtype) refuse_output(arg.desc->name, form.rank < 0 ? "shape" : "dtype");
    std::array<int64_t, kMaxRank> extents{};
    const auto rank = static_cast<size_t>(form.rank);
    for (size_t d = 0; d < rank; ++d) extents[d] = op_.rules->value(form.extents[d], raw());
    const std::span<const int64_t> shape(extents.data(), rank);
    Ref made = new_output(shape, *dtype);
    write(arg.desc->offset, tensor(made.get(), arg));
    return made;
  }
  // Throws the error of a call that lacks an output whose shape or dtype, `what`, is unknown. If
  // the cause is a wrong input, the call without the output has the better message.
  [[noreturn]] void refuse_output(const std::string& name, const std::string& what) {
    flatten();
    const CallOptions options = this->options();
    const Status status =
        without_lock([&] { return OpManager::instance().call(op_.id, raw(), options); });
    if (status.to_string().find("'" + name + "'") == std::string::npos) throw_status(status);
    throw_status(Status(StatusCode::kInvalidArgument,
                        std::string(op_.schema->name) + ": the " + what + " of '" + name +
                            "' does not follow from the inputs; give a tensor" +
                            (what == "shape" ? "" : ", or the dtype")));
  }
  // Allocates a tensor on the device of the call's first tensor.
  Ref new_output(std::span<const int64_t> shape, DType dtype) const {
    const te_fl_dltensor& model = model_tensor_->dl;
    const bool plain = model_tensor_->quant == nullptr;
    if (!plain || dtype_index(model.dtype) != static_cast<int>(dtype))
      return new_tensor(model_, shape, dtype);
    const std::span extents(model.shape, static_cast<size_t>(model.ndim));
    const bool alike = model_compact_ && std::ranges::equal(shape, extents);
    return alike ? new_tensor_like(model_) : new_tensor(model_, shape);
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
    const std::string_view word = to_text(value, arg.desc->name);
    std::string all;
    for (size_t i = 0; i < arg.enum_names.size(); ++i) {
      if (arg.enum_names[i] == word) return static_cast<int32_t>(i);
      all += (i == 0 ? "" : ", ") + arg.enum_names[i];
    }
    throw_invalid(std::string("'") + arg.desc->name + "' is '" + std::string(word) +
                  "'; it is one of " + all);
  }

  static uint32_t find_provider(const te_fl_tensor& t, std::string_view name) {
    if (t.dl.device.type != TE_FL_DEVICE_EXT) return 0;
    const Result<Device> device = to_device(t.dl.device);
    if (!device.ok()) throw_status(device.status().wrap(std::string(name)));
    return device->provider;
  }

  // True if the argument lies in the memory of the device that the op runs on.
  static bool is_placed(const te_fl_arg_desc& desc) {
    return (desc.flags & (TE_FL_ARG_HOST | TE_FL_ARG_ANY_MEMORY)) == 0;
  }
  void note(const te_fl_tensor& t, const te_fl_arg_desc& desc) {
    if (is_placed(desc) && !device_.has_value()) device_ = t.dl.device;
  }

  const te_fl_tensor* tensor(PyObject* value, const BoundArg& arg) {
    const te_fl_arg_desc& desc = *arg.desc;
    if (is_quantised(value)) return &quantised_tensor(value, desc).tensor;
    te_fl_tensor& t = tensors_.emplace_front();
    t.dl = borrowed_.describe(value, desc.role != TE_FL_IN, desc.name);
    note_model(value, t, desc);
    model_compact_ = model_compact_ || (model_tensor_ == &t && t.dl.strides == nullptr);
    if (form_ != CallForm::kNamed) make_compact(t, value, desc);
    if (form_ == CallForm::kMatrices && arg.is_matrix) flat_.push_back(&t);
    return noted(t, desc);
  }
  const te_fl_tensor* noted(te_fl_tensor& t, const te_fl_arg_desc& desc) {
    t.provider = find_provider(t, desc.name);
    note(t, desc);
    return &t;
  }

  void note_model(PyObject* object, const te_fl_tensor& t, const te_fl_arg_desc& desc) {
    if (model_ != nullptr || desc.type != TE_FL_ARG_TENSOR || !is_placed(desc)) return;
    model_ = object;
    model_tensor_ = &t;
  }
  // A non-contiguous input is copied first; an output keeps its strides.
  void make_compact(te_fl_tensor& t, PyObject* value, const te_fl_arg_desc& desc) {
    if (t.dl.strides == nullptr || desc.role != TE_FL_IN) return;
    held_.push_back(Ref::take(PyObject_CallMethod(value, "contiguous", nullptr)));
    t.dl = borrowed_.describe(held_.back().get(), false, desc.name);
  }
  void flatten(te_fl_tensor& t) {
    if (t.dl.ndim == 2 || t.dl.strides != nullptr) return;
    std::array<int64_t, 2>& shape = matrix_shapes_.emplace_front(std::array<int64_t, 2>{1, 1});
    if (t.dl.ndim > 0) shape[1] = t.dl.shape[t.dl.ndim - 1];
    for (int32_t d = 0; d + 1 < t.dl.ndim; ++d) shape[0] *= t.dl.shape[d];
    t.dl.ndim = 2;
    t.dl.shape = shape.data();
  }

  QuantisedTensor& quantised_tensor(PyObject* value, const te_fl_arg_desc& desc) {
    QuantisedTensor& q = quantised_.emplace_front();
    read_quantised(value, desc.role != TE_FL_IN, desc.name, borrowed_, held_, q);
    note_model(q.object, q.tensor, desc);
    noted(q.tensor, desc);
    return q;
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
    if (is_quantised(tensor)) {
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
    if (form_ != CallForm::kNamed) make_compact(whole, tensor, desc);
    if (form_ == CallForm::kMatrices && arg.is_matrix) flatten(whole);
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
    handle_ = find_handle(value, desc.name);
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
      record->storage.provider = find_provider(record->storage, "saved.storage");
      record->saved.storage = &record->storage;
    }
    write(desc.offset, &record->saved);
  }

  const OpBinding& op_;
  const CallForm form_;
  std::vector<std::byte> raw_;
  std::vector<bool> given_;
  uint64_t missing_;  // the set of outputs that make_outputs() allocates, by index in op_.args
  std::vector<std::pair<size_t, DType>> dtypes_;  // the dtypes that the call has requested
  // The first tensor of the call, or the first part of a quantised one, borrowed; null: none yet.
  PyObject* model_ = nullptr;
  const te_fl_tensor* model_tensor_ = nullptr;
  bool model_compact_ = false;  // true if it is plain and compact
  Borrowed borrowed_;
  std::vector<Ref> held_;  // objects that borrowed_ describes; this may be their only reference
  std::forward_list<te_fl_tensor> tensors_;  // a list, so addresses of its elements stay valid
  std::forward_list<QuantisedTensor> quantised_;
  std::forward_list<std::array<int64_t, 2>> matrix_shapes_;
  std::vector<te_fl_tensor*> flat_;  // the tensors that flatten() makes matrices
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
