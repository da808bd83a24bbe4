#include "torch/process_group.hpp"

#include <algorithm>

#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "py/interpreter.hpp"
#include "te_fl/device.hpp"
#include "te_fl/nn/modules/stripes.hpp"
#include "torch/arguments.hpp"
#include "torch/callback.hpp"

namespace te_fl::python {
namespace {

Status interpreter_ended() {
  return failed_precondition(
      "the interpreter has ended, so the process group's collectives cannot run");
}

// A collective that torch.distributed has begun.
class GroupWork final : public nn::SequenceRanks::Work {
 public:
  explicit GroupWork(Ref work) : work_(work.release()) {}
  ~GroupWork() override {
    if (work_ == nullptr) return;
    static_cast<void>(wait());  // an error on the way out has been returned already
    const InterpreterLock lock;
    if (lock.held()) PyErr_Clear();
  }
  Status wait() override {
    const InterpreterLock lock;
    if (!lock.held()) return interpreter_ended();
    const Ref work = Ref::take(std::exchange(work_, nullptr));
    PyObject* const done = PyObject_CallMethod(work.get(), "wait", nullptr);
    if (done == nullptr) return callback_failed();
    Py_DECREF(done);
    return {};
  }

 private:
  PyObject* work_;  // null once it was waited for
};

// A sum of rows that go to their ranks as they are written.
class GroupPieces final : public nn::SequenceRanks::Pieces {
 public:
  GroupPieces(Ref pieces, const Device& device)
      : pieces_(PyObject_GetAttrString(pieces.get(), "rows_done")),
        device_(device),
        work_(std::move(pieces)) {
    if (pieces_ == nullptr) throw PythonError();
  }
  ~GroupPieces() override {
    const InterpreterLock lock;
    if (lock.held()) Py_DECREF(pieces_);
  }
  Status rows_done(int rank) override {
    const InterpreterLock lock;
    if (!lock.held()) return interpreter_ended();
    const Ref stream = Ref::take(PyLong_FromVoidPtr(devices::current_stream(device_)));
    PyObject* const done = PyObject_CallFunction(pieces_, "iO", rank, stream.get());
    if (done == nullptr) return callback_failed();
    Py_DECREF(done);
    return {};
  }
  Status wait() override { return work_.wait(); }

 private:
  PyObject* pieces_;  // its method rows_done
  Device device_;
  GroupWork work_;
};

class GroupRanks final : public nn::SequenceRanks {
 public:
  explicit GroupRanks(PyObject* object)
      : object_(object), like_(Ref::take(PyObject_GetAttrString(object, "like")).get()) {
    size_ = static_cast<int>(integer_of(Ref::take(PyObject_GetAttrString(object, "size")).get()));
    rank_ = static_cast<int>(integer_of(Ref::take(PyObject_GetAttrString(object, "rank")).get()));
    ranks_ = ranks_of(Ref::take(PyObject_GetAttrString(object, "ranks")).get());
    pieces_from_ = integer_of(Ref::take(PyObject_GetAttrString(object, "pieces_from")).get());
  }
  int size() const noexcept override { return size_; }
  int rank() const noexcept override { return rank_; }
  Begun all_gather(const Tensor& part, const Tensor& whole) override {
    return begin("all_gather", part, whole);
  }
  Begun reduce_scatter(const Tensor& whole, const Tensor& part) override {
    return begin("reduce_scatter", whole, part);
  }
  int64_t pieces_from() const noexcept override { return pieces_from_; }
  Result<std::unique_ptr<Pieces>> scatter_pieces(const Tensor& whole, const Tensor& part) override {
    const InterpreterLock lock;
    if (!lock.held()) return interpreter_ended();
    try {
      TE_FL_ASSIGN_OR_RETURN(Ref pieces, called("scatter_pieces", whole, part));
      return std::unique_ptr<Pieces>(new GroupPieces(std::move(pieces), whole.device()));
    } catch (const PythonError&) {
      return callback_failed();
    }
  }
  Status sum(const Tensor& values) override { return in_place("sum", values); }
  Status largest(const Tensor& values) override { return in_place("largest", values); }
  bool share_amaxes(const nn::AmaxReduction* reduction) const noexcept override {
    if (reduction == nullptr || ranks_.empty()) return false;
    const auto& reduced = static_cast<const GroupReduction*>(reduction)->ranks();
    return std::ranges::includes(reduced, ranks_);
  }

 private:
  Status in_place(const char* method, const Tensor& values) {
    TE_FL_ASSIGN_OR_RETURN(const auto work, begin(method, values, values));
    return work->wait();
  }
  // object.METHOD(from, to, stream), with the interpreter's lock.
  Result<Ref> called(const char* method, const Tensor& from, const Tensor& to) {
    const Ref a = to_framework(from, like_.get()), b = to_framework(to, like_.get());
    const Ref stream = Ref::take(PyLong_FromVoidPtr(devices::current_stream(from.device())));
    PyObject* const result =
        PyObject_CallMethod(object_.get(), method, "OOO", a.get(), b.get(), stream.get());
    if (result == nullptr) return callback_failed();
    return Ref::take(result);
  }
  Begun begin(const char* method, const Tensor& from, const Tensor& to) {
    const InterpreterLock lock;
    if (!lock.held()) return interpreter_ended();
    try {
      TE_FL_ASSIGN_OR_RETURN(Ref work, called(method, from, to));
      return std::unique_ptr<Work>(new GroupWork(std::move(work)));
    } catch (const PythonError&) {
      return callback_failed();
    }
  }

  Kept object_, like_;
  int size_ = 1, rank_ = 0;
  int64_t pieces_from_ = 0;
  std::vector<int64_t> ranks_;  // sorted
};

}  // namespace

std::vector<int64_t> ranks_of(PyObject* tuple) {
  std::vector<int64_t> ranks;
  for (PyObject* rank : items_of(tuple, "ranks")) ranks.push_back(integer_of(rank));
  std::ranges::sort(ranks);
  return ranks;
}

std::shared_ptr<nn::SequenceRanks> sequence_ranks_of(PyObject* object) {
  return std::make_shared<GroupRanks>(object);
}

PyObject* stripes(PyObject*, PyObject*) noexcept {
  return guarded([] { return to_python(value_of(nn::stripes_in_words())); });
}

}  // namespace te_fl::python
